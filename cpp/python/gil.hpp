// Running native work without the GIL.
#pragma once

#include <cstddef>
#include <type_traits>

#include <unistd.h>

#include <nanobind/nanobind.h>

namespace memlane {

// Runs `work` without the GIL. Not nanobind's gil_scoped_release: if the interpreter ends while a thread is in `work`,
// taking the GIL back unwinds that thread, and unwinding through a destructor aborts the process. Here the thread
// sleeps instead, until the process ends.
template <class Work> auto without_gil(Work work) {
    PyThreadState *state = PyEval_SaveThread();
    const auto restore = [&] {
        try {
            PyEval_RestoreThread(state);
        } catch (...) {
            for (;;)
                pause();
        }
    };
    try {
        if constexpr (std::is_void_v<decltype(work())>) {
            work();
            restore();
        } else {
            const auto result = work();
            restore();
            return result;
        }
    } catch (...) { // thrown by `work`, which ran out of memory or threads
        restore();
        throw;
    }
}

// Runs a copy of this many bytes, without the GIL if it is large. Beside a busy Python thread, getting the GIL back
// takes that thread's whole time slice of 5 ms, in which a few kilobytes could be copied a thousand times.
inline constexpr std::size_t min_bytes_without_gil = 64 * 1024;
template <class Work> auto without_gil_for(std::size_t bytes, Work work) {
    return bytes < min_bytes_without_gil ? work() : without_gil(work);
}

} // namespace memlane
