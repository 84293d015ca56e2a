// A quorum: a count that several processes advance and one process waits for. Only the arrival that completes the
// wanted count wakes the waiter. A signal would wake it at each arrival: with 64 workers, 63 times in vain.
//
// Who may call: `quorum_arrive` any process; `quorum_wait` one process at a time.
//
//   offset  size  field    written by            when
//   0       64    arrived  arriving processes    a signal: the number of arrivals since the start
//   64      64    wanted   the waiting process   before it waits: the count at which it must be woken
//
// If a process dies before it arrives, the waiter notices by the process's pidfd, as in any wait. If it dies between
// its addition and the wake-up, the waiter finds the new count when its slice ends.
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

inline std::int64_t quorum_arrive(QuorumCell &cell, std::int64_t count) {
    // PAIR publish/see, partner: quorum_wait. What this process stored before its arrival is visible after the wait.
    // PAIR arrive/want, partner: quorum_wait. This side adds to the count, then loads `wanted`; the waiter stores
    // `wanted`, then loads the count (in signal_wait). All four are sequentially consistent, so at least one side sees
    // the other: either the waiter finds the count complete and does not sleep, or this side finds `wanted` and wakes
    // it. This prevents the load of `wanted` from moving before the addition, and the waiter's load of the count from
    // moving before its store: both sides would miss each other and the waiter would sleep on.
    const std::int64_t before = cell.arrived.value.fetch_add(count, std::memory_order_seq_cst);
    const std::int64_t wanted = cell.wanted.count.load(std::memory_order_seq_cst);
    const std::int64_t now = wrapping_sum(before, count);
    if (before < wanted && now >= wanted)
        signal_wake(cell.arrived);
    return now;
}

inline WaitResult quorum_wait(QuorumCell &cell, std::int64_t until, std::int64_t deadline_ns, std::span<const int> pidfds,
                              Spin &spin) {
    cell.wanted.count.store(until, std::memory_order_seq_cst); // PAIR arrive/want, partner: quorum_arrive
    // PAIR publish/see, partner: quorum_arrive. What arriving processes stored is loaded after the wait.
    return signal_wait(cell.arrived, until, deadline_ns, pidfds, spin);
}

} // namespace memlane
