// A replay whose control words, rows, links, priorities, streams and random state an input overwrites, and a second one to
// save into, as a file that another process scribbles on.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/guarded_memory.hpp"
#include "fuzz/lane.hpp"
#include "fuzz/life.hpp"
#include "fuzz/promises.hpp"
#include "lanes/replay.hpp"
#include "lanes/sampler.hpp"

namespace memlane::fuzz {

class ReplayLane final : public Lane {
  public:
    explicit ReplayLane(Input &input)
        : shape_(choose_shape(input)), prioritised_((input.byte() & 1) != 0), replay_(make("replay")), copy_(make("copy")),
          streams_(reinterpret_cast<std::int64_t *>(GuardedMemory::zeroed("streams", stream_count * sizeof(Word)))),
          rng_(*reinterpret_cast<Rng *>(GuardedMemory::zeroed("rng", sizeof(Rng)))),
          sampler_(replay_, choose_spec(input), rng_) {
        places_.add(reinterpret_cast<std::byte *>(streams_), stream_count);
        places_.add(reinterpret_cast<std::byte *>(&rng_), sizeof(Rng) / sizeof(Word));
        if (prioritised_)
            replay_.control().priority.highest = copy_.control().priority.highest = 1;
        rng_.seed(input.byte());
    }

  private:
    static constexpr std::size_t stream_count = 3;
    static constexpr std::int64_t max_rows = 4;

    // A row: an observation, its reward, and whether the episode ends.
    struct Row {
        std::int64_t observation;
        std::array<std::byte, 8> reward; // float or double
        std::uint8_t terminated, truncated;
    };
    struct BatchRow {
        std::array<std::int64_t, 3> observation, next_observation; // up to three frames
        std::int64_t key, version;
        std::array<std::byte, 8> reward;
        float discount, weight;
        std::int32_t horizon;
        std::uint8_t terminated, truncated, valid;
    };

    static Replay::Shape choose_shape(Input &input) {
        const bool linked = (input.byte() & 1) != 0, reward_is_double = (input.byte() & 1) != 0;
        const std::int64_t capacity = input.choose({1, 2, 3, 7, 16, 17, 64, 65, 300});
        // The smallest rows, padded ones, and rows whose offsets need more than 32 bits.
        const std::size_t stride = input.choose<std::size_t>({0, 64, 4096, 1 << 20, (std::size_t{1} << 31) + 64});
        const double ratio = input.choose({0.0, 1.0, 0.25, 32.0});
        return {.capacity = linked ? std::max<std::int64_t>(capacity, 2) : capacity,
                .stride_bytes = head_bytes(linked) + sizeof(Row) + stride,
                .linked = linked,
                .fields = {{offsetof(Row, observation), 8},
                           {offsetof(Row, reward), reward_is_double ? sizeof(double) : sizeof(float)},
                           {offsetof(Row, terminated), 1},
                           {offsetof(Row, truncated), 1}},
                .transition = {1, 2, 3, reward_is_double},
                .limit = {.ratio = ratio, .min_size = input.byte() % 8 + 1, .error_buffer = ratio * 8}};
    }

    SampleSpec choose_spec(Input &input) const {
        SampleSpec spec;
        spec.row_bytes = sizeof(BatchRow);
        const int stack = shape_.linked ? 1 + static_cast<int>(input.below(3)) : 1;
        spec.copies = {{offsetof(Row, observation), 8, offsetof(BatchRow, observation), stack, false}};
        spec.key = offsetof(BatchRow, key);
        spec.weight = prioritised_ ? static_cast<std::int64_t>(offsetof(BatchRow, weight)) : -1;
        if (!shape_.linked)
            return spec;
        spec.steps = static_cast<int>(input.below(4));
        if (spec.steps > 0)
            spec.copies.push_back({offsetof(Row, observation), 8, offsetof(BatchRow, next_observation), stack, true});
        spec.length = 1 + static_cast<int>(input.below(4));
        spec.reward = offsetof(BatchRow, reward);
        spec.terminated = offsetof(BatchRow, terminated);
        spec.truncated = offsetof(BatchRow, truncated);
        spec.discount = offsetof(BatchRow, discount);
        spec.horizon = offsetof(BatchRow, horizon);
        spec.version = offsetof(BatchRow, version);
        spec.valid = offsetof(BatchRow, valid);
        return spec;
    }

    Replay make(const std::string &name) {
        const auto capacity = static_cast<std::size_t>(shape_.capacity);
        const std::size_t stored_bytes = Replay::stored_bytes(shape_.capacity), tree_bytes = SumTree::bytes(shape_.capacity);
        const std::size_t words_of_a_row = (head_bytes(shape_.linked) + sizeof(Row)) / sizeof(Word);
        std::byte *control = GuardedMemory::zeroed(name + " control", sizeof(ReplayControl));
        std::byte *stored = GuardedMemory::zeroed(name + " stored", stored_bytes);
        std::byte *rows = GuardedMemory::zeroed(name + " rows", capacity * shape_.stride_bytes);
        std::byte *tree = prioritised_ ? GuardedMemory::zeroed(name + " tree", tree_bytes) : nullptr;
        places_.add_control(control, sizeof(ReplayControl), 6);
        places_.add(stored, stored_bytes / sizeof(Word));
        places_.add(rows, words_of_a_row, capacity, shape_.stride_bytes);
        if (prioritised_) {
            places_.add(tree, 1, capacity, sizeof(Word));
            places_.add(tree, tree_bytes / sizeof(Word)); // leaves and nodes
        }
        return {control, stored, rows, tree, shape_, life()};
    }

    void call_one(std::uint8_t choice, Input &input) override {
        switch (choice % 16) {
        case 0:
        case 1:
        case 2:
            return add(input);
        case 3:
        case 4:
        case 5:
            return sample(input);
        case 6:
            return set_priorities(input);
        case 7:
            return call("admit", [&] { replay_.admit(side(input), input.byte() % 32); });
        case 8:
            return call("wait_admitted", [&] {
                const Side waiting = side(input);
                const std::int64_t count = input.byte() % 32;
                replay_.wait_admitted(waiting, count, deadline_ns(input), {}, spin_);
                replay_.count_held(waiting);
            });
        case 9:
            return call("refund_samples", [&] { replay_.refund_samples(input.byte()); });
        case 10:
            return call("required_error_buffer", [&] {
                require(std::isfinite(replay_.required_error_buffer(input.byte(), input.byte())), "required_error_buffer",
                        "not a number");
            });
        case 11:
            return call("size", [&] {
                const std::int64_t size = replay_.size();
                require(size >= 0 && size <= shape_.capacity, "size", "more rows than the replay holds");
            });
        case 12:
            return save(replay_, copy_);
        case 13: // as Replay.load
            return save(copy_, replay_);
        case 14:
            return call("first_implausible", [&] {
                replay_.counters_plausible();
                const std::int64_t slot = replay_.first_implausible();
                require(slot >= -1 && slot < shape_.capacity, "first_implausible", "a row that the replay does not have");
            });
        default:
            if (prioritised_)
                call("refresh_all", [&] {
                    replay_.tree().refresh_all();
                    require(std::isfinite(replay_.tree().total()), "total", "not a number");
                });
        }
    }

    static Side side(Input &input) { return (input.byte() & 1) != 0 ? Side::writers : Side::samplers; }

    void save(Replay &from, Replay &to) {
        if (shape_.stride_bytes > 1 << 13)
            return; // whole rows are copied, and gigabytes of them take seconds
        call("save_into", [&] {
            const std::int64_t changed = from.save_into(to);
            require(changed >= 0 && changed <= shape_.capacity, "save_into", "more rows than the replay holds");
        });
    }

    void add(Input &input) {
        std::array<Row, max_rows> rows{}, finals{};
        std::array<std::uint8_t, max_rows> skip{}, has_final{};
        std::array<std::int64_t, max_rows> streams{};
        AddRequest request{};
        request.count = 1 + static_cast<std::int64_t>(input.below(max_rows));
        std::int64_t stored = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(request.count); ++i) {
            const std::uint8_t kind = input.byte();
            rows[i].observation = kind;
            rows[i].terminated = (kind & 1) != 0;
            rows[i].truncated = (kind & 2) != 0;
            skip[i] = (kind & 12) == 12;
            has_final[i] = shape_.linked && !skip[i] && (kind & 3) != 0 && (kind & 16) != 0;
            streams[i] = kind >> 5 & 1;
            stored += skip[i] ? 0 : 1 + has_final[i];
        }
        if (stored > shape_.capacity)
            return; // the bindings refuse it
        const auto field = [](std::array<Row, max_rows> &of, std::size_t offset, std::size_t bytes) {
            return Field{reinterpret_cast<std::byte *>(of.data()) + offset, sizeof(Row), bytes};
        };
        std::vector<Field> fields;
        for (const FieldSlice &slice : shape_.fields)
            fields.push_back(field(rows, slice.offset, slice.bytes));
        const std::array<Field, 1> final_fields{field(finals, offsetof(Row, observation), 8)};
        const std::array<std::size_t, 1> final_indices{0};
        request.fields = fields;
        request.skip = {skip.data(), static_cast<std::size_t>(request.count)};
        if (shape_.linked) {
            request.newest = streams_;
            request.streams = {streams.data(), static_cast<std::size_t>(request.count)};
            request.finals = final_fields;
            request.final_fields = final_indices;
            request.has_final = {has_final.data(), static_cast<std::size_t>(request.count)};
        }
        call("add", [&] {
            const std::int64_t added = replay_.add(request);
            require(added >= 0 && added <= request.count, "add", "more rows than it was given");
        });
    }

    void sample(Input &input) {
        const std::size_t count = 1 + input.below(16);
        const auto rows = count * static_cast<std::size_t>(sampler_.spec().length);
        std::vector<std::byte> batch(rows * sizeof(BatchRow)); // on the heap: AddressSanitizer knows its end
        call("sample", [&] {
            if (!sampler_.sample(static_cast<std::int64_t>(count), batch.data(), 0.4, 1))
                return;
            for (std::size_t i = 0; i < rows; ++i) {
                BatchRow row;
                std::memcpy(static_cast<void *>(&row), batch.data() + i * sizeof row, sizeof row);
                require(!prioritised_ || (row.weight >= 0 && row.weight <= 1), "sample", "a weight that is none");
                require(row.horizon >= 0 && row.horizon <= 3, "sample", "more steps than were asked for");
                keys_[i % keys_.size()] = row.key;
            }
        });
    }

    // Of rows that were drawn, and of any numbers.
    void set_priorities(Input &input) {
        if (!prioritised_)
            return;
        const std::size_t drawn = input.below(keys_.size());
        std::vector<std::int64_t> keys(keys_.begin(), keys_.begin() + static_cast<std::ptrdiff_t>(drawn));
        keys.push_back(input.word());
        const std::vector<float> priorities(keys.size(), input.choose({1.0F, 1e-30F, 3e38F, 0.5F}));
        call("set_priorities", [&] {
            const std::int64_t set = replay_.set_priorities(keys, priorities);
            require(set >= 0 && set <= static_cast<std::int64_t>(keys.size()), "set_priorities", "more than were given");
        });
    }

    Replay::Shape shape_;
    bool prioritised_;
    Replay replay_, copy_;
    std::int64_t *streams_;
    Rng &rng_;
    Sampler sampler_;
    Spin spin_{0};
    std::array<std::int64_t, 16> keys_{};
};

} // namespace memlane::fuzz
