// A lifeline: a thread that ends this process when another one dies.
//
// PR_SET_PDEATHSIG is not enough: it follows the *thread* that forked us, and under forkserver the parent that matters
// is not the parent that forked. A pidfd names the process that is meant, and no other can inherit its number.
#pragma once

#include <cstdint>

namespace memlane {

// When the process behind `pidfd` dies: SIGTERM to ourselves, and SIGKILL `grace_ns` later. The file descriptor is
// duplicated. Threads do not survive fork(): a child that wants a lifeline ties its own.
void tie_lifeline(int pidfd, std::int64_t grace_ns);

} // namespace memlane
