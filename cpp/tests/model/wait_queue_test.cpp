// Model checks of sync/wait_queue.hpp, with things that are only counted. A waiter waits as in Ring::wait_in_turn.

#include <algorithm>

#include "os/clock.hpp"
#include "scenario.hpp"
#include "sync/wait_queue.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

struct Shared {
    WaitQueue queue;
    SignalCell changed;
    struct alignas(64) {
        Word count;
    } things;

    void offer() {
        things.count.fetch_add(1, std::memory_order_release);
        signal_add(changed, 1);
        call_if_any();
    }
    void call_if_any() {
        if (!queue.empty())
            queue.call(see(things.count));
    }
    WaitPlace joined() {
        WaitPlace place;
        require(queue.join(place), "there is a free place");
        return place;
    }
    Word &ticket(const WaitPlace &place) { // as in the table of wait_queue.hpp
        return reinterpret_cast<Word *>(reinterpret_cast<std::byte *>(&queue) + 128)[place.index];
    }
    bool get(const WaitPlace &place) {
        queue.look(place, changed);
        if (!queue.holds(place))
            return false;
        const std::int64_t rank = queue.rank(place), available = see(things.count);
        if (available > rank && publish_if(things.count, available, available - 1))
            return true;
        queue.call(available);
        return false;
    }
    void get_or_wait(WaitPlace place) {
        Spin spin(0);
        for (;;) {
            if (!queue.holds(place))
                place = joined();
            const std::int64_t seen = see(queue.signal(place).value);
            if (get(place))
                break;
            signal_wait(queue.signal(place), wrapping_sum(seen, 1), queue.next_stuck_ns(), {}, spin);
        }
        queue.leave_served(place, changed);
        call_if_any();
    }
    // Leaves without a thing, at whatever line the others are.
    void give_up(WaitPlace place) {
        queue.leave(place, changed);
        call_if_any();
    }
    // A slice after all were called, the places of the dead are free.
    void require_empty() {
        for (int round = 0; round < 2 && !queue.empty(); ++round) {
            queue.call(WaitQueue::places);
            queue.remove_stuck();
            let_time_pass(slice_ns);
            queue.remove_stuck();
        }
        require(queue.empty(), "no place stays taken");
    }
};

Shared &make() {
    auto &memory = shared<Shared>();
    const auto *words = reinterpret_cast<const std::byte *>(&memory.queue); // as in the table of wait_queue.hpp
    name_word(words, "waiting");
    name_word(words + 16, "called");
    name_word(words + 64, "last ticket");
    name_word(words + 72, "overtaken");
    name_word(words + 128, "tickets");
    name_word(words + 1152, "called_ns");
    name_word(words + 2176, "signals");
    name_word(&memory.changed.value, "changed");
    name_word(&memory.things.count, "things");
    return memory;
}

} // namespace

SCENARIO("a waiter gets what is offered while it joins", BOUNDS(4, 3, 0), BOUNDS(8, 6, 0)) {
    Shared &memory = make();
    start("offerer", [&] { memory.offer(); });
    start("waiter", [&] { memory.get_or_wait({}); });
    join();
    require(see(memory.things.count) == 0, "it is taken once");
    require(memory.queue.empty(), "its place is free");
}

SCENARIO("a call that does not ask first whether anybody waits misses no waiter", BOUNDS(4, 3, 0), BOUNDS(8, 6, 0)) {
    Shared &memory = make();
    start("offerer", [&] {
        memory.things.count.fetch_add(1, std::memory_order_release);
        signal_add(memory.changed, 1);
        memory.queue.call(1);
    });
    start("waiter", [&] { memory.get_or_wait({}); });
    join();
}

SCENARIO("a waiter that has looked in vain is called again", BOUNDS(3, 3, 0), BOUNDS(5, 4, 0)) {
    Shared &memory = make();
    const WaitPlace place = memory.joined();
    memory.queue.call(1);
    start("offerer", [&] { memory.offer(); });
    start("waiter", [&] { memory.get_or_wait(place); });
    join();
}

SCENARIO("two things that two processes offer reach two waiters", BOUNDS(1, 1, 0), BOUNDS(2, 1, 0)) {
    Shared &memory = make();
    const WaitPlace first = memory.joined(), second = memory.joined();
    start("offerer 1", [&] { memory.offer(); });
    start("offerer 2", [&] { memory.offer(); });
    start("waiter 1", [&] { memory.get_or_wait(first); });
    start("waiter 2", [&] { memory.get_or_wait(second); });
    join();
    require(see(memory.things.count) == 0, "each is taken once");
    require(memory.queue.empty(), "their places are free");
}

SCENARIO("a waiter that gives up passes its call on", BOUNDS(2, 2, 0), BOUNDS(4, 3, 0)) {
    Shared &memory = make();
    const WaitPlace first = memory.joined(), second = memory.joined();
    start("offerer", [&] { memory.offer(); });
    start("quitter", [&] { memory.give_up(first); });
    start("waiter", [&] { memory.get_or_wait(second); });
    join();
    require(memory.queue.empty(), "their places are free");
}

SCENARIO("a waiter that dies at any access loses nothing for the others", BOUNDS(2, 1, 1), BOUNDS(3, 2, 1)) {
    Shared &memory = make();
    start(
        "victim",
        [&] {
            const WaitPlace place = memory.joined();
            memory.queue.look(place, memory.changed);
            memory.give_up(place);
        },
        Mortal::yes);
    start("offerer", [&] { memory.offer(); });
    start("waiter", [&] { memory.get_or_wait({}); });
    join();
    require(see(memory.things.count) == 0, "the living waiter gets it");
    memory.require_empty();
}

SCENARIO("a process that dies while it calls or removes costs a slice at most", BOUNDS(2, 1, 1), BOUNDS(3, 2, 1)) {
    Shared &memory = make();
    const WaitPlace stuck = memory.joined(), place = memory.joined();
    memory.offer(); // to the first
    let_time_pass(slice_ns);
    start("victim", [&] { memory.queue.remove_stuck(); }, Mortal::yes);
    start("waiter", [&] { memory.get_or_wait(place); });
    join();
    require(!memory.queue.holds(stuck), "a waiter that does not look for a slice is removed");
    memory.require_empty();
}

SCENARIO("a waiter that was called just now is not stuck", BOUNDS(6, 6, 0), BOUNDS(16, 16, 0)) {
    Shared &memory = make();
    const WaitPlace place = memory.joined();
    start("caller", [&] { memory.queue.call(1); });
    start("other", [&] { memory.queue.remove_stuck(); });
    join();
    require(memory.queue.holds(place), "it keeps its place");
}

SCENARIO("two processes that remove the same place free it once", BOUNDS(3, 1, 0), BOUNDS(4, 2, 0)) {
    Shared &memory = make();
    const WaitPlace stuck = memory.joined();
    memory.queue.call(1);
    let_time_pass(slice_ns);
    if (pick(2) == 1) // as if its process had died in `join` before it stored its ticket
        memory.ticket(stuck).store(0, std::memory_order_relaxed);
    WaitPlace place;
    start("remover 1", [&] { memory.queue.remove_stuck(); });
    start("remover 2", [&] { memory.queue.remove_stuck(); });
    start("waiter", [&] { place = memory.joined(); });
    join();
    require(!memory.queue.holds(stuck), "it is removed");
    require(memory.queue.holds(place), "the waiter that has its place since keeps it");
}

SCENARIO("a slow waiter that leaves while it is removed frees its place once", BOUNDS(3, 1, 0), BOUNDS(4, 2, 0)) {
    Shared &memory = make();
    const WaitPlace slow = memory.joined();
    memory.queue.call(1);
    let_time_pass(slice_ns);
    WaitPlace place;
    start("slow", [&] { memory.give_up(slow); });
    start("remover", [&] { memory.queue.remove_stuck(); });
    start("waiter", [&] { place = memory.joined(); });
    join();
    require(!memory.queue.holds(slow), "it has left");
    require(memory.queue.holds(place), "the waiter that has its place since keeps it");
}

SCENARIO("a slow waiter that was removed notices it and waits again", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    Shared &memory = make();
    const WaitPlace slow = memory.joined();
    memory.queue.call(1);
    let_time_pass(slice_ns);
    let_slices_end(); // a waiter that is removed while it sleeps finds out when its slice ends
    start("slow", [&] { memory.get_or_wait(slow); });
    start("remover", [&] { memory.queue.remove_stuck(); });
    start("offerer", [&] { memory.offer(); });
    join();
    require(see(memory.things.count) == 0, "it gets what is offered");
    require(memory.queue.empty(), "its place is free");
}
