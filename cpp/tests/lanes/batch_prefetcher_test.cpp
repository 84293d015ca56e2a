#include "lanes/batch_prefetcher.hpp"

#include <algorithm>
#include <array>
#include <list>
#include <optional>
#include <thread>
#include <vector>

#include "support/check.hpp"
#include "os/clock.hpp"
#include "support/processes.hpp"
#include "lanes/replay.hpp"
#include "support/replay_fixture.hpp"
#include "lanes/sampler.hpp"

using namespace memlane;
using enum memlane::Drawn; // ::Drawn is a drawn row

namespace {

// A sampler with dice of its own, whose batches are drawn ahead.
template <class T> struct Ahead {
    memlane::Rng dice;
    Sampler sampler;
    std::list<std::vector<T>> batches; // that were asked for
    BatchPrefetcher drawer;                     // last: its thread ends before what it uses goes

    Ahead(Replay &replay, SampleSpec wish, std::uint64_t seed)
        : dice(dice_of(seed)), sampler(replay, std::move(wish), dice), drawer(replay, sampler) {}

    void ask(std::int64_t count, double beta = 1, int threads = 1) {
        batches.emplace_back(static_cast<std::size_t>(count * sampler.wish().length));
        drawer.ask(count, bytes_of(batches.back()), beta, threads);
    }
    // How the oldest ended. `not_yet`: somebody stopped it.
    memlane::Drawn ended() {
        while (drawer.oldest() == not_yet && drawer.shared())
            BatchPrefetcher::wait(*drawer.shared(), now_ns() + second);
        return drawer.oldest();
    }
    std::vector<T> take() {
        drawer.take();
        std::vector<T> oldest = std::move(batches.front());
        batches.pop_front();
        return oldest;
    }
    void stop() {
        BatchPrefetcher::end(drawer.let_go().get());
        batches.clear(); // AddressSanitizer tells whoever still draws into them
    }
};

// The same batches, drawn by the sampler itself.
template <class T> void expect_as_drawn_here(Replay &replay, const SampleSpec &wish, std::uint64_t seed) {
    struct Asked {
        std::int64_t count;
        double beta;
        int threads;
    };
    constexpr std::array<Asked, 5> wanted{{{64, 1, 1}, {1, 0.5, 1}, {2000, 0.25, 2}, {33, 1, 4}, {2000, 0, 1}}};
    memlane::Rng dice = dice_of(seed);
    Sampler here(replay, wish, dice);
    Ahead<T> ahead(replay, wish, seed);
    const std::int64_t before = see(replay.control().sampled.value);
    for (const Asked &each : wanted)
        ahead.ask(each.count, each.beta, each.threads);
    CHECK_EQ(ahead.drawer.asked(), wanted.size());
    std::int64_t rows = 0;
    for (const Asked &each : wanted) {
        std::vector<T> expected(static_cast<std::size_t>(each.count * wish.length));
        CHECK(here.sample(each.count, bytes_of(expected), each.beta, 1));
        CHECK_EQ(ahead.ended(), whole);
        const std::vector<T> drawn = ahead.take();
        CHECK(std::memcmp(drawn.data(), expected.data(), drawn.size() * sizeof(T)) == 0);
        rows += each.count;
    }
    CHECK_EQ(ahead.drawer.asked(), 0);
    CHECK_EQ(ahead.drawer.oldest(), not_yet);
    CHECK_EQ(see(replay.control().sampled.value), before + rows);
}

} // namespace

// ------------------------------------------------------------------------------------------------------ what is drawn

TEST("what is drawn ahead is what the sampler would have drawn, in the order in which it was asked for") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay streams = memory->replay(61, prioritised);
        std::vector<Environment> all = environments(4);
        for (int i = 0; i < 60; ++i)
            step(streams, all, memory->newest.data());
        expect_as_drawn_here<::Drawn<3>>(streams, ::Drawn<3>::wish(2), 1);
        expect_as_drawn_here<::Drawn<1>>(streams, ::Drawn<1>::wish(1, 3), 2);

        memory->wipe(61, prioritised);
        Replay loose = memory->loose(61, prioritised);
        for (std::int64_t number = 1; number <= 100; ++number)
            add(loose, {plain(0, number)});
        expect_as_drawn_here<Loose>(loose, Loose::wish(prioritised), 3);
    }
}

TEST("a batch of which nothing can be drawn says so in its turn, and what comes after it is drawn") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(10, false, {.ratio = 1, .least = 1, .slack = 100});
    std::vector<Environment> one = environments(1, 0, 6); // ten steps long
    step(replay, one, memory->newest.data());             // a row without a next observation
    Ahead<::Drawn<1>> ahead(replay, ::Drawn<1>::wish(1), 4);
    ahead.ask(4);
    ahead.ask(8);
    for (int i = 0; i < 2; ++i) {
        CHECK_EQ(ahead.ended(), nothing_there);
        ahead.take();
    }
    CHECK_EQ(see(replay.control().admitted.samples), 0); // what the limiter let out was given back
    CHECK_EQ(see(replay.control().sampled.value), 0);
    step(replay, one, memory->newest.data());
    ahead.ask(4);
    CHECK_EQ(ahead.ended(), whole);
    CHECK(std::ranges::all_of(ahead.take(), [](const ::Drawn<1> &row) { return row.fault(1) == "" && row.key == 1; }));
    CHECK_EQ(see(replay.control().admitted.samples), 4);
    CHECK_EQ(see(replay.control().sampled.value), 4);
}

TEST("a batch that the limiter holds back is drawn as soon as there is enough") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(64, false, {.ratio = 1, .least = 10, .slack = 8});
    Ahead<Loose> ahead(replay, Loose::wish(false), 5);
    ahead.ask(8);
    await([&] { return see(replay.control().admitted.held_samplers) == 1; });
    for (std::int64_t number = 1; number <= 9; ++number)
        CHECK(replay.admit_inserts(1) && add(replay, {plain(0, number)}) == 1);
    BatchPrefetcher::wait(*ahead.drawer.shared(), now_ns() + 20 * ms);
    CHECK_EQ(ahead.drawer.oldest(), not_yet);
    CHECK(replay.admit_inserts(1) && add(replay, {plain(0, 10)}) == 1);
    CHECK_EQ(ahead.ended(), whole);
    CHECK(std::ranges::all_of(ahead.take(), [](const Loose &row) { return row.seen.whole(); }));
    CHECK_EQ(see(replay.control().admitted.held_samplers), 1); // one wait, however often it looked
}

// ----------------------------------------------------------------------------------------------------------- the end

TEST("stop ends the thread that has drawn everything and waits to be asked") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(16);
    add(replay, {plain(0, 1)});
    Ahead<Loose> ahead(replay, Loose::wish(false), 6);
    for (int round = 0; round < 3; ++round) { // asked again, it begins anew
        ahead.ask(4);
        ahead.ask(4);
        CHECK_EQ(ahead.ended(), whole);
        ahead.take();
        CHECK_EQ(ahead.ended(), whole); // and is not taken
        const std::int64_t begin = now_ns();
        ahead.stop();
        CHECK(now_ns() - begin < 10 * second);
        CHECK_EQ(ahead.drawer.asked(), 0);
        CHECK_EQ(ahead.drawer.oldest(), not_yet);
    }
    ahead.stop(); // there is none
}

TEST("stop ends the thread that waits for the limiter, and what it waited for is on no account") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(16, false, {.ratio = 1, .least = 10, .slack = 8});
    for (int round = 1; round <= 4; ++round) {
        std::optional<Ahead<Loose>> ahead;
        ahead.emplace(replay, Loose::wish(false), 7);
        ahead->ask(4);
        ahead->ask(4);
        await([&] { return see(replay.control().admitted.held_samplers) == round; });
        const std::int64_t begin = now_ns();
        if (round % 2 == 0)
            ahead->stop();
        ahead.reset(); // which stops it, too
        CHECK(now_ns() - begin < 10 * second);
    }
    CHECK_EQ(see(replay.control().admitted.samples), 0);
    CHECK_EQ(see(replay.control().sampled.value), 0);
}

TEST("stop in the middle of many batches leaves the rest undrawn, and their memory alone") {
    for (int round = 0; round < check::times(80); ++round) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->loose(64);
        for (std::int64_t number = 1; number <= 64; ++number)
            add(replay, {plain(0, number)});
        Ahead<Loose> ahead(replay, Loose::wish(false), 8);
        for (int i = 0; i < 200; ++i)
            ahead.ask(64);
        dawdle(round * 10'000);
        ahead.stop();
        CHECK_EQ(see(replay.control().sampled.value) % 64, 0);
    }
}

TEST("whoever waits for a batch is let go when another thread stops the drawer") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(16, false, {.ratio = 1, .least = 10, .slack = 8});
    Ahead<Loose> ahead(replay, Loose::wish(false), 9);
    ahead.ask(4);
    std::atomic<bool> waiting = false, over = false;
    std::thread waiter([&waiting, &over, shared = ahead.drawer.shared()] {
        waiting = true;
        BatchPrefetcher::wait(*shared, now_ns() + 50 * second);
        over = true;
    });
    await([&] { return waiting.load(); });
    usleep(10'000);
    CHECK(!over);
    const std::int64_t begin = now_ns();
    ahead.stop();
    waiter.join();
    CHECK(now_ns() - begin < 10 * second);
}

// ThreadSanitizer cannot follow threads that start after a fork() of a process with threads.
#if !defined(__SANITIZE_THREAD__)

TEST("a forked child has nothing of what its parent asked for, and draws with a thread of its own") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->loose(16);
    add(replay, {plain(0, 1)});
    Ahead<Loose> ahead(replay, Loose::wish(false), 10);
    ahead.ask(4);
    CHECK_EQ(ahead.ended(), whole);
    Child child([&] {
        CHECK_EQ(ahead.drawer.asked(), 0);
        CHECK_EQ(ahead.drawer.oldest(), not_yet);
        ahead.batches.clear();
        ahead.ask(8);
        CHECK_EQ(ahead.ended(), whole);
        CHECK(std::ranges::all_of(ahead.take(), [](const Loose &row) { return row.seen.whole(); }));
        ahead.stop();
    });
    CHECK_EQ(child.join(), 0);
    CHECK_EQ(ahead.ended(), whole);
    ahead.take();
}

#endif

// ------------------------------------------------------------------------------------------------------------- races

namespace {

// Race: writers go round and round in few slots while batches are drawn ahead, checked, and given new priorities.
//   rows whole, of one stream and episode; as many as were asked for, all of them counted   acceptable
//   torn or wrongly linked rows; a batch that is missing or counted twice                   FORBIDDEN
template <class T, class Write, class Fault>
void race(Replay &replay, const SampleSpec &wish, int threads, Write write, Fault is_wrong) {
    constexpr std::int64_t rows = 256, ahead_of = 3;
    const int batches = check::times(600);
    std::atomic<bool> drawing = true;
    std::list<std::thread> writers;
    for (std::int64_t writer = 0; writer < 2; ++writer)
        writers.emplace_back([&drawing, &write, writer] {
            for (std::int64_t i = 0; drawing; ++i)
                write(writer, i);
        });
    await([&] { return see(replay.control().added.value) > 100; });
    {
        Ahead<T> ahead(replay, wish, 11);
        const auto length = static_cast<std::size_t>(wish.length);
        std::int64_t wrong = 0;
        std::vector<std::int64_t> keys;
        std::vector<float> priorities;
        for (int i = 0; i < ahead_of; ++i)
            ahead.ask(rows, 0.5, threads);
        for (int i = 0; i < batches; ++i) {
            CHECK_EQ(ahead.ended(), whole);
            const std::vector<T> drawn = ahead.take();
            ahead.ask(rows, 0.5, threads);
            wrong += std::ranges::count_if(drawn, is_wrong);
            if (!replay.prioritised())
                continue;
            keys.clear();
            priorities.clear();
            for (std::size_t k = 0; k < drawn.size(); k += length) {
                wrong += !(drawn[k].weight > 0 && drawn[k].weight <= 1);
                keys.push_back(drawn[k].key);
                priorities.push_back(static_cast<float>(1 + drawn[k].key % 3));
            }
            replay.set_priorities(keys, priorities);
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(ahead.drawer.asked(), ahead_of);
        ahead.stop();
    }
    const std::int64_t sampled = see(replay.control().sampled.value);
    CHECK(sampled >= batches * rows && sampled <= (batches + ahead_of) * rows && sampled % rows == 0);
    drawing = false;
    for (std::thread &writer : writers)
        writer.join();
    CHECK_EQ(fault(replay), "");
}

} // namespace

TEST("batches drawn ahead while writers overwrite the rows are whole") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->loose(48, prioritised);
        // 22 KB a batch: too little for a second thread; the sampler's own tests have those.
        race<Loose>(
            replay, Loose::wish(prioritised), 1,
            [replay](std::int64_t writer, std::int64_t i) mutable {
                add(replay, {plain(writer, 2 * i), plain(writer, 2 * i + 1)});
            },
            [](const Loose &row) { return !row.seen.whole(); });
    }
}

TEST("batches of streams drawn ahead while writers add to them are made of the right steps") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->replay(96, prioritised);
        std::array<std::vector<Environment>, 2> all{environments(2, 0), environments(2, 2)};
        race<::Drawn<3>>(
            replay, ::Drawn<3>::wish(2), 2, // 132 KB a batch: drawn by the drawer and a thread of the pool
            [replay, &all, &memory](std::int64_t writer, std::int64_t) mutable {
                step(replay, all[static_cast<std::size_t>(writer)], memory->newest.data());
            },
            [](const ::Drawn<3> &row) { return row.fault(2) != ""; });
    }
}

// Race: writers and a drawer hold each other back at every turn.
//   both come to the end, and no more was drawn than was earned   acceptable
//   both wait; samples that are on no account                     FORBIDDEN
TEST("a drawer and writers whom one limiter holds back let each other go, to the end") {
    constexpr std::int64_t rows = 16, insert = 4, ahead_of = 8;
    const int batches = check::times(2400);
    const auto memory = std::make_unique<ReplayMemory>();
    const Limit limit{.ratio = 2, .least = 20, .slack = 12}; // as little as lets both pass
    Replay replay = memory->loose(64, false, limit);
    CHECK_EQ(replay.slack_needed(insert, rows), limit.slack);
    Ahead<Loose> ahead(replay, Loose::wish(false), 12);
    for (int i = 0; i < ahead_of; ++i)
        ahead.ask(rows);
    await([&] { return see(replay.control().admitted.held_samplers) == 1; });
    std::atomic<bool> drawing = true;
    std::list<std::thread> writers;
    for (std::int64_t writer = 0; writer < 2; ++writer)
        writers.emplace_back([&drawing, replay, writer]() mutable {
            Spin spin(0);
            for (std::int64_t number = 0; drawing; ++number) {
                if (replay.wait_for_leave(Side::writers, insert, now_ns() + 10 * ms, {}, spin).end == WaitEnd::reached)
                    add(replay, std::vector<Row>(insert, plain(writer, number)));
            }
        });
    for (int i = 0; i < batches; ++i) {
        CHECK_EQ(ahead.ended(), whole);
        CHECK(std::ranges::all_of(ahead.take(), [](const Loose &row) { return row.seen.whole(); }));
        ahead.ask(rows);
        const std::int64_t samples = see(replay.control().admitted.samples);
        const std::int64_t inserts = see(replay.control().admitted.inserts); // later: there can only be more of them
        CHECK(static_cast<double>(samples) <= limit.slack + limit.ratio * static_cast<double>(inserts - limit.least));
    }
    ahead.stop();
    drawing = false;
    for (std::thread &writer : writers)
        writer.join();
    CHECK_EQ(see(replay.control().admitted.samples), see(replay.control().sampled.value));
    CHECK_EQ(see(replay.control().admitted.inserts), see(replay.control().added.value));
}
