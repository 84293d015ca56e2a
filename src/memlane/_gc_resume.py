"""The last module that the fork server imports: garbage is collected again, but not among what is imported so far.

A collection writes to every object that it looks at, and would give each child its own copy of the modules' memory.
"""

import gc

gc.freeze()
gc.enable()
