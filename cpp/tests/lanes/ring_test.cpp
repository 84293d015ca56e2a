#include "lanes/ring.hpp"

#include <algorithm>
#include <array>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/life.hpp"
#include "support/processes.hpp"
#include "support/single_steps.hpp"
#include "support/syscalls.hpp"

using namespace memlane;

namespace {

// A payload that can be checked for tears: its writer, the writer's count, and words that are a function of both and
// their position.
constexpr int words = 40;

struct Payload {
    std::int64_t writer, number;
    std::array<std::int64_t, words> rest;

    static std::int64_t expected_word(std::int64_t writer, std::int64_t number, std::size_t position) {
        return (writer * 1'000'003 + number) * 1'000'003 ^ static_cast<std::int64_t>(position) * 0x9E3779B97F4A7C15;
    }
    void fill(std::int64_t by, std::int64_t which) {
        writer = by;
        number = which;
        for (std::size_t i = 0; i < rest.size(); ++i)
            rest[i] = expected_word(by, which, i);
    }
    bool intact() const {
        for (std::size_t i = 0; i < rest.size(); ++i)
            if (rest[i] != expected_word(writer, number, i))
                return false;
        return true;
    }
};

struct Memory {
    static constexpr int max_slots = 8;
    RingControl control;
    struct alignas(64) Slot {
        SlotHead head;
        Payload payload;
    } slot[max_slots];
    int count; // slots that the ring uses

    Ring ring(int slots, Overflow overflow, std::int64_t unread_limit) {
        count = slots;
        return {reinterpret_cast<std::byte *>(&control),
                reinterpret_cast<std::byte *>(slot),
                slots,
                sizeof(Slot),
                unread_limit,
                overflow,
                life()};
    }
    Ring blocking(int slots) { return ring(slots, Overflow::block, slots); }
    Ring dropping(int slots) { return ring(slots, Overflow::drop_oldest, slots - 2); } // one to write, one to read

    Payload &payload(std::int64_t index) { return slot[index].payload; }

    void write(Ring &ring, std::int64_t process, std::int64_t writer, std::int64_t number) {
        const std::int64_t index = ring.try_claim(process);
        CHECK(index >= 0);
        if (index < 0)
            return;
        payload(index).fill(writer, number);
        ring.commit(index);
    }
    // Takes and releases the oldest slot and returns its number; 0 if there is none, -1 if it is torn.
    std::int64_t read(Ring &ring, std::int64_t process) {
        const std::int64_t index = ring.try_take(process);
        if (index < 0)
            return 0;
        const std::int64_t number = payload(index).intact() ? payload(index).number : -1;
        ring.release(index);
        return number;
    }
    std::vector<std::int64_t> drain(Ring &ring, std::int64_t process) {
        std::vector<std::int64_t> numbers;
        while (const std::int64_t number = read(ring, process))
            numbers.push_back(number);
        return numbers;
    }
    int in(SlotState state) const {
        return static_cast<int>(
            std::count_if(slot, slot + count, [&](const Slot &each) { return slot_state(see(each.head.state)) == state; }));
    }
    // `written` minus its expected value; see the counters in ring.hpp.
    std::int64_t excess() const {
        return see(control.written.value) - see(control.taken.read) - see(control.lost.dropped) - in(SlotState::ready) -
               in(SlotState::reading);
    }
    void wipe() {
        new (&control) RingControl{};
        for (Slot &each : slot)
            each.head.state = 0;
    }
};

// Waits as callers do: again after each pause.
template <class Wait> WaitResult to_the_end(Wait wait, std::int64_t deadline_ns, std::span<const int> pidfds = {}) {
    const std::int64_t me = this_process();
    Spin spin(0);
    for (;;) {
        const WaitResult result = wait(me, deadline_ns, pidfds, spin);
        if (result.end != WaitEnd::paused)
            return result;
    }
}
WaitResult claim(Ring &ring, std::int64_t deadline_ns = forever_ns, std::span<const int> pidfds = {}) {
    Ring::Waiter waiter(ring, Ring::Side::writers);
    return to_the_end([&](auto... arguments) { return ring.wait_claim(arguments..., waiter); }, deadline_ns, pidfds);
}
WaitResult take(Ring &ring, std::int64_t deadline_ns = forever_ns, std::span<const int> pidfds = {}) {
    Ring::Waiter waiter(ring, Ring::Side::readers);
    return to_the_end([&](auto... arguments) { return ring.wait_take(arguments..., waiter); }, deadline_ns, pidfds);
}

bool waiter_may_sleep(const SignalCell &cell) { return (cell.gate.load() & 1u) != 0; }
int sleepers(const WaitQueue &queue) {
    int count = 0;
    for (int place = 0; place < WaitQueue::places; ++place)
        count += waiter_may_sleep(queue.signal(place));
    return count;
}
bool waiter_may_sleep(const WaitQueue &queue) { return sleepers(queue) > 0; }

using Numbers = std::vector<std::int64_t>;

} // namespace

// ------------------------------------------------------------------------------------------------------ one process

// ------------------------------------------------------------------------------------------------------ stray words

TEST("whatever the last sequence number says, writers find the slots of the ring and no other memory") {
    for (const std::int64_t last : {std::int64_t{-1}, std::int64_t{-3}, INT64_MIN, INT64_MAX, INT64_MAX - 1}) {
        // The ring lies in the middle: a slot in front of it or behind it would be one of its neighbours.
        struct {
            Memory before, memory, after;
        } area{};
        Ring ring = area.memory.blocking(5);
        area.memory.control.sequence.last = last;
        std::vector<std::int64_t> claimed;
        for (int i = 0; i < 5; ++i)
            claimed.push_back(ring.try_claim(this_process()));
        std::sort(claimed.begin(), claimed.end());
        CHECK(claimed == std::vector<std::int64_t>{0, 1, 2, 3, 4});
        CHECK_EQ(ring.try_claim(this_process()), -1);
        for (const std::int64_t slot : claimed)
            ring.commit(slot);
        for (int i = 0; i < 5; ++i)
            ring.release(ring.try_take(this_process()));
        CHECK_EQ(ring.try_take(this_process()), -1);
    }
}

TEST("a stray time of the next reclaim does not keep a dead process's slots from a dropping ring") {
    for (const std::int64_t next : {INT64_MAX, now_ns() + 10 * slice_ns, INT64_MIN}) {
        Memory memory{};
        Ring ring = memory.dropping(4);
        Shared<Word> dead;
        Child([&] { publish(*dead, this_process()); }).join();
        for (int i = 0; i < 2; ++i)
            CHECK(ring.try_claim(see(*dead)) >= 0);
        for (int i = 0; i < 2; ++i)
            memory.write(ring, this_process(), 1, i + 1);
        memory.control.lost.next_reap_ns = next;
        memory.write(ring, this_process(), 1, 3);
        CHECK_EQ(see(memory.control.lost.abandoned), 2);
    }
}

TEST("calls of a ring whose words another thread scribbles on return, with a slot of the ring or none") {
    Memory memory{};
    Ring ring = memory.dropping(6);
    std::atomic<bool> stop{false};
    std::thread scribbler([&] {
        std::uint64_t random = 1;
        while (!stop) {
            random = random * 6364136223846793005 + 1442695040888963407;
            Word &word = random >> 60 & 1 ? memory.slot[(random >> 33) % 6].head.state : memory.control.sequence.last;
            word = static_cast<std::int64_t>(random);
        }
    });
    const auto inside = [](std::int64_t slot) { return slot >= -1 && slot < 6; };
    for (int i = 0; i < check::times(8'000); ++i) {
        const std::int64_t claimed = ring.try_claim(this_process());
        CHECK(inside(claimed));
        if (claimed >= 0)
            ring.commit(claimed);
        const std::int64_t taken = ring.try_take(this_process());
        CHECK(inside(taken));
        if (taken >= 0)
            ring.release(taken);
    }
    stop = true;
    scribbler.join();
}

TEST("a new ring has no slot to take, and each of its slots can be claimed once") {
    Memory memory{};
    Ring ring = memory.blocking(4);
    CHECK_EQ(ring.try_take(1), -1);
    CHECK_EQ(ring.unread(), 0);
    std::array<bool, 4> claimed{};
    for (int i = 0; i < 4; ++i)
        claimed[static_cast<std::size_t>(ring.try_claim(1))] = true;
    CHECK(std::ranges::all_of(claimed, [](bool each) { return each; }));
    CHECK_EQ(ring.try_claim(1), -1);
}

TEST("slots are taken in the order of their commits, whatever the order of their claims") {
    Memory memory{};
    Ring ring = memory.blocking(4);
    std::array<std::int64_t, 4> claimed;
    for (std::int64_t &slot : claimed)
        slot = ring.try_claim(1);
    const std::array order{2, 0, 3, 1};
    for (const int which : order)
        ring.commit(claimed[static_cast<std::size_t>(which)]);
    for (std::int64_t sequence = 1; sequence <= 4; ++sequence) {
        const std::int64_t slot = ring.try_take(1);
        CHECK_EQ(slot, claimed[static_cast<std::size_t>(order[static_cast<std::size_t>(sequence - 1)])]);
        CHECK_EQ(ring.head(slot).sequence.load(), sequence);
    }
}

TEST("a long run through few slots keeps order and content") {
    Memory memory{};
    Ring ring = memory.blocking(3);
    for (std::int64_t number = 1; number <= 1000; ++number) {
        memory.write(ring, 1, 7, number);
        if (number % 3 == 0)
            CHECK(memory.drain(ring, 1) == Numbers({number - 2, number - 1, number}));
    }
    CHECK_EQ(see(memory.control.written.value), 1000);
    CHECK_EQ(see(memory.control.taken.read), 999);
    CHECK_EQ(memory.excess(), 0);
}

TEST("a full blocking ring refuses a claim until a slot is released") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    memory.write(ring, 1, 0, 1);
    memory.write(ring, 1, 0, 2);
    CHECK_EQ(ring.try_claim(1), -1);
    const std::int64_t taken = ring.try_take(1);
    CHECK_EQ(ring.try_claim(1), -1);
    ring.release(taken);
    CHECK_EQ(ring.try_claim(1), taken);
    CHECK_EQ(see(memory.control.lost.dropped), 0);
}

TEST("if there are more unread slots than the limit, the oldest is dropped and counted") {
    Memory memory{};
    Ring ring = memory.dropping(5);
    for (std::int64_t number = 1; number <= 10; ++number) {
        memory.write(ring, 1, 0, number);
        CHECK_EQ(ring.unread(), std::min<std::int64_t>(number, 3));
        CHECK_EQ(memory.in(SlotState::ready), std::min<std::int64_t>(number, 3));
    }
    CHECK_EQ(see(memory.control.lost.dropped), 7);
    CHECK(memory.drain(ring, 1) == Numbers({8, 9, 10}));
    CHECK_EQ(memory.excess(), 0);
}

TEST("a dropping ring without a free slot gives the oldest unread one to the writer") {
    Memory memory{};
    Ring ring = memory.ring(3, Overflow::drop_oldest, 3);
    for (std::int64_t number = 1; number <= 3; ++number)
        memory.write(ring, 1, 0, number);
    const std::int64_t claimed = ring.try_claim(1);
    CHECK_EQ(see(memory.control.lost.dropped), 1);
    CHECK(memory.drain(ring, 1) == Numbers({2, 3}));
    memory.payload(claimed).fill(0, 4);
    ring.commit(claimed);
    CHECK(memory.drain(ring, 1) == Numbers({4}));
    CHECK_EQ(memory.excess(), 0);
}

TEST("a slot that is being written or read is given to no other process") {
    Memory memory{};
    const std::int64_t me = this_process(); // alive: slots of dead processes would be reclaimed
    Ring ring = memory.ring(4, Overflow::drop_oldest, 2);
    memory.write(ring, me, 0, 1);
    const std::int64_t reading = ring.try_take(me), writing = ring.try_claim(me);
    for (int i = 0; i < 50; ++i) {
        const std::int64_t slot = ring.try_claim(me);
        CHECK(slot != reading && slot != writing);
        ring.commit(slot);
    }
    std::array<std::int64_t, 2> rest{ring.try_claim(me), ring.try_claim(me)};
    CHECK(rest[0] >= 0 && rest[1] >= 0);
    CHECK_EQ(ring.try_claim(me), -1); // all slots are held now, and none is unread
    CHECK_EQ(ring.try_take(me), -1);
    CHECK_EQ(memory.payload(reading).number, 1);
}

TEST("a slot that its writer abandons is free and counted, and no reader sees it") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t slot = ring.try_claim(1);
    ring.abandon(slot);
    CHECK_EQ(ring.try_take(1), -1);
    CHECK_EQ(see(memory.control.lost.abandoned), 1);
    CHECK_EQ(ring.try_claim(1), slot);
    CHECK_EQ(memory.excess(), 0);
}

TEST("a slot that its reader gives back unread is the oldest again, with its content, and counted") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    memory.write(ring, 1, 0, 1);
    memory.write(ring, 1, 0, 2);
    const std::int64_t slot = ring.try_take(1);
    ring.give_back(slot);
    CHECK_EQ(ring.unread(), 2);
    CHECK_EQ(see(memory.control.taken.returned), 1);
    CHECK_EQ(see(memory.control.taken.read), 0);
    CHECK_EQ(ring.try_take(1), slot);
    CHECK_EQ(memory.payload(slot).number, 1);
    CHECK_EQ(memory.excess(), 0);
}

TEST("unread() is at most the limit when a writer died before it could drop the oldest slot") {
    Memory memory{};
    Ring ring = memory.dropping(4);
    memory.write(ring, 1, 0, 1);
    memory.write(ring, 1, 0, 2);
    const std::int64_t slot = ring.try_claim(1);
    publish(memory.slot[slot].head.state, slot_word(SlotState::ready, 3)); // without the trim
    CHECK_EQ(ring.unread(), 2);
    memory.control.sequence.last = 3;
    memory.write(ring, 1, 0, 4); // drops two
    CHECK_EQ(memory.in(SlotState::ready), 2);
    CHECK_EQ(see(memory.control.lost.dropped), 2);
}

// ---------------------------------------------------------------------------------------------------- dead processes

TEST("slots of live processes are not reclaimed, even if the processes are stopped") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(2);
    memory->write(ring, this_process(), 0, 1);
    Shared<Word> held;
    Child holder([&] {
        const std::int64_t me = this_process();
        ring.try_take(me);
        ring.try_claim(me);
        publish(*held, 1);
        for (;;)
            pause();
    });
    await([&] { return see(*held) == 1; });
    CHECK_EQ(ring.reap(), 0);
    holder.kill(SIGSTOP);
    CHECK_EQ(ring.reap(), 0);
    CHECK_EQ(memory->in(SlotState::writing), 1);
    CHECK_EQ(memory->in(SlotState::reading), 1);
}

TEST("slots that a dead process or a zombie wrote go back to the writers and those it read to the readers, counted") {
    for (const bool zombie : {false, true}) {
        Shared<Memory> memory;
        Ring ring = memory->blocking(3);
        memory->write(ring, this_process(), 5, 1);
        Child holder([&] {
            const std::int64_t me = this_process();
            ring.try_take(me);
            memory->payload(ring.try_claim(me)).fill(6, 6);
        });
        CHECK(holder.dies_within(30 * second));
        if (!zombie)
            CHECK_EQ(holder.join(), 0);
        CHECK_EQ(ring.reap(), 2);
        CHECK_EQ(see(memory->control.lost.abandoned), 1);
        CHECK_EQ(see(memory->control.taken.returned), 1);
        CHECK_EQ(ring.reap(), 0);
        CHECK_EQ(memory->in(SlotState::free), 2);
        const std::int64_t slot = ring.try_take(this_process());
        CHECK_EQ(ring.head(slot).sequence.load(), 1);
        CHECK(memory->payload(slot).intact());
        CHECK_EQ(memory->payload(slot).writer, 5);
        CHECK_EQ(memory->excess(), 0);
    }
}

TEST("a slot returned from a dead reader is the oldest again") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(4);
    memory->write(ring, this_process(), 0, 1);
    Child([&] { ring.try_take(this_process()); }).join();
    memory->write(ring, this_process(), 0, 2);
    CHECK_EQ(ring.reap(), 1);
    CHECK(memory->drain(ring, this_process()) == Numbers({1, 2}));
}

TEST("slots of an identity that no process has are reclaimed") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    for (const std::int64_t stray :
         {std::int64_t{0}, std::int64_t{1}, this_process() + 1, INT64_MAX >> 2, std::int64_t{-1}}) {
        memory.slot[0].head.state = slot_word(SlotState::writing, stray);
        CHECK_EQ(ring.reap(), 1);
    }
    CHECK_EQ(ring.try_claim(this_process()), 0);
}

TEST("a slot of a process in another pid namespace stays its own until that process is killed") {
    for (const bool reads : {false, true}) {
        Shared<Memory> memory;
        Ring ring = memory->blocking(1);
        if (reads)
            memory->write(ring, this_process(), 0, 1);
        LiveProcess holder(
            [&] {
                const std::int64_t me = this_process();
                CHECK_EQ(reads ? ring.try_take(me) : ring.try_claim(me), 0);
                return me;
            },
            CLONE_NEWPID);
        if (holder.refused())
            return;
        CHECK_EQ(ring.reap(), 0);
        CHECK_EQ(see(memory->slot[0].head.state), slot_word(reads ? SlotState::reading : SlotState::writing, holder.word()));
        holder.child().kill(SIGKILL);
        await([&] { return ring.reap() == 1; });
        CHECK_EQ(reads ? memory->read(ring, this_process()) : ring.try_claim(this_process()), reads ? 1 : 0);
    }
}

TEST("a slot that a process held when it called exec is reclaimed while the program runs") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    Child child([&] {
        CHECK_EQ(ring.try_claim(this_process()), 0);
        execl("/bin/sleep", "sleep", "100", nullptr);
    });
    await([&] { return ring.reap() == 1; });
    CHECK(!child.dead());
    CHECK_EQ(ring.try_claim(this_process()), 0);
}

// Race: several survivors reclaim the slots of one dead process.
//   each slot is reclaimed by one of them  acceptable
//   by two of them, or by none             FORBIDDEN
TEST("if several processes reap, each slot of a dead process is reclaimed by one of them") {
    constexpr int reapers = 3;
    struct Scene {
        Memory memory;
        SpinBarrier<reapers> meeting;
        std::atomic<std::int64_t> reaped;
    };
    for (int i = 0; i < check::times(100); ++i) {
        Shared<Scene> scene;
        Ring ring = scene->memory.blocking(8);
        for (std::int64_t number = 1; number <= 4; ++number)
            scene->memory.write(ring, 1, 0, number);
        Child([&] {
            const std::int64_t me = this_process();
            for (int slot = 0; slot < 4; ++slot) {
                ring.try_take(me);
                ring.try_claim(me);
            }
        }).join();
        std::list<Child> children;
        for (int reaper = 0; reaper < reapers; ++reaper)
            children.emplace_back([&] {
                scene->meeting.arrive_and_wait();
                scene->reaped += ring.reap();
            });
        for (auto &child : children)
            CHECK_EQ(child.join(), 0);
        CHECK_EQ(scene->reaped.load(), 8);
        CHECK_EQ(see(scene->memory.control.lost.abandoned), 4);
        CHECK_EQ(see(scene->memory.control.taken.returned), 4);
        CHECK(scene->memory.drain(ring, 1) == Numbers({1, 2, 3, 4}));
    }
}

// ---------------------------------------------------------------------------------------------------------- waiting

TEST("a wait for a slot that is available returns it without a system call") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    CHECK(claim(ring).end == WaitEnd::reached);
    memory.write(ring, 1, 0, 1);
    const WaitResult taken = take(ring);
    CHECK(taken.end == WaitEnd::reached);
    CHECK_EQ(memory.payload(taken.value).number, 1);
    CHECK_EQ(syscalls::waits.load(), 0);
}

TEST("a wait for a slot ends at its deadline and not before") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    for (const std::int64_t timeout : {0 * ms, 20 * ms, 150 * ms}) {
        std::int64_t begin = now_ns();
        CHECK(take(ring, begin + timeout).end == WaitEnd::timed_out);
        CHECK(now_ns() - begin >= timeout && now_ns() - begin < timeout + second);
        const std::int64_t slot = ring.try_claim(this_process());
        begin = now_ns();
        CHECK(claim(ring, begin + timeout).end == WaitEnd::timed_out);
        CHECK(now_ns() - begin >= timeout && now_ns() - begin < timeout + second);
        ring.abandon(slot);
    }
}

TEST("a waiter whose slots are always taken by others pauses, and times out at its deadline") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    Child peer([] { pause(); });
    const int pidfd = peer.pidfd();
    // Between the waiter's attempt and its sleep, a slot is committed and taken by another reader.
    syscalls::before_poll = [&] { memory.control.readers.call(1); };
    Spin spin(0);
    CHECK(ring.wait_take(this_process(), forever_ns, {&pidfd, 1}, spin).end == WaitEnd::paused);
    CHECK(ring.wait_take(this_process(), now_ns(), {&pidfd, 1}, spin).end == WaitEnd::timed_out);
    CHECK_EQ(syscalls::waits.load(), 0);
}

TEST("a slot committed between the waiter's check of the slots and of its peers takes precedence over the death") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(2);
    Shared<Word> go;
    Child writer([&] {
        const std::int64_t slot = ring.try_claim(this_process());
        while (see(*go) == 0)
            sched_yield();
        publish(memory->slot[slot].head.state, slot_word(SlotState::ready, 1)); // without the signal: it dies first
    });
    syscalls::before_poll = [&, first = true]() mutable {
        if (!std::exchange(first, false))
            return; // dies_within polls too
        publish(*go, 1);
        CHECK(writer.dies_within(30 * second));
    };
    await([&] { return memory->in(SlotState::writing) == 1; });
    const int pidfd = writer.pidfd();
    CHECK(take(ring, forever_ns, {&pidfd, 1}).end == WaitEnd::reached);
    CHECK_EQ(syscalls::waits.load(), 0);
}

namespace {

// Lets a thread wait for a signal or in a queue, calls `act` once it sleeps, and checks that `act` woke it.
template <class Slept, class Wait, class Act> void check_woken(const Slept &slept, Wait wait, Act act) {
    std::thread waiter([&] {
        CHECK(wait().end == WaitEnd::reached);
        CHECK(syscalls::last_wait != ETIMEDOUT);
    });
    await([&] { return waiter_may_sleep(slept); });
    act();
    waiter.join();
}

} // namespace

TEST("a commit wakes a reader") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    check_woken(memory.control.readers, [&] { return take(ring); }, [&] { memory.write(ring, 1, 0, 1); });
}

TEST("a release wakes a blocked writer") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    memory.write(ring, this_process(), 0, 1);
    const std::int64_t slot = ring.try_take(this_process());
    check_woken(memory.control.writers, [&] { return claim(ring); }, [&] { ring.release(slot); });
}

TEST("a writer that abandons its slot wakes a blocked writer") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    check_woken(memory.control.writers, [&] { return claim(ring); }, [&] { ring.abandon(slot); });
}

TEST("a commit to a dropping ring wakes a writer that found every slot held") {
    Memory memory{};
    Ring ring = memory.dropping(3);
    const std::array held{ring.try_claim(this_process()), ring.try_claim(this_process()), ring.try_claim(this_process())};
    check_woken(memory.control.freed, [&] { return claim(ring); }, [&] { ring.commit(held[1]); });
    CHECK_EQ(see(memory.control.lost.dropped), 1);
}

TEST("a slot committed between the attempt and the sleep ends the wait") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    syscalls::before_wait = [&] { memory.write(ring, 1, 0, 1); };
    CHECK(take(ring).end == WaitEnd::reached);
    CHECK_EQ(syscalls::last_wait, EAGAIN);
}

TEST("a slot whose writer was killed before its signal is found when the slice ends") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    const std::int64_t slot = ring.try_claim(1);
    syscalls::before_wait = [&] { publish(memory.slot[slot].head.state, slot_word(SlotState::ready, 1)); };
    const std::int64_t begin = now_ns();
    CHECK(take(ring).end == WaitEnd::reached);
    CHECK(now_ns() - begin < second);
}

TEST("a blocked writer gets the slot of a process that dies, within a second") {
    for (const bool reads : {false, true}) {
        Shared<Memory> memory;
        Ring ring = memory->ring(1, reads ? Overflow::drop_oldest : Overflow::block, 1);
        if (reads)
            memory->write(ring, this_process(), 0, 1);
        Shared<Word> held;
        Child holder([&] {
            CHECK_EQ(reads ? ring.try_take(this_process()) : ring.try_claim(this_process()), 0);
            publish(*held, 1);
            for (;;)
                pause();
        });
        await([&] { return see(*held) == 1; });
        std::int64_t killed_ns = 0;
        syscalls::before_wait = [&] {
            if (killed_ns == 0)
                holder.kill(SIGKILL);
            killed_ns = now_ns();
        };
        CHECK(claim(ring).end == WaitEnd::reached);
        CHECK(killed_ns != 0 && now_ns() - killed_ns < second);
    }
}

TEST("a reader gets the slot of a reader that dies, within a second") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(2);
    memory->write(ring, this_process(), 3, 1);
    Shared<Word> held;
    Child holder([&] {
        ring.try_take(this_process());
        publish(*held, 1);
        for (;;)
            pause();
    });
    await([&] { return see(*held) == 1; });
    syscalls::before_wait = [&] { holder.kill(SIGKILL); };
    const std::int64_t begin = now_ns();
    const WaitResult taken = take(ring);
    CHECK(taken.end == WaitEnd::reached);
    CHECK(now_ns() - begin < second);
    CHECK(memory->payload(taken.value).intact());
    CHECK_EQ(memory->payload(taken.value).writer, 3);
}

TEST("a wait for a slot ends within a second of the death of a watched process and identifies it") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    for (const bool reads : {true, false}) {
        Child first([] { pause(); }), second_child([] { pause(); });
        const std::array pidfds{first.pidfd(), second_child.pidfd()};
        syscalls::before_wait = [&] { second_child.kill(SIGKILL); };
        if (!reads)
            ring.try_claim(this_process());
        const std::int64_t begin = now_ns();
        const WaitResult result = reads ? take(ring, forever_ns, pidfds) : claim(ring, forever_ns, pidfds);
        CHECK(result.end == WaitEnd::peer_died);
        CHECK_EQ(result.peer, 1);
        CHECK(now_ns() - begin < second);
    }
}

// Race: a process commits a slot and dies at once; another waits for a slot and watches the process.
//   the slot   acceptable
//   peer_died  FORBIDDEN    the last commit of a dead process was lost
TEST("a commit right before its process's death is never reported as the death") {
    int forbidden = 0;
    for (int i = 0; i < check::times(200); ++i) {
        Shared<Memory> memory;
        Ring ring = memory->blocking(2);
        Child writer([&] {
            const std::int64_t slot = ring.try_claim(this_process());
            if (i % 50 == 0)
                publish(memory->slot[slot].head.state, slot_word(SlotState::ready, 1)); // killed before its signal
            else
                ring.commit(slot);
            raise(SIGKILL);
        });
        const int pidfd = writer.pidfd();
        forbidden += take(ring, forever_ns, {&pidfd, 1}).end != WaitEnd::reached;
    }
    CHECK_EQ(forbidden, 0);
}

// ---------------------------------------------------------------------------------------------------------- fairness

namespace {

// A writer or reader that waits in its queue without sleeping: it looks when the test says so.
class Looker {
  public:
    Looker(Ring &ring, Ring::Side side) : ring_(ring), side_(side), waiter_(ring, side) {}
    // Looks once. Returns the slot, or -1.
    std::int64_t look() {
        Spin never(0);
        return side_ == Ring::Side::writers ? ring_.wait_claim(this_process(), 0, {}, never, waiter_).value
                                            : ring_.wait_take(this_process(), 0, {}, never, waiter_).value;
    }

  private:
    Ring &ring_;
    Ring::Side side_;
    Ring::Waiter waiter_;
};

// From now on newcomers may not overtake, until a waiter is served.
void exhaust_overtakes(WaitQueue &queue) {
    while (queue.may_overtake())
        queue.count_overtake();
}

// Children that wait in the queue of the writers, in the order of their numbers, from 1. Each writes one slot.
struct WaitingWriters {
    WaitingWriters(Memory &memory, Ring &ring, int count) {
        for (int number = 1; number <= count; ++number) {
            children.emplace_back([&, number] {
                const WaitResult claimed = claim(ring);
                memory.payload(claimed.value).fill(number, number);
                ring.commit(claimed.value);
            });
            await([&] { return sleepers(memory.control.writers) == number && state_letter(children.back().pid()) == 'S'; });
        }
    }
    void stop() {
        for (Child &child : children) {
            child.kill(SIGSTOP);
            await([&] { return state_letter(child.pid()) == 'T'; });
        }
    }
    std::list<Child> children;
};

} // namespace

TEST("writers that wait get the slots that become free in the order of their arrival") {
    // A writer that gets no core for a slice may lose its place. That shows in the number of tickets: then once more.
    for (bool undisturbed = false; !undisturbed;) {
        Shared<Memory> memory;
        Ring ring = memory->blocking(2);
        const std::int64_t me = this_process();
        memory->write(ring, me, 0, 100);
        memory->write(ring, me, 0, 101);
        WaitingWriters waiting(*memory, ring, 6);
        Numbers order;
        for (int i = 0; i < 8; ++i) {
            await([&] { return ring.unread() == (i < 7 ? 2 : 1); }); // the next writer has got its slot
            order.push_back(memory->read(ring, me));
        }
        for (Child &child : waiting.children)
            CHECK_EQ(child.join(), 0);
        CHECK(memory->control.writers.empty());
        undisturbed = memory->control.writers.last_ticket() == 6;
        if (undisturbed)
            CHECK(order == Numbers({100, 101, 1, 2, 3, 4, 5, 6}));
    }
}

// Not exactly one: it may be awake, because its slice has ended.
TEST("a slot that becomes free wakes one writer at most, however many wait") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    memory->write(ring, this_process(), 0, 100);
    WaitingWriters waiting(*memory, ring, 5);
    for (int i = 0; i < 5; ++i) {
        const int wakes = syscalls::wakes;
        memory->read(ring, this_process());
        CHECK(syscalls::wakes - wakes <= 1);
        await([&] { return ring.unread() == 1; });
    }
}

TEST("a committed slot wakes one reader at most, however many wait") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(8);
    std::list<Child> readers;
    for (int i = 1; i <= 5; ++i) {
        readers.emplace_back([&] { ring.release(take(ring).value); });
        await([&] { return sleepers(memory->control.readers) == i && state_letter(readers.back().pid()) == 'S'; });
    }
    for (int i = 1; i <= 5; ++i) {
        const int wakes = syscalls::wakes;
        memory->write(ring, this_process(), 0, i);
        CHECK(syscalls::wakes - wakes <= 1);
        await([&] { return see(memory->control.taken.read) == i; });
    }
}

TEST("a free slot is for the first of the writers that wait, whichever looks first") {
    Memory memory{};
    Ring ring = memory.blocking(3);
    const std::int64_t me = this_process();
    const std::array held{ring.try_claim(me), ring.try_claim(me), ring.try_claim(me)};
    std::list<Looker> lookers;
    for (int i = 0; i < 5; ++i)
        CHECK_EQ(lookers.emplace_back(ring, Ring::Side::writers).look(), -1);
    exhaust_overtakes(memory.control.writers);
    std::array<bool, 5> served{};
    const auto look_from_the_last = [&] {
        std::size_t index = served.size();
        for (auto looker = lookers.rbegin(); looker != lookers.rend(); ++looker)
            if (!served[--index])
                served[index] = looker->look() >= 0;
    };
    ring.abandon(held[0]);
    look_from_the_last();
    CHECK((served == std::array{true, false, false, false, false}));
    ring.abandon(held[1]);
    ring.abandon(held[2]);
    look_from_the_last();
    CHECK((served == std::array{true, true, true, false, false}));
}

TEST("an unread slot is for the reader that looks first, whoever waits: a dead one keeps no other from it") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(2);
    Child waiting([&] { take(ring); });
    await([&] { return sleepers(memory->control.readers) == 1 && state_letter(waiting.pid()) == 'S'; });
    waiting.kill(SIGKILL);
    waiting.join();
    for (std::int64_t number = 1; number <= 100; ++number) {
        memory->write(ring, this_process(), 0, number);
        CHECK_EQ(memory->read(ring, this_process()), number);
    }
}

TEST("a newcomer overtakes those who wait a few times, then not until one of them was served") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t me = this_process();
    memory.write(ring, me, 0, 1);
    Looker first(ring, Ring::Side::writers), second(ring, Ring::Side::writers);
    CHECK_EQ(first.look(), -1);
    CHECK_EQ(second.look(), -1);
    memory.read(ring, me);
    for (Looker *waiting : {&first, &second}) {
        for (std::uint64_t i = 0; i < WaitQueue::max_overtakes; ++i) {
            memory.write(ring, me, 0, 2);
            memory.read(ring, me);
        }
        CHECK_EQ(ring.try_claim(me), -1); // a slot is free, but not for this one
        CHECK_EQ(Looker(ring, Ring::Side::writers).look(), -1);
        const std::int64_t slot = waiting->look();
        CHECK_EQ(slot, 0);
        ring.abandon(slot);
    }
    CHECK(memory.control.writers.empty());
    CHECK_EQ(ring.try_claim(me), 0);
}

TEST("a newcomer takes what is left if more slots are free than writers wait") {
    Memory memory{};
    Ring ring = memory.blocking(3);
    const std::int64_t me = this_process();
    const std::array held{ring.try_claim(me), ring.try_claim(me), ring.try_claim(me)};
    Looker first(ring, Ring::Side::writers), newcomer(ring, Ring::Side::writers);
    CHECK_EQ(first.look(), -1);
    exhaust_overtakes(memory.control.writers);
    ring.abandon(held[0]);
    CHECK_EQ(newcomer.look(), -1);
    ring.abandon(held[1]);
    CHECK(newcomer.look() >= 0);
    CHECK(first.look() >= 0);
}

TEST("what a writer was called for goes to the next one if it gives up") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    std::optional<Looker> first(std::in_place, ring, Ring::Side::writers);
    CHECK_EQ(first->look(), -1);
    check_woken(
        memory.control.writers, [&] { return claim(ring); },
        [&] {
            await([&] { return sleepers(memory.control.writers) == 2; }); // the first would sleep if it had time left
            ring.abandon(slot); // calls the first, which does not look
            first.reset();
        });
}

TEST("a slot released between the writer's attempt and its sleep ends the wait") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    syscalls::before_wait = [&] { ring.abandon(slot); };
    CHECK(claim(ring).end == WaitEnd::reached);
    CHECK_EQ(syscalls::last_wait, EAGAIN);
}

TEST("a stopped writer that is the first in the queue delays the others by a slice, and is served when it continues") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    const std::int64_t me = this_process(), slot = ring.try_claim(me);
    WaitingWriters waiting(*memory, ring, 1);
    waiting.stop();
    exhaust_overtakes(memory->control.writers);
    const std::int64_t begin = now_ns();
    ring.abandon(slot);
    const WaitResult claimed = claim(ring);
    CHECK(claimed.end == WaitEnd::reached);
    CHECK(now_ns() - begin < second);
    waiting.children.front().kill(SIGCONT);
    ring.abandon(claimed.value);
    CHECK_EQ(waiting.children.front().join(), 0);
    CHECK_EQ(memory->read(ring, me), 1);
    CHECK(memory->control.writers.empty());
}

// One after the other, forty would take four seconds.
TEST("many stopped or dead writers in the queue delay the others by two slices, not by one each") {
    for (const int signal : {SIGSTOP, SIGKILL}) {
        Shared<Memory> memory;
        Ring ring = memory->blocking(1);
        const std::int64_t slot = ring.try_claim(this_process());
        WaitingWriters waiting(*memory, ring, 40);
        if (signal == SIGSTOP)
            waiting.stop();
        else
            waiting.children.clear(); // kills them
        exhaust_overtakes(memory->control.writers);
        const std::int64_t begin = now_ns();
        ring.abandon(slot);
        CHECK(claim(ring).end == WaitEnd::reached);
        CHECK(now_ns() - begin < 2 * second);
        CHECK(memory->control.writers.empty());
    }
}

TEST("a writer that only tries is not kept out for ever by dead or stopped writers in the queue") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    WaitingWriters waiting(*memory, ring, 2);
    waiting.stop();
    exhaust_overtakes(memory->control.writers);
    ring.abandon(slot);
    const std::int64_t begin = now_ns();
    await([&] { return Looker(ring, Ring::Side::writers).look() >= 0; });
    CHECK(now_ns() - begin < 2 * second);
}

TEST("more writers than the queue has places wait too, and each gets a slot") {
    constexpr int count = WaitQueue::places + 3;
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    std::list<Child> writers;
    for (int i = 0; i < count; ++i)
        writers.emplace_back([&] {
            const WaitResult claimed = claim(ring);
            memory->payload(claimed.value).fill(1, 1);
            ring.commit(claimed.value);
        });
    await([&] { return sleepers(memory->control.writers) == WaitQueue::places && waiter_may_sleep(memory->control.freed); });
    ring.abandon(slot);
    for (int i = 0; i < count; ++i)
        ring.release(take(ring).value);
    for (Child &child : writers)
        CHECK_EQ(child.join(), 0);
    CHECK(memory->control.writers.empty());
}

TEST("whatever the words of the queues say, calls end and return a slot of the ring or none") {
    for (const std::int64_t stray : {std::int64_t{0}, std::int64_t{1}, std::int64_t{-1}, INT64_MAX, INT64_MIN, now_ns()}) {
        const std::size_t words_of_a_queue = sizeof(WaitQueue) / sizeof(Word);
        for (std::size_t index = 0; index < words_of_a_queue; index += index < 300 ? 1 : 64) {
            Memory memory{};
            Ring ring = memory.blocking(2);
            for (std::int64_t number = 1; number <= 2; ++number)
                memory.write(ring, this_process(), 0, number);
            Looker waiting(ring, Ring::Side::writers);
            CHECK_EQ(waiting.look(), -1);
            reinterpret_cast<Word *>(&memory.control.writers)[index] = stray;
            reinterpret_cast<Word *>(&memory.control.readers)[index] = stray;
            const std::int64_t taken = ring.try_take(this_process());
            CHECK(taken >= -1 && taken < 2);
            if (taken >= 0)
                ring.release(taken);
            const std::int64_t claimed = waiting.look();
            CHECK(claimed >= -1 && claimed < 2);
            if (claimed >= 0)
                ring.commit(claimed);
        }
    }
}

TEST("a stray word in a queue delays writers and readers by two slices at most") {
    for (const std::int64_t stray : {std::int64_t{-1}, std::int64_t{1}, INT64_MIN}) {
        Memory memory{};
        Ring ring = memory.blocking(1);
        for (WaitQueue *queue : {&memory.control.writers, &memory.control.readers})
            for (const std::size_t index : {0, 1, 2, 3, 8, 9}) // waiting, called, last, overtaken
                reinterpret_cast<Word *>(queue)[index] = stray;
        const std::int64_t begin = now_ns();
        const WaitResult claimed = claim(ring);
        CHECK(claimed.end == WaitEnd::reached);
        ring.commit(claimed.value);
        CHECK(take(ring).end == WaitEnd::reached);
        CHECK(now_ns() - begin < 4 * second);
    }
}

// ------------------------------------------------------------------------------------------- at every instruction

#if defined(MEMLANE_STEPPED)

namespace {

constexpr std::int64_t no_process = 1; // an identity that no process has

// The invariants after a process was killed: after one reap every slot is free or unread, the unread ones are untorn,
// in order and unique, and each of `before` is present or its loss is counted.
Numbers check_aftermath(Memory &memory, Ring &ring, const Numbers &before) {
    const std::int64_t me = this_process();
    ring.reap();
    CHECK_EQ(memory.in(SlotState::writing) + memory.in(SlotState::reading), 0);
    CHECK(std::abs(memory.excess()) <= 1);
    const Numbers left = memory.drain(ring, me);
    CHECK(std::ranges::is_sorted(left) && std::ranges::adjacent_find(left) == left.end());
    CHECK(std::ranges::find(left, -1) == left.end()); // torn
    const auto missing =
        std::ranges::count_if(before, [&](std::int64_t number) { return std::ranges::find(left, number) == left.end(); });
    CHECK(missing <= see(memory.control.lost.dropped) + see(memory.control.lost.abandoned));
    std::vector<std::int64_t> claimed;
    for (std::int64_t slot; (slot = ring.try_claim(me)) >= 0;)
        claimed.push_back(slot);
    CHECK_EQ(claimed.size(), memory.count);
    return left;
}

} // namespace

TEST("a writer killed at any instruction of claim and commit costs no slot, and nothing is lost or torn") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(3);
    const std::int64_t me = this_process();
    int written = 0;
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->write(ring, me, 0, 1);
            memory->write(ring, me, 0, 2);
        },
        [&](std::int64_t process) { memory->write(ring, process, 0, 3); },
        [&](SteppedChild &writer, int) {
            writer.kill();
            const Numbers left = check_aftermath(*memory, ring, {1, 2});
            CHECK(left == Numbers({1, 2}) || left == Numbers({1, 2, 3}));
            written += left.size() == 3;
        });
    CHECK(written > 0);
}

TEST("a writer killed at any instruction of a commit that drops the oldest costs no slot, and no loss goes uncounted") {
    Shared<Memory> memory;
    Ring ring = memory->dropping(4);
    const std::int64_t me = this_process();
    int dropped = 0;
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->write(ring, me, 0, 1);
            memory->write(ring, me, 0, 2);
        },
        [&](std::int64_t process) { memory->write(ring, process, 0, 3); },
        [&](SteppedChild &writer, int) {
            writer.kill();
            const Numbers left = check_aftermath(*memory, ring, {1, 2});
            CHECK(left == Numbers({1, 2}) || left == Numbers({1, 2, 3}) || left == Numbers({2, 3}));
            dropped += left == Numbers({2, 3});
        });
    CHECK(dropped > 0);
}

TEST(
    "a writer killed at any instruction of a claim that takes the oldest unread costs no slot, and no loss goes uncounted") {
    Shared<Memory> memory;
    Ring ring = memory->ring(3, Overflow::drop_oldest, 3);
    const std::int64_t me = this_process();
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            for (std::int64_t number = 1; number <= 3; ++number)
                memory->write(ring, me, 0, number);
        },
        [&](std::int64_t process) { ring.try_claim(process); },
        [&](SteppedChild &writer, int) {
            writer.kill();
            const Numbers left = check_aftermath(*memory, ring, {1, 2, 3});
            CHECK(left == Numbers({1, 2, 3}) || left == Numbers({2, 3}));
        });
}

TEST("a writer killed at any instruction of abandon costs no slot") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(2);
    after_every_change(
        *memory, [&] { memory->wipe(); }, [&](std::int64_t process) { ring.abandon(ring.try_claim(process)); },
        [&](SteppedChild &writer, int) {
            writer.kill();
            CHECK(check_aftermath(*memory, ring, {}).empty());
        });
}

TEST("a reader killed at any instruction of take and release costs no slot, and what it did not finish is read by another") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(3);
    const std::int64_t me = this_process();
    int returned = 0;
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            for (std::int64_t number = 1; number <= 3; ++number)
                memory->write(ring, me, 0, number);
        },
        [&](std::int64_t process) { ring.release(ring.try_take(process)); },
        [&](SteppedChild &reader, int) {
            reader.kill();
            const bool finished = memory->in(SlotState::free) == 1;
            const Numbers left = check_aftermath(*memory, ring, {});
            CHECK(left == (finished ? Numbers({2, 3}) : Numbers({1, 2, 3})));
            returned += static_cast<int>(see(memory->control.taken.returned));
        });
    CHECK(returned > 0);
}

TEST("a process killed at any instruction of reap costs no slot: the next reap finishes") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(3);
    const std::int64_t me = this_process();
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->write(ring, me, 0, 1);
            ring.try_take(no_process);
            ring.try_claim(no_process);
        },
        [&](std::int64_t) { ring.reap(); },
        [&](SteppedChild &reaper, int) {
            reaper.kill();
            CHECK(check_aftermath(*memory, ring, {1}) == Numbers({1}));
            const std::int64_t counted = see(memory->control.lost.abandoned) + see(memory->control.taken.returned);
            CHECK(counted == 1 || counted == 2);
        });
}

// A reader is stopped at an instruction of its search while a writer commits three slots, at positions in any order.
//   no slot, or the first  acceptable
//   a later one            FORBIDDEN    its writer's order is broken
TEST("a reader stopped at any instruction never takes a later slot of a writer before an earlier one") {
    Shared<Memory> memory;
    Shared<Word> taken;
    Ring ring = memory->blocking(4);
    const std::int64_t me = this_process();
    for (const std::array<int, 3> &order : {std::array{0, 1, 2}, std::array{1, 0, 2}})
        at_every_instruction(
            [&] {
                memory->wipe();
                *taken = 0;
                for (int slot = 0; slot < 3; ++slot)
                    CHECK_EQ(ring.try_claim(me), slot);
            },
            [&](std::int64_t process) {
                const std::int64_t slot = ring.try_take(process);
                publish(*taken, slot < 0 ? 0 : ring.head(slot).sequence.load(std::memory_order_relaxed));
            },
            [&](SteppedChild &reader) {
                for (const int slot : order)
                    ring.commit(slot);
                CHECK_EQ(reader.finish(), 0);
                CHECK(see(*taken) == 0 || see(*taken) == 1);
            });
}

// A writer is stopped at an instruction while another one writes and a reader reads; then it continues. It holds one
// slot at most.
//   all counts are exact, the number of unread slots is the limit  acceptable
//   a slot lost, a count wrong, more dropped than needed           FORBIDDEN
TEST("a writer stopped at any instruction neither blocks the others nor makes a count wrong") {
    Shared<Memory> memory;
    Ring ring = memory->dropping(5);
    const std::int64_t me = this_process();
    at_every_instruction(
        [&] {
            memory->wipe();
            for (std::int64_t number = 1; number <= 3; ++number)
                memory->write(ring, me, 0, number);
        },
        [&](std::int64_t process) {
            const std::int64_t slot = ring.try_claim(process);
            memory->payload(slot).number = -1;
            ring.commit(slot);
        },
        [&](SteppedChild &writer) {
            for (std::int64_t number = 4; number <= 6; ++number)
                memory->write(ring, me, 0, number);
            CHECK(memory->read(ring, me) != 0);
            memory->write(ring, me, 0, 7);
            CHECK_EQ(writer.finish(), 0);
            CHECK_EQ(see(memory->control.written.value), 8);
            CHECK_EQ(memory->excess(), 0);
            CHECK_EQ(see(memory->control.lost.dropped), 4);
            CHECK_EQ(memory->in(SlotState::ready), 3);
            CHECK_EQ(memory->in(SlotState::free), 2);
            Numbers left = memory->drain(ring, me);
            std::erase(left, -1); // the stopped writer's
            CHECK(std::ranges::is_sorted(left));
        });
}

TEST("a process stopped at any instruction of reap does not reclaim again what another process reclaimed") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(3);
    const std::int64_t me = this_process();
    at_every_instruction(
        [&] {
            memory->wipe();
            memory->write(ring, me, 0, 1);
            ring.try_take(no_process);
            ring.try_claim(no_process);
        },
        [&](std::int64_t) { ring.reap(); },
        [&](SteppedChild &reaper) {
            ring.reap();
            const std::int64_t slot = ring.try_take(me);
            CHECK_EQ(memory->payload(slot).number, 1);
            CHECK_EQ(reaper.finish(), 0);
            CHECK_EQ(memory->in(SlotState::reading), 1);
            CHECK_EQ(memory->in(SlotState::free), 2);
            CHECK_EQ(see(memory->control.lost.abandoned), 1);
            CHECK_EQ(see(memory->control.taken.returned), 1);
        });
}

namespace {

// Waits until no place of the queue is taken, as a writer that looks again and again. Returns whether that took less than
// two seconds.
bool queue_empties(Memory &memory, Ring &ring) {
    for (const std::int64_t begin = now_ns(); now_ns() - begin < 2 * second; usleep(1000)) {
        exhaust_overtakes(memory.control.writers);
        Looker looker(ring, Ring::Side::writers);
        if (const std::int64_t slot = looker.look(); slot >= 0)
            ring.abandon(slot);
        if (memory.control.writers.empty())
            return true;
    }
    return false;
}

} // namespace

// The child waits in the queue before this process does, and dies.
TEST("a writer killed at any instruction of a wait delays the next one by a slice, and costs no slot and no place") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    const std::int64_t me = this_process();
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->write(ring, me, 0, 1);
        },
        [&](std::int64_t process) {
            Spin never(0);
            ring.wait_claim(process, 0, {}, never);
        },
        [&](SteppedChild &waiting, int) {
            waiting.kill();
            exhaust_overtakes(memory->control.writers);
            const std::int64_t begin = now_ns();
            CHECK_EQ(memory->read(ring, me), 1);
            const WaitResult claimed = claim(ring);
            CHECK(claimed.end == WaitEnd::reached);
            CHECK(now_ns() - begin < second);
            CHECK_EQ(claimed.value, 0);
            ring.abandon(claimed.value);
            CHECK(queue_empties(*memory, ring));
            CHECK_EQ(ring.try_claim(me), 0);
        });
}

// The child waits in the queue, is called and gets the slot, and dies at any line of that.
TEST("a writer killed at any instruction after it was called costs no slot and no place") {
    Shared<Memory> memory;
    Ring ring = memory->blocking(1);
    int claimed_before_its_death = 0;
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->control.lost.next_reap_ns = now_ns() + slice_ns; // reading /proc takes thousands of instructions
        },
        [&](std::int64_t process) {
            WaitQueue &queue = memory->control.writers;
            WaitPlace place;
            queue.join(place); // as if it had waited
            queue.call(1);
            queue.look(place, memory->control.freed);
            if (queue.rank(place) == 0 && ring.try_claim(process) >= 0)
                queue.leave_served(place, memory->control.freed);
        },
        [&](SteppedChild &waiting, int) {
            waiting.kill();
            claimed_before_its_death += memory->in(SlotState::writing);
            exhaust_overtakes(memory->control.writers);
            const std::int64_t begin = now_ns();
            const WaitResult claimed = claim(ring);
            CHECK(claimed.end == WaitEnd::reached);
            CHECK(now_ns() - begin < second);
            ring.abandon(claimed.value);
            CHECK(queue_empties(*memory, ring));
        });
    CHECK(claimed_before_its_death > 0);
}

#endif

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: writers fill and commit, and sometimes abandon; readers take, check and release.
//   each commit is read once, or dropped and counted; each reader sees each writer's in order  acceptable
//   torn, twice, out of order, lost without a count                                            FORBIDDEN
template <int writers> struct Race {
    static constexpr int each = check::slowdown == 1 ? 50'000 : check::times(80'000);
    Memory memory;
    alignas(64) std::atomic<int> writing;
    std::atomic<int> torn, disordered, blocked;
    std::atomic<std::int64_t> given_up;
    std::array<std::array<std::atomic<std::uint8_t>, each + 1>, writers> seen;

    void write(Ring ring, int writer) {
        Rng rng(static_cast<std::uint64_t>(writer));
        const std::int64_t me = this_process();
        Spin spin(default_spin_limit_ns());
        for (std::int64_t number = 1; number <= each; ++number) {
            Ring::Waiter waiter(ring, Ring::Side::writers);
            WaitResult claimed{WaitEnd::paused, -1};
            while (claimed.end == WaitEnd::paused)
                claimed = ring.wait_claim(me, forever_ns, {}, spin, waiter);
            memory.payload(claimed.value).fill(writer, number);
            if (rng.between(0, 99) == 0) {
                ring.abandon(claimed.value);
                ++given_up;
                --number;
            } else {
                ring.commit(claimed.value);
            }
        }
        --writing;
    }
    void read(Ring ring) {
        const std::int64_t me = this_process();
        Spin spin(default_spin_limit_ns());
        std::array<std::int64_t, writers> last{};
        for (bool over = false; !over;) {
            over = writing == 0; // loaded before the attempt, which then finds all commits
            const WaitResult taken = ring.wait_take(me, now_ns() + 10 * ms, {}, spin);
            if (taken.end != WaitEnd::reached)
                continue;
            over = false;
            const Payload &payload = memory.payload(taken.value);
            if (payload.intact() && payload.number <= each) {
                std::int64_t &previous = last[static_cast<std::size_t>(payload.writer)];
                disordered += payload.number <= previous;
                previous = payload.number;
                ++seen[static_cast<std::size_t>(payload.writer)][static_cast<std::size_t>(payload.number)];
            } else {
                ++torn;
            }
            ring.release(taken.value);
        }
    }
    void check_results(Ring ring) {
        CHECK_EQ(torn.load(), 0);
        CHECK_EQ(disordered.load(), 0);
        std::int64_t once = 0, more = 0;
        for (const auto &numbers : seen)
            for (const auto &times : numbers) {
                once += times == 1;
                more += times > 1;
            }
        CHECK_EQ(more, 0);
        CHECK_EQ(see(memory.control.written.value), each * writers);
        CHECK_EQ(see(memory.control.taken.read), once);
        CHECK_EQ(see(memory.control.lost.dropped), each * writers - once);
        CHECK_EQ(see(memory.control.lost.abandoned), given_up.load());
        CHECK_EQ(see(memory.control.taken.returned), 0);
        CHECK_EQ(ring.unread(), 0);
        CHECK_EQ(memory.in(SlotState::free), memory.count);
        CHECK(once > 0);
    }
    void run_threads(Ring ring, int readers) {
        writing = writers;
        std::vector<std::thread> threads;
        for (int writer = 0; writer < writers; ++writer)
            threads.emplace_back([=, this] { write(ring, writer); });
        for (int reader = 0; reader < readers; ++reader)
            threads.emplace_back([=, this] { read(ring); });
        for (auto &thread : threads)
            thread.join();
        check_results(ring);
    }
    void run_processes(Ring ring, int readers) {
        writing = writers;
        std::list<Child> children;
        for (int writer = 0; writer < writers; ++writer)
            children.emplace_back([=, this] { write(ring, writer); });
        for (int reader = 0; reader < readers; ++reader)
            children.emplace_back([=, this] { read(ring); });
        for (auto &child : children)
            CHECK_EQ(child.join(), 0);
        check_results(ring);
    }
};

} // namespace

TEST("in a blocking ring every commit of threads is read once, untorn and in its writer's order") {
    Shared<Race<3>> race;
    race->run_threads(race->memory.blocking(4), 2);
    CHECK_EQ(see(race->memory.control.lost.dropped), 0);
}

TEST("in a blocking ring every commit of processes is read once, untorn and in its writer's order") {
    Shared<Race<3>> race;
    race->run_processes(race->memory.blocking(4), 2);
    CHECK_EQ(see(race->memory.control.lost.dropped), 0);
}

TEST("in a blocking ring of one slot every commit is read once") {
    Shared<Race<2>> race;
    race->run_processes(race->memory.blocking(1), 2);
    CHECK_EQ(see(race->memory.control.lost.dropped), 0);
}

TEST("in a dropping ring every commit of threads is read once or counted as dropped") {
    Shared<Race<2>> race;
    race->run_threads(race->memory.dropping(8), 2);
}

TEST("in a dropping ring every commit of processes is read once or counted as dropped") {
    Shared<Race<3>> race;
    race->run_processes(race->memory.dropping(8), 2);
}

TEST("in a dropping ring with more writers than slots the counts are exact") {
    Shared<Race<4>> race;
    race->run_processes(race->memory.ring(2, Overflow::drop_oldest, 1), 1);
}

// Race: two writers commit at once to a ring that has room for one unread slot.
//   one is dropped      acceptable
//   none is dropped     FORBIDDEN    neither saw the other's, and more than the limit is unread
//   both are dropped    FORBIDDEN    each dropped the other's
TEST("of two commits at once that exceed the limit by one, exactly one is dropped") {
    struct Scene {
        Memory memory;
        alignas(64) SpinBarrier<2> begin;
        alignas(64) SpinBarrier<2> end;
    };
    constexpr int rounds = check::times(160'000);
    Shared<Scene> scene;
    Ring ring = scene->memory.dropping(3);
    const std::int64_t me = this_process();
    const auto commit_one = [&](Rng &rng) {
        const std::int64_t slot = ring.try_claim(me);
        scene->begin.arrive_and_wait();
        for (std::int64_t pause = rng.between(0, 30); pause > 0; --pause) // varies which comes first
            see(scene->memory.control.taken.waited);
        ring.commit(slot);
        scene->end.arrive_and_wait();
    };
    std::thread other([&] {
        Rng rng(1);
        for (int round = 0; round < rounds; ++round)
            commit_one(rng);
    });
    Rng rng(2);
    int forbidden = 0;
    for (int round = 0; round < rounds; ++round) {
        commit_one(rng);
        forbidden += scene->memory.in(SlotState::ready) != 1;
        scene->memory.drain(ring, me);
    }
    other.join();
    CHECK_EQ(forbidden, 0);
}

namespace {

// Writers and readers that are killed and replaced. Each incarnation of a writer has a number and records its commits.
struct RandomKills {
    static constexpr int incarnations = 260;
    static constexpr int each = 20'000;
    Memory memory;
    alignas(64) std::atomic<int> torn;
    std::array<Word, incarnations> committed; // the last number whose commit returned
    std::array<std::array<std::atomic<std::uint8_t>, each + 1>, incarnations> seen;

    void write(Ring ring, int incarnation) {
        const std::int64_t me = this_process();
        Spin spin(0);
        for (std::int64_t number = 1; number <= each; ++number) {
            Ring::Waiter waiter(ring, Ring::Side::writers);
            WaitResult claimed{WaitEnd::paused, -1};
            while (claimed.end == WaitEnd::paused)
                claimed = ring.wait_claim(me, forever_ns, {}, spin, waiter);
            memory.payload(claimed.value).fill(incarnation, number);
            ring.commit(claimed.value);
            committed[static_cast<std::size_t>(incarnation)] = number;
        }
        for (;;)
            pause();
    }
    void check(std::int64_t slot) {
        const Payload &payload = memory.payload(slot);
        if (payload.intact() && payload.number <= each && payload.writer < incarnations)
            ++seen[static_cast<std::size_t>(payload.writer)][static_cast<std::size_t>(payload.number)];
        else
            ++torn;
    }
    void read(Ring ring) {
        const std::int64_t me = this_process();
        for (Spin spin(0);;) {
            Ring::Waiter waiter(ring, Ring::Side::readers);
            WaitResult taken{WaitEnd::paused, -1};
            while (taken.end == WaitEnd::paused)
                taken = ring.wait_take(me, forever_ns, {}, spin, waiter);
            check(taken.value);
            ring.release(taken.value);
        }
    }

    void run(Ring ring, std::uint64_t seed) {
        constexpr int writers = 3, readers = 2, kills = check::times(250);
        Rng rng(seed);
        std::array<std::optional<Child>, writers + readers> cast;
        int incarnation = 0, killed_readers = 0;
        const auto enter = [&](int member) {
            auto &child = cast[static_cast<std::size_t>(member)];
            if (member < writers) {
                const int mine = incarnation++;
                child.emplace([=, this] { write(ring, mine); });
            } else {
                child.emplace([=, this] { read(ring); });
            }
        };
        for (int member = 0; member < writers + readers; ++member)
            enter(member);
        for (int kill = 0; kill < kills; ++kill) {
            busy_wait(rng.between(0, 1500) * 1000);
            const auto member = static_cast<int>(rng.between(0, writers + readers - 1));
            cast[static_cast<std::size_t>(member)].reset(); // kills the child and waits for it
            killed_readers += member >= writers;
            enter(member);
        }
        for (auto &child : cast)
            child.reset();
        killed_readers += readers;

        ring.reap();
        CHECK_EQ(memory.in(SlotState::writing) + memory.in(SlotState::reading), 0);
        CHECK(std::abs(memory.excess()) <= kills + writers + readers);
        const std::int64_t me = this_process();
        for (std::int64_t slot; (slot = ring.try_take(me)) >= 0; ring.release(slot))
            check(slot);
        CHECK_EQ(torn.load(), 0);
        std::int64_t lost = 0, again = 0, read = 0;
        for (int writer = 0; writer < incarnation; ++writer)
            for (std::int64_t number = 1; number <= each; ++number) {
                const int times = seen[static_cast<std::size_t>(writer)][static_cast<std::size_t>(number)];
                lost += times == 0 && number <= committed[static_cast<std::size_t>(writer)];
                again += times > 1;
                read += times > 0;
            }
        CHECK(read > 0);
        CHECK(again <= killed_readers); // killed between the check and the release
        CHECK(lost <= see(memory.control.lost.dropped) + see(memory.control.lost.abandoned));
        if (see(memory.control.lost.dropped) == 0)
            CHECK_EQ(lost, 0);
        std::int64_t slots = 0;
        while (claim(ring, now_ns() + 4 * slice_ns).end == WaitEnd::reached) // dead writers are in the queue
            ++slots;
        CHECK_EQ(slots, 6);
    }
};

} // namespace

TEST("writers and readers killed at random instants cost a blocking ring no slot and no commit") {
    Shared<RandomKills> massacre;
    massacre->run(massacre->memory.blocking(6), 21);
    CHECK_EQ(see(massacre->memory.control.lost.dropped), 0);
}

TEST("writers and readers killed at random instants cost a dropping ring no slot, and what is lost is counted") {
    Shared<RandomKills> massacre;
    massacre->run(massacre->memory.dropping(6), 22);
}

TEST("a stopped reader keeps its slot unchanged and blocks no other process in a dropping ring") {
    Shared<Memory> memory;
    Ring ring = memory->dropping(5);
    const std::int64_t me = this_process();
    memory->write(ring, me, 0, 1);
    Shared<Word> taken;
    Child reader([&] {
        const std::int64_t slot = ring.try_take(this_process());
        publish(*taken, 1 + slot);
        raise(SIGSTOP);
        CHECK(memory->payload(slot).intact());
        CHECK_EQ(memory->payload(slot).number, 1);
        ring.release(slot);
    });
    await([&] { return see(*taken) != 0; });
    int status = 0;
    waitpid(reader.pid(), &status, WUNTRACED);
    CHECK(WIFSTOPPED(status));
    for (std::int64_t number = 2; number <= 2000; ++number) {
        memory->write(ring, me, 0, number);
        if (number % 10 == 0)
            CHECK_EQ(ring.reap(), 0);
    }
    CHECK(memory->drain(ring, me) == Numbers({1998, 1999, 2000}));
    reader.kill(SIGCONT);
    CHECK_EQ(reader.join(), 0);
    CHECK_EQ(memory->in(SlotState::free), 5);
    CHECK_EQ(memory->excess(), 0);
}

TEST("readers and writers stopped at random instants cause no torn slot and no wrong count") {
    Shared<Race<2>> race;
    Ring ring = race->memory.dropping(6);
    race->writing = 2;
    std::list<Child> children;
    for (int writer = 0; writer < 2; ++writer)
        children.emplace_back([=, &race] { race->write(ring, writer); });
    for (int reader = 0; reader < 2; ++reader)
        children.emplace_back([=, &race] { race->read(ring); });
    Rng rng(31);
    for (int i = 0; i < check::times(200); ++i)
        for (Child &child : children) {
            child.kill(SIGSTOP);
            busy_wait(rng.between(0, 200) * 1000);
            child.kill(SIGCONT);
        }
    for (auto &child : children)
        CHECK_EQ(child.join(), 0);
    race->check_results(ring);
}
