// Asking for rows before they are copied: how many ahead, how much of each, into which cache. For whoever copies rows
// that lie anywhere; nothing but time depends on it.
#pragma once

#include <algorithm>
#include <cstddef>

namespace memlane {

inline constexpr std::size_t cache_line_bytes = 64;
// How many rows ahead a copy asks for, and into which cache. 32 rows into the second: rows of 168 bytes take 1.8 ms
// per 65536; 16 rows into the first, which they overflow, took 2.1 ms; not asking, 2.4 ms.
inline constexpr std::size_t rows_ahead = 32;
inline constexpr int second_cache = 2;
// Asking for more lines than this per row only evicts what was asked for before; the hardware sees by then where a
// longer one goes on.
inline constexpr std::size_t lines_ahead = 8;

// always_inline: as functions of their own they have no effect that the compiler knows of, and their calls are dropped.
template <bool for_write> [[gnu::always_inline]] inline void prefetch_lines(const std::byte *row, std::size_t bytes) {
    for (std::size_t at = 0; at < std::min(bytes, lines_ahead * cache_line_bytes); at += cache_line_bytes)
        __builtin_prefetch(row + at, for_write ? 1 : 0, second_cache);
}

// With the line in which a row ends that does not begin on one.
template <bool for_write> [[gnu::always_inline]] inline void prefetch_row(const std::byte *row, std::size_t bytes) {
    prefetch_lines<for_write>(row, bytes);
    __builtin_prefetch(row + std::min(bytes, lines_ahead * cache_line_bytes) - 1, for_write ? 1 : 0, second_cache);
}

} // namespace memlane
