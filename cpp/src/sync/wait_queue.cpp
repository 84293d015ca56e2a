#include "sync/wait_queue.hpp"

#include <algorithm>
#include <limits>

#include "os/clock.hpp"

namespace memlane {

void WaitQueue::call_place(int index, std::int64_t now) {
    if (has_bit(called_, index))
        return; // since the time that it has
    // The time first: a place that is called since the time of an earlier call would count as stuck at once.
    called_ns_[index].store(now, std::memory_order_relaxed);
    // PAIR publish/see, partner: is_stuck, for this time.
    if ((called_[index / 64].fetch_or(bit_of(index), std::memory_order_seq_cst) & bit_of(index)) == 0)
        signal_add(signal_[index], 1); // otherwise another process calls it
}

bool WaitQueue::is_stuck(int index, std::int64_t now) const {
    // PAIR publish/see, partner: call_place. The time is loaded after the bit.
    if (!has_bit(called_, index))
        return false;
    // A time of the near future is that of a call after this process has read the clock. More than a slice ahead is a stray
    // word, or the clock of another time namespace, and nobody may wait for it.
    const std::int64_t since = called_ns_[index].load(std::memory_order_relaxed);
    return wrapping_sum(since, slice_ns) <= now || since > now + slice_ns;
}

bool WaitQueue::has_called(std::int64_t count) const {
    // Not those without a ticket: they are called only to find out whether they are alive.
    for_each(Select::called, [&](int index) { count -= see(ticket_[index]) != 0; });
    return count <= 0;
}

void WaitQueue::call(std::int64_t available) {
    available = std::min<std::int64_t>(available, places);
    for (std::int64_t called = 0; called < available && !has_called(available); ++called) {
        int first = -1;
        std::int64_t first_ticket = std::numeric_limits<std::int64_t>::max();
        for_each(Select::not_called, [&](int index) { // PAIR offer/look, partner: look and leave
            const std::int64_t ticket = see(ticket_[index]);
            if (ticket != 0 && ticket < first_ticket) {
                first = index;
                first_ticket = ticket;
            }
        });
        if (first < 0)
            return;
        call_place(first, now_ns());
    }
}

bool WaitQueue::join(WaitPlace &place) {
    for (int word = 0; word < words; ++word) {
        std::int64_t taken = waiting_[word].load(std::memory_order_relaxed);
        while (taken != -1) {
            const int index = word * 64 + std::countr_one(static_cast<std::uint64_t>(taken));
            taken = waiting_[word].fetch_or(bit_of(index), std::memory_order_seq_cst);
            if ((taken & bit_of(index)) != 0)
                continue; // another process was faster; `taken` has its bit
            place.index = index;
            place.ticket = wrapping_sum(last_.fetch_add(1, std::memory_order_relaxed), 1);
            publish(ticket_[index], place.ticket);
            return true;
        }
    }
    return false;
}

void WaitQueue::look(const WaitPlace &place, const SignalCell &changed) {
    // PAIR offer/look, partner: empty and call. The signal is loaded after the bit was cleared, or set by `join`.
    called_[place.index / 64].fetch_and(~bit_of(place.index), std::memory_order_seq_cst);
    static_cast<void>(changed.value.load(std::memory_order_seq_cst));
}

std::int64_t WaitQueue::rank(const WaitPlace &place) {
    const std::int64_t now = now_ns();
    std::int64_t rank = 0;
    bool removed = false;
    for_each(Select::all, [&](int index) {
        if (index == place.index)
            return;
        const std::int64_t ticket = see(ticket_[index]); // PAIR publish/see, partners: remove and leave
        if (is_stuck(index, now)) {
            remove(index, ticket);
            removed = true;
        } else if (ticket == 0) {
            // It comes last, but its process may be dead: then it is stuck a slice from now.
            call_place(index, now);
        } else {
            rank += ticket < place.ticket;
        }
    });
    // Where one process was killed or stopped, others may have been: all are called now, so that a slice from now those that
    // are gone are found at once. Otherwise they would take a slice each.
    if (removed)
        call(places);
    return rank;
}

std::int64_t WaitQueue::next_stuck_ns() const {
    std::int64_t next = std::numeric_limits<std::int64_t>::max();
    for_each(Select::called, [&](int index) {
        next = std::min(next, wrapping_sum(called_ns_[index].load(std::memory_order_relaxed), slice_ns));
    });
    return next;
}

void WaitQueue::free_place(int index) {
    called_[index / 64].fetch_and(~bit_of(index), std::memory_order_seq_cst);
    waiting_[index / 64].fetch_and(~bit_of(index), std::memory_order_seq_cst);
}

void WaitQueue::remove(int index, std::int64_t ticket) {
    // Of several processes that remove this place, one changes the ticket. Without one, to -1: a process that dies here
    // leaves a ticket that is removed in the same way.
    // PAIR publish/see, partner: rank. The time is stored before the ticket: a process that finds the place without a ticket
    // counts a slice from now. Otherwise it would remove the place at once, too, and of the two processes that free it, the
    // second could take it from the next waiter.
    called_ns_[index].store(now_ns(), std::memory_order_relaxed);
    if (publish_if(ticket_[index], ticket, ticket == 0 ? -1 : 0))
        free_place(index);
}

void WaitQueue::leave(WaitPlace &place, const SignalCell &changed) {
    // PAIR publish/see, partner: rank. As in `remove`: this process may have been slow, and its place stuck.
    called_ns_[place.index].store(now_ns(), std::memory_order_relaxed);
    if (publish_if(ticket_[place.index], place.ticket, 0)) // otherwise another process has removed this place
        free_place(place.index);
    place = {};
    // PAIR offer/look, partner: empty and call. The caller loads what is available after the bit was cleared: a call that
    // came too late for this waiter is repeated for another one.
    static_cast<void>(changed.value.load(std::memory_order_seq_cst));
}

} // namespace memlane
