// The replay: a writer, a sampler or a process that saves dies or is stopped at any point of a call.

#include "lanes/replay.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lanes/sampler.hpp"
#include "support/check.hpp"
#include "support/fault_points.hpp"
#include "support/processes.hpp"
#include "support/replay_fixture.hpp"

using namespace memlane;
using namespace fault_points;

namespace {

constexpr std::int64_t at_once = 1; // a deadline that has passed

std::int64_t complete(Replay &replay) { return count_in_state(replay, RowState::complete); }
std::int64_t writing(Replay &replay) { return count_in_state(replay, RowState::writing); }

std::string counters(Replay &replay) {
    const ReplayControl &control = replay.control();
    return listed({{"reserved", see(control.reserved.last)},
                   {"writing", writing(replay)},
                   {"complete", complete(replay)},
                   {"size", replay.size()},
                   {"added", see(control.added.value)},
                   {"evicted", see(control.lost.evicted)},
                   {"abandoned", see(control.lost.abandoned)}});
}

// A sum that is up to date: what the leaves add up to.
double sum_of_leaves(Replay &replay) {
    double sum = 0;
    for (std::int64_t slot = 0; slot < replay.capacity(); ++slot)
        sum += static_cast<double>(replay.tree().priority(slot));
    return sum;
}

// A replay with streams and priorities, used by three environments. The survivors have a stream of their own.
class TestedStreams {
  public:
    static constexpr std::int64_t capacity = 12;
    explicit TestedStreams(bool prioritised) : prioritised_(prioritised) {}

    ReplayMemory &memory() const { return *memory_; }
    Replay replay() const { return memory_->replay(capacity, prioritised_); }

    // A new replay after `steps` steps of the environments.
    void prepare(int steps) {
        memory_->wipe(capacity, prioritised_);
        theirs_ = environments(3);
        ours_ = environments(1, 3);
        for (int i = 0; i < steps; ++i)
            step();
    }
    // One step of the three environments, prepared, so that a child can run `add` alone.
    PreparedRows next() { return prepare_step(theirs_, memory_->newest.data()); }
    void step() {
        Replay replay = this->replay();
        CHECK_EQ(add_step(replay, theirs_, memory_->newest.data()), 3);
    }
    // A row of the survivors' stream, with its tail at the end of an episode.
    void survivor_step() {
        Replay replay = this->replay();
        CHECK_EQ(add_step(replay, ours_, memory_->newest.data()), 1);
    }
    void survivor_round() {
        for (std::int64_t i = 0; i < capacity; ++i)
            survivor_step();
    }
    // What must hold at any time while no call runs.
    void check_consistent(int deaths = 1) const {
        Replay replay = this->replay();
        CHECK_EQ(find_fault(replay), "");
        CHECK(replay.counters_plausible());
        CHECK_EQ(replay.first_implausible(), -1);
        // `size` may count slots whose new row is not published: that of the row, and that of its tail.
        CHECK(replay.size() >= complete(replay) && replay.size() <= complete(replay) + writing(replay));
        CHECK(writing(replay) <= 2 * deaths);
        for (std::size_t stream = 0; stream < 4; ++stream) { // a stream names a published row of its own, or none
            const std::int64_t newest = memory_->newest[stream], slot = replay.slot_of(newest);
            if (newest == 0 || see(replay.control().reserved.last) >= newest + capacity) // overwritten since
                continue;
            CHECK_EQ(see(replay.head(slot).state), row_word(RowState::complete, newest));
            Row row;
            std::memcpy(&row, replay.payload(slot), sizeof row);
            CHECK_EQ(row.observation.stream, stream);
        }
    }
    // The others go on: they add a round, and everything that a dead writer left is taken over and counted.
    void recover() {
        Replay replay = this->replay();
        const std::int64_t abandoned_before = see(replay.control().lost.abandoned), left = writing(replay);
        survivor_round();
        CHECK_EQ(writing(replay), 0);
        CHECK_EQ(see(replay.control().lost.abandoned), abandoned_before + left);
        CHECK_EQ(replay.size(), complete(replay));
        check_consistent();
        if (prioritised_)
            CHECK_EQ(replay.tree().total(), sum_of_leaves(replay));
        expect_right<2>(replay, 2, 1, 8);
        expect_right<1>(replay, 1, 3, 4);
    }

  private:
    bool prioritised_;
    Shared<ReplayMemory> memory_;
    std::vector<Environment> theirs_, ours_;
};

} // namespace

// ------------------------------------------------------------------------------------------------------------- writers

TEST("a writer of a replay that dies at any point: nothing of the unfinished row, and its slot in the next round") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->unlinked(4);
    Table table;
    const PreparedRows fifth({make_row(7, 5)}, nullptr, {}, {}, 0);
    die_at_every_point(
        "add", // evicts row 1
        [&] {
            memory->wipe(4);
            for (std::int64_t number = 1; number <= 4; ++number)
                CHECK_EQ(add(replay, {make_row(7, number)}), 1);
        },
        [&](std::int64_t) { CHECK_EQ(fifth.add(replay), 1); },
        [&](Child &) {
            std::string seen = counters(replay);
            CHECK_EQ(find_fault(replay), "");
            for (std::int64_t number = 6; number <= 9; ++number)
                CHECK_EQ(add(replay, {make_row(8, number)}), 1);
            CHECK_EQ(find_fault(replay), "");
            table.add(std::move(seen), counters(replay));
        });
    CHECK_TABLE(table, //
                {"reserved 4, complete 4, size 4, added 4", "reserved 8, complete 4, size 4, added 8, evicted 4"},
                {"reserved 5, complete 4, size 4, added 4", "reserved 9, complete 4, size 4, added 8, evicted 4"},
                {"reserved 5, writing 1, complete 3, size 4, added 4",
                 "reserved 9, complete 4, size 4, added 8, evicted 3, abandoned 1"},
                {"reserved 5, complete 4, size 4, added 4", "reserved 9, complete 4, size 4, added 8, evicted 4"},
                {"reserved 5, complete 4, size 4, added 4, evicted 1", "reserved 9, complete 4, size 4, added 8, evicted 5"},
                {"reserved 5, complete 4, size 4, added 5, evicted 1",
                 "reserved 9, complete 4, size 4, added 9, evicted 5"});
}

TEST("a writer of streams that dies at any point of rows, tails, links and priorities leaves nothing torn or uncounted") {
    for (const bool prioritised : {false, true})
        for (const int before : {0, 1, 2, 3, 5, 22}) { // the first rows, rows with tails (0, 3, 22), a full replay (5, 22)
            TestedStreams tested(prioritised);
            std::unique_ptr<PreparedRows> next;
            const std::string name =
                std::string("add to streams") + (prioritised ? " with priorities" : "") + ", step " + std::to_string(before);
            die_at_every_point(
                name.c_str(),
                [&] {
                    tested.prepare(before);
                    next.reset(new PreparedRows(tested.next()));
                },
                [&](std::int64_t) {
                    Replay replay = tested.replay();
                    CHECK_EQ(next->add(replay), 3);
                },
                [&](Child &) {
                    tested.check_consistent();
                    tested.recover();
                });
        }
}

TEST("two writers of streams that die one after the other at any points leave nothing torn or uncounted") {
    TestedStreams tested(true);
    const auto add_one = [&](std::int64_t stream) {
        return [&, stream](std::int64_t) {
            Replay replay = tested.replay();
            std::vector<Environment> one = environments(1, stream, 2); // an episode of more than one step
            add_step(replay, one, tested.memory().newest.data());
        };
    };
    die_at_every_pair(
        "add to streams with priorities, then again", [&] { tested.prepare(4); }, add_one(4), add_one(5),
        [&] {
            tested.check_consistent(2);
            tested.recover();
        });
}

TEST("a writer that is stopped at any point for more than a round goes on without a torn, lost or uncounted row") {
    for (const bool prioritised : {false, true})
        for (const Then then : {Then::resume, Then::kill}) {
            TestedStreams tested(prioritised);
            std::unique_ptr<PreparedRows> next;
            stop_at_every_point(
                then == Then::kill ? "add to streams beside a writer, killed" : "add to streams beside a writer, resumed",
                [&] {
                    tested.prepare(4);
                    next.reset(new PreparedRows(tested.next()));
                },
                [&](std::int64_t) {
                    Replay replay = tested.replay();
                    CHECK_EQ(next->add(replay), 3);
                },
                [&](Child &) {
                    tested.survivor_round();
                    tested.survivor_round();
                },
                [&] {
                    Replay replay = tested.replay();
                    CHECK_EQ(find_fault(replay), "");
                    if (then == Then::resume)
                        CHECK_EQ(writing(replay), 0);
                    tested.recover();
                },
                then);
        }
}

// ------------------------------------------------------------------------------------------------------------ samplers

TEST("a sampler that dies at any point of sampling changes nothing for the others") {
    for (const bool prioritised : {false, true}) {
        TestedStreams tested(prioritised);
        die_at_every_point(
            prioritised ? "sample by priority" : "sample", [&] { tested.prepare(5); },
            [&](std::int64_t) {
                Replay replay = tested.replay();
                expect_right<2>(replay, 2, 1, 2);
            },
            [&](Child &) {
                tested.check_consistent();
                tested.recover();
            });
    }
}

namespace {

// A sampler is stopped at each point while a writer adds rows; the batch that it returns then is right.
template <class Sample> void check_stopped_sampler(const std::string &name, bool prioritised, Sample sample) {
    for (const int rows : {3, 14}) { // a few, and more than the replay has slots
        TestedStreams tested(prioritised);
        stop_at_every_point(
            (name + (prioritised ? " by priority" : "") + ", " + std::to_string(rows) + " rows meanwhile").c_str(),
            [&] { tested.prepare(5); },
            [&](std::int64_t) {
                Replay replay = tested.replay();
                sample(replay);
            },
            [&](Child &) {
                for (int i = 0; i < rows; ++i)
                    tested.survivor_step();
            },
            [&] { tested.check_consistent(); });
    }
}

} // namespace

TEST("a sampler that is stopped at any point returns whole rows of one episode, whatever was overwritten meanwhile") {
    for (const bool prioritised : {false, true}) {
        check_stopped_sampler("sample n steps of stacked frames", prioritised,
                              [](Replay &replay) { expect_right<2>(replay, 2, 1, 2); });
        check_stopped_sampler("sample sequences", prioritised, [](Replay &replay) { expect_right<1>(replay, 1, 3, 1); });
    }
}

TEST("a sampler of independent rows that is stopped at any point returns whole rows") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->unlinked(4);
    stop_at_every_point(
        "sample independent rows",
        [&] {
            memory->wipe(4);
            for (std::int64_t number = 1; number <= 4; ++number)
                add(replay, {make_row(7, number)});
        },
        [&](std::int64_t) {
            memlane::Rng rng = seeded_rng(3);
            Sampler sampler(replay, UnlinkedSample::spec(false), rng);
            std::vector<UnlinkedSample> drawn(3);
            CHECK(sampler.sample(3, bytes_of(drawn), 1, 1));
            for (const UnlinkedSample &row : drawn)
                CHECK(row.observation.intact() && row.observation.step == row.key);
        },
        [&](Child &) {
            for (std::int64_t number = 5; number <= 9; ++number)
                add(replay, {make_row(7, number)});
        },
        [&] { CHECK_EQ(find_fault(replay), ""); });
}

TEST("a process that dies at any point of setting priorities: each is set or not, and the sums are repaired by the next") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->unlinked(20, true);
    std::int64_t changed = 0;
    die_at_every_point(
        "set_priorities",
        [&] {
            memory->wipe(20, true);
            for (std::int64_t number = 1; number <= 20; ++number)
                add(replay, {make_row(7, number)});
        },
        [&](std::int64_t) {
            const std::array<std::int64_t, 2> keys{3, 18};
            const std::array<float, 2> priorities{5, 7};
            CHECK_EQ(replay.set_priorities(keys, priorities), 2);
        },
        [&](Child &) {
            const float third = replay.tree().priority(3), eighteenth = replay.tree().priority(18);
            CHECK((third == 1 || third == 5) && (eighteenth == 1 || eighteenth == 7));
            changed += third == 5;
            memlane::Rng rng = seeded_rng(1);
            Sampler sampler(replay, UnlinkedSample::spec(true), rng);
            std::vector<UnlinkedSample> drawn(16);
            CHECK(sampler.sample(16, bytes_of(drawn), 1, 1));
            for (const UnlinkedSample &row : drawn)
                CHECK(row.observation.intact() && row.weight > 0 && row.weight <= 1);
            const std::array<std::int64_t, 2> neighbours{4, 19};
            const std::array<float, 2> ones{1, 1};
            CHECK_EQ(replay.set_priorities(neighbours, ones), 2);
            CHECK_EQ(replay.tree().total(), sum_of_leaves(replay));
        });
    CHECK(changed > 2);
}

// -------------------------------------------------------------------------------------------------------------- saving

namespace {

// What `Replay.open` checks before it accepts a file, and that no row in it is torn.
void check_loads(Replay &file) {
    CHECK(file.counters_plausible());
    CHECK_EQ(file.first_implausible(), -1);
    CHECK_EQ(find_fault(file), "");
    CHECK(file.size() >= complete(file) && file.size() <= complete(file) + writing(file));
}

void check_saved(Replay &replay, Replay &file) {
    check_loads(file);
    CHECK_EQ(file.size(), replay.size());
    for (std::int64_t slot = 0; slot < replay.capacity(); ++slot) {
        CHECK_EQ(see(file.head(slot).state), see(replay.head(slot).state));
        CHECK_EQ(see(file.head(slot).next), see(replay.head(slot).next));
        CHECK_EQ(std::memcmp(file.payload(slot), replay.payload(slot), sizeof(Row)), 0);
    }
    CHECK_EQ(see(file.control().reserved.last), see(replay.control().reserved.last));
    CHECK_EQ(see(file.control().added.value), see(replay.control().added.value));
    CHECK_EQ(file.tree().total(), replay.tree().total());
}

struct TestedFile {
    Shared<ReplayMemory> memory;
    Replay replay() const { return memory->replay(TestedStreams::capacity, true); }
    void prepare() const { memory->wipe(TestedStreams::capacity, true); }
};

} // namespace

TEST("a process that dies at any point of a save leaves a file that can be loaded, and the next save completes it") {
    for (const bool again : {false, true}) {
        TestedStreams tested(true);
        const TestedFile tested_file;
        die_at_every_point(
            again ? "save again" : "save",
            [&] {
                tested.prepare(3);
                tested_file.prepare();
                Replay replay = tested.replay(), file = tested_file.replay();
                if (again)
                    replay.save_into(file);
                tested.step();
                tested.step();
            },
            [&](std::int64_t) {
                Replay replay = tested.replay(), file = tested_file.replay();
                CHECK(replay.save_into(file) > 0);
            },
            [&](Child &) {
                Replay replay = tested.replay(), file = tested_file.replay();
                check_loads(file);
                tested.step();
                replay.save_into(file);
                check_saved(replay, file);
            });
    }
}

TEST("a process that is stopped at any point of a save beside a writer saves no torn row") {
    TestedStreams tested(true);
    const TestedFile tested_file;
    stop_at_every_point(
        "save beside a writer",
        [&] {
            tested.prepare(3);
            tested_file.prepare();
            Replay replay = tested.replay(), file = tested_file.replay();
            replay.save_into(file);
            tested.step();
        },
        [&](std::int64_t) {
            Replay replay = tested.replay(), file = tested_file.replay();
            replay.save_into(file);
        },
        [&](Child &) {
            for (int i = 0; i < 7; ++i)
                tested.survivor_step();
        },
        [&] {
            Replay replay = tested.replay(), file = tested_file.replay();
            check_loads(file);
            replay.save_into(file);
            check_saved(replay, file);
        });
}

TEST("what a writer left when it died at any point is saved as a file that can be loaded and goes on as a replay") {
    TestedStreams tested(true);
    const TestedFile tested_file;
    std::unique_ptr<PreparedRows> next;
    die_at_every_point(
        "add, then a save by another process",
        [&] {
            tested.prepare(4);
            tested_file.prepare();
            next.reset(new PreparedRows(tested.next()));
        },
        [&](std::int64_t) {
            Replay replay = tested.replay();
            next->add(replay);
        },
        [&](Child &) {
            Replay replay = tested.replay(), file = tested_file.replay();
            replay.save_into(file);
            check_loads(file);
            CHECK_EQ(writing(file), 0);
            std::vector<Environment> ours = environments(1, 3);
            std::array<std::int64_t, 8> newest{};
            for (std::int64_t i = 0; i < TestedStreams::capacity; ++i)
                CHECK_EQ(add_step(file, ours, newest.data()), 1);
            CHECK_EQ(find_fault(file), "");
            expect_right<2>(file, 2, 1, 8);
        });
}

// ------------------------------------------------------------------------------------------------------------- limiter

TEST("a process that dies at any point of being admitted: one side or the other is admitted afterwards, for ever") {
    constexpr Limit limit{.ratio = 2, .min_size = 2, .error_buffer = 4};
    Shared<ReplayMemory> memory;
    Replay replay = memory->unlinked(8, false, limit);
    for (const Side side : {Side::writers, Side::samplers}) {
        const auto be_admitted = [&](std::int64_t) {
            Spin spin(0);
            if (replay.wait_admitted(side, 1, at_once, {}, spin).end == WaitEnd::reached && side == Side::samplers)
                replay.refund_samples(1);
        };
        die_at_every_pair(
            side == Side::writers ? "admit inserts, twice" : "admit samples, twice",
            [&] {
                memory->wipe(8);
                for (std::int64_t number = 1; number <= 3; ++number) {
                    CHECK(replay.admit_inserts(1));
                    add(replay, {make_row(7, number)});
                }
            },
            be_admitted, be_admitted,
            [&] {
                const ReplayControl &control = replay.control();
                CHECK(see(control.admitted.inserts) >= 3 && see(control.admitted.inserts) <= 5);
                CHECK(see(control.admitted.samples) >= 0 && see(control.admitted.samples) <= 2);
                for (int i = 0; i < 50; ++i)
                    CHECK(replay.admit_inserts(1) || replay.admit_samples(1));
                // Neither side runs away: the samples that are due stay within the buffer.
                const double due = static_cast<double>(see(control.admitted.inserts)) * limit.ratio -
                                   static_cast<double>(see(control.admitted.samples));
                CHECK(std::abs(due - static_cast<double>(limit.min_size) * limit.ratio) <= limit.error_buffer);
            });
    }
}
