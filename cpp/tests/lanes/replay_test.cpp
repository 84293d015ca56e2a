#include "lanes/replay.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <thread>
#include <vector>

#include "support/check.hpp"
#include "os/process.hpp"
#include "support/processes.hpp"
#include "support/replay_fixture.hpp"
#include "support/single_steps.hpp"

using namespace memlane;

namespace {

std::int64_t number_in(Replay &replay, std::int64_t slot) { return row_detail(see(replay.head(slot).state)); }
std::int64_t next_of(Replay &replay, std::int64_t sequence) { return see(replay.head(replay.slot_of(sequence)).next); }
std::int64_t previous_of(Replay &replay, std::int64_t sequence) {
    return see(replay.head(replay.slot_of(sequence)).previous);
}

} // namespace

// ------------------------------------------------------------------------------------------------------ one process

TEST("rows get numbers in the order in which they come, and the newest overwrite the oldest") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(5);
    for (std::int64_t number = 1; number <= 17; ++number) {
        CHECK_EQ(add(replay, {plain(0, number)}), 1);
        CHECK_EQ(see(replay.head(number % 5).state), row_word(RowState::complete, number));
        CHECK_EQ(replay.size(), std::min<std::int64_t>(number, 5));
    }
    CHECK_EQ(add(replay, {plain(0, 18), plain(0, 19), plain(0, 20)}), 3);
    for (std::int64_t slot = 0; slot < 5; ++slot)
        CHECK_EQ(number_in(replay, slot), slot == 0 ? 20 : 15 + slot);
    CHECK_EQ(see(replay.control().added.value), 20);
    CHECK_EQ(see(replay.control().lost.evicted), 15);
    CHECK_EQ(see(replay.control().lost.avoided), 0);
    CHECK_EQ(fault(replay), "");
    CHECK_EQ(replay.first_implausible(), -1);
}

TEST("rows of a stream are linked, an episode ends at its tail or at itself, and rows to skip leave no trace") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(100);
    std::int64_t *newest = memory->newest.data();
    Row first = plain(0, 0), second = plain(0, 1), last = plain(0, 2), final = plain(0, 3);
    last.truncated = 1;
    CHECK_EQ(add(replay, {first}, newest), 1);
    CHECK_EQ(next_of(replay, 1), -1);
    CHECK_EQ(add(replay, {second}, newest), 1);
    CHECK_EQ(next_of(replay, 1), 2);
    CHECK_EQ(previous_of(replay, 2), 1);
    CHECK_EQ(add(replay, {last}, newest, {final}, {1}), 1);
    CHECK_EQ(next_of(replay, 2), 3);
    CHECK_EQ(next_of(replay, 3), 4);
    CHECK_EQ(see(replay.head(4).state), row_word(RowState::tail, 4));
    CHECK_EQ(previous_of(replay, 4), 3);
    CHECK_EQ(newest[0], 0);
    Row bare = plain(0, 0);
    bare.terminated = 1;
    CHECK_EQ(add(replay, {bare}, newest), 1); // a new episode of one step, without a last observation
    CHECK_EQ(previous_of(replay, 5), 0);
    CHECK_EQ(next_of(replay, 5), 5);
    CHECK_EQ(see(replay.control().added.value), 4);
    CHECK_EQ(replay.first_implausible(), -1);

    const std::array<std::uint8_t, 2> skip{1, 1};
    Addition nothing{};
    nothing.count = 2;
    nothing.skip = skip;
    CHECK_EQ(replay.add(nothing), 0);
    CHECK_EQ(see(replay.control().reserved.last), 5);
}

TEST("streams of any length in a replay of any size are linked step by step") {
    for (const std::int64_t capacity : {2, 3, 7, 16, 60, 250}) {
        const auto memory = std::make_unique<ReplayMemoryFor<256>>();
        Replay replay = memory->replay(capacity, capacity % 2 == 0);
        std::vector<Environment> all = environments(std::clamp<std::int64_t>(capacity / 2, 1, 5));
        std::int64_t added = 0;
        for (int i = 0; i < check::times(400); ++i) {
            added += step(replay, all, memory->newest.data());
            if (i % 16 == 0) {
                CHECK_EQ(fault(replay), "");
                CHECK_EQ(replay.first_implausible(), -1);
            }
        }
        CHECK_EQ(see(replay.control().added.value), added);
        CHECK_EQ(replay.size(), in_state(replay, RowState::complete));
        CHECK_EQ(see(replay.control().lost.avoided), 0);
    }
}

TEST("a link that comes after its row was overwritten changes nothing") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(4, true);
    std::int64_t *newest = memory->newest.data();
    add(replay, {plain(0, 0)}, newest); // row 1, waits for the next
    for (std::int64_t number = 0; number < 4; ++number)
        add(replay, {plain(1, number)}, newest); // rows 2 to 5; 5 lies where 1 was
    add(replay, {plain(0, 1)}, newest);
    CHECK_EQ(number_in(replay, 1), 5);
    CHECK_EQ(next_of(replay, 5), -5);
    CHECK_EQ(replay.tree().priority(1), 0.0F);
    CHECK_EQ(previous_of(replay, 6), 1); // which is gone: who stacks finds it missing, not another
    CHECK_EQ(fault(replay), "");
}

TEST("a priority counts only for the row that it was made for") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(8, true);
    for (std::int64_t number = 1; number <= 12; ++number)
        add(replay, {plain(0, number)});
    CHECK_EQ(replay.tree().total(), 8.0);
    const std::array<std::int64_t, 4> keys{3, 5, 11, 12}; // 3 was overwritten by 11
    const std::array<float, 4> priorities{100, 2, 3, 4};
    CHECK_EQ(replay.set_priorities(keys, priorities), 3);
    CHECK_EQ(see(replay.control().lost.stale), 1);
    CHECK_EQ(replay.tree().total(), 5.0 + 2 + 3 + 4);
    CHECK_EQ(replay.control().priority.highest.load(), 4.0F);
    add(replay, {plain(0, 13)}); // in place of 5; as likely as the likeliest
    CHECK_EQ(replay.tree().priority(5), 4.0F);
    CHECK_EQ(replay.tree().total(), 5.0 + 4 + 3 + 4);
}

TEST("a row whose next observation is not there yet is worth nothing, and something as soon as it is") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(8, true);
    add(replay, {plain(0, 0)}, memory->newest.data());
    CHECK_EQ(replay.tree().total(), 0.0);
    add(replay, {plain(0, 1)}, memory->newest.data());
    CHECK_EQ(replay.tree().priority(1), 1.0F);
    CHECK_EQ(replay.tree().total(), 1.0);
}

// ------------------------------------------------------------------------------------------- the living and the dead

TEST("a slot that a living writer holds is left alone, and one of a dead writer is taken over and counted") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(4, true);
    Shared<Word> told;
    Child dead([&] { publish(*told, this_process()); });
    CHECK_EQ(dead.join(), 0);
    const std::int64_t other = see(*told);
    CHECK(!process_alive(other));
    replay.head(2).state = row_word(RowState::writing, this_process());
    for (std::int64_t number = 1; number <= 7; ++number)
        CHECK_EQ(add(replay, {plain(0, number)}), 1);
    CHECK_EQ(see(replay.head(2).state), row_word(RowState::writing, this_process()));
    CHECK_EQ(see(replay.control().lost.avoided), 2);
    CHECK_EQ(see(replay.control().lost.abandoned), 0);
    replay.head(2).state = row_word(RowState::writing, other);
    for (std::int64_t number = 8; number <= 11; ++number)
        CHECK_EQ(add(replay, {plain(0, number)}), 1);
    CHECK_EQ(see(replay.control().lost.abandoned), 1);
    CHECK_EQ(see(replay.control().lost.avoided), 2);
    CHECK_EQ(in_state(replay, RowState::complete), 4);
    CHECK_EQ(fault(replay), "");
}

TEST("an add that finds every slot held ends, says how far it came, and gives back what it held") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(4);
    for (std::int64_t slot = 1; slot < 4; ++slot)
        replay.head(slot).state = row_word(RowState::writing, this_process());
    CHECK_EQ(add(replay, {plain(0, 1), plain(0, 2)}, memory->newest.data()), 2); // the second overwrites the first: slot 0 is all there is
    CHECK_EQ(fault(replay), "");
    Row last = plain(0, 3);
    last.truncated = 1;
    CHECK_EQ(add(replay, {last}, memory->newest.data(), {plain(0, 4)}, {1}), 0); // for the tail there is none left
    CHECK_EQ(see(replay.head(0).state), row_word(RowState::empty));
    replay.head(0).state = row_word(RowState::writing, this_process());
    CHECK_EQ(add(replay, {plain(0, 1)}, memory->newest.data()), 0);
    CHECK_EQ(see(replay.control().added.value), 2);
}

#if defined(MEMLANE_STEPPED)

namespace {

// Three steps of two streams, with an end in between and a tail: all that `add` does.
void three_steps(Replay &replay, std::int64_t *newest, std::int64_t first, std::int64_t episode) {
    std::vector<Environment> two{{first, episode, 0}, {first + 1, episode + 1, 0}};
    newest[first] = newest[first + 1] = 0; // as a new writer of these streams does
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(step(replay, two, newest), 2);
}

} // namespace

// A writer dies after any of its stores.
//   its last row is missing, one or two slots are found abandoned, others go on    acceptable
//   a torn row, a link to another stream, a slot that never comes back             FORBIDDEN
TEST("a writer killed at any change costs its unfinished rows, and its slots come back") {
    for (const bool prioritised : {false, true}) {
        Shared<ReplayMemory> memory;
        constexpr std::int64_t capacity = 12;
        Replay replay = memory->replay(capacity, prioritised);
        std::vector<Environment> ending{{2, 3, length_of(3) - 1}};
        const Prepared last = next_step(ending, memory->newest.data()); // of its episode, with a tail
        after_every_change(
            *memory,
            [&] {
                memory->wipe(capacity, prioritised);
                three_steps(replay, memory->newest.data(), 0, 3);
            },
            [&](std::int64_t) { last.add(replay); },
            [&](Stepped &writer, int) {
                writer.kill();
                CHECK_EQ(fault(replay), "");
                CHECK_EQ(replay.first_implausible(), -1);
                const std::int64_t held = in_state(replay, RowState::writing);
                CHECK(held <= 2);
                for (int i = 0; i < 5; ++i)
                    three_steps(replay, memory->newest.data(), 2, 6);
                CHECK_EQ(fault(replay), "");
                CHECK_EQ(replay.first_implausible(), -1);
                CHECK_EQ(see(replay.control().lost.abandoned), held);
                CHECK_EQ(in_state(replay, RowState::writing), 0);
                CHECK_EQ(see(replay.control().lost.avoided), 0);
                if (prioritised) {
                    const double total = replay.tree().total();
                    replay.tree().refresh_all();
                    CHECK_EQ(replay.tree().total(), total);
                }
            });
    }
}

// A writer is held at an instruction while another goes round twice; then it goes on.
//   the others' rows whole, all counted; the held one's row there, or already overwritten   acceptable
// a writer that was held between its reservation and its claim takes the slot with its old number: a
//   NEWER row, of a later round, is overwritten by an older one, and what is stored there now is below the window of numbers
//   that are drawn alike, so nobody ever draws it. A batch of 1000 rows held at its begin does so with 1000 rows. Cure: in
//   Claims::claim, a number at or below `reserved.last - capacity` (or below the one that lies in the slot) is left and
//   another is taken.
TEST("a writer held at any instruction stops nobody, and what it adds afterwards overwrites no newer row") {
    Shared<ReplayMemory> memory;
    constexpr std::int64_t capacity = 4;
    Replay replay = memory->loose(capacity);
    const auto prepare = [&] { memory->wipe(capacity); };
    const Prepared one({plain(7, 1)}, nullptr, {}, {}, 0);
    int overwritten = 0, instructions = 0;
    at_every_instruction(
        prepare, [&](std::int64_t) { one.add(replay); },
        [&](Stepped &writer) {
            for (std::int64_t number = 1; number <= 2 * capacity; ++number)
                CHECK_EQ(add(replay, {plain(0, number)}), 1);
            CHECK_EQ(fault(replay), "");
            CHECK(in_state(replay, RowState::writing) <= 1);
            std::array<std::int64_t, capacity> before{};
            for (std::int64_t slot = 0; slot < capacity; ++slot)
                if (row_state(see(replay.head(slot).state)) == RowState::complete)
                    before[static_cast<std::size_t>(slot)] = number_in(replay, slot);
            CHECK_EQ(writer.finish(), 0);
            CHECK_EQ(fault(replay), "");
            CHECK_EQ(see(replay.control().added.value), 2 * capacity + 1);
            CHECK_EQ(replay.size(), capacity);
            CHECK_EQ(in_state(replay, RowState::complete), capacity);
            ++instructions;
            for (std::int64_t slot = 0; slot < capacity; ++slot)
                overwritten += number_in(replay, slot) < before[static_cast<std::size_t>(slot)];
        });
    CHECK(instructions > 50);
    CHECK_EQ(overwritten, 0); // how often a newer row fell to an older one
}

TEST("a writer held after any change of a prioritised add leaves no priority out of date when it goes on") {
    Shared<ReplayMemory> memory;
    constexpr std::int64_t capacity = 20;
    Replay replay = memory->replay(capacity, true);
    std::vector<Environment> ending{{2, 3, length_of(3) - 1}};
    const Prepared last = next_step(ending, memory->newest.data());
    after_every_change(
        *memory,
        [&] {
            memory->wipe(capacity, true);
            three_steps(replay, memory->newest.data(), 0, 3);
        },
        [&](std::int64_t) { last.add(replay); },
        [&](Stepped &writer, int) {
            for (int i = 0; i < 8; ++i)
                three_steps(replay, memory->newest.data(), 4, 6);
            CHECK_EQ(writer.finish(), 0);
            CHECK_EQ(fault(replay), "");
            const double total = replay.tree().total();
            replay.tree().refresh_all();
            CHECK_EQ(replay.tree().total(), total);
            for (std::int64_t slot = 0; slot < capacity; ++slot)
                if (row_state(see(replay.head(slot).state)) == RowState::complete)
                    CHECK_EQ(replay.tree().generation(slot), replay.generation_of(number_in(replay, slot)));
        });
}

// the first save, or one after links were added, that is killed in the middle leaves rows whose `next` is
// above the file's last number (only the row's own number is carried before the row), which first_implausible then calls
// damage: the file cannot be opened. Cure: carry control_->reserved.last, read after the row's links, before each row and
// before each link that is stored.
TEST("a save killed at any change leaves what can be loaded") {
    Shared<ReplayMemory> memory, file;
    constexpr std::int64_t capacity = 9;
    Replay replay = memory->replay(capacity, true), saved = file->replay(capacity, true);
    int damaged = 0;
    for (const bool again : {false, true}) { // into a new file; over what was saved before
        after_every_change(
            *file,
            [&] {
                memory->wipe(capacity, true);
                file->wipe(capacity, true);
                std::vector<Environment> two = environments(2, 0, 6);
                for (int i = 0; i < 2; ++i)
                    step(replay, two, memory->newest.data());
                if (again)
                    replay.save_into(saved);
                for (int i = 0; i < 2; ++i)
                    step(replay, two, memory->newest.data());
            },
            [&](std::int64_t) { replay.save_into(saved); },
            [&](Stepped &saver, int) {
                saver.kill();
                damaged += saved.first_implausible() >= 0;
                CHECK_EQ(fault(saved), "");
                CHECK(in_state(saved, RowState::writing) <= 1);
                // And the next one completes it.
                replay.save_into(saved);
                CHECK_EQ(saved.first_implausible(), -1);
                CHECK_EQ(in_state(saved, RowState::complete), in_state(replay, RowState::complete));
                CHECK_EQ(saved.tree().total(), replay.tree().total());
                CHECK_EQ(replay.save_into(saved), 0);
            });
    }
    CHECK_EQ(damaged, 0); // times that the file could not have been opened
}

#endif

// ---------------------------------------------------------------------------------------------------------- limiter

// Also where `least` is not a multiple of the rows of an add: until there is enough to sample from, nobody may be held back.
TEST("a limiter lets neither side get ahead by more than the slack, and never both wait") {
    ::Rng dice(4);
    for (int round = 0; round < check::times(300); ++round) {
        const auto memory = std::make_unique<ReplayMemory>();
        const std::int64_t insert = dice.between(1, 8), sample = dice.between(1, 32), least = dice.between(1, 40);
        const double ratio = static_cast<double>(dice.between(1, 64)) / 8;
        const double slack = (static_cast<double>(insert) * ratio + static_cast<double>(sample)) / 2;
        Replay replay = memory->loose(64, false, {ratio, least, slack});
        std::int64_t added = 0, sampled = 0;
        for (int turn = 0; turn < 200; ++turn) {
            const bool writer_first = dice.between(0, 1) == 0;
            bool moved = false;
            for (const bool writer : {writer_first, !writer_first}) {
                if (moved)
                    break;
                moved = writer ? replay.admit_inserts(insert) : replay.admit_samples(sample);
                if (moved && writer)
                    signal_add(replay.control().added, insert), added += insert;
                else if (moved)
                    sampled += sample;
            }
            CHECK(moved);
            const double ahead = static_cast<double>(added - least) * ratio - static_cast<double>(sampled);
            // The first sample is due only when there are enough; by then writers may have come a whole add further.
            CHECK(added < least + insert || ahead <= slack);
            CHECK(sampled == 0 || (added >= least && ahead >= -slack));
        }
        CHECK(replay.slack_needed(insert, sample) <= slack);
    }
}

TEST("several processes at one limiter keep to it together") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->loose(64, false, {2, 10, 40});
    Shared<std::atomic<bool>> over;
    Shared<std::atomic<int>> beyond;
    std::list<Child> children;
    for (int i = 0; i < 4; ++i)
        children.emplace_back([&, i] {
            while (!*over) {
                if (i % 2 == 0 && replay.admit_inserts(3))
                    signal_add(replay.control().added, 3);
                else if (i % 2 == 1)
                    replay.admit_samples(5);
                sched_yield();
            }
        });
    for (const std::int64_t end = now_ns() + 150 * ms; now_ns() < end;) {
        // Inserts first: what is sampled between the two looks makes them look less far ahead, never further.
        const std::int64_t inserts = see(replay.control().admitted.inserts), samples = see(replay.control().admitted.samples);
        *beyond += inserts > 10 && 2 * inserts - samples > 2 * 10 + 40;
    }
    *over = true;
    for (Child &child : children)
        CHECK_EQ(child.join(), 0);
    CHECK_EQ(beyond->load(), 0);
    CHECK(see(replay.control().admitted.inserts) > 100);
}

// a writer that is killed between its admission and its `added` (or whose add ends early, every slot held)
// stays on the account of inserts, while samplers are let in by `added`. With as little slack as slack_needed() asks for, that
// is a deadlock: writers wait for samples, samplers wait for `added` to reach `least`, for ever. Cure: in
// admit_inserts, hold writers back only when `added` (not the account of inserts) has reached `least`.
TEST("writers killed after the limiter let them in do not leave both sides waiting for ever") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->loose(64, false, {1, 10, 8});
    CHECK(replay.admit_inserts(8)); // and killed before anything was added
    bool sampled = false;
    for (int turn = 0; turn < 20 && !sampled; ++turn) {
        bool moved = replay.admit_inserts(8);
        if (moved)
            add(replay, std::vector<Row>(8, plain(0, turn)));
        sampled = replay.admit_samples(8);
        CHECK(moved || sampled);
    }
    CHECK(replay.slack_needed(8, 8) <= 8);
    CHECK(sampled);
}

// ----------------------------------------------------------------------------------------------------------- saving

TEST("what is saved is what was there, and a second save writes what changed only") {
    for (const bool prioritised : {false, true}) {
        const auto memory = std::make_unique<ReplayMemory>(), file = std::make_unique<ReplayMemory>();
        constexpr std::int64_t capacity = 50;
        Replay replay = memory->replay(capacity, prioritised), saved = file->replay(capacity, prioritised);
        std::vector<Environment> all = environments(3);
        for (int i = 0; i < 30; ++i) {
            step(replay, all, memory->newest.data());
            const std::int64_t changed = replay.save_into(saved);
            CHECK(changed >= 3 && changed <= 3 + 3 + 3); // rows, links, tails
            CHECK_EQ(replay.save_into(saved), 0);
            CHECK_EQ(saved.first_implausible(), -1);
            CHECK_EQ(fault(saved), "");
            CHECK(std::memcmp(memory->rows.data(), file->rows.data(), ReplayMemory::stride_bytes * capacity) == 0);
            CHECK_EQ(saved.size(), replay.size());
            if (prioritised)
                CHECK_EQ(saved.tree().total(), replay.tree().total());
        }
    }
}

// Race: saves beside writers.
//   a row of the copy is whole, at its number, and its links lead to its neighbours   acceptable
//   a torn row, a link elsewhere                                                      FORBIDDEN
// Once the leaf was read after the row, so now and then the file gets a row with the
// priority and the generation of its successor. As the generation makes the number that is drawn, such a row is never
// found, and each draw of it is lost. Cure: read the leaf once; where its generation is not that of the saved number, 0 and
// the number's own generation.
TEST("a save beside busy writers holds whole rows with their own links only") {
    Shared<ReplayMemory> memory, file;
    constexpr std::int64_t capacity = 64;
    Replay replay = memory->replay(capacity, true), saved = file->replay(capacity, true);
    Shared<std::atomic<bool>> over;
    int foreign = 0;
    std::list<Child> writers;
    for (std::int64_t writer = 0; writer < 2; ++writer)
        writers.emplace_back([&, writer] {
            std::vector<Environment> mine = environments(3, 3 * writer);
            while (!*over)
                CHECK_EQ(step(replay, mine, memory->newest.data()), 3);
        });
    await([&] { return see(replay.control().added.value) > 2 * capacity; });
    for (int i = 0; i < check::times(4000); ++i) {
        replay.save_into(saved);
        CHECK_EQ(fault(saved), "");
        CHECK_EQ(saved.first_implausible(), -1);
        for (std::int64_t slot = 0; slot < capacity; ++slot)
            foreign += saved.tree().priority(slot) > 0 &&
                       (row_state(see(saved.head(slot).state)) != RowState::complete ||
                        saved.tree().generation(slot) != saved.generation_of(number_in(saved, slot)));
    }
    CHECK_EQ(foreign, 0); // priorities of rows that the file does not have
    *over = true;
    for (Child &writer : writers)
        CHECK_EQ(writer.join(), 0);
    replay.save_into(saved);
    CHECK_EQ(in_state(saved, RowState::complete), in_state(replay, RowState::complete));
}

// `last` is read once, before the rows, and a row's links are read after its state without a second look at
// it, so a file in which others write (Replay.open is how a second process joins a replay in a file) is called damaged now and
// then. The same for counters_plausible, which reads the last number before the count of those added. Cure: before a complaint,
// ask unchanged(row.state, word), and compare with reserved.last as it is then; read `added` before `last`.
TEST("rows that others write meanwhile are never taken for damage") {
    Shared<ReplayMemory> memory;
    Replay replay = memory->replay(64);
    Shared<std::atomic<bool>> over;
    Child writer([&] {
        std::vector<Environment> mine = environments(3);
        while (!*over)
            CHECK_EQ(step(replay, mine, memory->newest.data()), 3);
    });
    await([&] { return see(replay.control().added.value) > 200; });
    int complaints = 0;
    for (int i = 0; i < check::times(60'000); ++i)
        complaints += replay.first_implausible() >= 0 || !replay.counters_plausible();
    *over = true;
    CHECK_EQ(writer.join(), 0);
    CHECK_EQ(complaints, 0);
}

TEST("numbers that no writer leaves are found") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(10, true);
    const auto spoilt = [&](auto spoil) {
        memory->wipe(10, true);
        for (int i = 0; i < 6; ++i)
            add(replay, {plain(0, i)}, memory->newest.data());
        CHECK_EQ(replay.first_implausible(), -1);
        spoil();
        return replay.first_implausible();
    };
    const float infinite = std::numeric_limits<float>::infinity(), strange = std::numeric_limits<float>::quiet_NaN();
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::complete, 4); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::complete, 13); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::complete, -7); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::tail, 0); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::empty, 1); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).state = row_word(RowState::writing, -1); }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).next = 2; }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).next = -2; }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).next = 7; }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).previous = -1; }), 3);
    CHECK_EQ(spoilt([&] { replay.head(3).previous = 1'000; }), 3);
    CHECK_EQ(spoilt([&] { replay.tree().renew(7, 0, infinite); }), 7);
    CHECK_EQ(spoilt([&] { replay.tree().renew(7, 0, strange); }), 7);
    CHECK_EQ(spoilt([&] { replay.tree().renew(7, 0, -1); }), 7);
    CHECK_EQ(spoilt([&] { replay.control().reserved.last = 5; }), 5);
}

TEST("counters that no writer leaves are found") {
    const auto memory = std::make_unique<ReplayMemory>();
    Replay replay = memory->replay(10, true);
    const auto spoilt = [&](auto spoil) {
        memory->wipe(10, true);
        for (int i = 0; i < 6; ++i)
            add(replay, {plain(0, i)}, memory->newest.data());
        CHECK(replay.counters_plausible());
        spoil();
        return !replay.counters_plausible();
    };
    constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max() - 3; // the next numbers would be negative
    CHECK(spoilt([&] { replay.control().reserved.last = -100; }));
    CHECK(spoilt([&] { replay.control().reserved.last = huge; }));
    CHECK(spoilt([&] { replay.control().reserved.last = 5; }));
    CHECK(spoilt([&] { replay.control().added.value = -1; }));
    CHECK(spoilt([&] { replay.control().admitted.inserts = huge; }));
    CHECK(spoilt([&] { replay.control().admitted.samples = -1; }));
    CHECK(spoilt([&] { replay.control().lost.evicted = -1; }));
    CHECK(spoilt([&] { replay.control().priority.highest = std::numeric_limits<float>::quiet_NaN(); }));
    CHECK(spoilt([&] { replay.control().priority.highest = std::numeric_limits<float>::infinity(); }));
    CHECK(spoilt([&] { replay.control().priority.highest = -1; }));
}
