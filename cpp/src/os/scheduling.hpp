// How the kernel schedules the calling thread.
#pragma once

#include <cstdint>

namespace memlane {

// Asks the kernel for time slices of this length, 0.1 to 100 ms. When a thread with shorter slices than the running one
// wakes up, it gets the core at once; it does not get more of the core. Needs no privilege. False if the kernel refuses or is older than
// Linux 6.12, which ignores the request.
bool request_time_slice(std::int64_t slice_ns);

} // namespace memlane
