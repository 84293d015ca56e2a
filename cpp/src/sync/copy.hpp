// Copying bytes that another process may be overwriting.
//
// A reader of shared rows copies first and asks afterwards whether the copy is good (see `unchanged` in words.hpp).
// While it copies, a writer may store into the same bytes. The hardware is fine with that and the copy is thrown away;
// ThreadSanitizer would rightly call it a race, so its builds copy with relaxed atomics, byte by byte.
#pragma once

#if defined(__has_feature) // clang's way to say it
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
