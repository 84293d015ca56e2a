#include "lanes/sampler.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <list>
#include <map>
#include <thread>
#include <vector>

#include "lanes/replay.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"
#include "support/replay_fixture.hpp"
#include "support/single_steps.hpp"

using namespace memlane;

// ------------------------------------------------------------------------------------------------------ one process

TEST("samples of streams have the right steps, stacked and summed, whatever was overwritten") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->replay(61, prioritised);
        std::vector<Environment> all = environments(4);
        for (int i = 0; i < 60; ++i) {
            add_step(replay, all, memory->newest.data());
            if (i < 3 || i % 9 != 0)
                continue;
            expect_right<1>(replay, 1, 1, 200);
            expect_right<1>(replay, 3, 1, 200);
            expect_right<4>(replay, 1, 1, 200);
            expect_right<3>(replay, 5, 1, 200);
            expect_right<1>(replay, 1, 6, 100);
            expect_right<2>(replay, 2, 4, 100);
        }
    }
}

TEST("every row of a replay that was never full is drawn, with equal probability") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->unlinked(100);
    for (std::int64_t number = 1; number <= 40; ++number)
        add(replay, {make_row(0, number)});
    memlane::Rng rng = seeded_rng(1);
    Sampler sampler(replay, UnlinkedSample::spec(false), rng);
    std::vector<UnlinkedSample> drawn(8000);
    CHECK(sampler.sample(8000, bytes_of(drawn), 1, 1));
    std::map<std::int64_t, int> times;
    for (const UnlinkedSample &each : drawn) {
        CHECK(each.observation.intact() && each.observation.step == each.key);
        ++times[each.key];
    }
    CHECK_EQ(times.size(), 40);
    for (const auto &[key, often] : times)
        CHECK(often > 200 - 5 * 14 && often < 200 + 5 * 14); // five standard deviations
}

TEST("rows are drawn in proportion to their priorities, and importance weights correct for it") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->unlinked(50, true);
    std::vector<std::int64_t> keys;
    std::vector<float> priorities;
    for (std::int64_t number = 1; number <= 40; ++number) {
        add(replay, {make_row(0, number)});
        keys.push_back(number);
        priorities.push_back(static_cast<float>(number));
    }
    CHECK_EQ(replay.set_priorities(keys, priorities), 40);
    memlane::Rng rng = seeded_rng(2);
    Sampler sampler(replay, UnlinkedSample::spec(true), rng);
    std::vector<UnlinkedSample> drawn(8200); // 10 for each unit of priority, 820 in all
    CHECK(sampler.sample(8200, bytes_of(drawn), 0.5, 1));
    std::map<std::int64_t, int> times;
    for (const UnlinkedSample &each : drawn) {
        ++times[each.key];
        CHECK(std::abs(each.weight - static_cast<float>(1 / std::sqrt(static_cast<double>(each.key)))) < 1e-5F);
    }
    for (std::int64_t key = 1; key <= 40; ++key)
        CHECK(std::abs(times[key] - 10 * key) <= 2); // stratified: the counts differ at the edges of the parts only
}

TEST("which rows are drawn does not depend on the number of threads") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemoryFor<512>>();
        Replay replay = memory->replay(500, prioritised);
        std::vector<Environment> all = environments(4);
        for (int i = 0; i < 300; ++i)
            add_step(replay, all, memory->newest.data());
        std::vector<std::vector<LinkedSample<4>>> batches;
        for (const int threads : {1, 2, 3, 8}) {
            memlane::Rng rng = seeded_rng(9);
            Sampler sampler(replay, LinkedSample<4>::spec(3), rng);
            batches.emplace_back(600); // 330 KB: enough for five threads
            for (int i = 0; i < 2; ++i)
                CHECK(sampler.sample(600, bytes_of(batches.back()), 0.7, threads));
            CHECK(std::memcmp(batches[0].data(), batches.back().data(), sizeof(LinkedSample<4>) * 600) == 0);
        }
        CHECK(std::ranges::all_of(batches[0], [](const LinkedSample<4> &each) { return each.fault(3) == ""; }));
    }
}

TEST("a sample returns false if no row can be drawn") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->replay(10, prioritised);
        memlane::Rng rng = seeded_rng(3);
        Sampler sampler(replay, LinkedSample<1>::spec(1), rng);
        std::vector<LinkedSample<1>> drawn(4);
        CHECK(!sampler.sample(4, bytes_of(drawn), 1, 1));
        std::vector<Environment> one = environments(1, 0, 6); // its episode has ten steps
        add_step(replay, one, memory->newest.data());
        CHECK(!sampler.sample(4, bytes_of(drawn), 1, 1)); // a row without a next observation
        add_step(replay, one, memory->newest.data());
        CHECK(sampler.sample(4, bytes_of(drawn), 1, 1));
        CHECK(std::ranges::all_of(drawn, [](const LinkedSample<1> &each) { return each.fault(1) == "" && each.key == 1; }));
    }
}

TEST("the one row that can be drawn is found among a thousand that cannot") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemoryFor<2048>>();
        Replay replay = memory->replay(2000, prioritised);
        std::int64_t *newest = memory->newest.data();
        for (std::int64_t number = 0; number < 1999; ++number) {
            Row row = make_row(0, 0);
            if (number == 700)
                row.terminated = 1;
            add(replay, {row}, newest);
            newest[0] = 0; // cuts the stream
        }
        memlane::Rng rng = seeded_rng(4);
        Sampler sampler(replay, LinkedSample<1>::spec(1), rng);
        std::vector<LinkedSample<1>> drawn(2);
        CHECK(sampler.sample(2, bytes_of(drawn), 1, 1));
        CHECK(drawn[0].key == 701 && drawn[1].key == 701);
    }
}

// ------------------------------------------------------------------------------------------------------- dead writers

// Regression: the sampler used to draw sequence numbers, not slots. Rows whose slots were reserved by a writer that was
// killed, or stopped, before it claimed them were not drawn until the next round: with batches of 1000 rows, a thousand
// rows per kill. Sampler::draw_uniformly now draws a slot and takes the sequence number from its state.
TEST("rows that are not overwritten yet are drawn although a dead writer has reserved their slots") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->unlinked(16);
    for (std::int64_t number = 1; number <= 20; ++number)
        add(replay, {make_row(0, number)});
    replay.control().reserved.last.fetch_add(16); // a writer reserves 16 rows and dies
    CHECK_EQ(replay.size(), 16);
    memlane::Rng rng = seeded_rng(5);
    Sampler sampler(replay, UnlinkedSample::spec(false), rng);
    std::vector<UnlinkedSample> drawn(8);
    CHECK(sampler.sample(8, bytes_of(drawn), 1, 1));
}

// Regression: if the nodes of the sum tree were 0, `sample` used to return false without reading the leaves. That
// happens if the first writer dies before its first refresh, and in a file whose first save was killed. Sampler::sample
// now refreshes all nodes if their total is not above 0.
TEST("rows are drawn although their writer died before it refreshed the nodes above their priorities") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->unlinked(64, true);
    for (std::int64_t number = 1; number <= 20; ++number)
        add(replay, {make_row(0, number)});
    std::memset(memory->tree.data() + 64 * sizeof(Word), 0, SumTree::bytes(64) - 64 * sizeof(Word)); // no refresh yet
    CHECK_EQ(replay.tree().total(), 0.0);
    memlane::Rng rng = seeded_rng(6);
    Sampler sampler(replay, UnlinkedSample::spec(true), rng);
    std::vector<UnlinkedSample> drawn(8);
    CHECK(sampler.sample(8, bytes_of(drawn), 1, 1));
}

#if defined(MEMLANE_STEPPED)

// The sampler is stopped at an instruction; meanwhile a writer overwrites the row, and is itself stopped between the
// row and its priority (Replay::add: between `publish` and `make_drawable`). Then the sampler continues.
//   the old row, or the new one, with finite weights   acceptable
//   a weight that is not finite                        FORBIDDEN
// Regression: `find` used the old priority, and the probability was computed from the new one, which is 0 at first: 0 /
// 0 is not a number. Sampler::draw_by_priority now reads the priority once and accepts the row only if it is above 0.
TEST("a sampler stopped anywhere while a row is overwritten gives untorn rows and finite weights") {
    struct Scene {
        ReplayMemory memory;
        memlane::Rng rng;
        UnlinkedSample drawn;
        Word sampled;
    };
    Shared<Scene> scene;
    constexpr std::int64_t capacity = 2;
    Replay replay = scene->memory.unlinked(capacity, true);
    Sampler sampler(replay, UnlinkedSample::spec(true), scene->rng);
    const auto prepare = [&] {
        scene->memory.wipe(capacity, true);
        for (std::int64_t number = 1; number <= 4; ++number)
            add(replay, {make_row(0, number)});
        scene->rng.seed(8);
        scene->drawn = {};
        publish(scene->sampled, 0);
    };
    const auto body = [&](std::int64_t) {
        publish(scene->sampled, sampler.sample(1, reinterpret_cast<std::byte *>(&scene->drawn), 1, 1) ? 1 : -1);
    };
    prepare();
    body(0);
    prepare();
    int length = 0, bad_weights = 0, torn = 0;
    for (SteppedChild child(body); child.step();)
        ++length;
    for (int at = 0; at <= length; at += 17) {
        prepare();
        SteppedChild child(body, at);
        // What Replay::add does up to `publish(row.state, ...)`.
        const std::int64_t sequence = replay.control().reserved.last.fetch_add(1) + 1, slot = replay.slot_of(sequence);
        CHECK(
            publish_if(replay.head(slot).state, see(replay.head(slot).state), row_word(RowState::writing, this_process())));
        replay.tree().replace(slot, replay.generation_of(sequence), 0);
        const Row row = make_row(0, sequence);
        std::memcpy(replay.payload(slot), &row, sizeof row);
        publish(replay.head(slot).state, row_word(RowState::complete, sequence));
        CHECK_EQ(child.finish(), 0);
        CHECK_EQ(see(scene->sampled), 1);
        const UnlinkedSample &drawn = scene->drawn;
        torn += !drawn.observation.intact() || drawn.observation.step != drawn.key;
        bad_weights += !(drawn.weight > 0 && drawn.weight <= 1);
    }
    CHECK_EQ(torn, 0);
    CHECK_EQ(bad_weights, 0); // weights that are not in (0, 1]
}

// Regression: a writer that resumed the streams of a killed writer used to find the `newest` from before the row that
// was being added, and linked its first row to the wrong one, even across the end of an episode. Replay::add now sets
// `newest` to 0 before it publishes a row, and to the row's sequence number after it is linked.
TEST("a stream that is resumed after its writer was killed at any change is never linked across a missing row") {
    Shared<ReplayMemory> memory;
    constexpr std::int64_t capacity = 24, episode = 6; // ten steps, terminated with a final observation
    Replay replay = memory->replay(capacity);
    int wrong = 0;
    for (const std::int64_t before : {4, 9}) { // steps of the episode that are stored already: in the middle, and at the end
        std::vector<Environment> one{{0, episode, before}};
        const PreparedRows row = prepare_step(one, memory->newest.data());
        after_every_change(
            *memory,
            [&] {
                memory->wipe(capacity);
                std::vector<Environment> first{{0, episode, 0}};
                for (std::int64_t i = 0; i < before; ++i)
                    add_step(replay, first, memory->newest.data());
            },
            [&](std::int64_t) { row.add(replay); },
            [&](SteppedChild &writer, int) {
                writer.kill();
                if (count_in_state(replay, RowState::complete) == before)
                    return; // the step itself is lost, which the replay cannot know
                std::vector<Environment> continued = one;
                add_step(replay, continued, memory->newest.data());
                wrong += find_fault(replay) != "";
            });
    }
    CHECK_EQ(wrong, 0);
}

#endif

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: writers overwrite a few slots again and again; samplers draw, check, and set priorities.
//   untorn rows, of one stream and episode, summed and stacked correctly; all added rows are counted   acceptable
//   torn, mixed or wrongly linked rows, weights outside of (0, 1]                                      FORBIDDEN
struct Scene {
    static constexpr int adds = check::slowdown == 1 ? 90'000 : check::times(30'000); // by all writers together
    ReplayMemory memory;
    std::atomic<int> writing;
    std::atomic<std::int64_t> added, drawn, wrong, bad_weights;

    void write_streams(Replay replay, std::int64_t writer, int rounds) {
        std::vector<Environment> mine = environments(2, 2 * writer);
        for (int i = 0; i < rounds; ++i)
            added += add_step(replay, mine, memory.newest.data());
        --writing;
    }
    void write_unlinked(Replay replay, std::int64_t writer, int rounds) {
        for (int i = 0; i < rounds; ++i)
            added += add(replay, {make_row(writer, 2 * i), make_row(writer, 2 * i + 1)});
        --writing;
    }
    template <class T, class Fault> void sample(Replay replay, SampleSpec spec, std::uint64_t seed, Fault is_wrong) {
        memlane::Rng rng = seeded_rng(seed);
        Sampler sampler(replay, std::move(spec), rng);
        const auto length = static_cast<std::size_t>(sampler.spec().length);
        std::vector<T> rows(32 * length);
        std::vector<std::int64_t> keys;
        std::vector<float> priorities;
        while (writing > 0) {
            if (!sampler.sample(32, bytes_of(rows), 0.5, 1))
                continue; // no row can be drawn yet
            keys.clear();
            priorities.clear();
            for (std::size_t i = 0; i < rows.size(); ++i) {
                wrong += is_wrong(rows[i]);
                if (replay.prioritised() && i % length == 0) {
                    bad_weights += !(rows[i].weight > 0 && rows[i].weight <= 1);
                    keys.push_back(rows[i].key);
                    priorities.push_back(static_cast<float>(1 + rows[i].key % 3));
                }
            }
            if (replay.prioritised())
                replay.set_priorities(keys, priorities);
            drawn += 32;
        }
    }
    void check_results(Replay &replay, std::int64_t rows) {
        CHECK_EQ(wrong.load(), 0);
        CHECK_EQ(bad_weights.load(), 0); // weights that are not in (0, 1]
        CHECK_EQ(added.load(), rows);
        CHECK_EQ(see(replay.control().added.value), rows);
        CHECK_EQ(see(replay.control().lost.abandoned), 0);
        CHECK_EQ(replay.size(), count_in_state(replay, RowState::complete));
        CHECK_EQ(count_in_state(replay, RowState::writing), 0);
        CHECK_EQ(find_fault(replay), "");
        CHECK(drawn > 0);
        if (replay.prioritised()) {
            const double total = replay.tree().total();
            replay.tree().refresh_all();
            CHECK_EQ(replay.tree().total(), total);
        }
    }
};

template <class Start> void race(Scene &scene, Replay &replay, int writers, int rounds, bool streams, Start start) {
    scene.writing = writers;
    for (std::int64_t writer = 0; writer < writers; ++writer)
        start([&scene, replay, writer, rounds, streams] {
            streams ? scene.write_streams(replay, writer, rounds) : scene.write_unlinked(replay, writer, rounds);
        });
    for (std::uint64_t seed = 0; seed < 2; ++seed)
        start([&scene, replay, seed, streams] {
            if (!streams)
                scene.sample<UnlinkedSample>(replay, UnlinkedSample::spec(replay.prioritised()), seed,
                                             [](const UnlinkedSample &row) { return !row.observation.intact(); });
            else if (seed == 0)
                scene.sample<LinkedSample<3>>(replay, LinkedSample<3>::spec(2), seed,
                                              [](const LinkedSample<3> &row) { return row.fault(2) != ""; });
            else
                scene.sample<LinkedSample<1>>(replay, LinkedSample<1>::spec(1, 3), seed,
                                              [](const LinkedSample<1> &row) { return row.valid && row.fault(1) != ""; });
        });
}

void race_threads(int writers, bool streams, bool prioritised) {
    const auto scene = std::make_unique<Scene>();
    Replay replay = streams ? scene->memory.replay(96, prioritised) : scene->memory.unlinked(24, prioritised);
    const int rounds = Scene::adds / writers;
    std::list<std::thread> threads;
    race(*scene, replay, writers, rounds, streams, [&](auto body) { threads.emplace_back(body); });
    for (std::thread &thread : threads)
        thread.join();
    scene->check_results(replay, 2LL * rounds * writers);
}

void race_processes(int writers, bool streams, bool prioritised) {
    Shared<Scene> scene;
    Replay replay = streams ? scene->memory.replay(96, prioritised) : scene->memory.unlinked(24, prioritised);
    const int rounds = Scene::adds / writers;
    std::list<Child> children;
    race(*scene, replay, writers, rounds, streams, [&](auto body) { children.emplace_back(body); });
    for (Child &child : children)
        CHECK_EQ(child.join(), 0);
    scene->check_results(replay, 2LL * rounds * writers);
}

} // namespace

TEST("threads that write and sample streams at once never see a torn row or a step of another stream") {
    for (const int writers : {1, 2, 4})
        race_threads(writers, true, writers != 2);
}

TEST("processes that write and sample streams at once never see a torn row or a step of another stream") {
    for (const int writers : {1, 2, 4})
        race_processes(writers, true, writers == 2);
}

TEST("threads that write and sample unlinked rows at once never see a torn row") {
    for (const int writers : {1, 2, 4})
        race_threads(writers, false, writers == 2);
}

TEST("processes that write and sample unlinked rows at once never see a torn row") {
    for (const int writers : {1, 2, 4})
        race_processes(writers, false, writers != 2);
}

// One writer after the other is killed at a random instant; one writer and one sampler survive.
//   the unfinished rows of the killed writer are missing, its slots are counted as abandoned and reused   acceptable
TEST("writers killed at random instants leave untorn rows, and the others go on") {
    for (const bool prioritised : {false, true}) {
        Shared<Scene> scene;
        Replay replay = scene->memory.replay(96, prioritised);
        scene->writing = 1;
        ::Rng chance(prioritised);
        Child sampler([&] {
            scene->sample<LinkedSample<3>>(replay, LinkedSample<3>::spec(2), 1,
                                           [](const LinkedSample<3> &row) { return row.fault(2) != ""; });
        });
        Child survivor([&] {
            std::vector<Environment> mine = environments(2);
            while (scene->writing > 0)
                scene->added += add_step(replay, mine, scene->memory.newest.data());
        });
        for (int kill = 0; kill < check::times(36); ++kill) {
            Child victim([&] {
                scene->memory.newest[2] = scene->memory.newest[3] = 0;
                std::vector<Environment> mine = environments(2, 2, 100 * kill);
                for (;;)
                    add_step(replay, mine, scene->memory.newest.data());
            });
            usleep(static_cast<useconds_t>(chance.between(0, 3000)));
            victim.kill(SIGKILL);
            CHECK_EQ(victim.join(), -SIGKILL);
            const std::int64_t added = scene->added, drawn = scene->drawn;
            await([&] { return scene->added > added + 10 && scene->drawn > drawn + 32; });
        }
        scene->writing = 0;
        CHECK_EQ(survivor.join(), 0);
        CHECK_EQ(sampler.join(), 0);
        CHECK_EQ(scene->wrong.load(), 0);
        std::vector<Environment> mine = environments(2, 4);
        for (int i = 0; i < 100; ++i)
            add_step(replay, mine, scene->memory.newest.data());
        CHECK_EQ(count_in_state(replay, RowState::writing), 0);
        CHECK_EQ(find_fault(replay), "");
        CHECK_EQ(replay.first_implausible(), -1);
    }
}

// Regression: sequence numbers used to be computed from the 32 bits of the generation in a leaf. After 2^32 rounds none of
// them was right: every draw failed a thousand times, and then all rows were scanned.
TEST("rows are drawn by priority at the first attempt after 2^32 rounds through the slots") {
    constexpr std::int64_t capacity = 7;
    for (const std::int64_t rounds : {std::int64_t{1} << 32, (std::int64_t{3} << 32) - 1, std::int64_t{5} << 40}) {
        const auto memory = std::make_unique<ReplayMemory>();
        Replay replay = memory->unlinked(capacity, true);
        replay.control().reserved.last = rounds * capacity - 4; // the rows below are in two rounds
        for (std::int64_t number = 1; number <= capacity; ++number)
            add(replay, {make_row(0, number)});
        memlane::Rng rng = seeded_rng(1);
        Sampler sampler(replay, UnlinkedSample::spec(true), rng);
        std::vector<UnlinkedSample> drawn(200);
        CHECK(sampler.sample(200, bytes_of(drawn), 1, 1));
        for (const UnlinkedSample &row : drawn) {
            CHECK(row.observation.intact() && row.weight == 1);
            CHECK_EQ(row.key, rounds * capacity - 4 + row.observation.step);
        }
        CHECK_EQ(see(replay.control().drawn.redrawn), 0);
        CHECK_EQ(replay.set_priorities(std::array{drawn[0].key}, std::array{2.0F}), 1);
        CHECK_EQ(replay.tree().total(), capacity + 1.0);
    }
}

TEST("rows that random draws cannot find are drawn in proportion to their priorities") {
    constexpr std::int64_t capacity = 128, first = 3, second = 77;
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->unlinked(capacity, true);
    for (std::int64_t number = 1; number < capacity; ++number)
        add(replay, {make_row(0, number)});
    // Stray words: all other rows are gone, and their priorities are so high that every draw ends at one of them.
    for (std::int64_t slot = 1; slot < capacity; ++slot) {
        const bool kept = slot == first || slot == second;
        replay.tree().replace(slot, 0, slot == second ? 3.0F : kept ? 1.0F : 1e30F);
        if (!kept)
            replay.head(slot).state = row_word(RowState::empty);
    }
    replay.tree().refresh_all();
    memlane::Rng rng = seeded_rng(1);
    Sampler sampler(replay, UnlinkedSample::spec(true), rng);
    constexpr std::int64_t rows = 4000;
    std::vector<UnlinkedSample> drawn(rows);
    CHECK(sampler.sample(rows, bytes_of(drawn), 1, 1));
    std::int64_t of_second = 0;
    for (const UnlinkedSample &row : drawn) {
        CHECK(row.observation.intact() && (row.key == first || row.key == second));
        CHECK(row.weight == (row.key == first ? 1.0F : 1.0F / 3));
        of_second += row.key == second;
    }
    CHECK(of_second > rows * 0.72 && of_second < rows * 0.78); // 0.75, and four standard deviations
    for (std::int64_t slot : {first, second})
        replay.head(slot).state = row_word(RowState::empty);
    CHECK(!sampler.sample(1, bytes_of(drawn), 1, 1));
}

#if defined(MEMLANE_STEPPED)

// A sampler is stopped after any store into the batch while a writer overwrites the rows that it is about to copy; then it
// continues.
//   the whole sequence, another whole sequence, or one that ends at the newest row   acceptable
//   a sequence that ends where a row was overwritten                                 FORBIDDEN
// Regression: Sampler::copy_sequence used to end a sequence at such a row, as if nothing followed. It draws again now.
TEST("a sequence that is overwritten while it is drawn is drawn again, not shortened") {
    constexpr int length = 4;
    constexpr std::int64_t capacity = 8, before = 12, after = 15; // sequence numbers of the newest row
    using Sample = LinkedSample<1>;
    struct Scene {
        ReplayMemory memory;
        memlane::Rng rng;
        std::array<Sample, length> drawn;
    };
    Shared<Scene> scene;
    Replay replay = scene->memory.replay(capacity);
    Sampler sampler(replay, Sample::spec(1, length), scene->rng);
    const auto add_until = [&](std::int64_t last) {
        while (see(replay.control().reserved.last) < last)
            add(replay, {make_row(0, see(replay.control().reserved.last))}, scene->memory.newest.data());
    };
    const auto draw = [&] { CHECK(sampler.sample(1, reinterpret_cast<std::byte *>(scene->drawn.data()), 1, 1)); };
    std::uint64_t seed = 0;
    const auto prepare = [&] {
        scene->memory.wipe(capacity);
        scene->drawn = {};
        add_until(before);
        scene->rng.seed(seed);
    };
    do { // until the oldest row is drawn
        ++seed;
        prepare();
        draw();
    } while (scene->drawn[0].key != before - capacity + 1);
    int whole = 0, redrawn = 0;
    after_every_change(
        *scene, prepare, [&](std::int64_t) { draw(); },
        [&](SteppedChild &child, int) {
            add_until(after);
            CHECK_EQ(child.finish(), 0);
            int rows = 0;
            while (rows < length && scene->drawn[static_cast<std::size_t>(rows)].valid) {
                const Sample &row = scene->drawn[static_cast<std::size_t>(rows)];
                CHECK_EQ(row.key, scene->drawn[0].key + rows);
                CHECK(row.observation[0].is(row.observation[0], row.key - 1));
                ++rows;
            }
            CHECK(rows > 0);
            const std::int64_t last = scene->drawn[static_cast<std::size_t>(rows - 1)].key;
            CHECK(rows == length || last == before - 1 || last == after - 1);
            whole += rows == length;
            redrawn += scene->drawn[0].key != before - capacity + 1;
        });
    CHECK(whole > 0 && redrawn > 0);
}

#endif

TEST("a stopped writer that holds slots blocks no other") {
    Shared<Scene> scene;
    Replay replay = scene->memory.unlinked(24, true);
    Child victim([&] {
        for (std::int64_t i = 0;; ++i)
            add(replay, std::vector<Row>(12, make_row(7, i)));
    });
    std::int64_t held = 0;
    for (int attempt = 0; attempt < 200 && held == 0; ++attempt) {
        victim.kill(SIGCONT);
        usleep(300);
        victim.kill(SIGSTOP);
        int status = 0;
        waitpid(victim.pid(), &status, WUNTRACED);
        held = count_in_state(replay, RowState::writing);
    }
    CHECK(held > 0);
    scene->writing = 1;
    Child sampler([&] {
        scene->sample<UnlinkedSample>(replay, UnlinkedSample::spec(true), 1,
                                      [](const UnlinkedSample &row) { return !row.observation.intact(); });
    });
    const std::int64_t avoided = see(replay.control().lost.avoided);
    for (int i = 0; i < 500; ++i)
        CHECK_EQ(add(replay, {make_row(0, i)}), 1);
    CHECK(see(replay.control().lost.avoided) >= avoided + 20 * held);
    CHECK_EQ(count_in_state(replay, RowState::writing), held);
    await([&] { return scene->drawn > 100; });
    victim.kill(SIGKILL);
    CHECK_EQ(victim.join(), -SIGKILL);
    for (int i = 0; i < 50; ++i)
        CHECK_EQ(add(replay, {make_row(0, i)}), 1);
    CHECK_EQ(count_in_state(replay, RowState::writing), 0);
    CHECK_EQ(see(replay.control().lost.abandoned), held);
    scene->writing = 0;
    CHECK_EQ(sampler.join(), 0);
    CHECK_EQ(scene->wrong.load(), 0);
    CHECK_EQ(find_fault(replay), "");
}
