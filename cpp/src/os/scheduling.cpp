#include "os/scheduling.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace memlane {

namespace {

// struct sched_attr of the kernel in its first version; the C library has no declaration of it before glibc 2.41.
struct Attributes {
    std::uint32_t size;
    std::uint32_t policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime_ns; // of SCHED_OTHER: the length of a slice
    std::uint64_t deadline_ns;
    std::uint64_t period_ns;
};
static_assert(sizeof(Attributes) == 48);

} // namespace

bool request_time_slice(std::int64_t slice_ns) {
    Attributes attributes{};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0)
        return false;
    if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH)
        return false; // the user's choice, and the runtime would mean something else
    attributes.size = sizeof attributes;
    attributes.runtime_ns = static_cast<std::uint64_t>(slice_ns);
    if (syscall(SYS_sched_setattr, 0, &attributes, 0) != 0)
        return false;
    Attributes now{};
    return syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) == 0 && now.runtime_ns == attributes.runtime_ns;
}

} // namespace memlane
