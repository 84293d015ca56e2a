#include "lanes/ring.hpp"

#include <algorithm>
#include <array>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "os/process.hpp"
#include "support/check.hpp"
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
                overflow};
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
        for (Word *word : {&control.written.value, &control.freed.value, &control.sequence.last, &control.taken.read,
                           &control.taken.waited, &control.taken.returned, &control.lost.dropped, &control.lost.blocked,
                           &control.lost.abandoned})
            *word = 0;
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
    return to_the_end([&](auto... arguments) { return ring.wait_claim(arguments...); }, deadline_ns, pidfds);
}
WaitResult take(Ring &ring, std::int64_t deadline_ns = forever_ns, std::span<const int> pidfds = {}) {
    return to_the_end([&](auto... arguments) { return ring.wait_take(arguments...); }, deadline_ns, pidfds);
}

bool waiter_may_sleep(const SignalCell &cell) { return (cell.gate.load() & 1u) != 0; }

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

TEST("slots of a process whose pid was reused are reclaimed") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    CHECK_EQ(ring.try_claim(this_process() - (std::int64_t{1} << pid_bits)), 0);
    CHECK_EQ(ring.reap(), 1);
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
    // Between the waiter's attempt and its sleep a slot is committed and taken by another reader.
    syscalls::before_poll = [&] { signal_add(memory.control.written, 1); };
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

// Lets a thread wait, calls `act` once it sleeps, and checks that `act` woke it.
template <class Wait, class Act> void check_woken(const SignalCell &signal, Wait wait, Act act) {
    std::thread waiter([&] {
        CHECK(wait().end == WaitEnd::reached);
        CHECK(syscalls::last_wait != ETIMEDOUT);
    });
    await([&] { return waiter_may_sleep(signal); });
    act();
    waiter.join();
}

} // namespace

TEST("a commit wakes a reader") {
    Memory memory{};
    Ring ring = memory.blocking(2);
    check_woken(memory.control.written, [&] { return take(ring); }, [&] { memory.write(ring, 1, 0, 1); });
}

TEST("a release wakes a blocked writer") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    memory.write(ring, this_process(), 0, 1);
    const std::int64_t slot = ring.try_take(this_process());
    check_woken(memory.control.freed, [&] { return claim(ring); }, [&] { ring.release(slot); });
}

TEST("a writer that abandons its slot wakes a blocked writer") {
    Memory memory{};
    Ring ring = memory.blocking(1);
    const std::int64_t slot = ring.try_claim(this_process());
    check_woken(memory.control.freed, [&] { return claim(ring); }, [&] { ring.abandon(slot); });
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

// ------------------------------------------------------------------------------------------- at every instruction

#if defined(MEMLANE_STEPPED)

namespace {

// The identity of a dead process. No process has its pid, so process_alive takes few instructions.
constexpr std::int64_t no_process = std::int64_t{1} << pid_bits;

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
            WaitResult claimed{WaitEnd::paused, -1};
            while (claimed.end == WaitEnd::paused)
                claimed = ring.wait_claim(me, forever_ns, {}, spin);
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
            WaitResult claimed{WaitEnd::paused, -1};
            while (claimed.end == WaitEnd::paused)
                claimed = ring.wait_claim(me, forever_ns, {}, spin);
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
            const WaitResult taken = ring.wait_take(me, forever_ns, {}, spin);
            if (taken.end != WaitEnd::reached)
                continue;
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
        while (ring.try_claim(me) >= 0)
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
