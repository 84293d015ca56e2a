#include "os/lifeline.hpp"

#include <system_error>

#include <pthread.h>

#include "support/check.hpp"
#include "support/processes.hpp"
#include "sync/words.hpp"

using namespace memlane;

namespace {

// A process with a lifeline to `guardian`, which is not its parent: as under forkserver.
Child tied_to(const Child &guardian, Word &tied, std::int64_t grace_ns, void (*first)() = [] {}) {
    return Child([&guardian, &tied, grace_ns, first] {
        first();
        tie_lifeline(guardian.pidfd(), grace_ns);
        publish(tied, 1);
        for (;;)
            pause();
    });
}

int pidfd_of(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool dies_within(int pidfd, std::int64_t nanoseconds) {
    pollfd ended{pidfd, POLLIN, 0};
    return poll(&ended, 1, static_cast<int>(nanoseconds / ms)) == 1;
}

// Forks a process, not to be killed with this one, that calls `first`, publishes its pid and waits.
template <class First> void fork_and_publish(Word &pid, First first) {
    if (fork() != 0)
        return;
    first();
    publish(pid, getpid());
    for (;;)
        pause();
}

} // namespace

TEST("a process dies of SIGTERM within a second of the death of the process that it is tied to") {
    Shared<Word> tied;
    Child guardian([] { pause(); });
    Child worker = tied_to(guardian, *tied, 10 * second);
    await([&] { return see(*tied) == 1; });
    CHECK_EQ(worker.dead(), false);
    guardian.kill(SIGKILL);
    CHECK(worker.dies_within(second));
    CHECK_EQ(worker.join(), -SIGTERM);
}

TEST("a process that ignores SIGTERM is killed when the grace period is over") {
    Shared<Word> tied;
    Child guardian([] { pause(); });
    Child worker = tied_to(guardian, *tied, 200 * ms, [] { signal(SIGTERM, SIG_IGN); });
    await([&] { return see(*tied) == 1; });
    guardian.kill(SIGKILL);
    CHECK_EQ(worker.dies_within(100 * ms), false);
    CHECK(worker.dies_within(second));
    CHECK_EQ(worker.join(), -SIGKILL);
}

TEST("a process that exits by itself also ends the processes tied to it") {
    Shared<Word> tied;
    Child guardian([&] {
        while (see(*tied) == 0)
            usleep(100);
    });
    Child worker = tied_to(guardian, *tied, 10 * second);
    CHECK_EQ(guardian.join(), 0);
    CHECK(worker.dies_within(second));
}

TEST("a process that ties itself to a dead process dies") {
    Shared<Word> tied;
    Child guardian([] {});
    guardian.join();
    Child worker = tied_to(guardian, *tied, 10 * second);
    CHECK(worker.dies_within(5 * second)); // including its own start
    CHECK_EQ(worker.join(), -SIGTERM);
}

TEST("a stopped process ends with its parent") {
    Shared<Word> pid;
    Child parent([&] {
        const int self = pidfd_of(getpid());
        fork_and_publish(*pid, [&] { tie_lifeline(self, 10 * second); });
        for (;;)
            pause();
    });
    await([&] { return see(*pid) != 0; });
    const auto worker = static_cast<pid_t>(see(*pid));
    const int pidfd = pidfd_of(worker);
    kill(worker, SIGSTOP);
    await([&] { return state_letter(worker) == 'T'; });
    CHECK(!dies_within(pidfd, 100 * ms));
    parent.kill(SIGKILL);
    CHECK(dies_within(pidfd, second));
    kill(worker, SIGKILL);
    close(pidfd);
}

TEST("a fork server and its children that are stopped end with the process that started the server") {
    Shared<Word> server_pid, worker_pid;
    Child parent([&] {
        const int self = pidfd_of(getpid());
        fork_and_publish(*server_pid, [&] {
            exit_with_parent();
            fork_and_publish(*worker_pid, [&] { tie_lifeline(self, 10 * second); });
        });
        for (;;)
            pause();
    });
    await([&] { return see(*server_pid) != 0 && see(*worker_pid) != 0; });
    for (const Word *pid : {&*server_pid, &*worker_pid}) {
        kill(static_cast<pid_t>(see(*pid)), SIGSTOP);
        await([&] { return state_letter(static_cast<pid_t>(see(*pid))) == 'T'; });
    }
    const int server = pidfd_of(static_cast<pid_t>(see(*server_pid)));
    const int worker = pidfd_of(static_cast<pid_t>(see(*worker_pid)));
    parent.kill(SIGKILL);
    CHECK(dies_within(server, second));
    CHECK(dies_within(worker, second));
    for (const int pidfd : {server, worker}) {
        syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0);
        close(pidfd);
    }
}

TEST("a process that exits with its parent may be stopped and continued while its parent lives") {
    Shared<Word> ready;
    Child server([&] {
        exit_with_parent();
        CHECK_EQ(Child([] { // its own children have the default action
                     struct sigaction action;
                     sigaction(SIGCONT, nullptr, &action);
                     CHECK(action.sa_handler == SIG_DFL);
                 })
                     .join(),
                 0);
        publish(*ready, 1);
        for (;;)
            pause();
    });
    await([&] { return see(*ready) == 1; });
    for (int i = 0; i < 3; ++i) {
        server.kill(SIGSTOP);
        await([&] { return state_letter(server.pid()) == 'T'; });
        server.kill(SIGCONT);
        CHECK_EQ(server.dies_within(20 * ms), false);
    }
}

TEST("a lifeline holds after the descriptor that it was tied with is closed") {
    Shared<Word> tied;
    Child guardian([] { pause(); });
    Child worker([&] {
        const int mine = dup(guardian.pidfd());
        tie_lifeline(mine, 10 * second);
        close(mine);
        publish(*tied, 1);
        for (;;)
            pause();
    });
    await([&] { return see(*tied) == 1; });
    CHECK_EQ(worker.dies_within(100 * ms), false);
    guardian.kill(SIGKILL);
    CHECK(worker.dies_within(second));
}

TEST("the watching thread handles none of the process's signals") {
    Child guardian([] { pause(); });
    sigset_t one, pending;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    tie_lifeline(guardian.pidfd(), 60 * second);
    pthread_sigmask(SIG_BLOCK, &one, nullptr);
    kill(getpid(), SIGUSR1); // would end the process on any thread that does not block it
    usleep(50'000);
    sigpending(&pending);
    CHECK_EQ(sigismember(&pending, SIGUSR1), 1);
    signal(SIGUSR1, SIG_IGN);
    signal(SIGTERM, SIG_IGN); // the guardian ends with this scope, this process a moment later
}

TEST("tying a lifeline leaves the caller's signal mask as it was") {
    Child guardian([] { pause(); });
    Child worker([&] {
        sigset_t one, after;
        sigemptyset(&one);
        sigaddset(&one, SIGUSR1);
        pthread_sigmask(SIG_SETMASK, &one, nullptr);
        tie_lifeline(guardian.pidfd(), second);
        pthread_sigmask(SIG_SETMASK, nullptr, &after);
        for (int number = 1; number < 32; ++number)
            CHECK_EQ(sigismember(&after, number), number == SIGUSR1 ? 1 : 0);
    });
    CHECK_EQ(worker.join(), 0);
}

TEST("a lifeline to something that is not a file descriptor is an error") {
    CHECK_THROWS(std::system_error, tie_lifeline(-1, second));
}
