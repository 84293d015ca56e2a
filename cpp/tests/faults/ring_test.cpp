// The ring: a writer, a reader or a process that reclaims dies or is stopped at any point of a call. Each table here is the
// one at the top of ring.hpp, line by line: what the others see, what they take, and what the counters say in the end.

#include "lanes/ring.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/fault_points.hpp"
#include "support/processes.hpp"
#include "support/stamped_block.hpp"
#include "sync/copy.hpp"

using namespace memlane;
using namespace fault_points;

namespace {

using Block = StampedBlock<8>;

struct Settings {
    int slots;
    Overflow overflow;
    std::int64_t unread_limit;
    std::int64_t unread; // slots that are ready before the operation, with the stamps 1, 2, ...
};

struct Memory {
    RingControl control;
    struct alignas(64) Slot {
        SlotHead head;
        Block block;
    } slot[4];

    int in(const Settings &settings, SlotState state) const {
        int count = 0;
        for (int i = 0; i < settings.slots; ++i)
            count += slot_state(see(slot[i].head.state)) == state;
        return count;
    }
    std::string counters() const {
        return listed({{"sequence", see(control.sequence.last)},
                       {"written", see(control.written.value)},
                       {"read", see(control.taken.read)},
                       {"returned", see(control.taken.returned)},
                       {"dropped", see(control.lost.dropped)},
                       {"abandoned", see(control.lost.abandoned)}});
    }
    std::string seen(const Settings &settings) const {
        return listed({{"writing", in(settings, SlotState::writing)},
                       {"ready", in(settings, SlotState::ready)},
                       {"reading", in(settings, SlotState::reading)}}) +
               "; " + counters();
    }
};

constexpr std::int64_t at_once = 1; // a deadline that has passed: a wait tries, reclaims, tries again, and never sleeps

class TestedRing {
  public:
    explicit TestedRing(Settings settings) : settings_(settings) {}

    Memory &memory() const { return *memory_; }
    Ring ring() const {
        return {reinterpret_cast<std::byte *>(&memory_->control),
                reinterpret_cast<std::byte *>(memory_->slot),
                settings_.slots,
                sizeof(Memory::Slot),
                settings_.unread_limit,
                settings_.overflow,
                life()};
    }
    void prepare() const {
        std::memset(static_cast<void *>(&*memory_), 0, sizeof(Memory));
        for (std::int64_t stamp = 1; stamp <= settings_.unread; ++stamp)
            put(this_process(), stamp);
    }
    std::string seen() const { return memory_->seen(settings_); }
    int in(SlotState state) const { return memory_->in(settings_, state); }

    // False if there is no slot.
    bool put(std::int64_t process, std::int64_t stamp) const {
        Ring ring = this->ring();
        Spin spin(0);
        const WaitResult claim = ring.wait_claim(process, at_once, {}, spin);
        if (claim.end != WaitEnd::reached)
            return false;
        write(claim.value, stamp);
        ring.commit(claim.value);
        return true;
    }
    void write(std::int64_t slot, std::int64_t stamp) const {
        Block block = Block::of(stamp);
        copy_bytes(memory_->slot[slot].block.bytes(), block.bytes(), sizeof block);
    }
    // The stamp of the slot that was taken; 0 if there is none.
    std::int64_t get(std::int64_t process) const {
        Ring ring = this->ring();
        Spin spin(0);
        const WaitResult take = ring.wait_take(process, at_once, {}, spin);
        if (take.end != WaitEnd::reached)
            return 0;
        const std::int64_t stamp = read(take.value);
        ring.release(take.value);
        return stamp;
    }
    std::int64_t read(std::int64_t slot) const {
        Block block;
        copy_bytes(block.bytes(), memory_->slot[slot].block.bytes(), sizeof block);
        return block.stamp();
    }
    // All stamps, oldest first.
    std::vector<std::int64_t> drain() const {
        std::vector<std::int64_t> stamps;
        while (const std::int64_t stamp = get(this_process()))
            stamps.push_back(stamp);
        return stamps;
    }
    // The others go on: they take what is unread, and then claim every slot. Returns the stamps and the counters.
    std::string recover() const {
        std::string text = "took";
        for (const std::int64_t stamp : drain())
            text.append(" ").append(stamp == Block::torn ? "a torn one" : std::to_string(stamp));
        claim_all();
        return text + "; " + memory_->counters();
    }
    void claim_all() const {
        Ring ring = this->ring();
        Spin spin(0);
        for (int i = 0; i < settings_.slots; ++i)
            CHECK(ring.wait_claim(this_process(), at_once, {}, spin).end == WaitEnd::reached);
        CHECK(ring.wait_claim(this_process(), at_once, {}, spin).end == WaitEnd::timed_out);
    }
    // `written` minus its expected value; see the counters in ring.hpp.
    std::int64_t excess() const {
        const RingControl &control = memory_->control;
        return see(control.written.value) - see(control.taken.read) - see(control.lost.dropped) - in(SlotState::ready) -
               in(SlotState::reading);
    }

    template <class Operation> Table table(const char *name, Operation operation) const {
        Table table;
        die_at_every_point(
            name, [&] { prepare(); }, operation,
            [&](Child &) {
                std::string seen = this->seen();
                table.add(std::move(seen), recover());
            });
        return table;
    }

  private:
    Settings settings_;
    Shared<Memory> memory_;
};

constexpr Settings blocking{3, Overflow::block, 3, 1};
constexpr Settings full_dropping{3, Overflow::drop_oldest, 3, 3};
constexpr Settings trimming{4, Overflow::drop_oldest, 2, 2};

} // namespace

// ------------------------------------------------------------------------------------------------------------- deaths

TEST("a writer that dies at any point of claim and commit") {
    const TestedRing tested(blocking);
    const Table table = tested.table("put", [&](std::int64_t me) { CHECK(tested.put(me, 2)); });
    CHECK_TABLE(table, //
                {"ready 1; sequence 1, written 1", "took 1; sequence 1, written 1, read 1"},
                {"writing 1, ready 1; sequence 1, written 1", "took 1; sequence 1, written 1, read 1, abandoned 1"},
                {"writing 1, ready 1; sequence 2, written 1", "took 1; sequence 2, written 1, read 1, abandoned 1"},
                {"ready 2; sequence 2, written 1", "took 1 2; sequence 2, written 1, read 2"},
                {"ready 2; sequence 2, written 2", "took 1 2; sequence 2, written 2, read 2"});
}

TEST("a writer that dies at any point of a claim that drops the oldest slot, and of its commit") {
    const TestedRing tested(full_dropping);
    const Table table = tested.table("put that drops", [&](std::int64_t me) { CHECK(tested.put(me, 4)); });
    CHECK_TABLE(table, //
                {"ready 3; sequence 3, written 3", "took 1 2 3; sequence 3, written 3, read 3"},
                {"writing 1, ready 2; sequence 3, written 3", "took 2 3; sequence 3, written 3, read 2, abandoned 1"},
                {"writing 1, ready 2; sequence 3, written 3, dropped 1",
                 "took 2 3; sequence 3, written 3, read 2, dropped 1, abandoned 1"},
                {"writing 1, ready 2; sequence 4, written 3, dropped 1",
                 "took 2 3; sequence 4, written 3, read 2, dropped 1, abandoned 1"},
                {"ready 3; sequence 4, written 3, dropped 1", "took 2 3 4; sequence 4, written 3, read 3, dropped 1"},
                {"ready 3; sequence 4, written 4, dropped 1", "took 2 3 4; sequence 4, written 4, read 3, dropped 1"});
}

TEST("a writer that dies at any point of a commit that trims the unread slots") {
    const TestedRing tested(trimming);
    const Table table = tested.table("put that trims", [&](std::int64_t me) { CHECK(tested.put(me, 3)); });
    CHECK_TABLE(table, //
                {"ready 2; sequence 2, written 2", "took 1 2; sequence 2, written 2, read 2"},
                {"writing 1, ready 2; sequence 2, written 2", "took 1 2; sequence 2, written 2, read 2, abandoned 1"},
                {"writing 1, ready 2; sequence 3, written 2", "took 1 2; sequence 3, written 2, read 2, abandoned 1"},
                {"ready 3; sequence 3, written 2", "took 1 2 3; sequence 3, written 2, read 3"},
                {"ready 3; sequence 3, written 3", "took 1 2 3; sequence 3, written 3, read 3"},
                {"writing 1, ready 2; sequence 3, written 3", "took 2 3; sequence 3, written 3, read 2, abandoned 1"},
                {"writing 1, ready 2; sequence 3, written 3, dropped 1",
                 "took 2 3; sequence 3, written 3, read 2, dropped 1, abandoned 1"},
                {"ready 2; sequence 3, written 3, dropped 1", "took 2 3; sequence 3, written 3, read 2, dropped 1"});
}

TEST("a writer that dies at any point of an abandon: the slot is free, and counted once or twice") {
    const TestedRing tested(blocking);
    const Table table = tested.table("claim and abandon", [&](std::int64_t me) {
        Ring ring = tested.ring();
        ring.abandon(ring.try_claim(me));
    });
    CHECK_TABLE(table, //
                {"ready 1; sequence 1, written 1", "took 1; sequence 1, written 1, read 1"},
                {"writing 1, ready 1; sequence 1, written 1", "took 1; sequence 1, written 1, read 1, abandoned 1"},
                {"writing 1, ready 1; sequence 1, written 1, abandoned 1",
                 "took 1; sequence 1, written 1, read 1, abandoned 2"},
                {"ready 1; sequence 1, written 1, abandoned 1", "took 1; sequence 1, written 1, read 1, abandoned 1"});
}

// Slots of dead readers are reclaimed when no other slot is ready, so the survivors take slot 2 before slot 1 here.

TEST("a reader that dies at any point of take and release") {
    const TestedRing tested({3, Overflow::block, 3, 2});
    const Table table = tested.table("get", [&](std::int64_t me) { CHECK_EQ(tested.get(me), 1); });
    CHECK_TABLE(table, //
                {"ready 2; sequence 2, written 2", "took 1 2; sequence 2, written 2, read 2"},
                {"ready 1, reading 1; sequence 2, written 2", "took 2 1; sequence 2, written 2, read 2, returned 1"},
                {"ready 1, reading 1; sequence 2, written 2, read 1", "took 2 1; sequence 2, written 2, read 3, returned 1"},
                {"ready 1; sequence 2, written 2, read 1", "took 2; sequence 2, written 2, read 2"});
}

TEST("a reader that dies at any point of giving a slot back: the slot keeps its place and its content") {
    const TestedRing tested({3, Overflow::block, 3, 2});
    const Table table = tested.table("take and give back", [&](std::int64_t me) {
        Ring ring = tested.ring();
        ring.give_back(ring.try_take(me));
    });
    CHECK_TABLE(table, //
                {"ready 2; sequence 2, written 2", "took 1 2; sequence 2, written 2, read 2"},
                {"ready 1, reading 1; sequence 2, written 2", "took 2 1; sequence 2, written 2, read 2, returned 1"},
                {"ready 1, reading 1; sequence 2, written 2, returned 1",
                 "took 2 1; sequence 2, written 2, read 2, returned 2"},
                {"ready 2; sequence 2, written 2, returned 1", "took 1 2; sequence 2, written 2, read 2, returned 1"});
}

TEST("a process that dies at any point of reclaiming: a slot that was reclaimed and not counted, and none lost") {
    const TestedRing tested({3, Overflow::block, 3, 2});
    Table table;
    die_at_every_point(
        "reap",
        [&] {
            tested.prepare();
            Child([&] { // dies with one slot that it writes and one that it reads
                CHECK(tested.ring().try_claim(this_process()) >= 0);
                CHECK(tested.ring().try_take(this_process()) >= 0);
            })
                .join();
        },
        [&](std::int64_t) { tested.ring().reap(); },
        [&](Child &) {
            std::string seen = tested.seen();
            table.add(std::move(seen), tested.recover());
        });
    CHECK_TABLE(table, //
                {"writing 1, ready 1, reading 1; sequence 2, written 2",
                 "took 2 1; sequence 2, written 2, read 2, returned 1, abandoned 1"},
                {"ready 1, reading 1; sequence 2, written 2", "took 2 1; sequence 2, written 2, read 2, returned 1"},
                {"ready 1, reading 1; sequence 2, written 2, abandoned 1",
                 "took 2 1; sequence 2, written 2, read 2, returned 1, abandoned 1"},
                {"ready 2; sequence 2, written 2, abandoned 1", "took 1 2; sequence 2, written 2, read 2, abandoned 1"},
                {"ready 2; sequence 2, written 2, returned 1, abandoned 1",
                 "took 1 2; sequence 2, written 2, read 2, returned 1, abandoned 1"});
}

TEST("a slot that is reclaimed from a reader that died at any point keeps its place among the unread ones") {
    const TestedRing tested({3, Overflow::block, 3, 3});
    Ring ring = tested.ring();
    std::int64_t oldest = -1;
    die_at_every_point(
        "take and give back beside a reader",
        [&] {
            tested.prepare();
            oldest = ring.try_take(this_process());
        },
        [&](std::int64_t me) { ring.give_back(ring.try_take(me)); },
        [&](Child &) {
            ring.reap();
            ring.give_back(oldest); // which is older than the slot that was reclaimed
            CHECK(tested.drain() == std::vector<std::int64_t>({1, 2, 3}));
        });
}

// --------------------------------------------------------------------------------------- the process that repairs dies

namespace {

// After any two deaths: every slot can be claimed, nothing is torn or taken twice, and what is missing is counted. Stamps
// 1 to `unread` were committed before; `delivered` is what the dead readers have got.
void check_pairs(const char *name, Settings settings, bool readers_die, auto first, auto second) {
    const TestedRing tested(settings);
    Shared<Word> delivered; // a bit per stamp
    die_at_every_pair(
        name,
        [&] {
            tested.prepare();
            *delivered = 0;
        },
        [&](std::int64_t me) { first(tested, me, *delivered); }, [&](std::int64_t me) { second(tested, me, *delivered); },
        [&] {
            const std::vector<std::int64_t> taken = tested.drain();
            std::vector<std::int64_t> in_order = taken;
            std::sort(in_order.begin(), in_order.end());
            CHECK(std::adjacent_find(in_order.begin(), in_order.end()) == in_order.end());
            CHECK(readers_die || taken == in_order); // a slot of a dead reader is taken late
            std::int64_t missing = 0;
            for (std::int64_t stamp = 1; stamp <= settings.unread; ++stamp)
                missing +=
                    std::find(taken.begin(), taken.end(), stamp) == taken.end() && (see(*delivered) >> stamp & 1) == 0;
            for (const std::int64_t stamp : taken)
                CHECK(stamp >= 1 && stamp <= settings.unread + 2);
            tested.claim_all();
            const RingControl &control = tested.memory().control;
            // One more if the second process died between its reclaim of a slot and the count.
            CHECK(missing <= see(control.lost.dropped) + see(control.lost.abandoned) + 1);
            CHECK(std::abs(tested.excess()) <= 2); // each killed process makes it wrong by one at most
        });
}

// A reader notes what it has got before it releases the slot.
void get_noted(const TestedRing &tested, std::int64_t me, Word &delivered) {
    Ring ring = tested.ring();
    Spin spin(0);
    const WaitResult take = ring.wait_take(me, at_once, {}, spin);
    if (take.end != WaitEnd::reached)
        return;
    const std::int64_t stamp = tested.read(take.value);
    CHECK(stamp != Block::torn);
    static_cast<std::atomic<std::int64_t> &>(delivered).fetch_or(std::int64_t{1} << stamp); // no fault point
    ring.release(take.value);
}

} // namespace

TEST("two processes that die one after the other at any points of put and get lose no slot and nothing uncounted") {
    const auto put = [](std::int64_t stamp) {
        return [=](const TestedRing &tested, std::int64_t me, Word &) { tested.put(me, stamp); };
    };
    check_pairs("put, then put", {2, Overflow::block, 2, 0}, false, put(1), put(2));
    check_pairs("get, then get", {2, Overflow::block, 2, 2}, true, get_noted, get_noted);
    check_pairs("get, then put that reclaims", {2, Overflow::block, 2, 2}, true, get_noted, put(3));
    check_pairs("put, then get", {2, Overflow::block, 2, 1}, true, put(2), get_noted);
    check_pairs("put that drops, twice", {2, Overflow::drop_oldest, 2, 2}, false, put(3), put(4));
}

// --------------------------------------------------------------------------------------------------------------- stops

namespace {

// A process is stopped at each point of its put; others write and read meanwhile, then it goes on, or is killed.
void check_stopped_writer(const char *name, Settings settings, Then then) {
    const TestedRing tested(settings);
    std::vector<std::int64_t> taken;
    constexpr std::int64_t theirs = 100;
    stop_at_every_point(
        name, [&] { tested.prepare(); }, [&](std::int64_t me) { CHECK(tested.put(me, theirs)); },
        [&](Child &) {
            taken.clear();
            for (std::int64_t stamp = 10; stamp < 16; ++stamp) {
                // It holds one slot at most, so there is always one for the others, after they have made room.
                if (tested.in(SlotState::ready) >= settings.slots - 1)
                    taken.push_back(tested.get(this_process()));
                CHECK(tested.put(this_process(), stamp));
            }
        },
        [&] {
            for (const std::int64_t stamp : tested.drain())
                taken.push_back(stamp);
            std::erase(taken, 0);
            CHECK_EQ(std::count(taken.begin(), taken.end(), Block::torn), 0);
            const auto once = std::count(taken.begin(), taken.end(), theirs);
            CHECK(once <= 1 && (once == 1 || then == Then::kill || see(tested.memory().control.lost.dropped) > 0));
            std::erase(taken, theirs);
            // The slots of one writer are in its order, and none of them is missing without being counted.
            CHECK(std::is_sorted(taken.begin(), taken.end()));
            CHECK(std::adjacent_find(taken.begin(), taken.end()) == taken.end());
            const std::int64_t missing = settings.unread + 6 - static_cast<std::int64_t>(taken.size()) + (1 - once);
            const RingControl &control = tested.memory().control;
            if (then == Then::resume) {
                CHECK_EQ(missing, see(control.lost.dropped));
                CHECK_EQ(tested.excess(), 0);
            }
            tested.claim_all();
            CHECK(missing <= see(control.lost.dropped) + see(control.lost.abandoned) + (then == Then::kill));
        },
        then);
}

} // namespace

TEST("a writer that is stopped at any point of put holds up no other process, and goes on or is killed without a loss") {
    check_stopped_writer("put, resumed", {3, Overflow::block, 3, 1}, Then::resume);
    check_stopped_writer("put, killed", {3, Overflow::block, 3, 1}, Then::kill);
    check_stopped_writer("put that drops, resumed", {4, Overflow::drop_oldest, 2, 2}, Then::resume);
    check_stopped_writer("put that drops, killed", {4, Overflow::drop_oldest, 2, 2}, Then::kill);
}

TEST("a reader that is stopped at any point of get reads a whole slot when it goes on, while others use the ring") {
    for (const Settings settings : {Settings{3, Overflow::block, 3, 2}, Settings{4, Overflow::drop_oldest, 2, 2}}) {
        const TestedRing tested(settings);
        Shared<Word> got;
        std::vector<std::int64_t> taken;
        stop_at_every_point(
            settings.overflow == Overflow::block ? "get" : "get beside a writer that drops",
            [&] {
                tested.prepare();
                *got = 0;
            },
            [&](std::int64_t me) {
                const std::int64_t stamp = tested.get(me);
                CHECK(stamp != Block::torn);
                static_cast<std::atomic<std::int64_t> &>(*got) = stamp; // no fault point
            },
            [&](Child &) {
                taken.clear();
                for (std::int64_t stamp = 10; stamp < 16; ++stamp) {
                    if (tested.in(SlotState::ready) >= settings.slots - 1)
                        taken.push_back(tested.get(this_process()));
                    CHECK(tested.put(this_process(), stamp));
                }
            },
            [&] {
                const std::vector<std::int64_t> rest = tested.drain();
                taken.insert(taken.end(), rest.begin(), rest.end());
                if (see(*got) != 0)
                    taken.push_back(see(*got));
                std::sort(taken.begin(), taken.end());
                CHECK(std::adjacent_find(taken.begin(), taken.end()) == taken.end()); // each once
                CHECK_EQ(settings.unread + 6 - static_cast<std::int64_t>(taken.size()),
                         see(tested.memory().control.lost.dropped));
                CHECK_EQ(tested.excess(), 0);
            });
    }
}

namespace {

constexpr std::int64_t patience = 20 * second;

// Waits for as long as it takes, as callers do: again after each pause.
std::int64_t patiently(auto wait) {
    const std::int64_t deadline = now_ns() + patience;
    Spin spin(0);
    for (;;)
        if (const WaitResult result = wait(this_process(), deadline, std::span<const int>{}, spin);
            result.end != WaitEnd::paused)
            return result.end == WaitEnd::reached ? result.value : -1;
}

} // namespace

TEST("a writer that dies or is stopped at any point of its wait for a slot holds up no other writer") {
    const TestedRing tested({2, Overflow::block, 2, 2});
    const auto wait_in_vain = [&](std::int64_t me) {
        Spin spin(0);
        CHECK(tested.ring().wait_claim(me, now_ns() + 2 * ms, {}, spin).end != WaitEnd::reached);
    };
    const auto others_go_on = [&](Child &) {
        Ring ring = tested.ring();
        CHECK_EQ(tested.get(this_process()), 1);
        const std::int64_t slot = patiently([&](auto... arguments) { return ring.wait_claim(arguments...); });
        CHECK(slot >= 0);
        if (slot < 0)
            return;
        tested.write(slot, 3);
        ring.commit(slot);
    };
    const auto check = [&] { CHECK_EQ(tested.recover(), "took 2 3; sequence 3, written 3, read 3"); };
    die_at_every_point(
        "wait for a slot to write", [&] { tested.prepare(); }, wait_in_vain,
        [&](Child &child) {
            others_go_on(child);
            check();
        });
    for (const Then then : {Then::resume, Then::kill})
        stop_at_every_point("wait for a slot to write", [&] { tested.prepare(); }, wait_in_vain, others_go_on, check, then);
}

TEST("a reader that dies or is stopped at any point of its wait for a slot holds up no other reader") {
    const TestedRing tested({2, Overflow::block, 2, 0});
    const auto wait_in_vain = [&](std::int64_t me) {
        Spin spin(0);
        CHECK(tested.ring().wait_take(me, now_ns() + 2 * ms, {}, spin).end != WaitEnd::reached);
    };
    const auto others_go_on = [&](Child &) {
        Ring ring = tested.ring();
        CHECK(tested.put(this_process(), 1));
        const std::int64_t slot = patiently([&](auto... arguments) { return ring.wait_take(arguments...); });
        CHECK(slot >= 0);
        if (slot < 0)
            return;
        CHECK_EQ(tested.read(slot), 1);
        ring.release(slot);
    };
    const auto check = [&] { CHECK_EQ(tested.recover(), "took; sequence 1, written 1, read 1"); };
    die_at_every_point(
        "wait for a slot to read", [&] { tested.prepare(); }, wait_in_vain,
        [&](Child &child) {
            others_go_on(child);
            check();
        });
    for (const Then then : {Then::resume, Then::kill})
        stop_at_every_point("wait for a slot to read", [&] { tested.prepare(); }, wait_in_vain, others_go_on, check, then);
}

TEST("a process that is stopped at any point of reclaiming takes no slot from a process that has claimed it since") {
    const TestedRing tested({2, Overflow::block, 2, 1});
    stop_at_every_point(
        "reap",
        [&] {
            tested.prepare();
            Child([&] {
                CHECK(tested.ring().try_claim(this_process()) >= 0);
                CHECK(tested.ring().try_take(this_process()) >= 0);
            }).join();
        },
        [&](std::int64_t) { tested.ring().reap(); },
        [&](Child &) {
            Ring ring = tested.ring();
            ring.reap();
            // Both slots are claimed anew, one to write, one to read: by this process, which is alive.
            CHECK(ring.try_claim(this_process()) >= 0);
            CHECK(ring.try_take(this_process()) >= 0);
        },
        [&] {
            CHECK_EQ(tested.in(SlotState::writing), 1);
            CHECK_EQ(tested.in(SlotState::reading), 1);
            CHECK_EQ(see(tested.memory().control.lost.abandoned), 1);
            CHECK_EQ(see(tested.memory().control.taken.returned), 1);
        });
}
