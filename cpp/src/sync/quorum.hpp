// A quorum: a count that many advance and one waits for. Whoever brings it to what is wanted wakes the waiter; the others
// leave it asleep. A signal would wake it for each of them: with 64 workers, 63 times in vain.
//
// Who may call: `arrive` any process, `wait` one at a time.
//
//   offset  size  field    written by        when
//   0       64    arrived  those who arrive  a signal: how many have arrived since the start
//   64      64    wanted   the waiter        before it waits: the count at which it is to be woken
//
// If a process dies before it arrives, the waiter learns it from the process's pidfd, as in any wait; between the count
// and the wake-up: the waiter finds the count when its slice ends.
#pragma once

#include <cstdint>
#include <span>

#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

struct QuorumCell {
    SignalCell arrived;
    struct alignas(64) {
        Word count;
    } wanted;
};
static_assert(sizeof(QuorumCell) == 128 && offsetof(QuorumCell, wanted) == 64);

inline std::int64_t quorum_arrive(QuorumCell &cell, std::int64_t many) {
    // PAIR arrive/want. This side counts, then reads what is wanted; the waiter stores what it wants, then reads the count
    // (in signal_wait). All four are sequentially consistent, so at least one sees the other: either the waiter finds the
    // count and does not sleep, or we find what it wants and wake it. It prevents that our load of `wanted` moves in front
    // of our addition, or the waiter's load of the count in front of its store: both would miss, and the waiter slept on.
    const std::int64_t before = cell.arrived.value.fetch_add(many, std::memory_order_seq_cst);
    const std::int64_t wanted = cell.wanted.count.load(std::memory_order_seq_cst);
    const std::int64_t now = wrapping_sum(before, many);
    if (before < wanted && now >= wanted)
        signal_wake(cell.arrived);
    return now;
}

inline WaitResult quorum_wait(QuorumCell &cell, std::int64_t until, std::int64_t deadline_ns, std::span<const int> pidfds,
                              Spin &spin) {
    cell.wanted.count.store(until, std::memory_order_seq_cst); // PAIR arrive/want
    return signal_wait(cell.arrived, until, deadline_ns, pidfds, spin);
}

} // namespace memlane
