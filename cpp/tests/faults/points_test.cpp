// The fault points themselves: where they are, and what happens at them.

#include "sync/faults.hpp"

#include <array>

#include "support/check.hpp"
#include "support/fault_points.hpp"
#include "support/processes.hpp"
#include "sync/copy.hpp"
#include "sync/words.hpp"

using namespace memlane;
using faults::Action;

namespace {

template <class Body> std::int64_t points_of(Body body) {
    faults::arm(Action::none, 0);
    body();
    return faults::passed();
}

} // namespace

TEST("every access to an atomic has a point before it and one after it") {
    Word word{};
    std::int64_t plain = 0, expected = 0;
    CHECK_EQ(points_of([&] { word.load(); }), 2);
    CHECK_EQ(points_of([&] { word.store(1); }), 2);
    CHECK_EQ(points_of([&] { word.exchange(2); }), 2);
    CHECK_EQ(points_of([&] { word.fetch_add(1); }), 2);
    CHECK_EQ(points_of([&] { word.fetch_sub(1); }), 2);
    CHECK_EQ(points_of([&] { word.fetch_or(1); }), 2);
    CHECK_EQ(points_of([&] { word.fetch_and(3); }), 2);
    CHECK_EQ(points_of([&] { word.compare_exchange_strong(expected, 4); }), 2);
    CHECK_EQ(points_of([&] { word.compare_exchange_weak(expected, 4); }), 2);
    CHECK_EQ(points_of([&] { word = 5; }), 2);
    CHECK_EQ(points_of([&] { expected = word; }), 2);
    CHECK_EQ(points_of([&] { AtomicRef<std::int64_t>(plain).store(1); }), 2);
    CHECK_EQ(points_of([&] { AtomicRef<std::int64_t>(plain).load(); }), 2);
    CHECK_EQ(expected, 5);
}

TEST("a process that dies before an access has not made it, and one that dies after it has") {
    for (std::int64_t point = 1; point <= 2; ++point) {
        Shared<Word> word;
        CHECK_EQ(Child(fault_points::victim(Action::die, point, [&](std::int64_t) { word->store(7); })).join(), -SIGKILL);
        CHECK_EQ(word->load(), point == 1 ? 0 : 7);
    }
}

TEST("a copy has a point around each piece, at least two pieces, and none larger than 4 KB") {
    for (const auto &[bytes, pieces] : {std::pair{0, 0}, {1, 1}, {2, 2}, {3, 2}, {8192, 2}, {8193, 3}, {65536, 16}}) {
        std::vector<std::byte> from(static_cast<std::size_t>(bytes), std::byte{7}), to(from.size());
        CHECK_EQ(points_of([&] { copy_bytes(to.data(), from.data(), from.size()); }), pieces + 1);
        CHECK(from == to);
    }
}

TEST("a process that dies within a copy leaves the pieces before the point") {
    constexpr std::size_t bytes = 3 * 4096;
    for (std::int64_t point = 1; point <= 4; ++point) {
        Shared<std::array<std::byte, bytes>> to;
        std::vector<std::byte> from(bytes, std::byte{7});
        const auto copy = [&](std::int64_t) { copy_bytes(to->data(), from.data(), bytes); };
        CHECK_EQ(Child(fault_points::victim(Action::die, point, copy)).join(), -SIGKILL);
        CHECK_EQ(std::count(to->begin(), to->end(), std::byte{7}), (point - 1) * 4096);
    }
}

TEST("a yield happens at its point and again every so many points, and the process goes on") {
    Word word{};
    faults::arm(Action::yield, 3, 4); // points 3, 7, 11, ...
    const std::int64_t begin = now_ns();
    for (int i = 0; i < 10; ++i)
        word.store(i);
    CHECK_EQ(faults::passed(), 20);
    CHECK(now_ns() - begin >= 5 * 50'000);
    faults::disarm();
}

TEST("a plan is read from a text, and a text that is none is refused") {
    for (const char *text : {"", "die", "die:", "die:0", "die:-1", "die:1x", "kill:1", "yield:1:-2", "stop:1:2:3"})
        CHECK(!faults::arm_as(text));
    CHECK(faults::arm_as("yield:50:20"));
    CHECK(faults::plan.action.load() == Action::yield);
    CHECK_EQ(faults::plan.at.load(), 50);
    CHECK_EQ(faults::plan.every.load(), 20);
    faults::disarm();
}
