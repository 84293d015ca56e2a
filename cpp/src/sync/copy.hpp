// Copying bytes that another process may be overwriting.
//
// A reader of shared rows copies first and checks afterwards whether the copy is valid (see `unchanged` in words.hpp).
// A writer may store into the same bytes during the copy; the copy is then discarded. ThreadSanitizer rightly reports
// this as a race, so its builds copy with relaxed atomics, byte by byte; a build for model checks, word by word.
#pragma once

#if defined(__has_feature) // clang
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#include <atomic>
#include <cstddef>
#include <cstring>

#if defined(MEMLANE_FAULTS)
#include <algorithm>

#include "sync/faults.hpp"
#elif defined(MEMLANE_MODEL)
#include "model/atomic.hpp"
#endif

namespace memlane {

inline void copy_bytes(std::byte *to, const std::byte *from, std::size_t bytes) {
#if defined(MEMLANE_MODEL)
    model::copy(to, from, bytes);
#elif defined(__SANITIZE_THREAD__)
    for (std::size_t i = 0; i < bytes; ++i) {
        std::atomic_ref<std::byte> source(const_cast<std::byte &>(from[i]));
        std::atomic_ref<std::byte>(to[i]).store(source.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
#elif defined(MEMLANE_FAULTS)
    // At least two pieces, and one per 4 KB: a process can die or stop between them.
    const std::size_t piece = std::clamp<std::size_t>((bytes + 1) / 2, 1, 4096);
    for (std::size_t at = 0; at < bytes; at += piece) {
        faults::point();
        std::memcpy(to + at, from + at, std::min(piece, bytes - at));
    }
    faults::point();
#else
    std::memcpy(to, from, bytes);
#endif
}

} // namespace memlane
