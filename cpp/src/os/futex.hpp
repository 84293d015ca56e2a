// futex(2) on a word in shared memory: sleep while the word holds a value, wake all sleepers. Linux only.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <system_error>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace memlane {

enum class FutexEnd { woken, changed, timed_out, interrupted };

// Sleeps while `word` holds `expected`, for at most `nanoseconds`. Not FUTEX_PRIVATE_FLAG: the word is in shared
// memory. Throws std::system_error if the kernel refuses: the page is gone (EFAULT), or a sandbox forbids it. A caller that
// took that for a wake-up would spin for ever.
template <class Word32> FutexEnd futex_wait(Word32 &word, std::uint32_t expected, std::int64_t nanoseconds) {
    static_assert(sizeof(Word32) == sizeof(std::uint32_t)); // an atomic of any build (sync/words.hpp)
    timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
    if (syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0) == 0)
        return FutexEnd::woken;
    switch (errno) {
    case EAGAIN:
        return FutexEnd::changed;
    case EINTR:
        return FutexEnd::interrupted;
    case ETIMEDOUT:
        return FutexEnd::timed_out;
    default:
        throw std::system_error(errno, std::generic_category(), "futex");
    }
}

template <class Word32> void futex_wake_all(Word32 &word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace memlane
