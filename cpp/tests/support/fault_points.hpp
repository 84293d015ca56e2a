// Runs an operation in a child process that dies, or is stopped, at its n-th fault point: for every n, until the child
// completes the operation without having reached its point.
//
// `Table` compares what the others see at each point, in the order of the points, with the lines that a header promises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/wait.h>

#include "support/check.hpp"
#include "support/life.hpp"
#include "support/processes.hpp"
#include "sync/faults.hpp"

namespace fault_points {

using memlane::faults::Action;

// No operation of these tests has as many points: one that does repeats itself for ever.
inline constexpr std::int64_t max_points = 20'000;

// A child that runs `operation(its identity)` and acts at a point of it.
template <class Operation> auto victim(Action action, std::int64_t point, Operation operation) {
    return [=] {
        const std::int64_t me = this_process();
        memlane::faults::arm(action, point);
        operation(me);
        memlane::faults::disarm();
    };
}

inline std::int64_t report(const char *operation, std::int64_t points, std::int64_t processes) {
    CHECK(points > 0 && points < max_points);
    std::printf("     %-64s %5lld points, %6lld processes\n", operation, static_cast<long long>(points),
                static_cast<long long>(processes));
    std::fflush(stdout);
    return points;
}

// For every point: `prepare()`, then a child dies there in `operation(identity)`, then `after(child)`; at last once more
// for a child that completes. Returns the number of points.
template <class Prepare, class Operation, class After>
std::int64_t die_at_each(Prepare prepare, Operation operation, After after) {
    for (std::int64_t point = 1; point < max_points; ++point) {
        prepare();
        Child child(victim(Action::die, point, operation));
        const int end = child.join();
        CHECK(end == 0 || end == -SIGKILL);
        after(child);
        if (end != -SIGKILL)
            return point - 1;
    }
    return max_points;
}
template <class Prepare, class Operation, class After>
std::int64_t die_at_every_point(const char *name, Prepare prepare, Operation operation, After after) {
    const std::int64_t points = die_at_each(prepare, operation, after);
    return report(name, points, points + 1);
}

// The process that repairs dies too. For every pair of points: `prepare()`, a child dies in `first`, another one in
// `second`, then `after()`.
template <class Prepare, class First, class Second, class After>
std::int64_t die_at_every_pair(const char *name, Prepare prepare, First first, Second second, After after) {
    std::int64_t pairs = 0;
    for (std::int64_t point = 1; point < max_points; ++point) {
        int first_end = 0;
        pairs += die_at_each(
            [&] {
                prepare();
                first_end = Child(victim(Action::die, point, first)).join();
            },
            second, [&](Child &) { after(); });
        if (first_end != -SIGKILL)
            break;
    }
    return report(name, pairs, 2 * pairs);
}

enum class Then { resume, kill };

// For every point: `prepare()`, a child is stopped there in `operation(identity)`, `meanwhile(child)`; then it is resumed and
// must complete without a failed check, or it is killed; then `after()`.
template <class Prepare, class Operation, class Meanwhile, class After>
std::int64_t stop_at_every_point(const char *name, Prepare prepare, Operation operation, Meanwhile meanwhile, After after,
                                 Then then = Then::resume) {
    for (std::int64_t point = 1; point < max_points; ++point) {
        prepare();
        Child child(victim(Action::stop, point, operation));
        siginfo_t change{};
        waitid(P_PID, static_cast<id_t>(child.pid()), &change, WEXITED | WSTOPPED | WNOWAIT);
        const bool stopped = change.si_code == CLD_STOPPED;
        meanwhile(child);
        if (stopped)
            child.kill(then == Then::resume ? SIGCONT : SIGKILL);
        CHECK_EQ(child.join(), stopped && then == Then::kill ? -SIGKILL : 0);
        after();
        if (!stopped)
            return report(name, point - 1, point);
    }
    return report(name, max_points, max_points);
}

// A table of a header: what the others see after a death at each point of an operation, and what is left after they went
// on. Consecutive points with the same line are one line.
class Table {
  public:
    struct Line {
        std::string seen, after;
        bool operator==(const Line &) const = default;
    };
    void add(std::string seen, std::string after) {
        Line line{std::move(seen), std::move(after)};
        if (lines_.empty() || !(lines_.back() == line))
            lines_.push_back(std::move(line));
    }
    void equals(const std::vector<Line> &expected, const char *file, int line) const {
        for (std::size_t i = 0; i < std::max(lines_.size(), expected.size()); ++i) {
            const Line found = i < lines_.size() ? lines_[i] : Line{"(no line)", ""};
            const Line promised = i < expected.size() ? expected[i] : Line{"(no line)", ""};
            if (!(found == promised))
                check::fail(file, line,
                            "line " + std::to_string(i) + ": found " + found.seen + " -> " + found.after + "; expected " +
                                promised.seen + " -> " + promised.after);
        }
    }

  private:
    std::vector<Line> lines_;
};
#define CHECK_TABLE(table, ...) (table).equals({__VA_ARGS__}, __FILE__, __LINE__)

// "ready 2, written 1": the numbers that are not 0.
inline std::string listed(std::initializer_list<std::pair<const char *, std::int64_t>> numbers) {
    std::string text;
    for (const auto &[name, number] : numbers)
        if (number != 0)
            text += (text.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(number);
    return text.empty() ? "nothing" : text;
}

} // namespace fault_points
