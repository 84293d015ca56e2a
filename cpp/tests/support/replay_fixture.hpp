// A replay in memory of its own, rows that check themselves, and streams whose every step follows from its place.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "support/check.hpp"
#include "os/process.hpp"
#include "support/processes.hpp"
#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"

// What is seen at a step of an episode of a stream: words that follow from these three and their place.
struct Seen {
    std::int64_t stream, episode, step;
    std::array<std::int64_t, 5> rest;

    static std::int64_t followed(std::int64_t stream, std::int64_t episode, std::int64_t step, std::size_t place) {
        const auto mixed = (static_cast<std::uint64_t>(stream) * 1'000'003 + static_cast<std::uint64_t>(episode)) * 1'000'003 +
                           static_cast<std::uint64_t>(step) * 31;
        return static_cast<std::int64_t>(mixed * 0x9E3779B97F4A7C15 ^ static_cast<std::uint64_t>(place + 1) * 0xBF58476D1CE4E5B9);
    }
    void fill(std::int64_t of_stream, std::int64_t of_episode, std::int64_t at_step) {
        stream = of_stream;
        episode = of_episode;
        step = at_step;
        for (std::size_t i = 0; i < rest.size(); ++i)
            rest[i] = followed(stream, episode, step, i);
    }
    bool whole() const {
        for (std::size_t i = 0; i < rest.size(); ++i)
            if (rest[i] != followed(stream, episode, step, i))
                return false;
        return true;
    }
    bool is(const Seen &of, std::int64_t at_step) const {
        return whole() && stream == of.stream && episode == of.episode && step == at_step;
    }
};
static_assert(sizeof(Seen) == 64);

// How an episode goes: so many steps, then one of three ends.
inline std::int64_t length_of(std::int64_t episode) { return 1 + episode * 7 % 11; }
enum class End { terminated, terminated_without_final, truncated };
inline End end_of(std::int64_t episode) { return static_cast<End>(episode % 3); }

struct Row {
    Seen seen;
    float reward; // the step's number
    std::uint8_t terminated, truncated;
    std::uint16_t nothing;

    bool ended() const { return terminated || truncated; }
};
static_assert(sizeof(Row) == 72);

// One environment: its next row, and what is seen after it.
struct Environment {
    std::int64_t stream = 0, episode = 0, step = 0;

    Row next(Row &final) {
        Row row{};
        row.seen.fill(stream, episode, step);
        row.reward = static_cast<float>(step);
        final = {};
        if (++step == length_of(episode)) {
            row.terminated = end_of(episode) != End::truncated;
            row.truncated = end_of(episode) == End::truncated;
            final.seen.fill(stream, episode, step);
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

// Of streams, or of rows that stand for themselves (`loose`).
template <std::int64_t most> struct ReplayMemoryFor {
    static constexpr std::size_t stride_bytes = sizeof(memlane::RowHead) + sizeof(Row);
    memlane::ReplayControl control;
    alignas(64) std::array<std::byte, stride_bytes * most> rows;
    alignas(64) std::array<std::byte, most * 9 + 512> tree;
    std::array<std::int64_t, 8> newest; // of each stream

    memlane::Replay replay(std::int64_t capacity, bool prioritised = false, memlane::Limit limit = {}, bool linked = true) {
        CHECK(capacity <= most && memlane::SumTree::bytes(capacity) <= sizeof tree);
        if (prioritised)
            control.priority.highest = 1;
        return {reinterpret_cast<std::byte *>(&control), rows.data(), prioritised ? tree.data() : nullptr,
                {.capacity = capacity,
                 .stride_bytes = memlane::head_bytes(linked) + sizeof(Row),
                 .linked = linked,
                 .fields = {{0, 64}, {64, 4}, {68, 1}, {69, 1}},
                 .transition = {1, 2, 3, false},
                 .limit = limit}};
    }
    memlane::Replay loose(std::int64_t capacity, bool prioritised = false, memlane::Limit limit = {}) {
        return replay(capacity, prioritised, limit, false);
    }
    // All that a replay of at most this capacity can have used.
    void wipe(std::int64_t capacity, bool prioritised = false) {
        std::memset(static_cast<void *>(&control), 0, sizeof control);
        std::memset(rows.data(), 0, stride_bytes * static_cast<std::size_t>(capacity));
        tree = {};
        newest = {};
        if (prioritised)
            control.priority.highest = 1;
    }
};

using ReplayMemory = ReplayMemoryFor<128>;

// Rows that are ready to be added, of streams if `newest` is given: `add` is all that is left to do.
class Prepared {
  public:
    Prepared(std::vector<Row> rows, std::int64_t *newest, std::vector<Row> finals, std::vector<std::uint8_t> has_final,
             std::int64_t version)
        : rows_(std::move(rows)), finals_(std::move(finals)), has_final_(std::move(has_final)) {
        for (const Row &row : rows_)
            streams_.push_back(row.seen.stream);
        addition_.count = static_cast<std::int64_t>(rows_.size());
        addition_.fields = fields_;
        addition_.version = version;
        if (newest != nullptr) {
            addition_.newest = newest;
            addition_.streams = streams_;
        }
        if (!has_final_.empty()) {
            addition_.finals = last_;
            addition_.final_fields = which_;
            addition_.has_final = has_final_;
        }
    }
    Prepared(const Prepared &) = delete;

    std::int64_t add(memlane::Replay &replay) const { return replay.add(addition_); }

  private:
    static memlane::Field field(std::vector<Row> &of, std::size_t offset, std::size_t bytes) {
        return {reinterpret_cast<std::byte *>(of.data()) + offset, sizeof(Row), bytes};
    }

    std::vector<Row> rows_, finals_;
    std::vector<std::uint8_t> has_final_;
    std::vector<std::int64_t> streams_;
    std::array<memlane::Field, 4> fields_{field(rows_, offsetof(Row, seen), 64), field(rows_, offsetof(Row, reward), 4),
                                          field(rows_, offsetof(Row, terminated), 1), field(rows_, offsetof(Row, truncated), 1)};
    std::array<memlane::Field, 1> last_{field(finals_, offsetof(Row, seen), 64)};
    std::array<std::size_t, 1> which_{0};
    memlane::Addition addition_{};
};

inline std::int64_t add(memlane::Replay &replay, std::vector<Row> rows, std::int64_t *newest = nullptr,
                        std::vector<Row> finals = {}, std::vector<std::uint8_t> has_final = {}) {
    return Prepared(std::move(rows), newest, std::move(finals), std::move(has_final), 0).add(replay);
}

// One step of each of these environments. The version says who wrote it: the first of the streams that came with it.
inline constexpr std::int64_t first_version = 1000;
inline Prepared next_step(std::vector<Environment> &environments, std::int64_t *newest) {
    std::vector<Row> rows, finals(environments.size());
    std::vector<std::uint8_t> has_final;
    for (std::size_t i = 0; i < environments.size(); ++i) {
        rows.push_back(environments[i].next(finals[i]));
        has_final.push_back(rows[i].ended() && end_of(rows[i].seen.episode) != End::terminated_without_final);
    }
    const std::int64_t version = first_version + rows[0].seen.stream;
    return {std::move(rows), newest, std::move(finals), std::move(has_final), version};
}
inline std::int64_t step(memlane::Replay &replay, std::vector<Environment> &environments, std::int64_t *newest) {
    return next_step(environments, newest).add(replay);
}

inline Row plain(std::int64_t writer, std::int64_t number) {
    Row row{};
    row.seen.fill(writer, 0, number);
    row.reward = static_cast<float>(number);
    return row;
}

// What is wrong with what lies in the slots while nobody writes: "" or a complaint. Every row is whole, and where a link
// leads to a row that is still there, that one is the step before or after it.
inline std::string fault(memlane::Replay &replay) {
    using namespace memlane;
    const auto row_at = [&](std::int64_t slot) {
        Row row;
        std::memcpy(&row, replay.payload(slot), sizeof row);
        return row;
    };
    const auto there = [&](std::int64_t sequence) {
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
        if (!row.seen.whole())
            return name + " is torn";
        if (!replay.shape().linked)
            continue;
        const std::int64_t next = see(head.next), previous = see(head.previous);
        if (row_state(word) == RowState::complete && next > 0 && next != row_detail(word) && there(next) &&
            !row_at(replay.slot_of(next)).seen.is(row.seen, row.seen.step + 1))
            return name + " is followed by what is not its next step";
        if (previous > 0 && there(previous) && !row_at(replay.slot_of(previous)).seen.is(row.seen, row.seen.step - 1))
            return name + " comes after what is not the step before it";
        if (previous < 0)
            return name + " comes after nothing known";
    }
    return "";
}

inline std::int64_t in_state(memlane::Replay &replay, memlane::RowState state) {
    std::int64_t count = 0;
    for (std::int64_t slot = 0; slot < replay.capacity(); ++slot)
        count += memlane::row_state(memlane::see(replay.head(slot).state)) == state;
    return count;
}

inline memlane::Rng dice_of(std::uint64_t seed) {
    memlane::Rng dice{};
    dice.seed(seed);
    return dice;
}

template <class T> std::byte *bytes_of(std::vector<T> &rows) { return reinterpret_cast<std::byte *>(rows.data()); }

// A drawn row that stands for itself, in one piece.
struct Loose {
    Seen seen;
    std::int64_t key;
    float weight;

    static memlane::SampleSpec wish(bool weighted) {
        memlane::SampleSpec wish;
        wish.takes = {{0, sizeof(Seen), offsetof(Loose, seen), 1, false}};
        wish.row_bytes = sizeof(Loose);
        wish.key = offsetof(Loose, key);
        wish.weight = weighted ? static_cast<std::int64_t>(offsetof(Loose, weight)) : -1;
        return wish;
    }
};

// A drawn row with everything that can be wished for.
template <int frames> struct Drawn {
    std::array<Seen, frames> seen, after;
    std::int64_t key, version;
    float reward, discount, weight;
    std::int32_t horizon;
    std::uint8_t terminated, truncated, valid;

    static memlane::SampleSpec wish(int steps, int length = 1) {
        memlane::SampleSpec wish;
        wish.takes = {{0, sizeof(Seen), offsetof(Drawn, seen), frames, false}};
        if (steps > 0)
            wish.takes.push_back({0, sizeof(Seen), offsetof(Drawn, after), frames, true});
        wish.row_bytes = sizeof(Drawn);
        wish.steps = steps;
        wish.length = length;
        wish.reward = offsetof(Drawn, reward);
        wish.terminated = offsetof(Drawn, terminated);
        wish.truncated = offsetof(Drawn, truncated);
        wish.discount = offsetof(Drawn, discount);
        wish.horizon = offsetof(Drawn, horizon);
        wish.key = offsetof(Drawn, key);
        wish.version = offsetof(Drawn, version);
        wish.weight = offsetof(Drawn, weight);
        wish.valid = offsetof(Drawn, valid);
        return wish;
    }

    static bool stacked(const std::array<Seen, frames> &found, const Seen &of, std::int64_t last) {
        for (int i = 0; i < frames; ++i)
            if (!found[static_cast<std::size_t>(i)].is(of, std::max<std::int64_t>(0, last - (frames - 1 - i))))
                return false;
        return true;
    }
    // "" or what is wrong with it, as a row of a stream and `steps` steps on (gamma is 1).
    std::string fault(int steps) const {
        const Seen &of = seen.back();
        if (!stacked(seen, of, of.step))
            return "the row is torn, or its stack is of something else";
        if (valid != 1 || key <= 0)
            return "not marked as valid, or without a key";
        if (version > first_version + of.stream || version < first_version + of.stream - 4)
            return "of another version";
        const std::int64_t to = of.step + horizon, end = length_of(of.episode);
        if (horizon < 1 || horizon > steps || to > end)
            return "more steps than there are";
        const bool ended = to == end, bare = ended && end_of(of.episode) == End::terminated_without_final;
        if (terminated != (ended && end_of(of.episode) != End::truncated) ||
            truncated != (ended && end_of(of.episode) == End::truncated) || discount != (terminated ? 0.0F : 1.0F))
            return "ended in another way";
        float sum = 0;
        for (std::int64_t step = of.step; step < to; ++step)
            sum += static_cast<float>(step);
        if (reward != sum)
            return "another reward";
        return stacked(after, of, bare ? to - 1 : to) ? "" : "followed by something else";
    }
};
