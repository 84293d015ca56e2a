#include "lanes/ring.hpp"

#include <algorithm>

#include "os/clock.hpp"
#include "os/process.hpp"

namespace memlane {

namespace {

void count_up(Word &counter) { counter.fetch_add(1, std::memory_order_relaxed); }

} // namespace

Ring::Ring(std::byte *control, std::byte *slots, std::int64_t count, std::size_t stride_bytes, std::int64_t unread_limit,
           Overflow overflow)
    : control_(reinterpret_cast<RingControl *>(control)), slots_(slots), count_(count), stride_bytes_(stride_bytes),
      unread_limit_(unread_limit), overflow_(overflow) {}

Ring::Oldest Ring::oldest_ready() const {
    Oldest oldest;
    // A writer may commit two slots during the search, the first of them where it had already passed. Who sees the second
    // sees the first from then on (PAIR publish/see), so the search goes once round *after* it found what it returns: that
    // keeps each writer's order. A second look at the places before it would not do: what is found there is new itself, and
    // its elders can lie behind it.
    std::int64_t since = 0;
    for (std::int64_t look = 0; look < count_ || (oldest.slot >= 0 && since < count_); ++look, ++since) {
        const std::int64_t slot = look % count_;
        const std::int64_t word = see(head(slot).state); // PAIR publish/see, partner: Ring::commit
        if (slot_state(word) != SlotState::ready)
            continue;
        oldest.ready += look < count_;
        if (oldest.slot < 0 || slot_detail(word) < slot_detail(oldest.word)) {
            oldest.slot = slot;
            oldest.word = word;
            since = 0;
        }
    }
    return oldest;
}

std::int64_t Ring::claim_free(std::int64_t process) {
    const std::int64_t mine = slot_word(SlotState::writing, process);
    // Writers start their search at different slots, so that they do not fight over the first free one.
    const std::int64_t first = see(control_->sequence.last) % count_;
    for (std::int64_t i = 0; i < count_; ++i) {
        const std::int64_t slot = (first + i) % count_;
        Word &state = head(slot).state;
        const std::int64_t word = see(state); // PAIR publish/see, partner: Ring::release
        if (slot_state(word) == SlotState::free && publish_if(state, word, mine))
            return slot;
    }
    return -1;
}

std::int64_t Ring::try_claim(std::int64_t process) {
    const std::int64_t mine = slot_word(SlotState::writing, process);
    std::int64_t free = claim_free(process);
    if (free >= 0 || overflow_ == Overflow::block)
        return free;
    // Before unread slots are dropped: what the dead hold is free too. A writer of this mode never waits, so nobody else
    // would find that, and every death would make the ring smaller for good. Asking costs microseconds: once a slice.
    if (const std::int64_t now = now_ns(); now >= control_->lost.next_reap_ns.load(std::memory_order_relaxed)) {
        control_->lost.next_reap_ns.store(now + slice_ns, std::memory_order_relaxed);
        if (reap() > 0 && (free = claim_free(process)) >= 0)
            return free;
    }
    for (;;) {
        const Oldest oldest = oldest_ready();
        if (oldest.slot < 0)
            return -1;
        if (publish_if(head(oldest.slot).state, oldest.word, mine)) {
            count_up(control_->lost.dropped);
            return oldest.slot;
        }
    }
}

void Ring::commit(std::int64_t slot) {
    SlotHead &slot_head = head(slot);
    const std::int64_t mine = slot_head.state.load(std::memory_order_relaxed);
    const std::int64_t sequence = control_->sequence.last.fetch_add(1, std::memory_order_relaxed) + 1;
    slot_head.sequence.store(sequence, std::memory_order_relaxed);
    // PAIR publish/see: head and payload stand before `ready`. A writer that dies before this line has claimed a number
    // that nobody will see, and its slot goes back; after it, the slot is a reader's, woken or at its next look.
    publish(slot_head.state, slot_word(SlotState::ready, sequence));
    signal_add(control_->written, 1);
    if (overflow_ == Overflow::block)
        return;
    trim(mine);
    signal_add(control_->freed, 1); // whether or not one was dropped: in this mode a ready slot can be claimed too
}

void Ring::trim(std::int64_t mine) {
    // PAIR commit/trim: each of two writers stores its `ready`, then counts everybody's. With the fence between the two, on
    // both sides, at least one counts both. It prevents that the counting moves in front of the store (which even x86 does):
    // neither would see the other's, and one too many would stay unread.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Once round at most: what others commit meanwhile is theirs to trim.
    for (std::int64_t i = 0; i < count_; ++i) {
        const Oldest oldest = oldest_ready();
        if (oldest.ready <= unread_limit_)
            return;
        Word &state = head(oldest.slot).state;
        // By way of `writing`, not straight to `free`: if this process dies before it has counted, somebody finds the slot
        // and counts it as abandoned.
        if (publish_if(state, oldest.word, mine)) {
            count_up(control_->lost.dropped);
            publish(state, slot_word(SlotState::free));
        }
    }
}

void Ring::abandon(std::int64_t slot) {
    count_up(control_->lost.abandoned);
    publish(head(slot).state, slot_word(SlotState::free));
    signal_add(control_->freed, 1);
}

std::int64_t Ring::try_take(std::int64_t process) {
    for (;;) {
        const Oldest oldest = oldest_ready();
        if (oldest.slot < 0)
            return -1;
        if (publish_if(head(oldest.slot).state, oldest.word, slot_word(SlotState::reading, process)))
            return oldest.slot;
    }
}

void Ring::release(std::int64_t slot) {
    count_up(control_->taken.read);
    // PAIR publish/see: what this reader loaded stays before the word; the writer that claims the slot stores after it.
    publish(head(slot).state, slot_word(SlotState::free));
    signal_add(control_->freed, 1);
}

namespace {

// Waits for `signal` to move and attempts. The signal is read before the first attempt: a change that comes between the
// attempt and the wait ends the wait at once. What dead processes hold is put back before each sleep.
template <class Attempt, class Reap>
WaitResult wait_for_slot(SignalCell &signal, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                         Attempt attempt, Reap reap) {
    const std::int64_t seen = see(signal.value);
    std::int64_t slot = attempt();
    if (slot < 0 && reap() > 0)
        slot = attempt();
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    WaitResult result = signal_wait(signal, seen + 1, deadline_ns, pidfds, spin);
    slot = attempt(); // what came, if only with the peer's last breath or just before the deadline
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    // Somebody else was faster. That can happen any number of times, so the caller looks around and the deadline counts.
    if (result.end == WaitEnd::reached)
        result.end = now_ns() < deadline_ns ? WaitEnd::paused : WaitEnd::timed_out;
    return {result.end, -1, result.peer};
}

} // namespace

WaitResult Ring::wait_claim(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
    return wait_for_slot(
        control_->freed, deadline_ns, pidfds, spin, [&] { return try_claim(process); }, [&] { return reap(); });
}

WaitResult Ring::wait_take(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
    // Only what dead readers hold is of use to a reader. Asking after a process costs microseconds, and the writers are many.
    return wait_for_slot(
        control_->written, deadline_ns, pidfds, spin, [&] { return try_take(process); },
        [&] { return reap(SlotState::reading); });
}

std::int64_t Ring::unread() const {
    return std::min(oldest_ready().ready, unread_limit_);
}

std::int64_t Ring::reap(SlotState held) {
    std::int64_t reaped = 0;
    for (std::int64_t slot = 0; slot < count_; ++slot) {
        SlotHead &slot_head = head(slot);
        const std::int64_t word = see(slot_head.state);
        if (slot_state(word) != held || process_alive(slot_detail(word)))
            continue;
        // The dead change nothing any more, so the word can only have been changed by another one who reaps. If it was, and
        // the slot was used again since, the sequence number is wrong, but then the exchange fails.
        const bool writing = held == SlotState::writing;
        const std::int64_t sequence = slot_head.sequence.load(std::memory_order_relaxed);
        if (!publish_if(slot_head.state, word,
                        writing ? slot_word(SlotState::free) : slot_word(SlotState::ready, sequence)))
            continue;
        count_up(writing ? control_->lost.abandoned : control_->taken.returned);
        // `written` counts commits only: adding nothing wakes the readers all the same.
        writing ? signal_add(control_->freed, 1) : signal_add(control_->written, 0);
        ++reaped;
    }
    return reaped;
}

} // namespace memlane
