"""Storms: many processes use a lane while some of them die, stop or yield at fault points, and every result is checked.

``python -m tests.chaos`` runs them; it needs the extension with fault points (`make chaos` builds it).
"""
