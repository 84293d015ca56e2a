// A thread pool that splits one loop at a time into ranges.
//
// Who may call: any thread. One loop runs at a time; a caller that finds the pool busy runs its whole loop itself.
// Threads do not survive fork(): the first loop of a forked child starts new ones. The caller's TruncationGuard covers what
// the other threads access.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace memlane {

using RangeFunction = std::uint32_t (*)(void *context, std::size_t begin, std::size_t end);
std::uint32_t run_in_parts(std::size_t count, int threads, RangeFunction function, void *context);

// How many threads, at most `threads`, a copy of this size should use: a share below 64 KB is copied before another
// thread has woken up.
inline int threads_for(std::size_t bytes, int threads) {
    return static_cast<int>(std::min(bytes / (64 * 1024), static_cast<std::size_t>(std::max(threads, 0))));
}

// Splits [0, count) into `threads` ranges and runs `part(begin, end)` on each, the last one on the calling thread.
// Returns when all are done: nothing, or the sum of what the ranges returned, which must be less than 2^31. `part` must
// not throw. Where `part` and what it refers to are at the same address and unchanged since the last loop, the other
// threads still have them in their caches and start earlier.
template <class Part> auto run_in_parts(std::size_t count, int threads, Part &&part) {
    using Plain = std::remove_reference_t<Part>;
    constexpr bool returns = !std::is_void_v<std::invoke_result_t<Plain &, std::size_t, std::size_t>>;
    const std::uint32_t sum = run_in_parts(
        count, threads,
        [](void *context, std::size_t begin, std::size_t end) -> std::uint32_t {
            Plain &run = *static_cast<Plain *>(context);
            if constexpr (returns)
                return static_cast<std::uint32_t>(run(begin, end));
            else
                return run(begin, end), 0;
        },
        const_cast<void *>(static_cast<const void *>(&part)));
    if constexpr (returns)
        return sum;
}

} // namespace memlane
