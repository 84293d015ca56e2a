// Checks of the checker: small programs with known results. The allowed ones must be found, the forbidden ones must not.

#include "scenario.hpp"
#include "sync/words.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;
constexpr auto acq_rel = std::memory_order_acq_rel;
constexpr auto seq_cst = std::memory_order_seq_cst;

struct Words {
    struct alignas(64) {
        Word word;
    } x, y, z;
    struct alignas(64) {
        Plain plain;
    } data;
};

std::string digits(std::initializer_list<std::int64_t> numbers) {
    std::string text;
    for (const std::int64_t number : numbers)
        text += std::to_string(number);
    return text;
}

// Two threads; each stores into its word and loads the other's.
void store_buffering(std::memory_order store, std::memory_order load, bool fences) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0;
    start("first", [&] {
        w.x.word.store(1, store);
        if (fences)
            fence(seq_cst);
        a = w.y.word.load(load);
    });
    start("second", [&] {
        w.y.word.store(1, store);
        if (fences)
            fence(seq_cst);
        b = w.x.word.load(load);
    });
    join();
    observe(digits({a, b}));
}

// A message and a flag, both atomic.
void message_passing(std::memory_order store, std::memory_order load) {
    auto &w = shared<Words>();
    std::int64_t flag = 0, message = 0;
    start("writer", [&] {
        w.x.word.store(1, relaxed);
        w.y.word.store(1, store);
    });
    start("reader", [&] {
        flag = w.y.word.load(load);
        message = w.x.word.load(relaxed);
    });
    join();
    observe(digits({flag, message}));
}

void message_passing_with_fences(bool release_fence, bool acquire_fence) {
    auto &w = shared<Words>();
    std::int64_t flag = 0, message = 0;
    start("writer", [&] {
        w.x.word.store(1, relaxed);
        if (release_fence)
            fence(release);
        w.y.word.store(1, relaxed);
    });
    start("reader", [&] {
        flag = w.y.word.load(relaxed);
        if (acquire_fence)
            fence(acquire);
        message = w.x.word.load(relaxed);
    });
    join();
    observe(digits({flag, message}));
}

// Two writers of two words, two readers that load both in opposite order: does each see another first?
void independent_reads(std::memory_order store, std::memory_order load, bool fences = false) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0, c = 0, d = 0;
    start("writer x", [&] { w.x.word.store(1, store); });
    start("writer y", [&] { w.y.word.store(1, store); });
    start("reader xy", [&] {
        a = w.x.word.load(load);
        if (fences)
            fence(seq_cst);
        b = w.y.word.load(load);
    });
    start("reader yx", [&] {
        c = w.y.word.load(load);
        if (fences)
            fence(seq_cst);
        d = w.x.word.load(load);
    });
    join();
    observe(a == 1 && b == 0 && c == 1 && d == 0 ? "disagree" : "agree");
}

// Two threads store into two words in opposite order; which stores are last?
void two_plus_two_writes(std::memory_order store) {
    auto &w = shared<Words>();
    start("first", [&] {
        w.x.word.store(1, store);
        w.y.word.store(2, store);
    });
    start("second", [&] {
        w.y.word.store(1, store);
        w.x.word.store(2, store);
    });
    join();
    observe(digits({w.x.word.load(relaxed), w.y.word.load(relaxed)}));
}

// A message through a release store that another thread's change follows.
void release_sequence(bool by_change) {
    auto &w = shared<Words>();
    std::int64_t flag = 0, message = 0;
    start("writer", [&] {
        w.x.word.store(1, relaxed);
        w.y.word.store(1, release);
    });
    start("changer", [&] {
        if (by_change) {
            w.y.word.fetch_add(1, relaxed);
        } else {
            const std::int64_t before = w.y.word.load(relaxed);
            w.y.word.store(before + 1, relaxed);
        }
    });
    start("reader", [&] {
        flag = w.y.word.load(acquire);
        message = w.x.word.load(relaxed);
    });
    join();
    if (flag == 2)
        observe(message == 1 ? "seen" : "missed");
}

} // namespace

LITMUS("store buffering, relaxed: both can miss the other", RESULTS("00", "01", "10", "11")) {
    store_buffering(relaxed, relaxed, false);
}
LITMUS("store buffering, release and acquire: both can miss the other", RESULTS("00", "01", "10", "11")) {
    store_buffering(release, acquire, false);
}
LITMUS("store buffering, sequentially consistent: one sees the other", RESULTS("01", "10", "11")) {
    store_buffering(seq_cst, seq_cst, false);
}
LITMUS("store buffering, stores sequentially consistent and loads not: both can miss", RESULTS("00", "01", "10", "11")) {
    store_buffering(seq_cst, acquire, false);
}
LITMUS("store buffering, relaxed with sequentially consistent fences: one sees the other", RESULTS("01", "10", "11")) {
    store_buffering(relaxed, relaxed, true);
}
LITMUS("store buffering, a fence on one side and sequentially consistent accesses on the other", RESULTS("01", "10", "11")) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0;
    start("fenced", [&] {
        w.x.word.store(1, relaxed);
        fence(seq_cst);
        a = w.y.word.load(relaxed);
    });
    start("plain", [&] {
        w.y.word.store(1, seq_cst);
        b = w.x.word.load(seq_cst);
    });
    join();
    observe(digits({a, b}));
}
LITMUS("store buffering with exchanges that acquire and release: both can miss", RESULTS("00", "01", "10", "11")) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0;
    start("first", [&] {
        w.x.word.exchange(1, acq_rel);
        a = w.y.word.load(acquire);
    });
    start("second", [&] {
        w.y.word.exchange(1, acq_rel);
        b = w.x.word.load(acquire);
    });
    join();
    observe(digits({a, b}));
}

LITMUS("message passing, relaxed: the flag can arrive before the message", RESULTS("00", "01", "10", "11")) {
    message_passing(relaxed, relaxed);
}
LITMUS("message passing, release and acquire: it cannot", RESULTS("00", "01", "11")) { message_passing(release, acquire); }
LITMUS("message passing, release alone: it can", RESULTS("00", "01", "10", "11")) { message_passing(release, relaxed); }
LITMUS("message passing, acquire alone: it can", RESULTS("00", "01", "10", "11")) { message_passing(relaxed, acquire); }
LITMUS("message passing with both fences: it cannot", RESULTS("00", "01", "11")) { message_passing_with_fences(true, true); }
LITMUS("message passing with a release fence alone: it can", RESULTS("00", "01", "10", "11")) {
    message_passing_with_fences(true, false);
}
LITMUS("message passing with an acquire fence alone: it can", RESULTS("00", "01", "10", "11")) {
    message_passing_with_fences(false, true);
}

LITMUS("independent reads of independent writes, acquire: the readers can disagree", RESULTS("agree", "disagree")) {
    independent_reads(release, acquire);
}
LITMUS("independent reads of independent writes, sequentially consistent: they agree", RESULTS("agree")) {
    independent_reads(seq_cst, seq_cst);
}
LITMUS("independent reads of independent writes with sequentially consistent fences: they agree", RESULTS("agree")) {
    independent_reads(relaxed, relaxed, true);
}

LITMUS("2+2W, relaxed: both first stores can be last", RESULTS("11", "12", "21", "22")) { two_plus_two_writes(relaxed); }
LITMUS("2+2W, release: both first stores can be last", RESULTS("11", "12", "21", "22")) { two_plus_two_writes(release); }
LITMUS("2+2W, sequentially consistent: one second store is last", RESULTS("12", "21", "22")) {
    two_plus_two_writes(seq_cst);
}

LITMUS("a change continues a release sequence", RESULTS("seen")) { release_sequence(true); }
LITMUS("a relaxed store of another thread ends a release sequence", RESULTS("seen", "missed")) { release_sequence(false); }

LITMUS("loads of one word never go back", RESULTS("00", "01", "02", "11", "12", "22")) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0;
    start("writer", [&] {
        w.x.word.store(1, relaxed);
        w.x.word.store(2, relaxed);
    });
    start("reader", [&] {
        a = w.x.word.load(relaxed);
        b = w.x.word.load(relaxed);
    });
    join();
    observe(digits({a, b}));
}
LITMUS("load buffering is not explored", RESULTS("00", "01", "10")) {
    auto &w = shared<Words>();
    std::int64_t a = 0, b = 0;
    start("first", [&] {
        a = w.x.word.load(relaxed);
        w.y.word.store(1, relaxed);
    });
    start("second", [&] {
        b = w.y.word.load(relaxed);
        w.x.word.store(1, relaxed);
    });
    join();
    observe(digits({a, b}));
}
LITMUS("no addition is lost", RESULTS("3")) {
    auto &w = shared<Words>();
    for (const char *name : {"first", "second", "third"})
        start(name, [&] { w.x.word.fetch_add(1, relaxed); });
    join();
    observe(digits({w.x.word.load(relaxed)}));
}
LITMUS("one of two exchanges of the same value succeeds", RESULTS("01", "10")) {
    auto &w = shared<Words>();
    bool first = false, second = false;
    start("first", [&] {
        std::int64_t expected = 0;
        first = w.x.word.compare_exchange_strong(expected, 1, relaxed);
    });
    start("second", [&] {
        std::int64_t expected = 0;
        second = w.x.word.compare_exchange_strong(expected, 2, relaxed);
    });
    join();
    observe(digits({first, second}));
}
LITMUS("an exchange that fails acquires", RESULTS("seen")) {
    auto &w = shared<Words>();
    std::int64_t expected = 0, message = 0;
    start("writer", [&] {
        w.x.word.store(1, relaxed);
        w.y.word.store(1, release);
    });
    start("reader", [&] {
        expected = 7;
        w.y.word.compare_exchange_strong(expected, 8, seq_cst);
        message = w.x.word.load(relaxed);
    });
    join();
    if (expected == 1)
        observe(message == 1 ? "seen" : "missed");
}
LITMUS("what a dead process stored is visible to the process that finds it dead", RESULTS("1")) {
    auto &w = shared<Words>();
    std::int64_t found = -1;
    const std::int64_t victim = start(
        "victim",
        [&] {
            w.x.word.store(1, relaxed);
            w.y.word.store(1, relaxed);
        },
        Mortal::yes);
    start("finder", [&] {
        if (w.x.word.load(relaxed) == 1 && !alive(victim))
            found = w.x.word.load(relaxed);
    });
    join();
    if (found >= 0)
        observe(digits({found}));
}
LITMUS("a plain word that is published does not race", RESULTS("0", "5")) {
    auto &w = shared<Words>();
    std::uint64_t found = 0;
    start("writer", [&] {
        w.data.plain.write(5);
        publish(w.x.word, 1);
    });
    start("reader", [&] {
        if (see(w.x.word) == 1)
            found = w.data.plain.read();
    });
    join();
    observe(std::to_string(found));
}
