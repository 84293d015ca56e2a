// The kernel calls of the code under test, counted, and with a place right before each where a test can act: change a
// value between a sleeper's last look and its sleep, or kill a process between its change and its wake-up.
//
// The linker's --wrap puts kernel.cpp between the code and libc (see CMakeLists.txt).
#pragma once

#include <atomic>
#include <functional>

namespace kernel {

// How this thread's last futex wait ended: 0 when it was woken, else the error number; `never_slept` before the first.
inline constexpr int never_slept = -1;
extern thread_local int last_wait;

// Of this process, since it began or since its parent's count was copied by fork().
extern std::atomic<int> waits;
extern std::atomic<int> wakes;

// Set them before other threads run. Each is called on the thread that is about to make the call.
extern std::function<void()> before_wait;
extern std::function<void()> before_wake;
extern std::function<void()> before_poll;

} // namespace kernel
