// A random number generator whose state can lie in a segment, so that it is saved together with the rows.
//
// xoshiro256** by Blackman and Vigna (public domain): 1 ns per number, and no pattern that sampling could reveal.
// Who may call: one thread at a time.
#pragma once

#include <cstdint>

namespace memlane {

struct Rng {
    std::uint64_t state[4];

    void seed(std::uint64_t seed) {
        for (std::uint64_t &word : state) { // splitmix64: similar seeds, such as 0 and 1, give unrelated states
            std::uint64_t mixed = (seed += 0x9E3779B97F4A7C15);
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
            word = mixed ^ (mixed >> 31);
        }
    }
    // Seeds a state of zeros, which a stray store may leave: it would return 0 for ever.
    void repair() {
        if ((state[0] | state[1] | state[2] | state[3]) == 0)
            seed(0);
    }
    std::uint64_t next() {
        const auto rotate_left = [](std::uint64_t x, int by) { return x << by | x >> (64 - by); };
        const std::uint64_t result = rotate_left(state[1] * 5, 7) * 9;
        const std::uint64_t shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = rotate_left(state[3], 45);
        return result;
    }
    // An integer in [0, bound), uniformly: the few values that would cause a bias are rejected (Lemire's method). At most
    // 64 times, which a state that is not damaged needs less than once in 2^64 draws.
    std::uint64_t below(std::uint64_t bound) {
        unsigned __int128 product = static_cast<unsigned __int128>(next()) * bound;
        if (static_cast<std::uint64_t>(product) < bound) {
            const std::uint64_t threshold = -bound % bound;
            for (int rejected = 0; static_cast<std::uint64_t>(product) < threshold && rejected < 64; ++rejected)
                product = static_cast<unsigned __int128>(next()) * bound;
        }
        return static_cast<std::uint64_t>(product >> 64);
    }
    // A number in [0, 1), uniformly.
    double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

} // namespace memlane
