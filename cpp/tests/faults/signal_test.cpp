// Signals and quorums: a process that dies or is stopped at any point of a call, and what the others see of it.

#include "sync/signal.hpp"

#include <optional>
#include <string>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/fault_points.hpp"
#include "support/processes.hpp"
#include "sync/quorum.hpp"

using namespace memlane;
using namespace fault_points;

namespace {

constexpr std::int64_t long_ago = 1; // a deadline that has passed: a wait returns without sleeping
constexpr std::int64_t patience = 20 * second;

void wipe(SignalCell &cell, bool sleeper) {
    cell.value = 0;
    cell.gate = sleeper ? 1 : 0; // with a sleeper, the signal includes the wake-up
}

// One call of a wait that watches the child.
WaitEnd wait_once(SignalCell &cell, std::int64_t until, const Child &child) {
    const int pidfd = child.pidfd();
    Spin spin(0);
    return signal_wait(cell, until, forever_ns, {&pidfd, 1}, spin).end;
}

const char *shown(WaitEnd end) {
    return end == WaitEnd::reached ? "reached" : end == WaitEnd::peer_died ? "peer died" : "neither";
}

template <class Change> void check_changes(const char *name, Change change) {
    for (const bool sleeper : {false, true}) {
        Shared<SignalCell> cell;
        Table table;
        die_at_every_point(
            name, [&] { wipe(*cell, sleeper); }, [&](std::int64_t) { change(*cell); },
            [&](Child &child) {
                const std::string seen = listed({{"value", see(cell->value)}});
                table.add(seen, shown(wait_once(*cell, 5, child)));
                signal_store(*cell, 9); // the signal itself works on
                CHECK(wait_once(*cell, 9, child) == WaitEnd::reached);
            });
        CHECK_TABLE(table, {"nothing", "peer died"}, {"value 5", "reached"});
    }
}

} // namespace

TEST("a process that dies at any point of a signal: a wait that watches it ends, with the value or with its death") {
    check_changes("signal_store", [](SignalCell &cell) { signal_store(cell, 5); });
    check_changes("signal_add", [](SignalCell &cell) { signal_add(cell, 5); });
    check_changes("signal_compare_and_swap", [](SignalCell &cell) { signal_compare_and_swap(cell, 0, 5); });
}

TEST("a process that dies between its change and the wake-up: a sleeper finds the value when its slice ends") {
    Shared<SignalCell> cell;
    std::int64_t changed = 0;
    std::optional<Child> sleeper;
    die_at_every_point(
        "signal_add beside a sleeper",
        [&] {
            wipe(*cell, false);
            sleeper.emplace([&] {
                Spin spin(0);
                while (signal_wait(*cell, 1, forever_ns, {}, spin).end != WaitEnd::reached) {
                }
            });
            await([&] { return (cell->gate.load() & 1u) != 0 && state_letter(sleeper->pid()) == 'S'; });
        },
        [&](std::int64_t) { signal_add(*cell, 1); },
        [&](Child &) {
            changed += see(cell->value);
            if (see(cell->value) == 0)
                signal_add(*cell, 1); // another process does it
            CHECK(sleeper->dies_within(patience));
            CHECK_EQ(sleeper->join(), 0);
        });
    CHECK(changed > 2); // some died after the change
}

TEST("a waiter that dies at any point of its wait holds up neither the signalling process nor another waiter") {
    Shared<SignalCell> cell;
    die_at_every_point(
        "signal_wait", [&] { wipe(*cell, false); },
        [&](std::int64_t) {
            Spin spin(0);
            CHECK(signal_wait(*cell, 1, long_ago, {}, spin).end == WaitEnd::timed_out);
        },
        [&](Child &child) {
            CHECK_EQ(signal_add(*cell, 1), 1);
            CHECK(wait_once(*cell, 1, child) == WaitEnd::reached);
        });
}

TEST("a process that is stopped at any point of a signal: neither its change nor that of another is lost") {
    Shared<SignalCell> cell;
    stop_at_every_point(
        "signal_add", [&] { wipe(*cell, true); }, [&](std::int64_t) { signal_add(*cell, 1); },
        [&](Child &) { signal_add(*cell, 10); }, [&] { CHECK_EQ(see(cell->value), 11); });
    Shared<Word> exchanged; // by the child
    bool ours = false;
    stop_at_every_point(
        "signal_compare_and_swap",
        [&] {
            wipe(*cell, true);
            *exchanged = 0;
        },
        [&](std::int64_t) { *exchanged = signal_compare_and_swap(*cell, 0, 1); },
        [&](Child &) { ours = signal_compare_and_swap(*cell, 0, 10); },
        [&] {
            CHECK_EQ(ours, see(*exchanged) == 0); // exactly one of the two
            CHECK_EQ(see(cell->value), ours ? 10 : 1);
        });
}

TEST("a process that dies at any point of its arrival: the waiter gets the count or the death") {
    Shared<QuorumCell> cell;
    Table table;
    const auto prepare = [&] {
        wipe(cell->arrived, true);
        cell->wanted.count = 1;
    };
    die_at_every_point(
        "quorum_arrive", prepare, [&](std::int64_t) { quorum_arrive(*cell, 1); },
        [&](Child &child) {
            const std::string seen = listed({{"arrived", see(cell->arrived.value)}});
            const int pidfd = child.pidfd();
            Spin spin(0);
            table.add(seen, shown(quorum_wait(*cell, 1, forever_ns, {&pidfd, 1}, spin).end));
        });
    CHECK_TABLE(table, {"nothing", "peer died"}, {"arrived 1", "reached"});
}

TEST("a waiter that dies at any point of quorum_wait: processes arrive, and the next waiter gets the count") {
    Shared<QuorumCell> cell;
    die_at_every_point(
        "quorum_wait",
        [&] {
            wipe(cell->arrived, false);
            cell->wanted.count = 0;
        },
        [&](std::int64_t) {
            Spin spin(0);
            CHECK(quorum_wait(*cell, 2, long_ago, {}, spin).end == WaitEnd::timed_out);
        },
        [&](Child &) {
            CHECK_EQ(quorum_arrive(*cell, 1), 1);
            CHECK_EQ(quorum_arrive(*cell, 1), 2);
            Spin spin(0);
            CHECK(quorum_wait(*cell, 2, forever_ns, {}, spin).end == WaitEnd::reached);
        });
}

TEST("a process that is stopped at any point of its arrival beside another: the waiter gets both") {
    Shared<QuorumCell> cell;
    std::optional<Child> waiter;
    stop_at_every_point(
        "quorum_arrive beside an arrival",
        [&] {
            wipe(cell->arrived, false);
            cell->wanted.count = 0;
            waiter.emplace([&] {
                Spin spin(0);
                while (quorum_wait(*cell, 2, forever_ns, {}, spin).end != WaitEnd::reached) {
                }
            });
            await([&] { return (cell->arrived.gate.load() & 1u) != 0; });
        },
        [&](std::int64_t) { quorum_arrive(*cell, 1); }, [&](Child &) { quorum_arrive(*cell, 1); },
        [&] {
            CHECK(waiter->dies_within(patience));
            CHECK_EQ(waiter->join(), 0);
            CHECK_EQ(see(cell->arrived.value), 2);
        });
}
