#include "os/lifeline.hpp"

#include <cerrno>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

namespace memlane {

namespace {

void terminate_after_death_of(int pidfd, std::int64_t grace_ns) {
    pollfd watched{pidfd, POLLIN, 0};
    while (poll(&watched, 1, -1) < 0 && errno == EINTR) {
    }
    kill(getpid(), SIGTERM);
    timespec grace{static_cast<time_t>(grace_ns / 1'000'000'000), static_cast<long>(grace_ns % 1'000'000'000)};
    while (nanosleep(&grace, &grace) != 0 && errno == EINTR) {
    }
    kill(getpid(), SIGKILL);
}

} // namespace

void tie_lifeline(int pidfd, std::int64_t grace_ns) {
    const int fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        throw std::system_error(errno, std::generic_category(), "fcntl(F_DUPFD_CLOEXEC)");
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all,
                    &before); // the new thread inherits the mask and handles none of the process's signals
    try {
        std::thread(terminate_after_death_of, fd, grace_ns).detach();
    } catch (const std::system_error &) { // the system has no thread left: undo what was done
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close(fd);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace memlane
