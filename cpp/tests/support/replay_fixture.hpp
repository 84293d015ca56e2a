// A replay in the test's own memory, rows that can be checked for tears, and streams whose steps are known in advance.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"
#include "support/check.hpp"
#include "support/life.hpp"
#include "support/processes.hpp"

// The observation at a step of an episode of a stream. The words of `rest` are a function of these three and their
// position, so a torn observation is detected.
struct Observation {
    std::int64_t stream, episode, step;
    std::array<std::int64_t, 5> rest;

    static std::int64_t expected_word(std::int64_t stream, std::int64_t episode, std::int64_t step, std::size_t position) {
        const auto mixed =
            (static_cast<std::uint64_t>(stream) * 1'000'003 + static_cast<std::uint64_t>(episode)) * 1'000'003 +
            static_cast<std::uint64_t>(step) * 31;
        return static_cast<std::int64_t>(mixed * 0x9E3779B97F4A7C15 ^
                                         static_cast<std::uint64_t>(position + 1) * 0xBF58476D1CE4E5B9);
    }
    void fill(std::int64_t of_stream, std::int64_t of_episode, std::int64_t at_step) {
        stream = of_stream;
        episode = of_episode;
        step = at_step;
        for (std::size_t i = 0; i < rest.size(); ++i)
            rest[i] = expected_word(stream, episode, step, i);
    }
    bool intact() const {
        for (std::size_t i = 0; i < rest.size(); ++i)
            if (rest[i] != expected_word(stream, episode, step, i))
                return false;
        return true;
    }
    bool is(const Observation &of, std::int64_t at_step) const {
        return intact() && stream == of.stream && episode == of.episode && step == at_step;
    }
};
static_assert(sizeof(Observation) == 64);

// The length and the end of each episode of every stream.
inline std::int64_t length_of(std::int64_t episode) { return 1 + episode * 7 % 11; }
enum class End { terminated, terminated_without_final, truncated };
inline End end_of(std::int64_t episode) { return static_cast<End>(episode % 3); }

struct Row {
    Observation observation;
    float reward; // the step's number
    std::uint8_t terminated, truncated;
    std::uint16_t padding;

    bool ended() const { return terminated || truncated; }
};
static_assert(sizeof(Row) == 72);

// One environment: `next` returns its next row, and at the end of an episode sets the final observation.
struct Environment {
    std::int64_t stream = 0, episode = 0, step = 0;

    Row next(Row &final) {
        Row row{};
        row.observation.fill(stream, episode, step);
        row.reward = static_cast<float>(step);
        final = {};
        if (++step == length_of(episode)) {
            row.terminated = end_of(episode) != End::truncated;
            row.truncated = end_of(episode) == End::truncated;
            final.observation.fill(stream, episode, step);
            ++episode;
            step = 0;
        }
        return row;
    }
};

inline std::vector<Environment> environments(std::int64_t count, std::int64_t first = 0, std::int64_t episode = 0) {
    std::vector<Environment> all;
    for (std::int64_t stream = first; stream < first + count; ++stream)
        all.push_back({stream, episode + stream, 0});
    return all;
}

// The memory of a replay with streams (`replay`) or without (`unlinked`), of at most `max_capacity` rows.
template <std::int64_t max_capacity> struct ReplayMemoryFor {
    static constexpr std::size_t stride_bytes = sizeof(memlane::RowHead) + sizeof(Row);
    memlane::ReplayControl control;
    std::array<std::uint64_t, (max_capacity + 63) / 64> stored;
    alignas(64) std::array<std::byte, stride_bytes * max_capacity> rows;
    alignas(64) std::array<std::byte, max_capacity * 9 + 512> tree;
    std::array<std::int64_t, 8> newest; // per stream: the sequence number of its last row

    memlane::Replay replay(std::int64_t capacity, bool prioritised = false, memlane::Limit limit = {}, bool linked = true) {
        CHECK(capacity <= max_capacity && memlane::SumTree::bytes(capacity) <= sizeof tree);
        if (prioritised)
            control.priority.highest = 1;
        return {reinterpret_cast<std::byte *>(&control),
                reinterpret_cast<std::byte *>(stored.data()),
                rows.data(),
                prioritised ? tree.data() : nullptr,
                {.capacity = capacity,
                 .stride_bytes = memlane::head_bytes(linked) + sizeof(Row),
                 .linked = linked,
                 .fields = {{0, 64}, {64, 4}, {68, 1}, {69, 1}},
                 .transition = {1, 2, 3, false},
                 .limit = limit},
                life()};
    }
    memlane::Replay unlinked(std::int64_t capacity, bool prioritised = false, memlane::Limit limit = {}) {
        return replay(capacity, prioritised, limit, false);
    }
    // Zeroes everything that a replay of at most this capacity can have used.
    void wipe(std::int64_t capacity, bool prioritised = false) {
        std::memset(static_cast<void *>(&control), 0, sizeof control);
        stored = {};
        std::memset(rows.data(), 0, stride_bytes * static_cast<std::size_t>(capacity));
        tree = {};
        newest = {};
        if (prioritised)
            control.priority.highest = 1;
    }
};

using ReplayMemory = ReplayMemoryFor<128>;

// Rows with their AddRequest, so that a test can run `add` alone. With `newest`, rows of streams.
class PreparedRows {
  public:
    PreparedRows(std::vector<Row> rows, std::int64_t *newest, std::vector<Row> finals, std::vector<std::uint8_t> has_final,
                 std::int64_t version)
        : rows_(std::move(rows)), finals_(std::move(finals)), has_final_(std::move(has_final)) {
        for (const Row &row : rows_)
            streams_.push_back(row.observation.stream);
        request_.count = static_cast<std::int64_t>(rows_.size());
        request_.fields = fields_;
        request_.version = version;
        if (newest != nullptr) {
            request_.newest = newest;
            request_.streams = streams_;
        }
        if (!has_final_.empty()) {
            request_.finals = final_fields_;
            request_.final_fields = final_indices_;
            request_.has_final = has_final_;
        }
    }
    PreparedRows(const PreparedRows &) = delete;

    std::int64_t add(memlane::Replay &replay) const { return replay.add(request_); }

  private:
    static memlane::Field field(std::vector<Row> &of, std::size_t offset, std::size_t bytes) {
        return {reinterpret_cast<std::byte *>(of.data()) + offset, sizeof(Row), bytes};
    }

    std::vector<Row> rows_, finals_;
    std::vector<std::uint8_t> has_final_;
    std::vector<std::int64_t> streams_;
    std::array<memlane::Field, 4> fields_{field(rows_, offsetof(Row, observation), 64),
                                          field(rows_, offsetof(Row, reward), 4), field(rows_, offsetof(Row, terminated), 1),
                                          field(rows_, offsetof(Row, truncated), 1)};
    std::array<memlane::Field, 1> final_fields_{field(finals_, offsetof(Row, observation), 64)};
    std::array<std::size_t, 1> final_indices_{0};
    memlane::AddRequest request_{};
};

inline std::int64_t add(memlane::Replay &replay, std::vector<Row> rows, std::int64_t *newest = nullptr,
                        std::vector<Row> finals = {}, std::vector<std::uint8_t> has_final = {}) {
    return PreparedRows(std::move(rows), newest, std::move(finals), std::move(has_final), 0).add(replay);
}

// One step of each of these environments. Its version identifies the call: it is the first of the streams in it.
inline constexpr std::int64_t first_version = 1000;
inline PreparedRows prepare_step(std::vector<Environment> &environments, std::int64_t *newest) {
    std::vector<Row> rows, finals(environments.size());
    std::vector<std::uint8_t> has_final;
    for (std::size_t i = 0; i < environments.size(); ++i) {
        rows.push_back(environments[i].next(finals[i]));
        has_final.push_back(rows[i].ended() && end_of(rows[i].observation.episode) != End::terminated_without_final);
    }
    const std::int64_t version = first_version + rows[0].observation.stream;
    return {std::move(rows), newest, std::move(finals), std::move(has_final), version};
}
inline std::int64_t add_step(memlane::Replay &replay, std::vector<Environment> &environments, std::int64_t *newest) {
    return prepare_step(environments, newest).add(replay);
}

inline Row make_row(std::int64_t writer, std::int64_t number) {
    Row row{};
    row.observation.fill(writer, 0, number);
    row.reward = static_cast<float>(number);
    return row;
}

// Checks all slots while no writer is running; returns "" or the first fault. No row may be torn, and a link to a row
// that is still stored must lead to the step before or after it.
inline std::string find_fault(memlane::Replay &replay) {
    using namespace memlane;
    const auto row_at = [&](std::int64_t slot) {
        Row row;
        std::memcpy(&row, replay.payload(slot), sizeof row);
        return row;
    };
    const auto is_stored = [&](std::int64_t sequence) {
        const std::int64_t word = see(replay.head(replay.slot_of(sequence)).state);
        return row_detail(word) == sequence && (row_state(word) == RowState::complete || row_state(word) == RowState::tail);
    };
    for (std::int64_t slot = 0; slot < replay.capacity(); ++slot) {
        const RowHead &head = replay.head(slot);
        const std::int64_t word = see(head.state);
        if (row_state(word) != RowState::complete && row_state(word) != RowState::tail)
            continue;
        const Row row = row_at(slot);
        const std::string name = "row " + std::to_string(row_detail(word));
        if (!row.observation.intact())
            return name + " is torn";
        if (!replay.shape().linked)
            continue;
        const std::int64_t next = see(head.next), previous = see(head.previous);
        if (row_state(word) == RowState::complete && next > 0 && next != row_detail(word) && is_stored(next) &&
            !row_at(replay.slot_of(next)).observation.is(row.observation, row.observation.step + 1))
            return name + " has a `next` that is not its next step";
        if (previous > 0 && is_stored(previous) &&
            !row_at(replay.slot_of(previous)).observation.is(row.observation, row.observation.step - 1))
            return name + " has a `previous` that is not the step before it";
        if (previous < 0)
            return name + " has a negative `previous`";
    }
    return "";
}

inline std::int64_t count_in_state(memlane::Replay &replay, memlane::RowState state) {
    std::int64_t count = 0;
    for (std::int64_t slot = 0; slot < replay.capacity(); ++slot)
        count += memlane::row_state(memlane::see(replay.head(slot).state)) == state;
    return count;
}

inline memlane::Rng seeded_rng(std::uint64_t seed) {
    memlane::Rng rng{};
    rng.seed(seed);
    return rng;
}

template <class T> std::byte *bytes_of(std::vector<T> &rows) { return reinterpret_cast<std::byte *>(rows.data()); }

// A batch row of a replay without streams.
struct UnlinkedSample {
    Observation observation;
    std::int64_t key;
    float weight;

    static memlane::SampleSpec spec(bool weighted) {
        memlane::SampleSpec spec;
        spec.copies = {{0, sizeof(Observation), offsetof(UnlinkedSample, observation), 1, false}};
        spec.row_bytes = sizeof(UnlinkedSample);
        spec.key = offsetof(UnlinkedSample, key);
        spec.weight = weighted ? static_cast<std::int64_t>(offsetof(UnlinkedSample, weight)) : -1;
        return spec;
    }
};

// A batch row of a replay with streams, with everything that a SampleSpec can ask for.
template <int frames> struct LinkedSample {
    std::array<Observation, frames> observation, next_observation;
    std::int64_t key, version;
    float reward, discount, weight;
    std::int32_t horizon;
    std::uint8_t terminated, truncated, valid;

    static memlane::SampleSpec spec(int steps, int length = 1) {
        memlane::SampleSpec spec;
        spec.copies = {{0, sizeof(Observation), offsetof(LinkedSample, observation), frames, false}};
        if (steps > 0)
            spec.copies.push_back({0, sizeof(Observation), offsetof(LinkedSample, next_observation), frames, true});
        spec.row_bytes = sizeof(LinkedSample);
        spec.steps = steps;
        spec.length = length;
        spec.reward = offsetof(LinkedSample, reward);
        spec.terminated = offsetof(LinkedSample, terminated);
        spec.truncated = offsetof(LinkedSample, truncated);
        spec.discount = offsetof(LinkedSample, discount);
        spec.horizon = offsetof(LinkedSample, horizon);
        spec.key = offsetof(LinkedSample, key);
        spec.version = offsetof(LinkedSample, version);
        spec.weight = offsetof(LinkedSample, weight);
        spec.valid = offsetof(LinkedSample, valid);
        return spec;
    }

    static bool stacked(const std::array<Observation, frames> &found, const Observation &of, std::int64_t last) {
        for (int i = 0; i < frames; ++i)
            if (!found[static_cast<std::size_t>(i)].is(of, std::max<std::int64_t>(0, last - (frames - 1 - i))))
                return false;
        return true;
    }
    // Checks the row as the start of an n-step return with n = `steps` and gamma = 1; returns "" or the first fault.
    std::string fault(int steps) const {
        const Observation &of = observation.back();
        if (!stacked(observation, of, of.step))
            return "the row is torn, or its stack has wrong frames";
        if (valid != 1 || key <= 0)
            return "not valid, or without a key";
        if (version > first_version + of.stream || version < first_version + of.stream - 4)
            return "wrong version";
        const std::int64_t to = of.step + horizon, end = length_of(of.episode);
        if (horizon < 1 || horizon > steps || to > end)
            return "wrong number of steps";
        const bool ended = to == end, no_final = ended && end_of(of.episode) == End::terminated_without_final;
        if (terminated != (ended && end_of(of.episode) != End::truncated) ||
            truncated != (ended && end_of(of.episode) == End::truncated) || discount != (terminated ? 0.0F : 1.0F))
            return "wrong terminated, truncated or discount";
        float sum = 0;
        for (std::int64_t step = of.step; step < to; ++step)
            sum += static_cast<float>(step);
        if (reward != sum)
            return "wrong reward";
        return stacked(next_observation, of, no_final ? to - 1 : to) ? "" : "wrong next observation";
    }
};

// Draws `batch` rows, or sequences of `length` rows, of a replay with streams and checks each of them.
template <int frames> void expect_right(memlane::Replay &replay, int steps, int length, int batch) {
    memlane::Rng rng = seeded_rng(static_cast<std::uint64_t>(frames * 100 + steps * 10 + length));
    memlane::Sampler sampler(replay, LinkedSample<frames>::spec(steps, length), rng);
    std::vector<LinkedSample<frames>> drawn(static_cast<std::size_t>(batch * length));
    CHECK(sampler.sample(batch, bytes_of(drawn), 1, 1));
    for (std::size_t begin = 0; begin < drawn.size(); begin += static_cast<std::size_t>(length)) {
        const LinkedSample<frames> *run = &drawn[begin];
        for (int i = 0; i < length; ++i) {
            if (run[i].valid) {
                CHECK_EQ(run[i].fault(steps), "");
                CHECK(i == 0 || (run[i - 1].valid && run[i].observation.back().is(run[0].observation.back(),
                                                                                  run[0].observation.back().step + i)));
            } else {
                CHECK(i > 0);
                CHECK(run[i].observation.back().rest[0] == 0 && run[i].key == 0);
            }
        }
    }
}
