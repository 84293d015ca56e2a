// Model checks of lanes/ring.hpp. The payload of a slot is plain memory: an access that the ring does not order is a data
// race and fails the run.

#include <algorithm>
#include <array>

#include "lanes/ring.hpp"
#include "os/clock.hpp"
#include "scenario.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

constexpr std::size_t stride_bytes = 128;

class SharedRing {
  public:
    SharedRing(std::int64_t count, std::int64_t unread_limit, Overflow overflow)
        : control_(shared_bytes(sizeof(RingControl))), slots_(shared_bytes(static_cast<std::size_t>(count) * stride_bytes)),
          ring_(control_, slots_, count, stride_bytes, unread_limit, overflow, life_) {
        for (const Ring::Side side : {Ring::Side::writers, Ring::Side::readers}) { // as in the table of wait_queue.hpp
            const bool writers = side == Ring::Side::writers;
            const std::string whose = writers ? "writers' " : "readers' ";
            const auto *words = reinterpret_cast<const std::byte *>(writers ? &control().writers : &control().readers);
            name_word(words, whose + "waiting");
            name_word(words + 16, whose + "called");
            name_word(words + 64, whose + "last ticket");
            name_word(words + 72, whose + "overtaken");
            name_word(words + 128, whose + "tickets");
            name_word(words + 1152, whose + "called_ns");
            name_word(words + 2176, whose + "signals");
        }
        name_word(&control().written.value, "written");
        name_word(&control().freed.value, "freed");
        name_word(&control().sequence.last, "last sequence");
        name_word(&control().taken.read, "taken");
        name_word(&control().lost.dropped, "lost");
        for (std::int64_t slot = 0; slot < count; ++slot) {
            name_word(&ring_.head(slot).state, "state " + std::to_string(slot));
            name_word(&ring_.head(slot).sequence, "sequence " + std::to_string(slot));
        }
    }

    Ring &ring() { return ring_; }
    RingControl &control() { return ring_.control(); }
    Plain &payload(std::int64_t slot) {
        return *reinterpret_cast<Plain *>(slots_ + static_cast<std::size_t>(slot) * stride_bytes + sizeof(SlotHead));
    }

    std::int64_t claim() {
        return wait([&](Spin &spin) { return ring_.wait_claim(self(), forever_ns, {}, spin); });
    }
    std::int64_t claim(Ring::Waiter &waiter) {
        return wait([&](Spin &spin) { return ring_.wait_claim(self(), forever_ns, {}, spin, waiter); });
    }
    std::int64_t take() {
        return wait([&](Spin &spin) { return ring_.wait_take(self(), forever_ns, {}, spin); });
    }
    void put(std::uint64_t value) {
        const std::int64_t slot = claim();
        payload(slot).write(value);
        ring_.commit(slot);
    }
    std::uint64_t get() {
        const std::int64_t slot = take();
        const std::uint64_t value = payload(slot).read();
        ring_.release(slot);
        return value;
    }
    std::int64_t in_state(SlotState state) {
        std::int64_t count = 0;
        for (std::int64_t slot = 0; slot < ring_.count(); ++slot)
            count += slot_state(see(ring_.head(slot).state)) == state;
        return count;
    }
    // The sum of the header of ring.hpp, if no process died.
    void require_all_counted() {
        require(see(control().written.value) == see(control().taken.read) + see(control().lost.dropped) +
                                                    in_state(SlotState::ready) + in_state(SlotState::reading),
                "written == read + dropped + ready + reading");
    }

  private:
    template <class Wait> std::int64_t wait(Wait wait) {
        Spin spin(0);
        for (;;) {
            const WaitResult result = wait(spin);
            if (result.end == WaitEnd::reached)
                return result.value;
            require(result.end == WaitEnd::paused, "a wait without peers and deadline ends only with a slot");
        }
    }

    std::byte *control_, *slots_;
    Life life_{-1};
    Ring ring_;
};

} // namespace

SCENARIO("one slot passes from a writer to a reader, twice", BOUNDS(2, 2, 0), BOUNDS(5, 3, 0)) {
    SharedRing shared(1, 1, Overflow::block);
    start("writer", [&] {
        shared.put(1);
        shared.put(2);
    });
    start("reader", [&] {
        require(shared.get() == 1, "the first slot is taken first");
        require(shared.get() == 2, "the second slot is taken second");
    });
    join();
    shared.require_all_counted();
}

SCENARIO("the slots of a writer are taken in the order of their commits", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedRing shared(3, 3, Overflow::block);
    start("writer", [&] {
        // The positions of the commits are not those of the claims.
        const std::int64_t first = shared.claim(), second = shared.claim(), third = shared.claim();
        shared.payload(third).write(1);
        shared.ring().commit(third);
        shared.payload(first).write(2);
        shared.ring().commit(first);
        shared.payload(second).write(3);
        shared.ring().commit(second);
    });
    start("reader", [&] {
        for (std::uint64_t expected = 1; expected <= 3; ++expected)
            require(shared.get() == expected, "slots are taken in the order of their commits");
    });
    join();
    shared.require_all_counted();
}

SCENARIO("two writers and one reader: each slot once, those of each writer in order", BOUNDS(1, 1, 0), BOUNDS(2, 1, 0)) {
    SharedRing shared(2, 2, Overflow::block);
    std::array<std::uint64_t, 3> got{};
    start("writer 1", [&] {
        shared.put(11);
        shared.put(12);
    });
    start("writer 2", [&] { shared.put(21); });
    start("reader", [&] {
        for (std::uint64_t &value : got)
            value = shared.get();
    });
    join();
    std::array<std::uint64_t, 3> sorted = got;
    std::sort(sorted.begin(), sorted.end());
    require(sorted == std::array<std::uint64_t, 3>{11, 12, 21}, "each slot is taken once");
    require(std::find(got.begin(), got.end(), 11) < std::find(got.begin(), got.end(), 12), "a writer's slots are in order");
    shared.require_all_counted();
}

SCENARIO("two readers take each slot once, also one that is given back", BOUNDS(1, 1, 0), BOUNDS(2, 1, 0)) {
    SharedRing shared(1, 1, Overflow::block);
    std::uint64_t first = 0, second = 0;
    start("writer", [&] {
        shared.put(1);
        shared.put(2);
    });
    start("reader 1", [&] {
        const std::int64_t slot = shared.take();
        const std::uint64_t seen = shared.payload(slot).read();
        shared.ring().give_back(slot);
        first = shared.get();
        require(first >= seen, "a slot that was given back keeps its place");
    });
    start("reader 2", [&] { second = shared.get(); });
    join();
    require(first + second == 3 && first != second, "each slot is taken once");
    shared.require_all_counted();
}

SCENARIO("a slot that is abandoned is claimed again", BOUNDS(3, 2, 0), BOUNDS(5, 3, 0)) {
    SharedRing shared(1, 1, Overflow::block);
    bool claimed = false;
    start("writer 1", [&] {
        const std::int64_t slot = shared.ring().try_claim(self());
        if (slot < 0)
            return;
        claimed = true;
        shared.payload(slot).write(5);
        shared.ring().abandon(slot);
    });
    start("writer 2", [&] { shared.put(1); });
    join();
    require(shared.get() == 1, "the committed slot can be taken");
    require(see(shared.control().lost.abandoned) == claimed, "an abandoned slot is counted");
}

SCENARIO("two writers that drop the oldest leave no more unread slots than the limit", BOUNDS(3, 2, 0), BOUNDS(4, 3, 0)) {
    SharedRing shared(3, 1, Overflow::drop_oldest);
    start("writer 1", [&] { shared.put(1); });
    start("writer 2", [&] { shared.put(2); });
    join();
    require(shared.in_state(SlotState::ready) == 1, "one unread slot is left");
    require(see(shared.control().lost.dropped) == 1, "the other one is counted as dropped");
    shared.require_all_counted();
}

SCENARIO("a reader beside writers that drop the oldest takes whole slots in order", BOUNDS(2, 1, 0), BOUNDS(3, 1, 0)) {
    SharedRing shared(2, 2, Overflow::drop_oldest);
    start("writer", [&] {
        for (std::uint64_t value = 1; value <= 3; ++value)
            shared.put(value);
    });
    start("reader", [&] {
        const std::uint64_t first = shared.get();
        if (const std::int64_t slot = shared.ring().try_take(self()); slot >= 0) {
            require(shared.payload(slot).read() > first, "slots are taken in the order of their commits");
            shared.ring().release(slot);
        }
    });
    join();
    shared.require_all_counted();
}

SCENARIO("no slot of a living process is reclaimed", BOUNDS(3, 1, 0), BOUNDS(4, 3, 0)) {
    SharedRing shared(2, 2, Overflow::block);
    shared.put(1);
    start("writer", [&] {
        const std::int64_t slot = shared.claim();
        shared.payload(slot).write(2);
        shared.payload(slot).write(3);
        shared.ring().commit(slot);
    });
    start("reader", [&] {
        const std::int64_t slot = shared.take();
        require(shared.payload(slot).read() == 1, "the first slot is taken first");
        require(shared.payload(slot).read() == 1, "a taken slot does not change");
        shared.ring().release(slot);
    });
    start("reaper", [&] {
        require(shared.ring().reap() == 0, "nothing is reclaimed");
        require(shared.ring().reap() == 0, "nothing is reclaimed");
    });
    join();
    require(shared.get() == 3, "the second slot is left");
    require(see(shared.control().lost.abandoned) == 0 && see(shared.control().taken.returned) == 0, "nothing was reclaimed");
}

SCENARIO("a writer that dies at any access leaves its slot to the next writer", BOUNDS(1, 1, 1), BOUNDS(2, 2, 1)) {
    SharedRing shared(1, 1, Overflow::block);
    const std::int64_t victim = start("victim", [&] { shared.put(1); }, Mortal::yes);
    start("writer", [&] { shared.put(2); });
    std::uint64_t first = 0, second = 0;
    start("reader", [&] {
        first = shared.get();
        // Not `get`: the victim's slot may never come.
        if (const std::int64_t slot = shared.ring().try_take(self()); slot >= 0) {
            second = shared.payload(slot).read();
            shared.ring().release(slot);
        }
    });
    join();
    if (first != 2 && second != 2)
        require(shared.get() == 2, "the living writer's slot can be taken");
    require(first != second, "no slot is taken twice");
    if (!died(victim))
        shared.require_all_counted();
    shared.ring().reap();
    require(shared.in_state(SlotState::writing) == 0, "no slot stays claimed by a dead process");
}

SCENARIO("a writer that drops the oldest gets the slot of a dead writer", BOUNDS(2, 1, 1), BOUNDS(3, 1, 1)) {
    SharedRing shared(2, 2, Overflow::drop_oldest);
    const std::int64_t victim = start("victim", [&] { shared.put(1); }, Mortal::yes);
    start("writer", [&] {
        shared.put(2);
        shared.put(3);
    });
    join();
    let_time_pass(slice_ns); // such writers look for dead processes once per slice
    shared.put(4);
    shared.put(5);
    require(shared.get() == 4 && shared.get() == 5, "both slots are used again");
    require(shared.in_state(SlotState::free) == 2, "no slot is lost");
    if (!died(victim))
        shared.require_all_counted();
}

SCENARIO("a reader that dies at any access leaves its slot to the next reader", BOUNDS(1, 1, 1), BOUNDS(2, 2, 1)) {
    SharedRing shared(1, 1, Overflow::block);
    bool victim_got = false;
    const std::int64_t victim = start(
        "victim",
        [&] {
            const std::int64_t slot = shared.take();
            require(shared.payload(slot).read() <= 2, "the payload is whole");
            victim_got = true;
            shared.ring().release(slot);
        },
        Mortal::yes);
    start("writer", [&] {
        shared.put(1);
        shared.put(2);
    });
    std::uint64_t got = 0;
    start("reader", [&] { got = shared.get(); });
    join();
    require(got == 1 || got == 2, "a living reader gets a slot");
    shared.ring().reap();
    require(shared.in_state(SlotState::reading) == 0, "no slot stays taken by a dead process");
    require(!died(victim) || shared.in_state(SlotState::ready) + shared.in_state(SlotState::free) == 1, "no slot is lost");
    (void)victim_got;
}

SCENARIO("a newcomer overtakes a waiting writer only so many times", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedRing shared(1, 1, Overflow::block);
    const std::int64_t held = shared.claim();
    Ring::Waiter waiter(shared.ring(), Ring::Side::writers);
    Spin spin(0);
    // Joins the queue, and gives up after the first attempt without leaving it.
    require(shared.ring().wait_claim(self(), now_ns(), {}, spin, waiter).end == WaitEnd::timed_out, "no slot is free");
    for (std::uint64_t i = 1; i < WaitQueue::max_overtakes; ++i)
        shared.control().writers.count_overtake();
    auto &served = model::shared<Word>();
    start("holder", [&] { shared.ring().abandon(held); });
    start("waiter", [&] {
        const std::int64_t slot = shared.claim(waiter);
        served.store(1, std::memory_order_relaxed); // visible to whoever claims the slot next
        shared.ring().abandon(slot);
    });
    start("newcomer", [&] {
        for (int overtakes = 0, attempts = 0; attempts < 3; ++attempts) {
            const std::int64_t slot = shared.ring().try_claim(self());
            if (slot < 0)
                continue;
            require(++overtakes == 1 || served.load(std::memory_order_relaxed) == 1, "a waiter is served before the next");
            shared.ring().abandon(slot);
        }
    });
    join();
    require(shared.in_state(SlotState::free) == 1, "no slot is lost");
}

SCENARIO("a writer whose time is over leaves the slot to the next writer", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedRing shared(1, 1, Overflow::block);
    const std::int64_t held = shared.claim();
    start("holder", [&] { shared.ring().abandon(held); });
    start("quitter", [&] {
        Spin spin(0);
        const WaitResult result = shared.ring().wait_claim(self(), now_ns(), {}, spin);
        if (result.end == WaitEnd::reached)
            shared.ring().abandon(result.value);
    });
    start("writer", [&] { shared.put(1); });
    join();
    require(shared.get() == 1, "the slot is committed");
}

SCENARIO("two slots that become free reach two waiting writers", BOUNDS(1, 1, 0), BOUNDS(2, 1, 0)) {
    SharedRing shared(2, 2, Overflow::block);
    const std::int64_t first = shared.claim(), second = shared.claim();
    Ring::Waiter one(shared.ring(), Ring::Side::writers), other(shared.ring(), Ring::Side::writers);
    Spin spin(0);
    for (Ring::Waiter *waiter : {&one, &other}) // joins, as above
        shared.ring().wait_claim(self(), now_ns(), {}, spin, *waiter);
    start("holder", [&] {
        shared.ring().abandon(first);
        shared.ring().abandon(second);
    });
    // They keep their slots: nothing else wakes the other one.
    start("writer 1", [&] { shared.claim(one); });
    start("writer 2", [&] { shared.claim(other); });
    join();
    require(shared.in_state(SlotState::writing) == 2, "each writer has a slot");
}

SCENARIO("a process that dies before it calls a waiter leaves that to the others", BOUNDS(2, 1, 1), BOUNDS(3, 2, 1)) {
    SharedRing shared(1, 1, Overflow::block);
    WaitPlace dead; // its process is dead from the start: whoever waits behind it has to find that out
    shared.control().writers.join(dead);
    let_slices_end();
    start(
        "victim",
        [&] {
            if (const std::int64_t slot = shared.ring().try_claim(self()); slot >= 0)
                shared.ring().abandon(slot);
        },
        Mortal::yes);
    start("writer", [&] {
        Ring::Waiter waiter(shared.ring(), Ring::Side::writers); // it keeps its place from slice to slice
        shared.claim(waiter);
    });
    join();
    require(shared.in_state(SlotState::writing) == 1, "the writer has the slot");
}

SCENARIO("two processes that reclaim the same slot do it once", BOUNDS(3, 1, 1), BOUNDS(4, 2, 1)) {
    SharedRing shared(2, 2, Overflow::block);
    const std::int64_t victim = start("victim", [&] { shared.put(1); }, Mortal::yes);
    std::int64_t first = 0, second = 0;
    start("reaper 1", [&] { first = shared.ring().reap(); });
    start("reaper 2", [&] {
        second = shared.ring().reap();
        if (const std::int64_t slot = shared.ring().try_claim(self()); slot >= 0) {
            shared.payload(slot).write(2);
            shared.ring().commit(slot);
        }
    });
    join();
    require(first + second <= (died(victim) ? 1 : 0), "a slot is reclaimed once");
    require(see(shared.control().lost.abandoned) == first + second, "each is counted");
}
