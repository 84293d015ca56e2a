// Rows: fields of equal length whose rows are copied by index, several fields in one call.
//
// Who may call: any thread. Nothing here is atomic: whoever gathers rows that others write decides afterwards, by the
// rows' words, whether the copy is good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace memlane {

struct Field {
    std::byte *data;
    std::size_t stride_bytes; // from one row to the next
    std::size_t row_bytes;    // what belongs to one row, side by side
};

// The position of the first index outside [0, rows), or -1.
std::int64_t first_out_of_range(std::span<const std::int64_t> indices, std::int64_t rows);

// to[k][i] = from[k][indices[i]]. Indices must be in range.
void gather(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads);

// to[k][indices[i]] = from[k][i]. Indices must be in range; where one occurs twice and threads > 1, either may win, field
// by field.
void scatter(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads);

} // namespace memlane
