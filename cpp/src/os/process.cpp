#include "os/process.hpp"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

namespace memlane {

namespace {

struct Stat {
    char state;
    std::int64_t threads;
    std::int64_t start;
};

// Reads /proc/PID/stat. False with errno set if there is no such process or the file cannot be read.
bool read_stat(std::int64_t pid, Stat &stat) {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    char line[1024];
    const ssize_t length = read(fd, line, sizeof line - 1);
    const int error = length < 0 ? errno : EIO; // EIO also for a line that cannot be parsed, below
    close(fd);
    errno = error;
    if (length <= 0)
        return false;
    line[length] = '\0';
    // The command's name is in parentheses and may contain parentheses itself: the fields begin after the last one.
    const char *at = std::strrchr(line, ')');
    if (at == nullptr || at[1] == '\0')
        return false;
    at += 2;
    for (int field = 3; field <= 22; ++field) { // as proc(5) numbers them
        if (field == 3)
            stat.state = *at;
        else if (field == 20)
            stat.threads = std::strtoll(at, nullptr, 10);
        else if (field == 22)
            stat.start = std::strtoll(at, nullptr, 10);
        at = std::strchr(at, ' ');
        if (at == nullptr)
            return false;
        ++at;
    }
    return true;
}

// Read once and cached: getpid() alone takes 110 ns, and a ring needs the identity five times per slot that it hands
// over. Reset after fork(): the child is another process.
std::atomic<std::int64_t> cached{0};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { cached.store(0, std::memory_order_relaxed); });

} // namespace

std::int64_t this_process() {
    if (const std::int64_t process = cached.load(std::memory_order_relaxed))
        return process;
    const std::int64_t process = process_of(getpid());
    if (process == 0)
        throw std::system_error(ESRCH, std::generic_category(), "/proc does not show this process");
    cached.store(process, std::memory_order_relaxed);
    return process;
}

std::int64_t process_of(pid_t pid) {
    Stat stat;
    if (read_stat(pid, stat))
        return stat.start << pid_bits | pid;
    if (errno == ENOENT || errno == ESRCH)
        return 0;
    throw std::system_error(errno, std::generic_category(), "cannot read the start time of a process from /proc/<pid>/stat");
}

ProcessState process_state(std::int64_t pid, std::int64_t start) {
    if (pid <= 0 || pid >= std::int64_t{1} << pid_bits)
        return ProcessState::dead; // no process has such a pid; kill(0, ...) would address the process group
    Stat stat;
    if (!read_stat(pid, stat)) {
        const bool found = kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH;
        return found ? ProcessState::alive : ProcessState::dead;
    }
    if (stat.start != start)
        return ProcessState::recycled;
    // The state is that of the first thread, which can end, or be killed, before the other threads.
    const bool ended = stat.state == 'Z' || stat.state == 'X';
    return ended && stat.threads <= 1 ? ProcessState::zombie : ProcessState::alive;
}

bool process_alive(std::int64_t process) {
    return process_state(process & ((std::int64_t{1} << pid_bits) - 1), process >> pid_bits) == ProcessState::alive;
}

} // namespace memlane
