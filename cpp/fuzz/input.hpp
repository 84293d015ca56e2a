// The input of a fuzz target as a stream of choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "fuzz/life.hpp"
#include "lanes/replay.hpp"
#include "lanes/weights.hpp"

namespace memlane::fuzz {

// Reads choices from bytes, one byte for most of them: a changed byte changes one choice. Behind the last byte every
// choice is 0, so every input is valid.
class Input {
  public:
    Input(const std::uint8_t *data, std::size_t size) : at_(data), end_(data + size) {}

    bool empty() const { return at_ == end_; }
    std::uint8_t byte() { return empty() ? 0 : *at_++; }
    // A number in [0, bound). The bound must be from 1 to 65536.
    std::size_t below(std::size_t bound) {
        const std::size_t high = bound > 256 ? byte() : 0;
        return (high << 8 | byte()) % bound;
    }
    template <class T, std::size_t count> T choose(const T (&values)[count]) { return values[below(count)]; }
    std::int64_t integer(int bytes) {
        std::uint64_t value = 0;
        for (int i = 0; i < bytes; ++i)
            value = value << 8 | byte();
        return static_cast<std::int64_t>(value);
    }

    // A value of a word: one that a lane stores itself, one at a limit, or any.
    std::int64_t word() {
        constexpr auto smallest = std::numeric_limits<std::int64_t>::min(),
                       largest = std::numeric_limits<std::int64_t>::max();
        const std::uint8_t kind = byte();
        const auto small = static_cast<std::int8_t>(byte());
        const std::int64_t process = (small & 2) != 0 ? this_process() : other_process(); // both alive
        switch (kind % 16) {
        case 0:
            return 0;
        case 1:
            return small;
        case 2:
            return smallest + (small & 3);
        case 3:
            return largest - (small & 3);
        case 4: // a power of two, and its neighbours
            return wrapping_sum(static_cast<std::int64_t>(std::uint64_t{1} << (small & 63)), byte() % 3 - 1);
        case 5: // a slot or a row in any state, with a number of a few slots
            return std::int64_t{small} * 4 | (kind >> 4 & 3);
        case 6: // a slot or a row in any state, held by a process that is alive
            return process << 2 | (kind >> 4 & 3);
        case 7: // the same, by a process that is not
            return (process ^ std::int64_t{1} << 40) << 2 | (kind >> 4 & 3);
        case 8: // a buffer of the weights, held
            return process;
        case 9:
            return process ^ std::int64_t{1} << 40;
        case 10: // a version of the weights and its buffer
            return std::int64_t{small} << 8 | byte() % (max_buffers + 1);
        case 11:
            return (max_version + small) << 8 | byte();
        case 12:
            return max_sequence + small;
        case 13: { // a leaf of the sum tree, or two of its nodes, with numbers that do not count among them
            constexpr std::uint32_t floats[] = {0x3F800000, 0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001,
                                                0xFFC00002, 0x7F800003, 0x7F7FFFFF, 0xBF800000, 0x00000001, 0x42280000};
            const std::uint32_t high = (kind & 16) != 0 ? choose(floats) : static_cast<std::uint32_t>(small);
            return static_cast<std::int64_t>(std::uint64_t{high} << 32 | choose(floats));
        }
        default:
            return integer(8);
        }
    }

  private:
    const std::uint8_t *at_, *end_;
};

} // namespace memlane::fuzz
