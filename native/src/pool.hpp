// A few threads that share out one loop at a time.
//
// Who may call: any thread; one loop runs at a time, and a caller that finds the pool busy does its loop alone.
// Threads do not survive fork(): the child's first loop makes its own.
#pragma once

#include <cstddef>
#include <functional>

namespace memlane {

// Splits [0, count) into `threads` ranges and runs `part(begin, end)` on each, one of them on the calling thread.
// Returns when all are done. `part` must not throw.
void run_in_parts(std::size_t count, int threads, const std::function<void(std::size_t, std::size_t)> &part);

} // namespace memlane
