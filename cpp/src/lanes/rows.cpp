#include "lanes/rows.hpp"

#include <algorithm>

#include "sync/copy.hpp"
#include "sync/pool.hpp"
#include "sync/prefetch.hpp"

namespace memlane {

namespace {

// 128 rows of a few hundred bytes stay in the first or second cache while the other fields are copied.
constexpr std::size_t rows_together = 128;

// `bytes` is a compile-time constant for the widths that scalar and small vector fields have: the copy is then a few
// moves instead of a call.
template <std::size_t bytes> struct Fixed {
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
            prefetch_row<true>(to.data + static_cast<std::size_t>(indices[i + rows_ahead]) * to.stride_bytes,
                               to.row_bytes);
        Width::copy(to.data + static_cast<std::size_t>(indices[i]) * to.stride_bytes, from.data + i * from.stride_bytes,
                    from.row_bytes);
    }
}

// Rows [begin, end); those up to `last` come next and may be asked for.
using Move = void (*)(const Field &, const std::int64_t *, const Field &, std::size_t, std::size_t, std::size_t);

struct GatherMoves {
    template <class Width> static constexpr Move move = gather_field<Width>;
};
struct ScatterMoves {
    template <class Width> static constexpr Move move = scatter_field<Width>;
};

template <class Moves> Move move_for(std::size_t row_bytes) {
    switch (row_bytes) {
    case 1:
        return Moves::template move<Fixed<1>>;
    case 2:
        return Moves::template move<Fixed<2>>;
    case 4:
        return Moves::template move<Fixed<4>>;
    case 8:
        return Moves::template move<Fixed<8>>;
    case 16:
        return Moves::template move<Fixed<16>>;
    case 32:
        return Moves::template move<Fixed<32>>;
    case 64:
        return Moves::template move<Fixed<64>>;
    case 128:
        return Moves::template move<Fixed<128>>;
    default:
        return Moves::template move<AnyWidth>;
    }
}

template <class Moves>
void move_rows(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to,
               int threads) {
    std::size_t bytes = 0;
    for (const Field &field : from)
        bytes += field.row_bytes * indices.size();
    run_in_parts(indices.size(), threads_for(bytes, threads), [&](std::size_t begin, std::size_t end) {
        // All fields of a few rows before the next few: the fields of a packed row share cache lines.
        const std::size_t step = from.size() > 1 ? rows_together : end - begin;
        for (std::size_t at = begin; at < end; at += step)
            for (std::size_t k = 0; k < from.size(); ++k)
                if (from[k].row_bytes > 0)
                    move_for<Moves>(from[k].row_bytes)(from[k], indices.data(), to[k], at, std::min(end, at + step), end);
    });
}

} // namespace

std::int64_t first_out_of_range(std::span<const std::int64_t> indices, std::int64_t rows) {
    // One unsigned maximum answers for all (a negative index is a huge unsigned one); the position is sought only on failure.
    std::uint64_t highest = 0;
    for (const std::int64_t index : indices)
        highest = std::max(highest, static_cast<std::uint64_t>(index));
    if (indices.empty() || highest < static_cast<std::uint64_t>(rows))
        return -1;
    const auto bad = std::find_if(indices.begin(), indices.end(),
                                  [rows](std::int64_t index) { return index < 0 || index >= rows; });
    return bad - indices.begin();
}

void gather(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads) {
    move_rows<GatherMoves>(from, indices, to, threads);
}

void scatter(std::span<const Field> from, std::span<const std::int64_t> indices, std::span<const Field> to, int threads) {
    move_rows<ScatterMoves>(from, indices, to, threads);
}

} // namespace memlane
