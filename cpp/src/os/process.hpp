// A process identity in one integer: start time (clock ticks since boot) << 22 | pid. The same number as Peer.word in
// Python. Pids are reused; the start time distinguishes two processes with the same pid. One word can be claimed with
// one atomic exchange.
#pragma once

#include <cstdint>

namespace memlane {

inline constexpr int pid_bits = 22; // Linux pids are below 2^22

// The identity of the calling process. Throws std::system_error if /proc cannot be read: with a wrong identity, other
// processes would consider this one dead.
std::int64_t this_process();

// Whether the process can still run. False for a zombie and for a pid that now belongs to another process. True if
// /proc cannot be read (for example, this process has no file descriptor left): slots of a live process must never be
// reclaimed.
bool process_alive(std::int64_t process);

} // namespace memlane
