// Model checks of lanes/replay.hpp, lanes/sampler.hpp and lanes/sum_tree.hpp. A sampler copies rows that a writer may be
// overwriting: the copy reads any values that the memory model allows, and a torn one must be refused.

#include <array>

#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"
#include "os/clock.hpp"
#include "scenario.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

// The row of a step. Its flags have a word each, because the explorer knows no smaller words than the writer's.
struct Row {
    std::int64_t first, second; // the observation: `second` follows from `first`
    double reward;
    std::uint8_t terminated, padding[7], truncated, more_padding[7];

    static std::int64_t second_of(std::int64_t first) { return first * 31 + 7; }
    static Row of(std::int64_t step, bool ends = false) {
        return {step, second_of(step), static_cast<double>(step), ends, {}, 0, {}};
    }
    bool is(std::int64_t step) const { return first == step && second == second_of(step); }
    bool whole() const { return second == second_of(first); }
};
static_assert(sizeof(Row) == 40);

class SharedReplay {
  public:
    SharedReplay(std::int64_t capacity, bool linked, bool prioritised = false, Limit limit = {})
        : linked_(linked), stride_((head_bytes(linked) + sizeof(Row))), control_(shared_bytes(sizeof(ReplayControl))),
          stored_(shared_bytes(Replay::stored_bytes(capacity))),
          rows_(shared_bytes(static_cast<std::size_t>(capacity) * stride_)),
          tree_(prioritised ? shared_bytes(SumTree::bytes(capacity)) : nullptr),
          replay_(control_, stored_, rows_, tree_,
                  {.capacity = capacity,
                   .stride_bytes = stride_,
                   .linked = linked,
                   .fields = {{0, 16}, {16, 8}, {24, 1}, {32, 1}},
                   .transition = {1, 2, 3, true},
                   .limit = limit},
                  life_) {
        if (prioritised) {
            const std::size_t leaves = static_cast<std::size_t>((capacity + 15) / 16 * 16) * sizeof(Word);
            narrow_words(tree_ + leaves, SumTree::bytes(capacity) - leaves);
            replay_.control().priority.highest.store(1, std::memory_order_relaxed);
        }
        name_word(&replay_.control().reserved.last, "last sequence");
        name_word(&replay_.control().added.value, "added");
        for (std::int64_t slot = 0; slot < capacity; ++slot) {
            name_word(&replay_.head(slot).state, "state " + std::to_string(slot));
            if (linked) {
                name_word(&replay_.head(slot).next, "next " + std::to_string(slot));
                name_word(&replay_.head(slot).previous, "previous " + std::to_string(slot));
            }
            name_word(replay_.payload(slot), "row " + std::to_string(slot));
        }
    }

    Replay &replay() { return replay_; }

    // Adds one step of a stream. `newest` belongs to the stream; `final`: with a tail, the observation after the last step.
    std::int64_t add(std::int64_t step, std::int64_t *newest = nullptr, bool ends = false, bool final = false) {
        Row row = Row::of(step, ends), after = Row::of(step + 1);
        const auto field = [](Row &of, std::size_t offset, std::size_t bytes) {
            return Field{reinterpret_cast<std::byte *>(&of) + offset, sizeof(Row), bytes};
        };
        const std::array fields{field(row, 0, 16), field(row, 16, 8), field(row, 24, 1), field(row, 32, 1)};
        const std::array finals{field(after, 0, 16)};
        const std::array<std::size_t, 1> final_fields{0};
        const std::array<std::uint8_t, 1> has_final{final};
        const std::array<std::int64_t, 1> streams{0};
        AddRequest request{};
        request.count = 1;
        request.fields = fields;
        request.version = step;
        if (linked_) {
            request.newest = newest;
            request.streams = streams;
        }
        if (final) {
            request.finals = finals;
            request.final_fields = final_fields;
            request.has_final = has_final;
        }
        return replay_.add(request);
    }

    // While no thread runs: no row that is stored may be torn, and a link that leads to a stored row leads to the next step.
    void require_whole() {
        for (std::int64_t slot = 0; slot < replay_.capacity(); ++slot) {
            const std::int64_t word = see(replay_.head(slot).state);
            if (row_state(word) != RowState::complete && row_state(word) != RowState::tail)
                continue;
            const Row row = row_at(slot);
            require(row.whole(), "no stored row is torn");
            require(replay_.slot_of(row_detail(word)) == slot, "a row is in the slot of its sequence number");
            require(row_detail(word) <= see(replay_.control().reserved.last), "no row is beyond the last sequence number");
            if (!linked_ || row_state(word) == RowState::tail)
                continue;
            const std::int64_t next = see(replay_.head(slot).next);
            if (next > 0 && next != row_detail(word) && is_stored(next))
                require(row_at(replay_.slot_of(next)).is(row.first + 1), "a link leads to the next step");
        }
    }
    bool is_stored(std::int64_t sequence) {
        const std::int64_t word = see(replay_.head(replay_.slot_of(sequence)).state);
        return word == row_word(RowState::complete, sequence) || word == row_word(RowState::tail, sequence);
    }
    Row row_at(std::int64_t slot) {
        Row row{};
        model::copy(reinterpret_cast<std::byte *>(&row), replay_.payload(slot), 16);
        return row;
    }

  private:
    bool linked_;
    std::size_t stride_;
    std::byte *control_, *stored_, *rows_, *tree_;
    Life life_{-1};
    Replay replay_;
};

struct PlainBatch {
    std::int64_t first, second, key;
    // In one piece, which the sampler copies on its fast path, or in two.
    static SampleSpec spec(bool one_piece) {
        SampleSpec spec;
        spec.copies = {{0, 16, 0, 1, false}};
        if (!one_piece)
            spec.copies = {{0, 8, 0, 1, false}, {8, 8, 8, 1, false}};
        spec.row_bytes = sizeof(PlainBatch);
        spec.key = offsetof(PlainBatch, key);
        return spec;
    }
};

struct StepBatch {
    std::int64_t first, second, next_first, next_second, key, version;
    double reward;
    float discount;
    std::int32_t horizon;
    std::uint8_t terminated, truncated, valid, padding[5];
    static SampleSpec spec(int steps, int length) {
        SampleSpec spec;
        spec.copies = {{0, 16, 0, 1, false}};
        if (steps > 0)
            spec.copies.push_back({0, 16, offsetof(StepBatch, next_first), 1, true});
        spec.row_bytes = sizeof(StepBatch);
        spec.steps = steps;
        spec.length = length;
        if (steps > 0) {
            spec.reward = offsetof(StepBatch, reward);
            spec.discount = offsetof(StepBatch, discount);
            spec.horizon = offsetof(StepBatch, horizon);
            spec.terminated = offsetof(StepBatch, terminated);
            spec.truncated = offsetof(StepBatch, truncated);
        }
        spec.key = offsetof(StepBatch, key);
        spec.version = offsetof(StepBatch, version);
        spec.valid = offsetof(StepBatch, valid);
        return spec;
    }
    bool whole() const { return second == Row::second_of(first); }
    void require_step(int steps) const {
        require(whole(), "a drawn row is not torn");
        require(version == first, "the version is that of the row");
        if (steps == 0)
            return;
        require(next_second == Row::second_of(next_first), "a next observation is not torn");
        require(horizon >= 1 && horizon <= steps && next_first == first + horizon, "the next observation follows");
        double sum = 0;
        for (std::int64_t step = first; step < first + horizon; ++step)
            sum += static_cast<double>(step);
        require(reward == sum, "the reward is that of the steps");
    }
};

Rng rng_of(int seed) {
    Rng rng{};
    rng.seed(static_cast<std::uint64_t>(seed));
    return rng;
}

} // namespace

SCENARIO("a sampler beside a writer draws whole rows", BOUNDS(3, 2, 0), BOUNDS(4, 4, 0)) {
    SharedReplay shared(2, false);
    for (std::int64_t step = 1; step <= 2; ++step)
        shared.add(step);
    start("writer", [&] {
        for (std::int64_t step = 3; step <= 4; ++step)
            require(shared.add(step) == 1, "a single writer always finds a slot");
    });
    start("sampler", [&] {
        Rng rng = rng_of(pick(3));
        Sampler sampler(shared.replay(), PlainBatch::spec(true), rng);
        PlainBatch row{};
        if (sampler.sample(1, reinterpret_cast<std::byte *>(&row), 0, 0)) {
            require(row.second == Row::second_of(row.first), "a drawn row is not torn");
            require(row.first == row.key, "the key is that of the row");
        }
    });
    join();
    shared.require_whole();
    require(shared.replay().size() == 2 && see(shared.replay().control().lost.evicted) == 2, "rows are counted");
}

SCENARIO("a sampler by priority beside a writer draws whole rows", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedReplay shared(2, false, true);
    shared.add(1);
    shared.add(2);
    start("writer", [&] { shared.add(3); });
    start("sampler", [&] {
        Rng rng = rng_of(pick(3));
        Sampler sampler(shared.replay(), PlainBatch::spec(false), rng);
        PlainBatch row{};
        if (sampler.sample(1, reinterpret_cast<std::byte *>(&row), 0, 0)) {
            require(row.second == Row::second_of(row.first), "a drawn row is not torn");
            require(row.first == row.key, "the key is that of the row");
        }
    });
    join();
    shared.require_whole();
    require(shared.replay().tree().total() == 2, "each row has the priority of a new one");
}

SCENARIO("a sampler of one-step transitions beside their writer", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedReplay shared(4, true);
    std::int64_t newest = 0;
    for (std::int64_t step = 1; step <= 3; ++step)
        shared.add(step, &newest);
    start("writer", [&] {
        shared.add(4, &newest);
        shared.add(5, &newest);
    });
    start("sampler", [&] {
        Rng rng = rng_of(pick(4));
        Sampler sampler(shared.replay(), StepBatch::spec(1, 1), rng);
        StepBatch row{};
        if (sampler.sample(1, reinterpret_cast<std::byte *>(&row), 0, 0))
            row.require_step(1);
    });
    join();
    shared.require_whole();
}

SCENARIO("the first transition of a stream is drawn after its row and its successor", BOUNDS(3, 2, 0), BOUNDS(4, 3, 0)) {
    SharedReplay shared(4, true);
    std::int64_t newest = 0;
    shared.add(1, &newest);
    start("writer", [&] { shared.add(2, &newest); });
    start("sampler", [&] {
        Rng rng = rng_of(1);
        Sampler sampler(shared.replay(), StepBatch::spec(1, 1), rng);
        StepBatch row{};
        const std::int64_t next = see(shared.replay().head(1).next);
        if (next <= 0)
            return;
        require(shared.is_stored(next), "a link leads to a row that is stored");
        require(sampler.sample(1, reinterpret_cast<std::byte *>(&row), 0, 0), "a row that has a successor can be drawn");
        row.require_step(1);
    });
    join();
    shared.require_whole();
}

SCENARIO("an episode's last transition is drawn with its final observation", BOUNDS(2, 2, 0), BOUNDS(3, 2, 0)) {
    SharedReplay shared(4, true);
    std::int64_t newest = 0;
    shared.add(1, &newest);
    shared.add(2, &newest);
    start("writer", [&] {
        shared.add(3, &newest, true, true); // rows 3 and 4, its tail
    });
    start("sampler", [&] {
        Rng rng = rng_of(pick(4));
        Sampler sampler(shared.replay(), StepBatch::spec(2, 1), rng);
        StepBatch row{};
        if (sampler.sample(1, reinterpret_cast<std::byte *>(&row), 0, 0))
            row.require_step(2);
    });
    join();
    shared.require_whole();
}

SCENARIO("a sampler of sequences beside their writer", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedReplay shared(3, true);
    std::int64_t newest = 0;
    for (std::int64_t step = 1; step <= 3; ++step)
        shared.add(step, &newest);
    start("writer", [&] {
        shared.add(4, &newest, true); // in the slot of row 1, with another flag
        shared.add(5, &newest);
    });
    start("sampler", [&] {
        Rng rng = rng_of(pick(3));
        Sampler sampler(shared.replay(), StepBatch::spec(0, 2), rng);
        std::array<StepBatch, 2> rows{};
        if (!sampler.sample(1, reinterpret_cast<std::byte *>(rows.data()), 0, 0))
            return;
        rows[0].require_step(0);
        if (rows[1].valid) {
            rows[1].require_step(0);
            require(rows[1].first == rows[0].first + 1, "the rows of a sequence follow each other");
        } else {
            require(rows[0].first >= 3, "a sequence ends only where the stream ended when it was drawn");
        }
    });
    join();
    shared.require_whole();
}

SCENARIO("a sampler of sequences of transitions beside their writer", BOUNDS(2, 1, 0), BOUNDS(3, 2, 0)) {
    SharedReplay shared(3, true);
    std::int64_t newest = 0;
    for (std::int64_t step = 1; step <= 3; ++step)
        shared.add(step, &newest);
    start("writer", [&] {
        shared.add(4, &newest);
        shared.add(5, &newest);
    });
    start("sampler", [&] {
        Rng rng = rng_of(pick(3));
        Sampler sampler(shared.replay(), StepBatch::spec(1, 2), rng);
        std::array<StepBatch, 2> rows{};
        if (!sampler.sample(1, reinterpret_cast<std::byte *>(rows.data()), 0, 0))
            return;
        rows[0].require_step(1);
        if (rows[1].valid) {
            rows[1].require_step(1);
            require(rows[1].first == rows[0].first + 1, "the rows of a sequence follow each other");
        } else {
            require(rows[0].first >= 2, "a sequence ends only before the newest row");
        }
    });
    join();
    shared.require_whole();
}

SCENARIO("two writers never have the same slot", BOUNDS(3, 1, 0), BOUNDS(4, 2, 0)) {
    SharedReplay shared(2, false);
    std::int64_t a = 0, b = 0;
    start("writer 1", [&] {
        a += shared.add(10);
        a += shared.add(11);
    });
    start("writer 2", [&] { b += shared.add(20); });
    join();
    shared.require_whole();
    require(a == 2 && b == 1, "with two slots, two writers find one each");
    require(shared.replay().size() + see(shared.replay().control().lost.evicted) == 3, "rows are counted");
}

SCENARIO("a writer that dies at any access leaves its slot to the next round", BOUNDS(2, 1, 1), BOUNDS(3, 2, 1)) {
    SharedReplay shared(2, true);
    std::int64_t victims_newest = 0, newest = 0;
    start(
        "victim",
        [&] {
            shared.add(10, &victims_newest);
            shared.add(11, &victims_newest);
        },
        Mortal::yes);
    start("writer", [&] {
        shared.add(20, &newest);
        shared.add(21, &newest);
    });
    join();
    shared.require_whole();
    for (std::int64_t step = 22; step <= 24; ++step)
        require(shared.add(step, &newest) == 1, "no slot is lost");
    shared.require_whole();
    require(shared.replay().size() == 2, "both slots are used again");
}

SCENARIO("a process that saves beside a writer saves whole rows", BOUNDS(2, 2, 0), BOUNDS(3, 3, 0)) {
    SharedReplay shared(2, true), file(2, true);
    std::int64_t newest = 0;
    shared.add(1, &newest);
    shared.add(2, &newest);
    start("writer", [&] {
        shared.add(3, &newest, true, true); // rows 3 and 4, its tail
    });
    start("saver", [&] { shared.replay().save_into(file.replay()); });
    join();
    file.require_whole();
}

SCENARIO("two processes that change two priorities leave the right sum", BOUNDS(3, 1, 0), BOUNDS(4, 2, 0)) {
    const std::size_t leaf_bytes = 16 * sizeof(Word);
    std::byte *memory = shared_bytes(SumTree::bytes(2));
    narrow_words(memory + leaf_bytes, SumTree::bytes(2) - leaf_bytes);
    SumTree tree(memory, 2);
    for (const std::int64_t leaf : {0, 1})
        start(leaf == 0 ? "first" : "second", [&tree, leaf] {
            tree.set(leaf, 0, leaf == 0 ? 1.0F : 2.0F);
            tree.refresh({&leaf, 1});
        });
    join();
    require(tree.total() == 3, "the sum is that of both priorities");
}

SCENARIO("a limited writer and a limited sampler do not wait for each other for ever", BOUNDS(2, 2, 0), BOUNDS(4, 3, 0)) {
    SharedReplay shared(4, false, false, {.ratio = 1, .min_size = 1, .error_buffer = 1});
    const auto admit = [&](Side side) {
        Spin spin(0);
        while (shared.replay().wait_admitted(side, 1, forever_ns, {}, spin).end != WaitEnd::reached) {
        }
    };
    start("writer", [&] {
        for (std::int64_t step = 1; step <= 3; ++step) {
            admit(Side::writers);
            shared.add(step);
        }
    });
    start("sampler", [&] {
        for (int sample = 0; sample < 2; ++sample) {
            admit(Side::samplers);
            signal_add(shared.replay().control().sampled, 1);
        }
    });
    join();
}
