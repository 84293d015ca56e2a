#include "lifeline.hpp"

#include <cerrno>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

namespace memlane {

void tie_lifeline(int pidfd, std::int64_t grace_ns) {
    const int fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        throw std::system_error(errno, std::generic_category(), "fcntl(F_DUPFD_CLOEXEC)");
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // the new thread inherits: it takes none of the process's signals
    std::thread([fd, grace_ns] {
        pollfd watched{fd, POLLIN, 0};
        while (poll(&watched, 1, -1) < 0 && errno == EINTR) {
        }
        kill(getpid(), SIGTERM);
        timespec grace{static_cast<time_t>(grace_ns / 1'000'000'000), static_cast<long>(grace_ns % 1'000'000'000)};
        while (nanosleep(&grace, &grace) != 0 && errno == EINTR) {
        }
        kill(getpid(), SIGKILL);
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace memlane
