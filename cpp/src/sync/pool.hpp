// A thread pool that splits one loop at a time into ranges.
//
// Who may call: any thread. One loop runs at a time; a caller that finds the pool busy runs its whole loop itself.
// Threads do not survive fork(): the first loop of a forked child starts new ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace memlane {

using RangeFunction = void (*)(void *context, std::size_t begin, std::size_t end);
void run_in_parts(std::size_t count, int threads, RangeFunction function, void *context);

// How many threads, at most `threads`, a copy of this size should use: a share below 64 KB is copied before another
// thread has woken up.
inline int threads_for(std::size_t bytes, int threads) {
    return static_cast<int>(std::min(bytes / (64 * 1024), static_cast<std::size_t>(std::max(threads, 0))));
}

// Splits [0, count) into `threads` ranges and runs `part(begin, end)` on each, one of them on the calling thread.
// Returns when all are done. `part` must not throw.
template <class Part> void run_in_parts(std::size_t count, int threads, Part &&part) {
    using Plain = std::remove_reference_t<Part>;
    run_in_parts(
        count, threads,
        [](void *context, std::size_t begin, std::size_t end) { (*static_cast<Plain *>(context))(begin, end); },
        const_cast<void *>(static_cast<const void *>(&part)));
}

} // namespace memlane
