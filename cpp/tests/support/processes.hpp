// Real processes and real shared memory for tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <type_traits>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "sync/words.hpp"

inline constexpr std::int64_t ms = 1'000'000;
inline constexpr std::int64_t second = 1'000'000'000;

// A zeroed T in memory that this process shares with its forked children.
template <class T> class Shared {
  public:
    Shared() {
        void *memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(), "mmap");
        value_ = new (memory) T{};
    }
    ~Shared() { munmap(static_cast<void *>(value_), sizeof(T)); }
    Shared(const Shared &) = delete;
    Shared &operator=(const Shared &) = delete;
    T &operator*() const { return *value_; }
    T *operator->() const { return value_; }

  private:
    static_assert(std::is_trivially_destructible_v<T>);
    T *value_;
};

// A forked child. A CHECK that fails in it makes its exit code 1. It is killed with the object, and dies with this
// process.
class Child {
  public:
    template <class Body> explicit Child(Body body) {
        std::fflush(nullptr);
        const pid_t parent = getpid();
        pid_ = fork();
        if (pid_ < 0)
            throw std::system_error(errno, std::generic_category(), "fork");
        if (pid_ > 0) {
            pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
            return;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        check::failures = 0;
        try {
            body();
        } catch (const std::exception &error) {
            check::fail(__FILE__, __LINE__, std::string("a child threw ") + error.what());
        }
        _exit(check::failures > 0 ? 1 : 0);
    }
    ~Child() {
        if (!joined_) {
            kill(SIGKILL);
            join();
        }
        close(pidfd_);
    }
    Child(const Child &) = delete;
    Child &operator=(const Child &) = delete;

    pid_t pid() const { return pid_; }
    int pidfd() const { return pidfd_; }
    void kill(int signal) { ::kill(pid_, signal); }
    bool dead() const { return dies_within(0); }
    bool dies_within(std::int64_t nanoseconds) const {
        pollfd ended{pidfd_, POLLIN, 0};
        return poll(&ended, 1, static_cast<int>(nanoseconds / ms)) == 1;
    }
    // Waits for its end. Returns the exit code, or minus the number of the signal that killed it.
    int join() {
        int status = 0;
        waitpid(pid_, &status, 0);
        joined_ = true;
        return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    }

  private:
    pid_t pid_ = -1;
    int pidfd_ = -1;
    bool joined_ = false;
};

// Polls until `condition` holds. The harness ends a test whose condition never holds.
template <class Condition> void await(Condition condition) {
    while (!condition())
        usleep(100);
}

// A child that lives until it is killed, and its identity as it sees it itself. With `namespaces` (CLONE_NEWPID, ...), its
// only child in new namespaces, which dies with it; `refused` if the kernel does not permit that.
class LiveProcess {
  public:
    static constexpr int no_permission = 77;

    template <class Identity>
    explicit LiveProcess(Identity identity, int namespaces = 0)
        : child_([this, &identity, namespaces] {
              if (namespaces != 0 && unshare(namespaces) != 0)
                  _exit(no_permission);
              // A new pid namespace begins with the next child. Not a Child, which asks for the pid of its parent: that has
              // none there.
              if (const pid_t inside = namespaces != 0 ? fork() : 0; inside != 0) {
                  waitpid(inside, nullptr, 0);
                  return;
              }
              if (namespaces != 0)
                  prctl(PR_SET_PDEATHSIG, SIGKILL);
              memlane::publish(*word_, identity());
              for (;;)
                  pause();
          }) {
        await([&] { return word() != 0 || child_.dead(); });
    }
    std::int64_t word() const { return memlane::see(*word_); }
    bool refused() { return word() == 0 && child_.join() == no_permission; }
    Child &child() { return child_; }

  private:
    Shared<memlane::Word> word_;
    Child child_;
};

// The kernel's letter for a process: R runs, S sleeps, T is stopped, Z has ended and is not reaped.
inline char state_letter(pid_t pid) {
    char path[32], line[512] = {};
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool any = read(fd, line, sizeof line - 1) > 0;
    close(fd);
    const char *name_end = any ? std::strrchr(line, ')') : nullptr;
    return name_end == nullptr ? '?' : name_end[2];
}

// Waits without sleeping: a sleep would take far longer than the windows of the races under test.
inline void busy_wait(std::int64_t nanoseconds) {
    for (const std::int64_t end = memlane::now_ns() + nanoseconds; memlane::now_ns() < end;) {
    }
}

// A barrier for `parties` threads or processes that spin, so that they continue at the same time.
template <int parties> class SpinBarrier {
  public:
    void arrive_and_wait() {
        const std::int64_t mine = arrived_.fetch_add(1) + 1;
        const std::int64_t all = (mine + parties - 1) / parties * parties;
        for (int spins = 0; arrived_.load() < all; ++spins)
            if (spins % 1000 == 999)
                sched_yield(); // the awaited party may need this core
    }

  private:
    std::atomic<std::int64_t> arrived_{0};
};

// Random numbers from a fixed seed: a failure can be reproduced.
class Rng {
  public:
    explicit Rng(std::uint64_t seed) : engine_(seed) {}
    std::int64_t between(std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
    }
    void fill(std::span<std::byte> bytes) {
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
            const std::uint64_t noise = engine_();
            std::memcpy(&bytes[i], &noise, std::min(sizeof noise, bytes.size() - i));
        }
    }

    std::mt19937_64 &engine() { return engine_; }

  private:
    std::mt19937_64 engine_;
};
