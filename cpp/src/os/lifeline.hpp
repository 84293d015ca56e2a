// A lifeline: a thread that ends this process when another process dies.
//
// PR_SET_PDEATHSIG is not enough: it watches the *thread* that forked this process, and under forkserver the process
// that matters is not the one that forked. A pidfd refers to exactly one process, even after its pid is reused.
#pragma once

#include <cstdint>

namespace memlane {

// When the process behind `pidfd` dies, this process sends itself SIGTERM, and SIGKILL `grace_ns` later. The file
// descriptor is duplicated, so the caller may close its own. Threads do not survive fork(): a forked child must tie its
// own lifeline.
void tie_lifeline(int pidfd, std::int64_t grace_ns);

} // namespace memlane
