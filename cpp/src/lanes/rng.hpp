// Random numbers whose state lies where its owner wants it: in a segment, so that it is saved with the rows it draws.
//
// xoshiro256**, of Blackman and Vigna (public domain): 1 ns a number, and no pattern that sampling could meet.
#pragma once

#include <cstdint>

namespace memlane {

struct Rng {
    std::uint64_t state[4];

    void seed(std::uint64_t seed) {
        for (std::uint64_t &word : state) { // splitmix64: also from 0 and 1 come states that have nothing in common
            std::uint64_t mixed = (seed += 0x9E3779B97F4A7C15);
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
            word = mixed ^ (mixed >> 31);
        }
    }
    std::uint64_t next() {
        const auto turned = [](std::uint64_t x, int by) { return x << by | x >> (64 - by); };
        const std::uint64_t result = turned(state[1] * 5, 7) * 9;
        const std::uint64_t shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = turned(state[3], 45);
        return result;
    }
    // [0, bound), each alike: the few numbers that would favour some are thrown again (Lemire).
    std::uint64_t below(std::uint64_t bound) {
        unsigned __int128 product = static_cast<unsigned __int128>(next()) * bound;
        if (static_cast<std::uint64_t>(product) < bound)
            for (const std::uint64_t unfair = -bound % bound; static_cast<std::uint64_t>(product) < unfair;)
                product = static_cast<unsigned __int128>(next()) * bound;
        return static_cast<std::uint64_t>(product >> 64);
    }
    // [0, 1)
    double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

} // namespace memlane
