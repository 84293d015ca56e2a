"""The first module that the fork server imports: the server exits when the process that started it dies.

``multiprocessing`` lets it exit when a pipe is closed that every child of the server holds too. So a server, or a child
of it, that was stopped would outlive that process, and keep all memory mapped. Its exit continues stopped children,
which then end themselves; see ``core.liveness.die_with``.
"""

from memlane import _native

_native.exit_with_parent()
