// Lifelines: how a process ends when another dies, even if it is stopped then.
//
// PR_SET_PDEATHSIG alone is not enough: it is sent whenever the *thread* ends that forked this process (the kernel then
// makes another thread the parent, until none is left), and under forkserver the process that matters is not the one
// that forked. A pidfd refers to exactly one process, but a thread that polls it cannot run while its process is stopped.
// So the signal here is SIGCONT: it lets a stopped process go on, which looks who has died, and it changes nothing in
// one that runs.
#pragma once

#include <cstdint>

namespace memlane {

// When the process behind `pidfd` dies, this process sends itself SIGTERM, and SIGKILL `grace_ns` later. The file
// descriptor is duplicated, so the caller may close its own. Threads do not survive fork(): a forked child must tie its
// own lifeline.
//
// If this process is stopped, that begins when it continues: at the latest when its parent dies. So a child of the
// watched process, and a child of a process that exits with it, does not have to be continued by anybody.
void tie_lifeline(int pidfd, std::int64_t grace_ns);

// Lets this process exit when its parent dies, without a thread: for a fork server, which forks often. Not inherited by
// forked children, which the exit continues if they are stopped. Call it once.
void exit_with_parent();

} // namespace memlane
