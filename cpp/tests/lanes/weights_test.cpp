#include "lanes/weights.hpp"

#include <array>
#include <list>
#include <thread>
#include <vector>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/life.hpp"
#include "support/processes.hpp"
#include "support/single_steps.hpp"
#include "support/syscalls.hpp"

using namespace memlane;

namespace {

// Weights that can be checked for tears: the first word is a stamp, and every other word is a function of it and its
// position.
constexpr std::size_t words = 48;
using Block = std::array<std::int64_t, words>;
constexpr std::int64_t torn = -1;

std::int64_t expected_word(std::int64_t stamp, std::size_t position) {
    return stamp * 1'000'003 ^ static_cast<std::int64_t>(position) * 0x9E3779B97F4A7C15;
}

Block stamped(std::int64_t stamp) {
    Block block;
    block[0] = stamp;
    for (std::size_t i = 1; i < words; ++i)
        block[i] = expected_word(stamp, i);
    return block;
}

std::int64_t stamp_of(const Block &block) {
    for (std::size_t i = 1; i < words; ++i)
        if (block[i] != expected_word(block[0], i))
            return torn;
    return block[0];
}

// A block in three parts that are not in the order of their offsets, like the tensors of a state dict.
std::array<Part, 3> parts_of(Block &block) {
    const auto part = [&](std::size_t begin, std::size_t end) {
        return Part{begin * 8, reinterpret_cast<std::byte *>(&block[begin]), (end - begin) * 8};
    };
    return {part(20, words), part(0, 3), part(3, 20)};
}

struct Seen {
    std::int64_t version;
    std::int64_t stamp;
};

template <int buffers> struct Memory {
    WeightsControl control;
    alignas(64) Block buffer[buffers];

    Weights weights() {
        return {reinterpret_cast<std::byte *>(&control), reinterpret_cast<std::byte *>(&buffer), buffers, sizeof(Block),
                life()};
    }
    std::int64_t publish(std::int64_t stamp, std::int64_t process) {
        Block block = stamped(stamp);
        return weights().publish(process, parts_of(block));
    }
    std::int64_t publish(std::int64_t stamp) { return publish(stamp, this_process()); }
    Seen read() {
        Block block{};
        std::int64_t version;
        do
            version = weights().try_read(parts_of(block));
        while (version < 0);
        return {version, stamp_of(block)};
    }
    int latest_buffer() const { return buffer_of(see(control.latest.value)); }
    void wipe(std::int64_t rotate_until = 0) {
        control.latest.value = 0;
        control.retries = 0;
        control.rotate_until = rotate_until;
        for (Word &state : control.state)
            state = 0;
        for (Block &block : buffer)
            block.fill(0);
    }
};

std::int64_t dead_process() {
    Shared<Word> word;
    Child([&] { publish(*word, this_process()); }).join();
    return see(*word);
}

} // namespace

// ------------------------------------------------------------------------------------------------------ stray words

TEST("a latest version in a buffer that does not exist is a stray word for readers and writers, and nothing is copied") {
    for (const std::int64_t latest : {std::int64_t{1} << 8 | 3, std::int64_t{1} << 8 | 255, std::int64_t{2},
                                      std::int64_t{-1}, INT64_MIN, INT64_MAX, max_version << 8}) {
        Memory<3> memory{};
        memory.publish(5);
        memory.control.latest.value = latest;
        Block block;
        block.fill(7);
        CHECK_THROWS(StrayWord, memory.weights().try_read(parts_of(block)));
        CHECK_THROWS(StrayWord, memory.publish(6));
        CHECK_THROWS(StrayWord, memory.weights().latest());
        CHECK_EQ(block[0], 7);
        for (const Word &state : memory.control.state)
            CHECK(see(state) <= 0); // no buffer stays claimed
    }
}

TEST("buffers with any state of no live writer can be published to") {
    for (const std::int64_t state : {INT64_MIN, INT64_MIN + 1, INT64_MAX, std::int64_t{1} << 62}) {
        Memory<3> memory{};
        for (Word &word : memory.control.state)
            word = state;
        CHECK_EQ(memory.publish(5), 1);
        CHECK_EQ(memory.publish(6), 2);
        CHECK_EQ(memory.read().stamp, 6);
    }
}

TEST("a reader beside a process that changes `latest` for no reason learns so after each copy") {
    Memory<2> memory{};
    memory.publish(5);
    for (Word &state : memory.control.state)
        state = 0; // no mark: only `latest` can prove a copy
    std::atomic<bool> stop{false};
    std::thread scribbler([&] {
        for (std::int64_t version = 1; !stop; ++version)
            memory.control.latest.value = version << 8 | (version & 1);
    });
    Block block;
    std::int64_t overtaken = 0;
    const std::int64_t deadline_ns = now_ns() + 60'000'000'000;
    while (overtaken < 100 && now_ns() < deadline_ns)
        overtaken += memory.weights().try_read(parts_of(block)) == -1;
    stop = true;
    scribbler.join();
    CHECK_EQ(overtaken, 100);
    CHECK_EQ(memory.control.retries.load(), 100);
}

// ------------------------------------------------------------------------------------------------------ one process

TEST("before the first publication a read finds version 0 and copies nothing") {
    Memory<3> memory{};
    Block block;
    block.fill(7);
    CHECK_EQ(memory.weights().try_read(parts_of(block)), 0);
    CHECK_EQ(block[0], 7);
    CHECK_EQ(block[words - 1], 7);
}

TEST("a read returns the published content, untorn and with its version") {
    Memory<3> memory{};
    for (std::int64_t version = 1; version <= 50; ++version) {
        CHECK_EQ(memory.publish(1000 + version), version);
        const Seen seen = memory.read();
        CHECK_EQ(seen.version, version);
        CHECK_EQ(seen.stamp, 1000 + version);
    }
    CHECK_EQ(memory.control.retries.load(), 0);
}

TEST("some parts can be published and read without the others") {
    Memory<2> memory{};
    memory.publish(1);
    Block published = stamped(2), found{};
    const auto source = parts_of(published), target = parts_of(found);
    CHECK_EQ(memory.weights().publish(this_process(), std::span(source).first(1)), 2);
    CHECK_EQ(memory.weights().try_read(std::span(target).first(1)), 2);
    CHECK_EQ(found[20], published[20]);
    CHECK_EQ(found[words - 1], published[words - 1]);
    CHECK_EQ(found[19], 0);
}

TEST("the latest buffer is never the one that is written next") {
    Memory<2> memory{};
    int before = -1;
    for (int i = 0; i < 20; ++i) {
        memory.publish(i);
        CHECK(memory.latest_buffer() != before);
        before = memory.latest_buffer();
    }
}

TEST("with one writer two buffers are used in turn while no reader is overtaken") {
    Memory<4> memory{};
    for (int i = 0; i < 20; ++i) {
        memory.publish(i);
        CHECK_EQ(memory.latest_buffer(), i % 2);
    }
}

TEST("after a reader was overtaken a version is not overwritten by the next n - 1 publications") {
    Memory<4> memory{};
    memory.publish(0);
    memory.publish(1);
    memory.control.rotate_until = 20;
    std::vector<int> used;
    for (int i = 2; i < 20; ++i) {
        memory.publish(i);
        used.push_back(memory.latest_buffer());
        for (std::size_t back = 1; back < 4 && back < used.size(); ++back)
            CHECK(used[used.size() - 1 - back] != used.back());
    }
    for (int i = 20; i < 30; ++i) // from that version on the two that were used last
        memory.publish(i);
    const int before = memory.latest_buffer();
    memory.publish(30);
    memory.publish(31);
    CHECK_EQ(memory.latest_buffer(), before);
}

TEST("a publication fails if live writers fill every buffer but the latest, and readers are not affected") {
    Memory<3> memory{};
    memory.publish(5);
    for (int buffer = 0; buffer < 3; ++buffer)
        if (buffer != memory.latest_buffer())
            memory.control.state[buffer] = this_process();
    CHECK_EQ(memory.publish(6), -1);
    CHECK_EQ(memory.read().version, 1);
    CHECK_EQ(memory.read().stamp, 5);
}

TEST("buffers that dead writers were filling are used again") {
    Memory<3> memory{};
    memory.publish(5);
    for (int buffer = 0; buffer < 3; ++buffer)
        if (buffer != memory.latest_buffer())
            memory.control.state[buffer] = dead_process();
    CHECK_EQ(memory.publish(6), 2);
    CHECK_EQ(memory.publish(7), 3);
    CHECK_EQ(memory.read().stamp, 7);
}

TEST("a buffer that a process in another pid namespace fills is used again only after that process was killed") {
    Shared<Memory<2>> memory;
    memory->publish(5);
    const int other = 1 - memory->latest_buffer();
    LiveProcess writer(
        [&] {
            publish(memory->control.state[other], this_process());
            return this_process();
        },
        CLONE_NEWPID);
    if (writer.refused())
        return;
    CHECK_EQ(memory->publish(6), -1);
    writer.child().kill(SIGKILL);
    await([&] { return memory->publish(6) == 2; });
    CHECK_EQ(memory->read().stamp, 6);
}

TEST("a version whose writer died before the mark is read, and not overwritten while it is the latest") {
    Memory<3> memory{};
    memory.publish(5);
    const int buffer = memory.latest_buffer();
    memory.control.state[buffer] = dead_process();
    CHECK_EQ(memory.read().stamp, 5);
    for (int i = 0; i < 2; ++i) { // all other buffers are claimed: if this one could be claimed, it would be
        memory.control.state[(buffer + 1) % 3] = this_process();
        memory.control.state[(buffer + 2) % 3] = this_process();
        CHECK_EQ(memory.publish(6), -1);
    }
    memory.control.state[(buffer + 1) % 3] = 0;
    CHECK_EQ(memory.publish(6), 2);
    CHECK_EQ(memory.publish(7), 3);
    CHECK_EQ(memory.latest_buffer(), buffer); // no longer the latest, so it was used again
    CHECK_EQ(memory.read().stamp, 7);
}

TEST("a version that its live writer has not marked yet is read") {
    Memory<3> memory{};
    memory.publish(5);
    memory.control.state[memory.latest_buffer()] = this_process();
    CHECK_EQ(memory.read().version, 1);
    CHECK_EQ(memory.read().stamp, 5);
    CHECK_EQ(memory.publish(6), 2);
    CHECK_EQ(memory.publish(7), 3); // with one buffer fewer
    CHECK_EQ(memory.read().stamp, 7);
}

TEST("a publication wakes a waiter") {
    Memory<3> memory{};
    std::thread waiter([&] {
        Spin spin(0);
        while (signal_wait(memory.control.latest, std::int64_t{1} << 8, forever_ns, {}, spin).end != WaitEnd::reached) {
        }
        CHECK(syscalls::last_wait != ETIMEDOUT);
        CHECK_EQ(memory.read().stamp, 9);
    });
    await([&] { return (memory.control.latest.gate.load() & 1u) != 0; });
    memory.publish(9);
    waiter.join();
}

// ------------------------------------------------------------------------------------------- at every instruction

#if defined(MEMLANE_STEPPED)

// A writer is killed, and its successors at the same instruction, with no publication in between.
//   the next writer publishes, readers see untorn versions  acceptable
//   the next writer finds no buffer                         FORBIDDEN    dead writers keep their buffers
//   a torn read                                             FORBIDDEN
TEST("writers killed at any instruction, more of them than buffers, do not prevent publishing or reading") {
    Shared<Memory<3>> memory;
    Block block = stamped(200);
    const auto parts = parts_of(block);
    const auto body = [&](std::int64_t process) { memory->weights().publish(process, parts); };
    after_every_change(
        *memory,
        [&] {
            memory->wipe();
            memory->publish(100);
        },
        body,
        [&](SteppedChild &writer, int at) {
            writer.kill();
            for (int successor = 0; successor < 3; ++successor)
                SteppedChild(body, at).kill();
            const Seen left = memory->read();
            CHECK(left.stamp == 100 || left.stamp == 200);
            CHECK_EQ(left.version > 1, left.stamp == 200);
            for (std::int64_t more = 1; more <= 3; ++more) {
                CHECK_EQ(memory->publish(300 + more), left.version + more);
                CHECK_EQ(memory->read().version, left.version + more);
                CHECK_EQ(memory->read().stamp, 300 + more);
            }
        });
}

// A writer is stopped at an instruction while another one publishes; then it continues.
//   both publish, each version exists once    acceptable
//   no buffer, torn, a version twice          FORBIDDEN
TEST("a writer stopped at any instruction delays neither another writer nor readers") {
    Shared<Memory<3>> memory;
    Shared<Word> version;
    Block block = stamped(200);
    const auto parts = parts_of(block);
    const std::int64_t me = this_process();
    at_every_instruction(
        [&] {
            memory->wipe();
            memory->publish(100, me);
            *version = 0;
        },
        [&](std::int64_t process) { publish(*version, memory->weights().publish(process, parts)); },
        [&](SteppedChild &writer) {
            std::int64_t last = memory->read().version;
            for (int more = 1; more <= 5; ++more) {
                const std::int64_t mine = memory->publish(300 + more, me);
                CHECK(mine > last);
                last = mine;
                CHECK_EQ(memory->read().version, last);
                CHECK_EQ(memory->read().stamp, 300 + more);
            }
            int forbidden = 0;
            while (writer.step()) { // at each instruction, the published version must stay untorn
                const Seen seen = memory->read();
                forbidden += seen.version < last || (seen.stamp != 305 && seen.stamp != 200);
                last = seen.version;
            }
            CHECK_EQ(forbidden, 0);
            CHECK_EQ(writer.finish(), 0);
            CHECK(see(*version) > 1);
            const Seen end = memory->read();
            CHECK_EQ(end.version, 7);
            CHECK_EQ(end.stamp, see(*version) == 7 ? 200 : 305);
            CHECK_EQ(memory->publish(400, me), 8);
            CHECK_EQ(memory->publish(500, me), 9);
            CHECK_EQ(memory->read().stamp, 500);
        });
}

// A reader is stopped at an instruction while a writer publishes once or more; then it continues.
//   the version before, or one of the later ones, untorn  acceptable
//   anything else                                         FORBIDDEN
TEST("a reader stopped at any instruction reads one untorn version whatever is published meanwhile") {
    Shared<Memory<3>> memory;
    Shared<Word> version;
    Shared<Block> block;
    const std::int64_t me = this_process();
    const auto parts = parts_of(*block);
    std::int64_t overtaken = 0;
    // The last publication overwrites the reader's buffer: the second, or the third after a reader was overtaken.
    for (std::int64_t publications = 1; publications <= 3; ++publications)
        at_every_instruction(
            [&] {
                memory->wipe(publications == 3 ? 100 : 0);
                memory->publish(1, me);
                *version = 0;
            },
            [&](std::int64_t) {
                std::int64_t seen;
                do
                    seen = memory->weights().try_read(parts);
                while (seen < 0);
                publish(*version, seen);
            },
            [&](SteppedChild &reader) {
                for (std::int64_t more = 1; more <= publications; ++more)
                    memory->publish(1 + more, me);
                CHECK_EQ(reader.finish(), 0);
                CHECK(see(*version) >= 1 && see(*version) <= 1 + publications);
                CHECK_EQ(stamp_of(*block), see(*version));
                // A reader that was overtaken asks writers to use all buffers in turn.
                CHECK_EQ(memory->control.rotate_until.load() > 100, memory->control.retries.load() > 0);
                overtaken += memory->control.retries.load();
            });
    CHECK(overtaken > 0);
}

#endif

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: writers publish as fast as they can, readers read as fast as they can. All readers of a version see the same
// content.
//   an untorn version, not older than the reader's last one     acceptable
//   torn, older, another content than its writer published      FORBIDDEN
//   a failed publication while buffers > writers                FORBIDDEN
template <int writers, int buffers> struct Race {
    static constexpr int each = check::slowdown == 1 ? 200'000 : check::times(80'000);
    Memory<buffers> memory;
    alignas(64) std::atomic<int> at_work;
    std::atomic<int> torn_reads, older, others, refused;
    std::atomic<std::int64_t> reads;
    std::array<Word, each * writers + 1> stamps; // by version: the stamp that its writer published

    void write(int writer) {
        const std::int64_t me = this_process();
        for (std::int64_t i = 0; i < each; ++i) {
            const std::int64_t stamp = 1 + i * writers + writer;
            const std::int64_t version = memory.publish(stamp, me);
            if (version < 0)
                ++refused;
            else
                stamps[static_cast<std::size_t>(version)] = stamp;
        }
        --at_work;
    }
    void read() {
        std::vector<Seen> all;
        Seen last{0, 0};
        for (bool over = false; !over;) {
            over = at_work == 0;
            const Seen seen = memory.read();
            if (seen.version == 0)
                continue;
            torn_reads += seen.stamp == torn;
            older += seen.version < last.version;
            others += seen.version == last.version && seen.stamp != last.stamp;
            if (seen.version != last.version)
                all.push_back(seen);
            last = seen;
        }
        for (const Seen &seen : all)
            others += stamps[static_cast<std::size_t>(seen.version)] != seen.stamp;
        reads += static_cast<std::int64_t>(all.size());
    }
    void check_results() {
        CHECK_EQ(torn_reads.load(), 0);
        CHECK_EQ(older.load(), 0);
        CHECK_EQ(others.load(), 0);
        CHECK_EQ(refused.load(), 0);
        CHECK_EQ(memory.read().version, each * writers);
        CHECK(reads > 0);
    }
    void run_threads(int readers) {
        at_work = writers;
        std::vector<std::thread> threads;
        for (int writer = 0; writer < writers; ++writer)
            threads.emplace_back([this, writer] { write(writer); });
        for (int reader = 0; reader < readers; ++reader)
            threads.emplace_back([this] { read(); });
        for (auto &thread : threads)
            thread.join();
        check_results();
    }
    void run_processes(int readers) {
        at_work = writers;
        std::list<Child> children;
        for (int writer = 0; writer < writers; ++writer)
            children.emplace_back([this, writer] { write(writer); });
        for (int reader = 0; reader < readers; ++reader)
            children.emplace_back([this] { read(); });
        for (auto &child : children)
            CHECK_EQ(child.join(), 0);
        check_results();
    }
};

} // namespace

TEST("readers in threads see untorn versions of one writer, never an older one than before") {
    Shared<Race<1, 3>>()->run_threads(3);
}

TEST("readers in processes see untorn versions of one writer, never an older one than before") {
    Shared<Race<1, 3>>()->run_processes(3);
}

TEST("two buffers are enough for one writer") { Shared<Race<1, 2>>()->run_processes(2); }

TEST("two writers in threads publish each version once and never fail") { Shared<Race<2, 3>>()->run_threads(2); }

TEST("two writers in processes publish each version once and never fail") { Shared<Race<2, 3>>()->run_processes(2); }

namespace {

// A reader that runs until `over` and counts forbidden outcomes.
struct Watched {
    Memory<3> memory;
    alignas(64) std::atomic<bool> over;
    std::atomic<int> forbidden;
    std::atomic<std::int64_t> reads;

    void read() {
        std::int64_t last = 0;
        while (!over) {
            const Seen seen = memory.read();
            forbidden += seen.version < last || (seen.version > 0 && seen.stamp == torn);
            last = seen.version;
            ++reads;
        }
    }
};

} // namespace

TEST("writers killed at random instants leave untorn versions and a buffer for the next writer") {
    Shared<Watched> watched;
    Child reader([&] { watched->read(); });
    Rng rng(11);
    const std::int64_t me = this_process();
    std::int64_t last = 0;
    for (int i = 0; i < check::times(80); ++i) {
        std::list<Child> writers;
        for (int writer = 0; writer < 2; ++writer)
            writers.emplace_back([&] {
                const std::int64_t process = this_process();
                for (std::int64_t stamp = 1;; ++stamp)
                    watched->memory.publish(stamp, process);
            });
        busy_wait(rng.between(0, 1500) * 1000);
        for (auto &writer : writers)
            writer.kill(SIGKILL);
        for (auto &writer : writers)
            writer.join();
        const std::int64_t version = watched->memory.publish(1000, me);
        CHECK(version > last);
        CHECK_EQ(watched->memory.read().version, version);
        CHECK_EQ(watched->memory.read().stamp, 1000);
        last = version;
    }
    watched->over = true;
    CHECK_EQ(reader.join(), 0);
    CHECK_EQ(watched->forbidden.load(), 0);
    CHECK(watched->reads > 0);
}

TEST("a reader stopped at random instants never delays the writer and never returns a mixture of versions") {
    Shared<Watched> watched;
    watched->memory.publish(1);
    Child reader([&] { watched->read(); });
    Rng rng(12);
    const std::int64_t me = this_process();
    for (int i = 0; i < check::times(600); ++i) {
        busy_wait(rng.between(0, 400) * 1000);
        reader.kill(SIGSTOP);
        for (std::int64_t stamp = rng.between(1, 5); stamp > 0; --stamp)
            CHECK(watched->memory.publish(stamp, me) > 0);
        reader.kill(SIGCONT);
    }
    for (int i = 0; i < 10'000 && watched->reads == 0; ++i)
        busy_wait(1'000'000); // on a busy machine the reader may not have run until now
    watched->over = true;
    CHECK_EQ(reader.join(), 0);
    CHECK_EQ(watched->forbidden.load(), 0);
    CHECK(watched->reads > 0);
}

TEST("a writer stopped at random instants delays neither another writer nor readers") {
    Shared<Watched> watched;
    Child reader([&] { watched->read(); });
    Child writer([&] {
        const std::int64_t process = this_process();
        for (std::int64_t stamp = 1; !watched->over; ++stamp)
            CHECK(watched->memory.publish(stamp, process) > 0);
    });
    Rng rng(13);
    const std::int64_t me = this_process();
    for (int i = 0; i < check::times(600); ++i) {
        busy_wait(rng.between(0, 400) * 1000);
        writer.kill(SIGSTOP);
        for (std::int64_t stamp = rng.between(1, 5); stamp > 0; --stamp)
            CHECK(watched->memory.publish(stamp, me) > 0);
        writer.kill(SIGCONT);
    }
    watched->over = true;
    CHECK_EQ(writer.join(), 0);
    CHECK_EQ(reader.join(), 0);
    CHECK_EQ(watched->forbidden.load(), 0);
}
