// The life tokens of a fuzz target: its own, and one that stands for another living process, because it is taken through a
// file description of its own.
#pragma once

#include <cstdint>

#include <sys/mman.h>

#include "os/life.hpp"

namespace memlane::fuzz {

inline const int life_file = memfd_create("fuzz", MFD_CLOEXEC);

// For the lanes.
inline Life &life() {
    static Life own(life_file);
    return own;
}
inline std::int64_t this_process() { return life().process(); }
inline std::int64_t other_process() {
    static Life other(life_file);
    return other.process();
}

} // namespace memlane::fuzz
