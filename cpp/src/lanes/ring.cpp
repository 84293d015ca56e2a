#include "lanes/ring.hpp"

#include <algorithm>

#include "os/clock.hpp"
#include "os/process.hpp"

namespace memlane {

namespace {

void increment(Word &counter) { counter.fetch_add(1, std::memory_order_relaxed); }

// How often a search for the oldest slot goes round the ring. Two rounds are the rule, and every further one needs an older commit that became
// visible during it: so many mean that a stray process changes the words all the time.
constexpr std::int64_t max_rounds = 64;

} // namespace

Ring::Ring(std::byte *control, std::byte *slots, std::int64_t count, std::size_t stride_bytes, std::int64_t unread_limit,
           Overflow overflow)
    : control_(reinterpret_cast<RingControl *>(control)), slots_(slots), count_(count), stride_bytes_(stride_bytes),
      unread_limit_(unread_limit), overflow_(overflow) {}

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
    const std::int64_t claim_word = slot_word(SlotState::writing, process);
    std::int64_t free = claim_free(process);
    if (free >= 0 || overflow_ == Overflow::block)
        return free;
    // Before an unread slot is dropped, slots of dead processes are reclaimed. Writers in this mode never wait, so no
    // other call would do that, and every death would make the ring smaller for good. It costs microseconds: once per
    // slice.
    const std::int64_t now = now_ns();
    // Later than a slice from now is a stray word, or the clock of another time namespace.
    if (const std::int64_t next = control_->lost.next_reap_ns.load(std::memory_order_relaxed);
        now >= next || next > now + slice_ns) {
        control_->lost.next_reap_ns.store(now + slice_ns, std::memory_order_relaxed);
        if (reap() > 0 && (free = claim_free(process)) >= 0)
            return free;
    }
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

void Ring::commit(std::int64_t slot) {
    SlotHead &slot_head = head(slot);
    const std::int64_t claim_word = slot_head.state.load(std::memory_order_relaxed);
    const std::int64_t sequence = wrapping_sum(control_->sequence.last.fetch_add(1, std::memory_order_relaxed), 1);
    slot_head.sequence.store(sequence, std::memory_order_relaxed);
    // PAIR publish/see, partner: Ring::oldest_ready. Head and payload are stored before `ready`: otherwise a reader could
    // take the slot and load its old content. If the writer dies before this line, its sequence number stays unused and
    // its slot is reclaimed; after this line, a reader finds the slot, by the wake-up or at its next check.
    publish(slot_head.state, slot_word(SlotState::ready, sequence));
    signal_add(control_->written, 1);
    if (overflow_ == Overflow::block)
        return;
    trim(claim_word);
    signal_add(control_->freed, 1); // even if none was dropped: in this mode a ready slot can be claimed too
}

void Ring::trim(std::int64_t claim_word) {
    // PAIR commit/trim, both sides are this line: each of two writers stores its `ready`, then counts all ready slots.
    // With a fence between the two on both sides, at least one counts both. This prevents the counting from moving
    // before the store (which even x86 does): neither would see the other's slot, and one too many would stay unread.
    std::atomic_thread_fence(std::memory_order_seq_cst);
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
    signal_add(control_->freed, 1);
}

std::int64_t Ring::try_take(std::int64_t process) {
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
        const Oldest oldest = oldest_ready();
        if (oldest.slot < 0)
            return -1;
        if (publish_if(head(oldest.slot).state, oldest.word, slot_word(SlotState::reading, process)))
            return oldest.slot;
    }
    return -1; // as in try_claim
}

void Ring::release(std::int64_t slot) {
    increment(control_->taken.read);
    // PAIR publish/see, partner: Ring::claim_free. This reader's loads come before `free`: otherwise it could load what
    // the next writer stores.
    publish(head(slot).state, slot_word(SlotState::free));
    signal_add(control_->freed, 1);
}

namespace {

// Attempts, waits for `signal` to change, and attempts again. The signal is loaded before the first attempt: a change
// between the attempt and the wait ends the wait at once. Slots of dead processes are reclaimed before each sleep.
template <class Attempt, class Reap>
WaitResult wait_for_slot(SignalCell &signal, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                         Attempt attempt, Reap reap) {
    const std::int64_t seen = see(signal.value);
    std::int64_t slot = attempt();
    if (slot < 0 && reap() > 0)
        slot = attempt();
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    WaitResult result = signal_wait(signal, wrapping_sum(seen, 1), deadline_ns, pidfds, spin);
    slot = attempt(); // also after a peer's death and after the deadline: a slot may have come just before
    if (slot >= 0)
        return {WaitEnd::reached, slot};
    // Another process got the slot. That can happen any number of times, so the deadline is checked and the caller may
    // act.
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
    // Only slots of dead readers can be read. Checking whether a process is alive costs microseconds, and there may be
    // many writers.
    return wait_for_slot(
        control_->written, deadline_ns, pidfds, spin, [&] { return try_take(process); },
        [&] { return reap(SlotState::reading); });
}

std::int64_t Ring::unread() const { return std::min(oldest_ready().ready, unread_limit_); }

std::int64_t Ring::reap(SlotState held) {
    std::int64_t reaped = 0;
    for (std::int64_t slot = 0; slot < count_; ++slot) {
        SlotHead &slot_head = head(slot);
        const std::int64_t word = see(slot_head.state);
        if (slot_state(word) != held || process_alive(slot_detail(word)))
            continue;
        // The holder is dead, so only another process that reaps can have changed the word. If it did, and the slot was
        // used again since, the sequence number loaded here is wrong, but then the exchange fails.
        const bool writing = held == SlotState::writing;
        const std::int64_t sequence = slot_head.sequence.load(std::memory_order_relaxed);
        if (!publish_if(slot_head.state, word, writing ? slot_word(SlotState::free) : slot_word(SlotState::ready, sequence)))
            continue;
        increment(writing ? control_->lost.abandoned : control_->taken.returned);
        // `written` counts commits only: adding 0 wakes the readers all the same.
        writing ? signal_add(control_->freed, 1) : signal_add(control_->written, 0);
        ++reaped;
    }
    return reaped;
}

} // namespace memlane
