// Fault points: where a process of a test build dies, stops or yields. Only in builds with MEMLANE_FAULTS.
//
// There is a point before and after every access to an atomic in shared memory (`Atomic` and `AtomicRef` of words.hpp are the
// types below in this build) and around every piece of a copy (copy.hpp). A test arms a process with an action and the number
// of a point, so it can try every point of an operation in turn: a window that a random kill hits once in a million runs is
// hit in every run.
//
// Who may call: any thread. The plan belongs to the process; threads share the count, and a forked child begins with its
// parent's plan and count.
#pragma once

#if !defined(MEMLANE_FAULTS)
#error "faults.hpp is for builds with MEMLANE_FAULTS only"
#endif

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include <signal.h>
#include <unistd.h>

namespace memlane::faults {

enum class Action {
    none,
    die, // SIGKILL: nothing of this process runs after it
    stop, // SIGSTOP: it goes on when another process sends SIGCONT
    yield, // sleeps for a moment, so that other processes run
};

struct Plan {
    std::atomic<Action> action{Action::none};
    std::atomic<std::int64_t> at{0}; // the number of the point, from 1, at which the action happens
    std::atomic<std::int64_t> every{0}; // above 0: it happens again every so many points
    std::atomic<std::int64_t> passed{0};
};
inline Plan plan;

// Points that this process has passed since it was armed.
inline std::int64_t passed() { return plan.passed.load(std::memory_order_relaxed); }

inline void arm(Action action, std::int64_t at, std::int64_t every = 0) {
    plan.passed.store(0, std::memory_order_relaxed);
    plan.at.store(at, std::memory_order_relaxed);
    plan.every.store(every, std::memory_order_relaxed);
    plan.action.store(action, std::memory_order_relaxed);
}
inline void disarm() { plan.action.store(Action::none, std::memory_order_relaxed); }

inline void act(Action action) {
    const int error = errno; // a point may stand between a system call and the use of its errno
    const timespec moment{0, 50'000};
    switch (action) {
    case Action::die:
        kill(getpid(), SIGKILL);
        break;
    case Action::stop:
        kill(getpid(), SIGSTOP);
        break;
    case Action::yield:
        nanosleep(&moment, nullptr);
        break;
    case Action::none:
        break;
    }
    errno = error;
}

inline void point() {
    const std::int64_t number = plan.passed.fetch_add(1, std::memory_order_relaxed) + 1;
    const Action action = plan.action.load(std::memory_order_relaxed);
    if (action == Action::none) [[likely]]
        return;
    const std::int64_t at = plan.at.load(std::memory_order_relaxed), every = plan.every.load(std::memory_order_relaxed);
    if (number == at || (every > 0 && number > at && (number - at) % every == 0))
        act(action);
}

// "die:100", "stop:7", "yield:50:20" (the 50th point and every 20th after it). False if it is none of these.
inline bool arm_as(const char *text) {
    for (const auto &[name, action] : {std::pair{"die:", Action::die}, {"stop:", Action::stop}, {"yield:", Action::yield}}) {
        if (std::strncmp(text, name, std::strlen(name)) != 0)
            continue;
        char *end = nullptr;
        const long long at = std::strtoll(text + std::strlen(name), &end, 10);
        const long long every = *end == ':' ? std::strtoll(end + 1, &end, 10) : 0;
        if (*end != '\0' || at < 1 || every < 0)
            return false;
        arm(action, at, every);
        return true;
    }
    return false;
}

// MEMLANE_FAULT arms a process as it starts: for one that a test does not fork itself.
inline const bool armed_by_environment = [] {
    const char *text = std::getenv("MEMLANE_FAULT");
    if (text == nullptr || *text == '\0')
        return false;
    if (arm_as(text))
        return true;
    std::fprintf(stderr, "MEMLANE_FAULT must be die:N, stop:N or yield:N[:EVERY], found %s\n", text);
    std::_Exit(2);
}();

// A point before and after each access.
template <class Access> auto between_points(Access access) {
    point();
    const auto result = access();
    point();
    return result;
}

template <class T> class Atomic : public std::atomic<T> {
    using Base = std::atomic<T>;
    using Order = std::memory_order;
    static constexpr Order seq_cst = std::memory_order_seq_cst;

  public:
    using Base::Base;

    T load(Order order = seq_cst) const noexcept {
        return between_points([&] { return Base::load(order); });
    }
    void store(T value, Order order = seq_cst) noexcept {
        point();
        Base::store(value, order);
        point();
    }
    T exchange(T value, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::exchange(value, order); });
    }
    bool compare_exchange_strong(T &expected, T value, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::compare_exchange_strong(expected, value, order); });
    }
    bool compare_exchange_weak(T &expected, T value, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::compare_exchange_weak(expected, value, order); });
    }
    bool compare_exchange_weak(T &expected, T value, Order success, Order failure) noexcept {
        return between_points([&] { return Base::compare_exchange_weak(expected, value, success, failure); });
    }
    bool compare_exchange_strong(T &expected, T value, Order success, Order failure) noexcept {
        return between_points([&] { return Base::compare_exchange_strong(expected, value, success, failure); });
    }
    T fetch_add(T amount, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::fetch_add(amount, order); });
    }
    T fetch_sub(T amount, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::fetch_sub(amount, order); });
    }
    T fetch_or(T bits, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::fetch_or(bits, order); });
    }
    T fetch_and(T bits, Order order = seq_cst) noexcept {
        return between_points([&] { return Base::fetch_and(bits, order); });
    }
    operator T() const noexcept { return load(); }
    T operator=(T value) noexcept {
        store(value);
        return value;
    }
};

template <class T> class AtomicRef : public std::atomic_ref<T> {
    using Base = std::atomic_ref<T>;

  public:
    using Base::Base;
    T load(std::memory_order order = std::memory_order_seq_cst) const noexcept {
        return between_points([&] { return Base::load(order); });
    }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) const noexcept {
        point();
        Base::store(value, order);
        point();
    }
};

} // namespace memlane::faults
