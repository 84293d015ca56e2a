// What every call must keep, whatever the words in shared memory are.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>

#include "lanes/replay.hpp"
#include "sync/words.hpp"

namespace memlane::fuzz {

[[noreturn]] inline void fail(const char *call, const char *what) {
    std::fprintf(stderr, "%s: %s\n", call, what);
    std::abort();
}

inline void require(bool holds, const char *call, const char *what) {
    if (!holds)
        fail(call, what);
}

// Calls a function of a lane. It may say that a word is stray, and nothing else; and it takes less than a second of this
// thread's time. Not of the clock's: the machine may be busy. A call that sleeps for ever is found by the fuzzer's own limit.
template <class Function> void call(const char *name, Function function) {
    constexpr std::int64_t limit_ns = 1'000'000'000;
    const auto used_ns = [] {
        timespec used;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
        return static_cast<std::int64_t>(used.tv_sec) * 1'000'000'000 + used.tv_nsec;
    };
    const std::int64_t begin = used_ns();
    try {
        function();
    } catch (const StrayWord &) {
    } catch (const ReplayDamaged &) {
    } catch (const std::exception &error) {
        fail(name, error.what());
    }
    require(used_ns() - begin < limit_ns, name, "took more than a second");
}

} // namespace memlane::fuzz
