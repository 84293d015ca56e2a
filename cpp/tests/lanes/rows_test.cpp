#include "lanes/rows.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "support/check.hpp"
#include "support/processes.hpp"
#include "sync/copy.hpp"
#include "sync/words.hpp"

using namespace memlane;

namespace {

constexpr std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max();

// One field in memory of exactly the size of its rows, so that AddressSanitizer detects an access outside.
struct Column {
    std::size_t lead, stride, row_bytes;
    std::vector<std::byte> memory;

    Column(Rng &rng, std::size_t rows, std::size_t width)
        : lead(static_cast<std::size_t>(rng.between(0, 7))),
          stride(width + static_cast<std::size_t>(rng.between(0, 1) * rng.between(0, 70))), row_bytes(width),
          memory(rows == 0 ? 0 : lead + (rows - 1) * stride + row_bytes) {
        rng.fill(memory);
    }
    Field field() { return {memory.data() + (memory.empty() ? 0 : lead), stride, row_bytes}; }
    std::byte *row(std::size_t i) { return memory.data() + lead + i * stride; }
};

struct Case {
    std::vector<Column> table, batch;
    std::vector<std::int64_t> indices;
    std::size_t rows = 0;
    int threads = 1;

    static std::vector<Field> fields(std::vector<Column> &columns) {
        std::vector<Field> all;
        for (auto &column : columns)
            all.push_back(column.field());
        return all;
    }
};

Case random_case(Rng &rng, bool distinct) {
    // Every width with a specialised copy, their neighbours, 0, and more than the prefetch covers.
    constexpr std::array<std::size_t, 24> widths{0,  1,  2,  3,  4,  5,  7,   8,   9,   12,  15,  16,
                                                 17, 31, 32, 33, 63, 64, 100, 127, 128, 129, 513, 4097};
    Case one;
    one.rows = static_cast<std::size_t>(rng.between(1, 200));
    const auto batch = static_cast<std::size_t>(rng.between(0, distinct ? static_cast<std::int64_t>(one.rows) : 400));
    if (distinct) {
        one.indices.resize(one.rows);
        std::iota(one.indices.begin(), one.indices.end(), 0);
        std::shuffle(one.indices.begin(), one.indices.end(), rng.engine());
        one.indices.resize(batch);
    } else {
        one.indices.resize(batch);
        for (auto &index : one.indices)
            index = rng.between(0, static_cast<std::int64_t>(one.rows) - 1);
    }
    one.threads = static_cast<int>(rng.between(-1, 5));
    for (std::int64_t k = rng.between(0, 5); k > 0; --k) {
        const std::size_t width = widths[static_cast<std::size_t>(rng.between(0, widths.size() - 1))];
        one.table.emplace_back(rng, one.rows, width);
        one.batch.emplace_back(rng, batch, width);
    }
    return one;
}

std::vector<std::vector<std::byte>> memories(const std::vector<Column> &columns) {
    std::vector<std::vector<std::byte>> all;
    for (const auto &column : columns)
        all.push_back(column.memory);
    return all;
}

} // namespace

TEST("gather equals a plain loop for any widths, strides, fields and threads, and touches nothing else") {
    Rng rng(11);
    for (int i = 0; i < check::times(600); ++i) {
        Case one = random_case(rng, false);
        auto expected = one.batch;
        for (std::size_t k = 0; k < one.table.size(); ++k)
            for (std::size_t row = 0; row < one.indices.size(); ++row)
                std::copy_n(one.table[k].row(static_cast<std::size_t>(one.indices[row])), one.table[k].row_bytes,
                            expected[k].row(row));
        const auto table = memories(one.table);
        gather(Case::fields(one.table), one.indices, Case::fields(one.batch), one.threads);
        CHECK(memories(one.batch) == memories(expected));
        CHECK(memories(one.table) == table);
    }
}

TEST("scatter equals a plain loop for any widths, strides, fields and threads, and touches nothing else") {
    Rng rng(12);
    for (int i = 0; i < check::times(600); ++i) {
        Case one = random_case(rng, true);
        auto expected = one.table;
        for (std::size_t k = 0; k < one.table.size(); ++k)
            for (std::size_t row = 0; row < one.indices.size(); ++row)
                std::copy_n(one.batch[k].row(row), one.batch[k].row_bytes,
                            expected[k].row(static_cast<std::size_t>(one.indices[row])));
        const auto batch = memories(one.batch);
        scatter(Case::fields(one.batch), one.indices, Case::fields(one.table), one.threads);
        CHECK(memories(one.table) == memories(expected));
        CHECK(memories(one.batch) == batch);
    }
}

TEST("of two equal indices in a scatter with one thread the later wins") {
    std::array<std::int64_t, 4> table{}, values{1, 2, 3, 4};
    const std::array<std::int64_t, 4> indices{2, 0, 2, 2};
    const Field to{reinterpret_cast<std::byte *>(table.data()), 8, 8};
    const Field from{reinterpret_cast<std::byte *>(values.data()), 8, 8};
    scatter({&from, 1}, indices, {&to, 1}, 1);
    CHECK(table == std::array<std::int64_t, 4>{2, 0, 4, 0});
}

TEST("rows of no bytes and batches of no rows copy nothing and read nothing") {
    std::array<std::byte, 8> table{}, out{};
    const Field nothing{nullptr, 0, 0}, something{table.data(), 1, 1}, into{out.data(), 1, 1};
    const std::array<std::int64_t, 3> indices{0, 5, 1};
    gather({&nothing, 1}, indices, {&nothing, 1}, 3);
    scatter({&nothing, 1}, indices, {&nothing, 1}, 3);
    gather({&something, 1}, {}, {&into, 1}, 3);
    scatter({&into, 1}, {}, {&something, 1}, 3);
    gather({}, indices, {}, 3);
    CHECK((out == std::array<std::byte, 8>{}));
}

TEST("the first index outside the rows is found, and a negative one is outside") {
    const auto found = [](std::vector<std::int64_t> indices, std::int64_t rows) {
        return first_out_of_range(indices, rows);
    };
    CHECK_EQ(found({}, 0), -1);
    CHECK_EQ(found({}, 5), -1);
    CHECK_EQ(found({0, 4, 2}, 5), -1);
    CHECK_EQ(found({0}, 0), 0);
    CHECK_EQ(found({0, 5, 2}, 5), 1);
    CHECK_EQ(found({0, 1, -1}, 5), 2);
    CHECK_EQ(found({0, lowest, highest}, 5), 1);
    CHECK_EQ(found({highest, 0}, 5), 0);
    CHECK_EQ(found({highest - 1}, highest), -1);
    CHECK_EQ(found({highest}, highest), 0);
}

TEST("the first index outside the rows is found at any position among many") {
    Rng rng(13);
    for (int i = 0; i < 2'000; ++i) {
        const std::int64_t rows = rng.between(1, 50);
        std::vector<std::int64_t> indices(static_cast<std::size_t>(rng.between(0, 100)));
        for (auto &index : indices)
            index = rng.between(0, rows - 1);
        std::int64_t expected = -1;
        for (std::int64_t bad = rng.between(0, 2); bad > 0 && !indices.empty(); --bad) {
            const std::int64_t at = rng.between(0, static_cast<std::int64_t>(indices.size()) - 1);
            const std::int64_t distance = rng.between(0, 9);
            indices[static_cast<std::size_t>(at)] = rng.between(0, 1) == 0 ? -1 - distance : rows + distance;
            expected = expected < 0 ? at : std::min(expected, at);
        }
        CHECK_EQ(first_out_of_range(indices, rows), expected);
    }
}

namespace {

// Race: a writer overwrites rows of two fields under their words (claim, scatter, publish) while others gather batches
// and check the words afterwards, as a replay buffer does. A row's word is even when the row is complete and only
// grows.
//   row rejected                           acceptable
//   row accepted, both fields of its word  acceptable
//   row accepted, anything else in it      FORBIDDEN    torn
struct Replay {
    static constexpr std::size_t rows = 256, narrow = 16, wide = 1500, batch = 256;
    std::array<Word, rows> words;
    std::array<std::byte, rows * narrow> narrow_rows;
    std::array<std::byte, rows * wide> wide_rows;
    std::atomic<std::int64_t> blessed, refused, torn;
    std::atomic<bool> over;

    std::array<Field, 2> fields() {
        return {Field{narrow_rows.data(), narrow, narrow}, Field{wide_rows.data(), wide, wide}};
    }
    static std::byte mark(std::int64_t word) { return static_cast<std::byte>(word / 2); }

    void write() {
        Rng rng(4);
        std::array<std::byte, narrow> new_narrow;
        std::array<std::byte, wide> new_wide;
        const std::array<Field, 2> fresh{Field{new_narrow.data(), narrow, narrow}, Field{new_wide.data(), wide, wide}};
        for (std::int64_t row = 0; !over; row = (row + 1) % static_cast<std::int64_t>(rows)) {
            Word &word = words[static_cast<std::size_t>(row)];
            const std::int64_t seen = see(word);
            CHECK(publish_if(word, seen, seen + 1));
            new_narrow.fill(mark(seen + 2));
            new_wide.fill(mark(seen + 2));
            scatter(fresh, {&row, 1}, fields(), 1);
            publish(word, seen + 2);
            busy_wait(rng.between(0, 5'000) * check::slowdown); // otherwise hardly any row would be unchanged during a batch
        }
    }

    void sample(std::uint64_t seed, int threads) {
        Rng rng(seed);
        std::vector<std::byte> out_narrow(batch * narrow), out_wide(batch * wide);
        const std::array<Field, 2> out{Field{out_narrow.data(), narrow, narrow}, Field{out_wide.data(), wide, wide}};
        std::vector<std::int64_t> indices(batch), seen(batch);
        while (!over) {
            for (std::size_t i = 0; i < batch; ++i) {
                indices[i] = rng.between(0, rows - 1);
                seen[i] = see(words[static_cast<std::size_t>(indices[i])]);
            }
            gather(fields(), indices, out, threads);
            for (std::size_t i = 0; i < batch; ++i) {
                if (seen[i] % 2 != 0 || !unchanged(words[static_cast<std::size_t>(indices[i])], seen[i])) {
                    ++refused;
                    continue;
                }
                ++blessed;
                const auto matches = [expected = mark(seen[i])](std::byte byte) { return byte == expected; };
                torn += !std::all_of(&out_narrow[i * narrow], &out_narrow[i * narrow] + narrow, matches) ||
                        !std::all_of(&out_wide[i * wide], &out_wide[i * wide] + wide, matches);
            }
        }
    }

    // Waits until both acceptable outcomes occurred often; the time limit is for a machine that runs one thread at a
    // time.
    void watch() {
        for (const std::int64_t end = now_ns() + 8 * second; now_ns() < end; usleep(1000))
            if (torn > 0 || (blessed > check::times(50'000) && refused > check::times(4'000)))
                break;
        over = true;
    }

    void check_results() {
        CHECK_EQ(torn.load(), 0);
        CHECK(blessed > 0);
        CHECK(refused > 0);
    }
};

} // namespace

TEST("a gathered row whose word is unchanged is never torn while a writer overwrites rows") {
    Shared<Replay> replay;
    Child writer([&] { replay->write(); });
    std::thread sampler([&] { replay->sample(1, 2); });
    replay->watch();
    sampler.join();
    CHECK_EQ(writer.join(), 0);
    replay->check_results();
}

TEST("a row gathered by a pool of threads whose word is unchanged is never torn while a thread overwrites rows") {
    Shared<Replay> replay;
    std::thread writer([&] { replay->write(); });
    std::thread sampler([&] { replay->sample(2, 3); });
    replay->watch();
    sampler.join();
    writer.join();
    replay->check_results();
}
