#include "support/syscalls.hpp"

#include <cerrno>

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>

namespace syscalls {

thread_local int last_wait = never_slept;
std::atomic<int> waits{0};
std::atomic<int> wakes{0};
std::function<void()> before_wait;
int wait_error = 0;
std::function<void()> before_wake;
std::function<void()> before_poll;
std::function<void()> instead_of_yield;

} // namespace syscalls

extern "C" {

long __real_syscall(long number, ...);
int __real_poll(pollfd *fds, nfds_t count, int timeout_ms);
int __real_sched_yield();

// libc's syscall() takes any number of arguments and passes on six registers; so does this.
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
    const bool waiting = number == SYS_futex && b == FUTEX_WAIT;
    if (waiting) {
        ++syscalls::waits;
        if (syscalls::before_wait)
            syscalls::before_wait();
        if (syscalls::wait_error != 0) {
            errno = syscalls::wait_error;
            return -1;
        }
    } else if (number == SYS_futex) {
        ++syscalls::wakes;
        if (syscalls::before_wake)
            syscalls::before_wake();
    }
    const long result = __real_syscall(number, a, b, c, d, e, f);
    if (waiting)
        syscalls::last_wait = result == 0 ? 0 : errno;
    return result;
}

int __wrap_poll(pollfd *fds, nfds_t count, int timeout_ms) {
    if (syscalls::before_poll)
        syscalls::before_poll();
    return __real_poll(fds, count, timeout_ms);
}

int __wrap_sched_yield() {
    if (!syscalls::instead_of_yield)
        return __real_sched_yield();
    syscalls::instead_of_yield();
    return 0;
}

} // extern "C"
