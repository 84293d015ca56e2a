// What the fuzz targets of all lanes have in common: an input chooses the sizes of a lane, then calls, and between them
// words that are overwritten.
#pragma once

#include <cstdint>

#include "fuzz/input.hpp"
#include "fuzz/places.hpp"
#include "os/clock.hpp"

namespace memlane::fuzz {

class Lane {
  public:
    virtual ~Lane() = default;

    const Places &places() const { return places_; }

    // The next choice of the input: a call, or a word that is overwritten.
    void act(Input &input) {
        constexpr std::uint8_t overwrite_one = 0xFF, overwrite_all = 0xFE;
        constexpr std::uint8_t first_overwrite = 0xC0;
        const std::uint8_t choice = input.byte();
        if (choice < first_overwrite)
            return call_one(choice, input);
        if (choice == overwrite_all)
            return places_.fill(input.byte(), input.word());
        for (int words = choice == overwrite_one ? 1 : 1 + choice % 8; words > 0; --words) {
            Word &word = places_.pick([&](std::size_t bound) { return input.below(bound); });
            word.store(input.word(), std::memory_order_relaxed);
        }
    }

  protected:
    // Calls the lane. `choice` says what, modulo the number of calls.
    virtual void call_one(std::uint8_t choice, Input &input) = 0;

    // A deadline that has passed or, seldom, one in a moment: a wait must end either way. Seldom, because a thread that
    // sleeps on a busy machine gets its core back milliseconds later.
    static std::int64_t deadline_ns(Input &input) { return input.byte() % 32 == 31 ? now_ns() + 20'000 : 0; }

    Places places_;
};

} // namespace memlane::fuzz
