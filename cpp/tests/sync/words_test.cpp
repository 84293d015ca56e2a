#include "sync/words.hpp"

#include <array>
#include <cstring>
#include <list>
#include <thread>
#include <vector>

#include "support/check.hpp"
#include "support/processes.hpp"
#include "sync/copy.hpp"

using namespace memlane;

TEST("a published word is seen") {
    Word word{0};
    publish(word, -3);
    CHECK_EQ(see(word), -3);
}

TEST("publish_if changes a word that holds what was expected, and no other") {
    Word word{4};
    CHECK_EQ(publish_if(word, 5, 6), false);
    CHECK_EQ(see(word), 4);
    CHECK_EQ(publish_if(word, 4, 6), true);
    CHECK_EQ(see(word), 6);
}

TEST("unchanged compares with what was seen") {
    Word word{4};
    CHECK_EQ(unchanged(word, 4), true);
    publish(word, 5);
    CHECK_EQ(unchanged(word, 4), false);
}

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: a writer fills rows one after the other, in plain memory, and publishes their number.
//   rows below the word are filled      acceptable
//   a row below the word is still empty FORBIDDEN (and a data race to ThreadSanitizer)
struct Growing {
    static constexpr int rows = 20'000;
    Word count;
    std::array<std::array<std::int64_t, 8>, rows> row;

    void write(int last, bool by_exchange) {
        for (int i = 0; i < last; ++i) {
            row[static_cast<std::size_t>(i)].fill(i + 1);
            by_exchange ? static_cast<void>(publish_if(count, i, i + 1)) : publish(count, i + 1);
        }
    }

    void read(int last) {
        int empty = 0;
        for (int checked = 0; checked < last;) {
            const auto filled = static_cast<int>(see(count));
            for (; checked < filled; ++checked)
                for (const std::int64_t number : row[static_cast<std::size_t>(checked)])
                    empty += number != checked + 1;
        }
        CHECK_EQ(empty, 0);
    }
};

} // namespace

TEST("a reader never sees a new word with an old payload in threads") {
    for (int i = 0; i < check::times(40); ++i) {
        Shared<Growing> growing;
        std::thread writer([&] { growing->write(Growing::rows, i % 2 == 0); });
        growing->read(Growing::rows);
        writer.join();
    }
}

TEST("a reader never sees a new word with an old payload in processes") {
    for (int i = 0; i < check::times(40); ++i) {
        Shared<Growing> growing;
        Child writer([&] { growing->write(Growing::rows, i % 2 == 0); });
        growing->read(Growing::rows);
        CHECK_EQ(writer.join(), 0);
    }
}

namespace {

// Race: writers repeatedly claim cells, overwrite them and publish them again; readers copy and check afterwards. A
// cell's word is even when the cell is complete, odd while a writer holds it, and only grows.
//   copy rejected                                acceptable   a writer was there; try again
//   copy accepted, every byte of the word seen   acceptable
//   copy accepted, any byte of another           FORBIDDEN    torn
//   two writers in one cell                      FORBIDDEN    the claim was not exclusive
struct Recycling {
    static constexpr std::size_t cells = 4;
    static constexpr std::size_t bytes = 1000;
    struct Cell {
        Word word;
        std::atomic<int> writers;
        std::array<std::byte, bytes> payload;
    };
    std::array<Cell, cells> cell;
    std::atomic<std::int64_t> blessed, refused, torn, crowded;
    std::atomic<bool> over;

    static std::byte mark(std::int64_t word) { return static_cast<std::byte>(word / 2); }

    void write(std::uint64_t seed) {
        Rng rng(seed);
        std::array<std::byte, bytes> fresh;
        while (!over) {
            Cell &one = cell[static_cast<std::size_t>(rng.between(0, cells - 1))];
            const std::int64_t seen = see(one.word);
            if (seen % 2 != 0 || !publish_if(one.word, seen, seen + 1))
                continue;
            crowded += one.writers.fetch_add(1) != 0;
            fresh.fill(mark(seen + 2));
            copy_bytes(one.payload.data(), fresh.data(), bytes);
            one.writers.fetch_sub(1);
            publish(one.word, seen + 2);
        }
    }

    void read(std::uint64_t seed) {
        Rng rng(seed);
        std::array<std::byte, bytes> copy;
        while (!over) {
            Cell &one = cell[static_cast<std::size_t>(rng.between(0, cells - 1))];
            const std::int64_t seen = see(one.word);
            if (seen % 2 != 0)
                continue;
            copy_bytes(copy.data(), one.payload.data(), bytes);
            if (!unchanged(one.word, seen)) {
                ++refused;
                continue;
            }
            ++blessed;
            for (const std::byte found : copy)
                if (found != mark(seen)) {
                    ++torn;
                    break;
                }
        }
    }

    // Waits until both acceptable outcomes occurred often; the time limit is for a machine that runs one thread at a
    // time.
    void watch(std::int64_t enough) {
        for (const std::int64_t end = now_ns() + 8 * second; now_ns() < end;) {
            if (torn > 0 || crowded > 0 || (blessed >= enough && refused >= enough / 100))
                break;
            usleep(1000);
        }
        over = true;
    }

    void check_results() {
        CHECK_EQ(torn.load(), 0);
        CHECK_EQ(crowded.load(), 0);
        CHECK(blessed > 0);
        CHECK(refused > 0);
    }
};

constexpr std::int64_t enough_copies = check::times(60'000);

} // namespace

TEST("an accepted copy is never torn in threads") {
    Recycling race{};
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 2; ++i) {
        threads.emplace_back([&race, i] { race.write(i); });
        threads.emplace_back([&race, i] { race.read(i + 10); });
    }
    race.watch(enough_copies);
    for (auto &thread : threads)
        thread.join();
    race.check_results();
}

TEST("an accepted copy is never torn in processes") {
    Shared<Recycling> race;
    std::list<Child> children;
    for (std::uint64_t i = 0; i < 2; ++i) {
        children.emplace_back([&race, i] { race->write(i); });
        children.emplace_back([&race, i] { race->read(i + 10); });
    }
    race->watch(enough_copies);
    for (auto &child : children)
        CHECK_EQ(child.join(), 0);
    race->check_results();
}

// A writer that is killed with a claimed cell leaves its word odd: readers never accept a copy of it.
TEST("a copy of the cell of a writer that was killed while it wrote is never accepted") {
    Shared<Recycling> state;
    auto &cell = state->cell[0];
    const std::int64_t seen = see(cell.word);
    std::array<std::byte, Recycling::bytes> copy;
    copy_bytes(copy.data(), cell.payload.data(), copy.size());
    Child writer([&] {
        publish_if(cell.word, 0, 1);
        cell.payload[0] = std::byte{1};
        raise(SIGKILL);
    });
    CHECK_EQ(writer.join(), -SIGKILL);
    CHECK_EQ(unchanged(cell.word, seen), false);
    CHECK_EQ(see(cell.word), 1);
}

// Race: all threads increment one word with publish_if.
//   as many as succeeded  acceptable
//   anything else         FORBIDDEN
TEST("compare-and-swap counts exactly in threads") {
    constexpr int threads_count = 4, each = check::times(100'000);
    Word word{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < threads_count; ++i)
        threads.emplace_back([&word] {
            for (int done = 0; done < each;) {
                const std::int64_t seen = see(word);
                done += publish_if(word, seen, seen + 1);
            }
        });
    for (auto &thread : threads)
        thread.join();
    CHECK_EQ(see(word), threads_count * each);
}

TEST("compare-and-swap counts exactly in processes") {
    constexpr int processes = 4, each = check::times(100'000);
    Shared<Word> word;
    std::list<Child> children;
    for (int i = 0; i < processes; ++i)
        children.emplace_back([&word] {
            for (int done = 0; done < each;) {
                const std::int64_t seen = see(*word);
                done += publish_if(*word, seen, seen + 1);
            }
        });
    for (auto &child : children)
        CHECK_EQ(child.join(), 0);
    CHECK_EQ(see(*word), processes * each);
}

TEST("copy_bytes copies every byte and none beside them") {
    Rng rng(7);
    for (int i = 0; i < 500; ++i) {
        const auto bytes = static_cast<std::size_t>(rng.between(0, 300));
        const auto lead_from = static_cast<std::size_t>(rng.between(0, 15));
        const auto lead_to = static_cast<std::size_t>(rng.between(0, 15));
        std::vector<std::byte> from(lead_from + bytes), to(lead_to + bytes + 16, std::byte{0xAA});
        rng.fill(from);
        auto expected = to;
        std::copy(from.begin() + static_cast<std::ptrdiff_t>(lead_from), from.end(),
                  expected.begin() + static_cast<std::ptrdiff_t>(lead_to));
        copy_bytes(to.data() + lead_to, from.data() + lead_from, bytes);
        CHECK(to == expected);
    }
}
