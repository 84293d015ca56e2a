// A process as one number: its start time (clock ticks since boot) above its pid (22 bits), the same as Peer.word.
// Pids are used again, start times tell the users apart, and one word can be claimed with one atomic exchange.
#pragma once

#include <cstdint>

namespace memlane {

inline constexpr int pid_bits = 22; // Linux numbers processes below 2^22

// Throws std::system_error when the kernel does not tell: under another number the others would take it for dead.
std::int64_t this_process();

// Whether that process can still do anything. A zombie cannot, nor can another process with the same pid. A process that
// cannot be looked at is alive: what it holds must not be given away because we, for one, are out of file descriptors.
bool process_alive(std::int64_t process);

} // namespace memlane
