"""The first module of the fork server's preload list: no garbage collections during the imports that follow.

They create many objects and hardly any garbage. Without collections, the imports of a vector worker take 4 ms less of
100, and those of torch 60 of 650. ``_gc_resume`` comes last; see ``core.children.ensure_fork_server``.
"""

import gc

gc.disable()
