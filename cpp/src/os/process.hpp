// Processes: identity and life. Python's Peer asks here too, so that both languages agree on who is dead.
//
// An identity is one integer: start time (clock ticks since boot) << 22 | pid, Peer.word in Python. Pids are reused; the start time distinguishes two processes with the same pid. One word can be claimed with
// one atomic exchange.
#pragma once

#include <cstdint>

#include <sys/types.h>

namespace memlane {

inline constexpr int pid_bits = 22; // Linux pids are below 2^22

// The identity of the calling process. Throws std::system_error if /proc cannot be read: with a wrong identity, other
// processes would consider this one dead.
std::int64_t this_process();

// The identity of the process that has this pid now; 0 if there is none. Throws std::system_error if /proc cannot be read.
std::int64_t process_of(pid_t pid);

enum class ProcessState {
    alive, // can still run: a stopped process can, and one whose first thread has ended while others run
    zombie, // dead, but its parent has not collected its exit status
    dead, // no process has this pid
    recycled, // dead, and another process has its pid now
};

// The state of the process with this pid and start time. `alive` if /proc cannot be read and there is such a pid (for
// example, this process has no file descriptor left): slots of a live process must never be reclaimed.
ProcessState process_state(std::int64_t pid, std::int64_t start);

// Whether the state of the process with this identity is `alive`.
bool process_alive(std::int64_t process);

} // namespace memlane
