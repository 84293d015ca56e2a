// A payload that can be checked for tears: every word is a function of the stamp and its position.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

template <std::size_t words> struct StampedBlock {
    static constexpr std::int64_t torn = -1;
    std::array<std::int64_t, words> word;

    static std::int64_t expected_word(std::int64_t stamp, std::size_t position) {
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(stamp) * 1'000'003 ^
                                         static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15);
    }
    static StampedBlock of(std::int64_t stamp) {
        StampedBlock block;
        block.word[0] = stamp;
        for (std::size_t i = 1; i < words; ++i)
            block.word[i] = expected_word(stamp, i);
        return block;
    }
    std::int64_t stamp() const {
        for (std::size_t i = 1; i < words; ++i)
            if (word[i] != expected_word(word[0], i))
                return torn;
        return word[0];
    }
    std::byte *bytes() { return reinterpret_cast<std::byte *>(word.data()); }
};
