// Copying bytes that another process may be overwriting.
//
// A reader of shared rows copies first and checks afterwards whether the copy is valid (see `unchanged` in words.hpp).
// A writer may store into the same bytes during the copy; the copy is then discarded. ThreadSanitizer rightly reports
// this as a race, so its builds copy with relaxed atomics, byte by byte.
#pragma once

#if defined(__has_feature) // clang
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#include <atomic>
#include <cstddef>
#include <cstring>

namespace memlane {

inline void copy_bytes(std::byte *to, const std::byte *from, std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
    for (std::size_t i = 0; i < bytes; ++i) {
        std::atomic_ref<std::byte> source(const_cast<std::byte &>(from[i]));
        std::atomic_ref<std::byte>(to[i]).store(source.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
#else
    std::memcpy(to, from, bytes);
#endif
}

} // namespace memlane
