// Rows: fields of equal length whose rows are copied by index, several fields in one call.
//
// Who may call: any thread. Nothing here is atomic: a caller that gathers rows which others may be writing must check
// afterwards, by the rows' words, whether the copy is valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace memlane {

struct Field {
    std::byte *data;
    std::size_t stride_bytes; // from one row to the next
    std::size_t row_bytes;    // contiguous bytes of one row
};

// The position of the first index that is outside [0, rows), or -1.
std::int64_t first_out_of_range(std::span<const std::int64_t> indices, std::int64_t rows);

// to[k][i] = from[k][indices[i]]. Indices must be in range.
void gather(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads);

// to[k][indices[i]] = from[k][i]. Indices must be in range. If an index occurs twice, the later row wins with one
// thread; with several threads either may win, separately for each field.
void scatter(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads);

} // namespace memlane
