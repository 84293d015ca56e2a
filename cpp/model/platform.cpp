// The operating system as the code under test sees it in a model check: life tokens, clock, futex and poll.
// The linker puts these functions in place of libc's (--wrap, CMakeLists.txt); os/life.cpp and sync/pool.cpp are not part of
// the build.

#include <cerrno>
#include <ctime>

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>

#include "model/explorer.hpp"
#include "os/life.hpp"
#include "sync/pool.hpp"

namespace memlane {

// A thread stands for a process, so the threads of a scenario share one object, as forked children do, and each has a token
// of its own from its start to its end. `process_` stays 0: process() asks every time which thread it is.
Life::Life(int fd) : source_(fd) {}
Life::~Life() = default;
std::int64_t Life::take() { return model::self(); }
bool Life::alive(std::int64_t process) { return process > 0 && (process == model::self() || model::alive(process)); }

// A sampler of a few rows copies them on its own thread.
std::uint32_t run_in_parts(std::size_t count, int, RangeFunction function, void *context) {
    return function(context, 0, count);
}

} // namespace memlane

extern "C" {

long __real_syscall(long number, ...);
int __real_clock_gettime(clockid_t clock, timespec *time);
int __real_poll(pollfd *fds, nfds_t count, int timeout_ms);

long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
    if (number != SYS_futex)
        return __real_syscall(number, a, b, c, d, e, f);
    const void *word = reinterpret_cast<const void *>(a);
    if (b == FUTEX_WAKE) {
        memlane::model::futex_wake(word);
        return 0;
    }
    errno = memlane::model::futex_sleep(word, static_cast<std::uint32_t>(c));
    return errno == 0 ? 0 : -1;
}

int __wrap_clock_gettime(clockid_t clock, timespec *time) {
    const std::int64_t now = memlane::model::clock_ns();
    if (now == 0) // outside a run
        return __real_clock_gettime(clock, time);
    *time = {static_cast<time_t>(now / 1'000'000'000), static_cast<long>(now % 1'000'000'000)};
    return 0;
}

int __wrap_poll(pollfd *fds, nfds_t count, int timeout_ms) {
    if (memlane::model::clock_ns() == 0)
        return __real_poll(fds, count, timeout_ms);
    int ready = 0;
    for (nfds_t i = 0; i < count; ++i) {
        fds[i].revents = memlane::model::alive(memlane::model::process_of_pidfd(fds[i].fd)) ? 0 : POLLIN;
        ready += fds[i].revents != 0;
    }
    return ready;
}

int __wrap_sched_yield() { return 0; }

} // extern "C"
