// A wait queue: processes that wait for one of several equal things, such as free slots, first come, first served.
//
// Who may call: any thread of any process that maps the queue. Each waiter has a place with a ticket, its number in the
// order of arrival, and with a signal of its own: one thing that becomes available wakes one waiter.
//
// The queue hands nothing over. It says which waiters may take what is available: with n things available the n first, and
// a newcomer only `max_overtakes` times in a row. So a waiter can die, stop or give up at any line, and nothing is lost with
// it; at worst the others wait beside things that are available. A waiter that was called, because something is available,
// and does not look for a slice (`slice_ns`) counts as stuck: the next waiter that looks removes it. A process that was only
// slow notices it, and joins again at the end.
//
//   offset  size  field      written by           when
//   0       16    waiting    waiters              join, leave: one bit per place
//   16      16    called     callers, waiters     call (sets the bit of a place), look (clears it)
//   64      8     last       waiters              join: the last ticket
//   72      8     overtaken  newcomers, waiters   how often newcomers were faster since a waiter was served
//   128     1024  ticket     waiters              join; 0 while its process joins or leaves
//   1152    1024  called_ns  callers              call: when, on the monotonic clock
//   2176    -     signal     callers              call (a signal: the waiter of the place waits for it)
//
// If a process dies or is stopped, the others see:
//   join     before `waiting`: nothing. Between it and `ticket`: a taken place without a ticket, which comes after all
//            others; it is called by the next waiter that looks, and removed a slice later
//   waiting  a place that is called in its turn, and removed a slice later
//   look     as waiting. Called and not awake yet, or awake and not served yet: the others find it stuck after a slice
//   leave    between `ticket` and `waiting`: as in join
//   call     between `called` and `signal`: the waiter looks when its own slice ends
//   remove   between `ticket` and `waiting`: as in join. A process that is stopped there for more than a slice may free a
//            place that another waiter has taken since: that waiter notices it when its slice ends, and joins again
// No line leaves anything locked. Stray words can disturb the order, but every wait ends with its slice, and the next look
// repairs them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

// A waiter's place in a queue. Belongs to one thread.
struct WaitPlace {
    int index = -1; // -1: not in the queue
    std::int64_t ticket = 0;
};

class WaitQueue {
  public:
    static constexpr int places = 128;
    // How often newcomers may take what waiters were called for, before one of the waiters is served. A newcomer runs
    // already, and a waiter has to be woken first: without overtaking, every hand-over costs a wake-up and a sleep. With 64
    // writers of a ring on two busy cores, that was 62,000 slots per second instead of 199,000.
    static constexpr std::uint64_t max_overtakes = 16;

    // PAIR offer/look, partner: look and leave. A process that makes something available changes a signal, then loads
    // `waiting` and `called`, here and in `call`. A waiter sets its bit in `waiting`, or clears the one in `called`, then
    // loads the signal, then what is available. All are sequentially consistent, so at least one sees the other: either the
    // waiter finds the thing, or it is called. This prevents the loads on either side from moving before the changes: both
    // would miss each other, and the waiter would sleep beside something available.
    bool empty() const {
        std::int64_t any = 0;
        for (const Word &word : waiting_)
            any |= word.load(std::memory_order_seq_cst);
        return any == 0;
    }
    // Makes sure that as many waiters are called as things are available; the first ones are called first.
    void call(std::int64_t available);
    // Whether at least `count` waiters are called and have not looked yet.
    bool has_called(std::int64_t count) const;

    // Whether a newcomer may take something before those who wait.
    bool may_overtake() const {
        // Unsigned: a stray negative number would allow any number.
        return static_cast<std::uint64_t>(overtaken_.load(std::memory_order_relaxed)) < max_overtakes;
    }
    void count_overtake() { overtaken_.fetch_add(1, std::memory_order_relaxed); }

    // Takes the last place; false if all places are taken.
    bool join(WaitPlace &place);
    bool holds(const WaitPlace &place) const {
        return place.index >= 0 && has_bit(waiting_, place.index) && see(ticket_[place.index]) == place.ticket;
    }
    // Begins a look at what is available. `changed` is the signal that changes when something becomes available.
    void look(const WaitPlace &place, const SignalCell &changed);
    // How many waiters come before this one. Removes those that are stuck.
    std::int64_t rank(const WaitPlace &place);
    // For a process that found all places taken.
    void remove_stuck() { rank({}); }
    // When the first waiter that was called counts as stuck; `forever_ns` if none is called.
    std::int64_t next_stuck_ns() const;
    // Gives the place up. What was offered to it must be offered to the others: the caller calls them afterwards.
    void leave(WaitPlace &place, const SignalCell &changed);
    // Gives the place up after its waiter has got what it waited for.
    void leave_served(WaitPlace &place, const SignalCell &changed) {
        overtaken_.store(0, std::memory_order_relaxed);
        leave(place, changed);
    }

    SignalCell &signal(const WaitPlace &place) { return signal_[place.index]; }
    const SignalCell &signal(int index) const { return signal_[index]; }
    // The ticket of the last waiter: the number of waits in this queue so far.
    std::int64_t last_ticket() const { return last_.load(std::memory_order_relaxed); }

  private:
    static constexpr int words = places / 64;
    using Bits = Word[words];

    static std::int64_t bit_of(int index) { return static_cast<std::int64_t>(std::uint64_t{1} << (index % 64)); }
    static bool has_bit(const Bits &bits, int index) {
        return (bits[index / 64].load(std::memory_order_seq_cst) & bit_of(index)) != 0;
    }
    // Calls `visit(index)` for every place that is taken; with `called`, only if it is called or not called.
    enum class Select { all, called, not_called };
    template <class Visit> void for_each(Select select, Visit visit) const {
        for (int word = 0; word < words; ++word) {
            const auto waiting = static_cast<std::uint64_t>(waiting_[word].load(std::memory_order_seq_cst));
            if (waiting == 0)
                continue;
            const auto called = static_cast<std::uint64_t>(called_[word].load(std::memory_order_seq_cst));
            const std::uint64_t selected = select == Select::all      ? waiting
                                           : select == Select::called ? waiting & called
                                                                      : waiting & ~called;
            for (std::uint64_t left = selected; left != 0; left &= left - 1)
                visit(word * 64 + std::countr_zero(left));
        }
    }
    void call_place(int index, std::int64_t now);
    bool is_stuck(int index, std::int64_t now) const;
    void remove(int index, std::int64_t ticket);
    void free_place(int index);

    alignas(64) Bits waiting_;
    Bits called_;
    alignas(64) Word last_;
    Word overtaken_;
    alignas(64) Word ticket_[places];
    Word called_ns_[places];
    SignalCell signal_[places];
};
static_assert(sizeof(WaitQueue) == 2176 + WaitQueue::places * sizeof(SignalCell));

} // namespace memlane
