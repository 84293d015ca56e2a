// Model checks of sync/signal.hpp and sync/quorum.hpp.

#include <array>

#include "os/clock.hpp"
#include "scenario.hpp"
#include "sync/quorum.hpp"
#include "sync/signal.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

struct Shared {
    SignalCell cell;
    QuorumCell quorum;
    struct alignas(64) {
        Plain value;
    } first, second;
};

Shared &make() {
    auto &memory = shared<Shared>();
    name_word(&memory.cell.value, "value");
    name_word(&memory.cell.gate, "gate");
    name_word(&memory.quorum.arrived.value, "arrived");
    name_word(&memory.quorum.arrived.gate, "arrived.gate");
    name_word(&memory.quorum.wanted.count, "wanted");
    return memory;
}

void await(SignalCell &cell, std::int64_t until) {
    Spin spin(0);
    for (;;) {
        const WaitResult result = signal_wait(cell, until, forever_ns, {}, spin);
        if (result.end == WaitEnd::reached)
            return require(result.value >= until, "the value is at least the awaited one");
        require(result.end == WaitEnd::paused, "a wait without peers and deadline ends only with the value");
    }
}

void await(QuorumCell &cell, std::int64_t until) {
    Spin spin(0);
    while (quorum_wait(cell, until, forever_ns, {}, spin).end != WaitEnd::reached) {
    }
}

} // namespace

SCENARIO("a store wakes a waiter, which sees what was stored before", BOUNDS(8, 8, 0), BOUNDS(16, 16, 0)) {
    Shared &memory = make();
    start("signaller", [&] {
        memory.first.value.write(7);
        signal_store(memory.cell, 1);
    });
    start("waiter", [&] {
        await(memory.cell, 1);
        require(memory.first.value.read() == 7, "what was stored before the signal is visible");
    });
    join();
}

SCENARIO("two additions wake a waiter, which sees what both stored before", BOUNDS(3, 2, 0), BOUNDS(5, 4, 0)) {
    Shared &memory = make();
    start("first", [&] {
        memory.first.value.write(7);
        signal_add(memory.cell, 1);
    });
    start("second", [&] {
        memory.second.value.write(8);
        signal_add(memory.cell, 1);
    });
    start("waiter", [&] {
        await(memory.cell, 2);
        require(memory.first.value.read() == 7 && memory.second.value.read() == 8, "both messages are visible");
    });
    join();
}

SCENARIO("an exchange wakes a waiter, which sees what was stored before", BOUNDS(8, 8, 0), BOUNDS(16, 16, 0)) {
    Shared &memory = make();
    start("signaller", [&] {
        memory.first.value.write(7);
        require(signal_compare_and_swap(memory.cell, 0, 1), "nobody else changes the value");
    });
    start("waiter", [&] {
        await(memory.cell, 1);
        require(memory.first.value.read() == 7, "what was stored before the signal is visible");
    });
    join();
}

SCENARIO("a value that was changed by other means wakes a waiter after signal_wake", BOUNDS(8, 8, 0), BOUNDS(16, 16, 0)) {
    Shared &memory = make();
    start("signaller", [&] {
        memory.first.value.write(7);
        publish(memory.cell.value, 1);
        signal_wake(memory.cell);
    });
    start("waiter", [&] {
        await(memory.cell, 1);
        require(memory.first.value.read() == 7, "what was stored before the signal is visible");
    });
    join();
}

SCENARIO("two waiters are woken by two signals", BOUNDS(3, 1, 0), BOUNDS(4, 3, 0)) {
    Shared &memory = make();
    start("signaller", [&] {
        memory.first.value.write(7);
        signal_add(memory.cell, 1);
        memory.second.value.write(8);
        signal_add(memory.cell, 1);
    });
    start("waiter 1", [&] {
        await(memory.cell, 1);
        require(memory.first.value.read() == 7, "the first message is visible");
        await(memory.cell, 2);
        require(memory.second.value.read() == 8, "the second message is visible");
    });
    start("waiter 2", [&] {
        await(memory.cell, 2);
        require(memory.second.value.read() == 8, "the second message is visible");
    });
    join();
}

SCENARIO("two processes that signal each other do not both sleep", BOUNDS(3, 2, 0), BOUNDS(5, 4, 0)) {
    auto &there = shared<SignalCell>(), &back = shared<SignalCell>();
    start("one", [&] {
        signal_store(there, 1);
        await(back, 1);
        signal_store(there, 2);
    });
    start("other", [&] {
        await(there, 1);
        signal_store(back, 1);
        await(there, 2);
    });
    join();
}

SCENARIO("a wait for a peer that dies ends, with the value that it stored before", BOUNDS(6, 6, 1), BOUNDS(16, 16, 1)) {
    Shared &memory = make();
    bool reached = false;
    const std::int64_t peer = start(
        "peer",
        [&] {
            memory.first.value.write(7);
            signal_store(memory.cell, 1);
        },
        Mortal::yes);
    start("waiter", [&] {
        Spin spin(0);
        const std::array pidfds{pidfd_of(peer)};
        for (;;) {
            const WaitResult result = signal_wait(memory.cell, 1, forever_ns, pidfds, spin);
            if (result.end == WaitEnd::peer_died) {
                require(result.peer == 0, "the dead peer is named");
                require(see(memory.cell.value) == 0, "a value that the peer stored before its death is not missed");
                return;
            }
            if (result.end == WaitEnd::reached)
                break;
        }
        require(memory.first.value.read() == 7, "what was stored before the signal is visible");
        reached = true;
    });
    join();
    require(reached || died(peer), "a wait without a death ends with the value");
}

SCENARIO("the last of two arrivals wakes the waiter, which sees what both stored", BOUNDS(3, 2, 0), BOUNDS(5, 4, 0)) {
    Shared &memory = make();
    start("first", [&] {
        memory.first.value.write(7);
        quorum_arrive(memory.quorum, 1);
    });
    start("second", [&] {
        memory.second.value.write(8);
        quorum_arrive(memory.quorum, 1);
    });
    start("waiter", [&] {
        await(memory.quorum, 2);
        require(memory.first.value.read() == 7 && memory.second.value.read() == 8, "both messages are visible");
    });
    join();
}

SCENARIO("a waiter that wants one arrival and then two is woken for each", BOUNDS(3, 2, 0), BOUNDS(5, 3, 0)) {
    Shared &memory = make();
    start("first", [&] { quorum_arrive(memory.quorum, 1); });
    start("second", [&] { quorum_arrive(memory.quorum, 1); });
    start("waiter", [&] {
        await(memory.quorum, 1);
        await(memory.quorum, 2);
    });
    join();
}
