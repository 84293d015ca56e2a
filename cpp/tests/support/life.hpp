// The life tokens of the processes of a test: one file, which this process and its forked children use.
//
// Tests of lanes name processes by these tokens. They do not include os/process.hpp, whose function of the same name is
// another identity: to call it by mistake is an error of the compiler.
#pragma once

#include <cstdint>

#include <sys/mman.h>

#include "os/life.hpp"

// Made before any test forks: a file that a child made would be another.
inline memlane::Life the_life{memfd_create("native-test", MFD_CLOEXEC)};
inline memlane::Life &life() { return the_life; }

inline std::int64_t this_process() { return the_life.process(); }
