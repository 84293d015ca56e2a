#include "lanes/ring.hpp"

#include <algorithm>

#include "os/clock.hpp"

namespace memlane {

namespace {

void increment(Word &counter) { counter.fetch_add(1, std::memory_order_relaxed); }

// How often a search for the oldest slot goes round the ring. Two rounds are the rule, and every further one needs an older commit that became
// visible during it: so many mean that a stray process changes the words all the time.
constexpr std::int64_t max_rounds = 64;

} // namespace

Ring::Ring(std::byte *control, std::byte *slots, std::int64_t count, std::size_t stride_bytes, std::int64_t unread_limit,
           Overflow overflow, Life &life)
    : control_(reinterpret_cast<RingControl *>(control)), slots_(slots), count_(count), stride_bytes_(stride_bytes),
      unread_limit_(unread_limit), overflow_(overflow), life_(&life) {}

Ring::Oldest Ring::oldest_ready() const {
    Oldest oldest;
    // A writer may commit two slots during the search, the first of them at a position that the search has already
    // passed. A process that sees the second commit also sees the first one from then on (PAIR publish/see), so the
    // search goes once round the ring *after* it found the slot that it returns: this keeps each writer's order.
    // Searching only the positions before the found slot again would not be enough: a slot found there is itself new,
    // and older slots of its writer can lie behind it.
    std::int64_t since = 0;
    for (std::int64_t probe = 0; probe < count_ || (oldest.slot >= 0 && since < count_ && probe < max_rounds * count_);
         ++probe, ++since) {
        const std::int64_t slot = probe % count_;
        // PAIR publish/see, partner: Ring::commit. Head and payload are loaded after `ready`.
        const std::int64_t word = see(head(slot).state);
        if (slot_state(word) != SlotState::ready)
            continue;
        oldest.ready += probe < count_;
        if (oldest.slot < 0 || slot_detail(word) < slot_detail(oldest.word)) {
            oldest.slot = slot;
            oldest.word = word;
            since = 0;
        }
    }
    return oldest;
}

std::int64_t Ring::claim_free(std::int64_t process) {
    const std::int64_t claim_word = slot_word(SlotState::writing, process);
    // Writers start their search at different slots, so that they do not compete for the first free one.
    // Unsigned: the remainder of a stray negative number would lie in front of the ring.
    const auto first = static_cast<std::int64_t>(static_cast<std::uint64_t>(see(control_->sequence.last)) %
                                                 static_cast<std::uint64_t>(count_));
    for (std::int64_t i = 0; i < count_; ++i) {
        const std::int64_t slot = (first + i) % count_;
        Word &state = head(slot).state;
        // PAIR publish/see, partner: Ring::release. This writer stores into the slot after `free`.
        const std::int64_t word = see(state);
        if (slot_state(word) == SlotState::free && publish_if(state, word, claim_word))
            return slot;
    }
    return -1;
}

std::int64_t Ring::try_claim(std::int64_t process) {
    return overflow_ == Overflow::block ? get_as_newcomer(Side::writers, [&] { return claim_free(process); })
                                        : claim_or_drop(process);
}

std::int64_t Ring::claim_or_drop(std::int64_t process) {
    const std::int64_t claim_word = slot_word(SlotState::writing, process);
    std::int64_t free = claim_free(process);
    if (free >= 0)
        return free;
    // Before an unread slot is dropped, slots of dead processes are reclaimed. Writers in this mode hardly ever wait, so no
    // other call would do that, and every death would make the ring smaller for good.
    if (reap_is_due() && reap() > 0 && (free = claim_free(process)) >= 0)
        return free;
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
        const Oldest oldest = oldest_ready();
        if (oldest.slot < 0)
            return -1;
        if (publish_if(head(oldest.slot).state, oldest.word, claim_word)) {
            increment(control_->lost.dropped);
            return oldest.slot;
        }
    }
    return -1; // the caller waits for a slice at most and tries again, unless it is interrupted or its time is over
}

bool Ring::reap_is_due() {
    const std::int64_t now = now_ns();
    const std::int64_t next = control_->lost.next_reap_ns.load(std::memory_order_relaxed);
    // Later than a slice from now is a stray word, or the clock of another time namespace.
    if (now < next && next <= now + slice_ns)
        return false;
    control_->lost.next_reap_ns.store(now + slice_ns, std::memory_order_relaxed);
    return true;
}

void Ring::commit(std::int64_t slot) {
    SlotHead &slot_head = head(slot);
    const std::int64_t claim_word = slot_head.state.load(std::memory_order_relaxed);
    const std::int64_t sequence = wrapping_sum(control_->sequence.last.fetch_add(1, std::memory_order_relaxed), 1);
    slot_head.sequence.store(sequence, std::memory_order_relaxed);
    // PAIR publish/see, partner: Ring::oldest_ready. Head and payload are stored before `ready`: otherwise a reader could
    // take the slot and load its old content. If the writer dies before this line, its sequence number stays unused and
    // its slot is reclaimed; after this line, a reader finds the slot, by the wake-up or at its next check.
    publish(slot_head.state, slot_word(SlotState::ready, sequence));
    offer(Side::readers, 1);
    if (overflow_ == Overflow::block)
        return;
    trim(claim_word);
    offer(Side::writers, 1); // even if none was dropped: in this mode a ready slot can be claimed too
}

void Ring::trim(std::int64_t claim_word) {
    // PAIR commit/trim, both sides are this line: each of two writers stores its `ready`, then counts all ready slots.
    // With a fence between the two on both sides, at least one counts both. This prevents the counting from moving
    // before the store (which even x86 does): neither would see the other's slot, and one too many would stay unread.
    fence(std::memory_order_seq_cst);
    // At most one round: slots that others commit meanwhile are trimmed by those writers.
    for (std::int64_t i = 0; i < count_; ++i) {
        const Oldest oldest = oldest_ready();
        if (oldest.ready <= unread_limit_)
            return;
        Word &state = head(oldest.slot).state;
        // Through `writing`, not directly to `free`: if this process dies before it has counted the drop, the process
        // that reclaims the slot counts it as abandoned.
        if (publish_if(state, oldest.word, claim_word)) {
            increment(control_->lost.dropped);
            publish(state, slot_word(SlotState::free));
        }
    }
}

void Ring::abandon(std::int64_t slot) {
    increment(control_->lost.abandoned);
    publish(head(slot).state, slot_word(SlotState::free));
    offer(Side::writers, 1);
}

std::int64_t Ring::try_take(std::int64_t process) {
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
        const Oldest oldest = oldest_ready();
        if (oldest.slot < 0)
            return -1;
        if (publish_if(head(oldest.slot).state, oldest.word, slot_word(SlotState::reading, process)))
            return oldest.slot;
    }
    return -1; // as in claim_or_drop
}

void Ring::release(std::int64_t slot) {
    increment(control_->taken.read);
    // PAIR publish/see, partner: Ring::claim_free. This reader's loads come before `free`: otherwise it could load what
    // the next writer stores.
    publish(head(slot).state, slot_word(SlotState::free));
    offer(Side::writers, 1);
}

void Ring::give_back(std::int64_t slot) {
    SlotHead &slot_head = head(slot);
    increment(control_->taken.returned);
    // The content is as its writer left it: the next reader's loads are ordered after the writer's stores, because this
    // process saw `ready` before (PAIR publish/see, partner: Ring::oldest_ready).
    publish(slot_head.state, slot_word(SlotState::ready, slot_head.sequence.load(std::memory_order_relaxed)));
    offer(Side::readers, 0); // `written` counts commits only
    if (overflow_ == Overflow::drop_oldest)
        offer(Side::writers, 1); // they may drop it
}

// --------------------------------------------------------------------------------------------------------- waiting

std::int64_t Ring::count_available(Side side, std::int64_t limit) const {
    const SlotState wanted = side == Side::writers ? SlotState::free : SlotState::ready;
    std::int64_t available = 0;
    for (std::int64_t slot = 0; slot < count_ && available < limit; ++slot)
        available += slot_state(see(head(slot).state)) == wanted;
    return available;
}

void Ring::offer(Side side, std::int64_t amount) {
    // PAIR offer/look, partner: WaitQueue::look and WaitQueue::leave. This side changes the signal, even by 0, then loads
    // which waiters there are: see WaitQueue::empty. The state of the slot was stored before: a waiter that sees the change
    // of the signal sees the slot.
    signal_add(changed(side), amount);
    if (!queue(side).empty()) [[unlikely]]
        call_waiters(side);
}

void Ring::call_waiters(Side side) {
    WaitQueue &waiters = queue(side);
    waiters.call(count_available(side, WaitQueue::places));
}

template <class Get> std::int64_t Ring::get_as_newcomer(Side side, Get get) {
    WaitQueue &waiters = queue(side);
    if (side == Side::readers || waiters.empty()) [[likely]]
        return get();
    if (!waiters.may_overtake())
        return -1;
    const std::int64_t slot = get();
    if (slot >= 0)
        waiters.count_overtake();
    return slot;
}

template <class Get> std::int64_t Ring::get_in_turn(Waiter &waiter, Get get) {
    WaitQueue &waiters = queue(waiter.side_);
    SignalCell &signal = changed(waiter.side_);
    waiters.look(waiter.place_, signal);
    if (!waiters.holds(waiter.place_))
        return -1; // removed as stuck: the next slice begins with a new place
    const std::int64_t rank = waiters.rank(waiter.place_);
    if (waiter.side_ == Side::writers) {
        const std::int64_t available = count_available(waiter.side_, rank + 1);
        if (available <= rank) {
            waiters.call(available); // a process that died before it could call them has left that to this one
            return -1;
        }
    }
    const std::int64_t slot = get();
    if (slot >= 0) {
        waiters.leave_served(waiter.place_, signal);
        if (!waiters.empty())
            call_waiters(waiter.side_);
    }
    return slot;
}

void Ring::leave(Waiter &waiter) {
    WaitQueue &waiters = queue(waiter.side_);
    waiters.leave(waiter.place_, changed(waiter.side_));
    if (!waiters.empty())
        call_waiters(waiter.side_);
}

namespace {

// Attempts, waits for `signal` to change, and attempts again. The signal is loaded before the first attempt: a change
// between the attempt and the wait ends the wait at once. Slots of dead processes are reclaimed before each sleep, which
// ends at `limit()` at the latest.
template <class Attempt, class Reap, class Limit>
WaitResult wait_for_slot(SignalCell &signal, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                         Attempt attempt, Reap reap, Limit limit) {
    const std::int64_t seen = see(signal.value);
    std::int64_t slot = attempt();
    if (slot < 0 && reap() > 0)
        slot = attempt();
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    WaitResult result = signal_wait(signal, wrapping_sum(seen, 1), std::min(deadline_ns, limit()), pidfds, spin);
    slot = attempt(); // also after a peer's death and after the deadline: a slot may have come just before
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    // Another process got the slot, or the limit has passed. That can happen any number of times, so the deadline is checked
    // and the caller may act.
    if (result.end == WaitEnd::reached || result.end == WaitEnd::timed_out)
        result.end = now_ns() < deadline_ns ? WaitEnd::paused : WaitEnd::timed_out;
    return {result.end, -1, result.peer};
}

constexpr auto no_limit = [] { return forever_ns; };

} // namespace

template <class Get, class Reap>
WaitResult Ring::wait_in_turn(Waiter &waiter, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin, Get get,
                              Reap reap) {
    WaitQueue &waiters = queue(waiter.side_);
    SignalCell &signal = changed(waiter.side_);
    const auto as_newcomer = [&] { return get_as_newcomer(waiter.side_, get); };
    // A waiter in the queue does not spin. Several that spin and yield take time from the process that they wait for, and
    // the scheduler gives them less in return: with 8 writers on two busy cores, the largest share of the slots was 1.9 times
    // the smallest with it, and 1.2 times without.
    Spin never(0);
    if (!waiters.holds(waiter.place_)) { // the first slice, or removed as stuck
        waiter.place_ = {};
        const std::int64_t seen = see(signal.value);
        std::int64_t slot = as_newcomer();
        if (slot < 0 && waiters.empty() && spin.until(signal, wrapping_sum(seen, 1), deadline_ns))
            slot = as_newcomer();
        if (slot >= 0)
            return {WaitEnd::reached, slot};
        if (!waiters.join(waiter.place_))
            return wait_for_slot(
                signal, deadline_ns, pidfds, never,
                [&] {
                    const std::int64_t found = as_newcomer();
                    if (found < 0) { // the processes of all places may be dead
                        waiters.remove_stuck();
                        call_waiters(waiter.side_);
                    }
                    return found;
                },
                reap, no_limit);
    }
    return wait_for_slot(
        waiters.signal(waiter.place_), deadline_ns, pidfds, never, [&] { return get_in_turn(waiter, get); }, reap,
        // Removed by another process, although it was not slow: its place had been called late for the waiter before. It does
        // not sleep, but joins again.
        [&] { return waiters.holds(waiter.place_) ? waiters.next_stuck_ns() : 0; });
}

WaitResult Ring::wait_claim(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                            Waiter &waiter) {
    if (overflow_ == Overflow::drop_oldest)
        return wait_for_slot(
            control_->freed, deadline_ns, pidfds, spin, [&] { return claim_or_drop(process); }, [&] { return reap(); },
            no_limit);
    // Checking whether a process is alive costs microseconds: all writers together do it once per slice, and each before it
    // gives up.
    return wait_in_turn(
        waiter, deadline_ns, pidfds, spin, [&] { return claim_free(process); },
        [&] { return reap_is_due() || now_ns() >= deadline_ns ? reap() : 0; });
}

WaitResult Ring::wait_take(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                           Waiter &waiter) {
    // Only slots of dead readers can be read, and there may be many writers.
    return wait_in_turn(
        waiter, deadline_ns, pidfds, spin, [&] { return try_take(process); }, [&] { return reap(SlotState::reading); });
}

std::int64_t Ring::unread() const { return std::min(oldest_ready().ready, unread_limit_); }

std::int64_t Ring::reap(SlotState held) {
    std::int64_t reaped = 0;
    for (std::int64_t slot = 0; slot < count_; ++slot) {
        SlotHead &slot_head = head(slot);
        const std::int64_t word = see(slot_head.state);
        if (slot_state(word) != held || life_->alive(slot_detail(word)))
            continue;
        // The holder is dead, so only another process that reaps can have changed the word. If it did, and the slot was
        // used again since, the sequence number loaded here is wrong, but then the exchange fails.
        const bool writing = held == SlotState::writing;
        const std::int64_t sequence = slot_head.sequence.load(std::memory_order_relaxed);
        if (!publish_if(slot_head.state, word, writing ? slot_word(SlotState::free) : slot_word(SlotState::ready, sequence)))
            continue;
        increment(writing ? control_->lost.abandoned : control_->taken.returned);
        if (!writing)
            offer(Side::readers, 0);
        if (writing || overflow_ == Overflow::drop_oldest)
            offer(Side::writers, 1);
        ++reaped;
    }
    return reaped;
}

} // namespace memlane
