#include "lanes/rows.hpp"

#include <algorithm>

#include "sync/copy.hpp"
#include "sync/pool.hpp"
#include "sync/prefetch.hpp"

namespace memlane {

namespace {

// 128 rows of a few hundred bytes stay in the first- or second-level cache while the other fields are copied.
constexpr std::size_t rows_per_block = 128;

// For the widths of scalar and small vector fields, `bytes` is a compile-time constant: the copy is then a few
// instructions instead of a call.
template <std::size_t bytes> struct FixedWidth {
    static void copy(std::byte *to, const std::byte *from, std::size_t) { copy_bytes(to, from, bytes); }
};
struct AnyWidth {
    static void copy(std::byte *to, const std::byte *from, std::size_t bytes) { copy_bytes(to, from, bytes); }
};

template <class Width>
void gather_field(const Field &from, const std::int64_t *indices, const Field &to, std::size_t begin, std::size_t end,
                  std::size_t last) {
    for (std::size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < last)
            prefetch_row<false>(from.data + static_cast<std::size_t>(indices[i + rows_ahead]) * from.stride_bytes,
                                from.row_bytes);
        Width::copy(to.data + i * to.stride_bytes, from.data + static_cast<std::size_t>(indices[i]) * from.stride_bytes,
                    from.row_bytes);
    }
}

template <class Width>
void scatter_field(const Field &from, const std::int64_t *indices, const Field &to, std::size_t begin, std::size_t end,
                   std::size_t last) {
    for (std::size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < last)
            prefetch_row<true>(to.data + static_cast<std::size_t>(indices[i + rows_ahead]) * to.stride_bytes, to.row_bytes);
        Width::copy(to.data + static_cast<std::size_t>(indices[i]) * to.stride_bytes, from.data + i * from.stride_bytes,
                    from.row_bytes);
    }
}

// Copies rows [begin, end) of one field; rows up to `last` come next and may be prefetched.
using CopyField = void (*)(const Field &, const std::int64_t *, const Field &, std::size_t, std::size_t, std::size_t);

struct Gather {
    template <class Width> static constexpr CopyField copy = gather_field<Width>;
};
struct Scatter {
    template <class Width> static constexpr CopyField copy = scatter_field<Width>;
};

template <class Direction> CopyField copy_for(std::size_t row_bytes) {
    switch (row_bytes) {
    case 1:
        return Direction::template copy<FixedWidth<1>>;
    case 2:
        return Direction::template copy<FixedWidth<2>>;
    case 4:
        return Direction::template copy<FixedWidth<4>>;
    case 8:
        return Direction::template copy<FixedWidth<8>>;
    case 16:
        return Direction::template copy<FixedWidth<16>>;
    case 32:
        return Direction::template copy<FixedWidth<32>>;
    case 64:
        return Direction::template copy<FixedWidth<64>>;
    case 128:
        return Direction::template copy<FixedWidth<128>>;
    default:
        return Direction::template copy<AnyWidth>;
    }
}

template <class Direction>
void copy_rows(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads) {
    std::size_t bytes = 0; // of all fields
    for (const Field &field : from)
        bytes += field.row_bytes * indices.size();
    run_in_parts(indices.size(), threads_for(bytes, threads), [&](std::size_t begin, std::size_t end) {
        // All fields of a block of rows before the next block: the fields of a packed row share cache lines.
        const std::size_t step = from.size() > 1 ? rows_per_block : end - begin;
        for (std::size_t at = begin; at < end; at += step)
            for (std::size_t k = 0; k < from.size(); ++k)
                if (from[k].row_bytes > 0)
                    copy_for<Direction>(from[k].row_bytes)(from[k], indices.data(), to[k], at, std::min(end, at + step),
                                                           end);
    });
}

} // namespace

std::int64_t first_out_of_range(std::span<const std::int64_t> indices, std::int64_t rows) {
    // One unsigned maximum checks all indices (a negative index is a huge unsigned one); the position is needed only on
    // failure.
    std::uint64_t highest = 0;
    for (const std::int64_t index : indices)
        highest = std::max(highest, static_cast<std::uint64_t>(index));
    if (indices.empty() || highest < static_cast<std::uint64_t>(rows))
        return -1;
    const auto bad =
        std::find_if(indices.begin(), indices.end(), [rows](std::int64_t index) { return index < 0 || index >= rows; });
    return bad - indices.begin();
}

void gather(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads) {
    copy_rows<Gather>(from, indices, to, threads);
}

void scatter(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads) {
    copy_rows<Scatter>(from, indices, to, threads);
}

} // namespace memlane
