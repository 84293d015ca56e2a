// The clock of every wait in memlane: nanoseconds of CLOCK_MONOTONIC.
#pragma once

#include <cstdint>
#include <ctime>
#include <limits>

namespace memlane {

inline constexpr std::int64_t forever_ns = std::numeric_limits<std::int64_t>::max();

inline std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

} // namespace memlane
