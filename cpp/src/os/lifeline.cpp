#include "os/lifeline.hpp"

#include <cerrno>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

namespace memlane {

namespace {

void terminate_after_death_of(int pidfd, std::int64_t grace_ns, std::promise<void> armed) {
    prctl(PR_SET_PDEATHSIG, SIGCONT); // belongs to this thread, which lives as long as the process
    armed.set_value();
    pollfd watched{pidfd, POLLIN, 0};
    while (poll(&watched, 1, -1) < 0 && errno == EINTR) {
    }
    kill(getpid(), SIGTERM);
    timespec grace{static_cast<time_t>(grace_ns / 1'000'000'000), static_cast<long>(grace_ns % 1'000'000'000)};
    while (nanosleep(&grace, &grace) != 0 && errno == EINTR) {
    }
    kill(getpid(), SIGKILL);
}

// Of the process that called exit_with_parent.
pid_t own_pid, parent_pid;

void exit_if_orphaned(int) {
    if (getpid() == own_pid && getppid() != parent_pid)
        _exit(0);
}

void forget_parent() { signal(SIGCONT, SIG_DFL); }

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
        std::promise<void> armed;
        std::future<void> is_armed = armed.get_future();
        std::thread(terminate_after_death_of, fd, grace_ns, std::move(armed)).detach();
        is_armed.wait(); // this process may be stopped right after the return
    } catch (const std::system_error &) { // the system has no thread left: undo what was done
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close(fd);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void exit_with_parent() {
    own_pid = getpid();
    parent_pid = getppid();
    struct sigaction action{};
    action.sa_handler = exit_if_orphaned;
    action.sa_flags = SA_RESTART;
    pthread_atfork(nullptr, nullptr, forget_parent);
    sigaction(SIGCONT, &action, nullptr);
    prctl(PR_SET_PDEATHSIG, SIGCONT);
    exit_if_orphaned(SIGCONT); // it may have died before this line
}

} // namespace memlane
