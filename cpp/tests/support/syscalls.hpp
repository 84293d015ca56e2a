// Counts the system calls of the code under test, and calls a hook of the test right before each: to change a value
// between a sleeper's last check and its sleep, or to kill a process between its change and its wake-up. sched_yield can be
// replaced.
//
// The linker option --wrap puts syscalls.cpp between the code and libc (see CMakeLists.txt).
#pragma once

#include <atomic>
#include <functional>

namespace syscalls {

// The result of this thread's last futex wait: 0 if it was woken, else errno; `never_slept` before the first wait.
inline constexpr int never_slept = -1;
extern thread_local int last_wait;

// Counts of this process; a forked child starts with its parent's counts.
extern std::atomic<int> waits;
extern std::atomic<int> wakes;

// Hooks; set them before other threads run. Each is called on the thread that is about to make the system call.
extern std::function<void()> before_wait;
extern std::function<void()> before_wake;
extern std::function<void()> before_poll;
// If set, this function replaces sched_yield: the test decides how long a yield takes.
extern std::function<void()> instead_of_yield;
// If not 0, every futex wait fails with this errno, as in a sandbox that forbids it.
extern int wait_error;

} // namespace syscalls
