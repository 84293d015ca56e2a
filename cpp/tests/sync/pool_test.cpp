#include "sync/pool.hpp"

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "os/mapping.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"

using namespace memlane;

namespace {

// Counts in plain memory how often each index was covered: ThreadSanitizer detects a range that overlaps another, or
// one that had not ended when the call returned.
void cover(std::size_t count, int threads) {
    std::vector<int> covered(count, 0);
    run_in_parts(count, threads, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            ++covered[i];
    });
    for (const int times : covered)
        CHECK_EQ(times, 1);
}

std::set<std::thread::id> threads_that_run(std::size_t count, int threads) {
    std::mutex lock;
    std::set<std::thread::id> ids;
    run_in_parts(count, threads, [&](std::size_t, std::size_t) {
        const std::lock_guard held(lock);
        ids.insert(std::this_thread::get_id());
    });
    return ids;
}

} // namespace

TEST("every index is covered exactly once for any count and number of threads") {
    Rng rng(21);
    for (int i = 0; i < check::times(3'000); ++i)
        cover(static_cast<std::size_t>(rng.between(0, 500)), static_cast<int>(rng.between(-2, 7)));
}

TEST("the guard of the caller covers what the other threads access, for as long as it lives") {
    constexpr std::size_t page = 4096, pages = 64;
    const int fd = memfd_create("native-test", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(pages * page)), 0);
    Mapping mapping(fd, 0, pages * page, true);
    CHECK_EQ(ftruncate(fd, 0), 0);
    {
        const TruncationGuard guard(mapping);
        const std::uint32_t read = run_in_parts(pages, 2, [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i)
                mapping.data()[i * page] = std::byte{1};
            return static_cast<std::uint32_t>(end - begin);
        });
        CHECK_EQ(read, static_cast<std::uint32_t>(pages));
        CHECK(mapping.truncated());
    }
    std::atomic<int> guarded = 0;
    run_in_parts(2, 2, [&](std::size_t, std::size_t) { guarded += TruncationGuard::innermost() != nullptr; });
    CHECK_EQ(guarded.load(), 0);
    close(fd);
}

TEST("a loop returns the sum of what its ranges return") {
    Rng rng(22);
    for (int i = 0; i < check::times(3'000); ++i) {
        const auto count = static_cast<std::size_t>(rng.between(0, 500));
        const auto each = static_cast<std::uint32_t>(rng.between(0, 4'000'000)); // the largest sum is almost 2^31
        const auto part = [each](std::size_t begin, std::size_t end) {
            return static_cast<std::uint32_t>(end - begin) * each;
        };
        CHECK_EQ(run_in_parts(count, static_cast<int>(rng.between(-2, 7)), part), static_cast<std::uint32_t>(count) * each);
    }
}

TEST("the calling thread runs the last range") {
    for (const int threads : {1, 2, 5, 3}) {
        std::thread::id last;
        run_in_parts(100, threads, [&](std::size_t, std::size_t end) {
            if (end == 100)
                last = std::this_thread::get_id();
        });
        CHECK(last == std::this_thread::get_id());
    }
}

TEST("a loop of nothing runs no index") {
    run_in_parts(0, 4, [](std::size_t begin, std::size_t end) { CHECK_EQ(begin, end); });
}

TEST("the calling thread runs a range and the requested number of other threads run the rest") {
    for (const int threads : {1, 2, 5, 3}) {
        const auto ids = threads_that_run(100, threads);
        CHECK_EQ(ids.size(), static_cast<std::size_t>(threads));
        CHECK(ids.contains(std::this_thread::get_id()));
    }
}

TEST("no more threads run than there are indices") { CHECK_EQ(threads_that_run(3, 8).size(), 3u); }

TEST("the number of threads may grow and shrink from loop to loop") {
    for (int turn = 0; turn < check::times(40); ++turn)
        for (const int threads : {2, 3, 8, 2, 5, 9, 1})
            cover(1'000, threads);
}

// Race: several threads use the pool at once.
//   each loop covers each of its indices once  acceptable   with helpers or alone
//   anything else                              FORBIDDEN
TEST("loops of several threads at the same time do not mix") {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller)
        callers.emplace_back([caller] {
            Rng rng(static_cast<std::uint64_t>(caller));
            for (int i = 0; i < check::times(2'000); ++i)
                cover(static_cast<std::size_t>(rng.between(1, 200)), static_cast<int>(rng.between(1, 5)));
        });
    for (auto &caller : callers)
        caller.join();
}

TEST("a loop inside a range runs on one thread and completes") {
    std::atomic<int> total = 0;
    run_in_parts(4, 4, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            run_in_parts(10, 2, [&](std::size_t from, std::size_t to) { total += static_cast<int>(to - from); });
    });
    CHECK_EQ(total.load(), 40);
}

// ThreadSanitizer cannot follow threads that start after a fork() of a process with threads.
#if !defined(__SANITIZE_THREAD__)

TEST("a forked child of a process that used the pool can use it, and so can its child") {
    cover(1'000, 4);
    Child child([] {
        CHECK_EQ(threads_that_run(100, 4).size(), 4u);
        cover(1'000, 4);
        Child grandchild([] {
            CHECK_EQ(threads_that_run(100, 4).size(), 4u);
            cover(1'000, 4);
        });
        CHECK_EQ(grandchild.join(), 0);
        cover(1'000, 6);
    });
    CHECK_EQ(child.join(), 0);
    cover(1'000, 4);
}

// Race: one thread forks while another is in the middle of a loop.
//   child's loops get helpers          acceptable
//   child's loop hangs                 FORBIDDEN    it inherited a locked mutex
//   child's loop runs without helpers  FORBIDDEN    the same mutex; try_lock never succeeds
TEST("a child forked in the middle of another thread's loop can use the pool") {
    std::atomic<bool> over = false;
    std::thread looping([&] {
        // Allocates nothing: AddressSanitizer's allocator, unlike libc's, cannot be forked while another thread is in
        // it.
        const std::function<void(std::size_t, std::size_t)> part = [&over](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end && !over; ++i) {
            }
        };
        while (!over)
            run_in_parts(20'000, 3, part);
    });
    for (int i = 0; i < check::times(80); ++i) {
        Child child([] { CHECK_EQ(threads_that_run(100, 3).size(), 3u); });
        CHECK_EQ(child.join(), 0);
    }
    over = true;
    looping.join();
}

#endif

TEST("helpers handle none of the process's signals") {
    sigset_t one, before, pending;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    cover(1'000, 4);
    pthread_sigmask(SIG_BLOCK, &one, &before);
    kill(getpid(), SIGUSR1); // would end the process on any thread that does not block it
    usleep(50'000);
    sigpending(&pending);
    CHECK_EQ(sigismember(&pending, SIGUSR1), 1);
    signal(SIGUSR1, SIG_IGN);
}

TEST("starting helpers leaves the caller's signal mask as it was") {
    sigset_t one, after;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &one, nullptr);
    cover(1'000, 4);
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    for (int number = 1; number < 32; ++number)
        CHECK_EQ(sigismember(&after, number), number == SIGUSR1 ? 1 : 0);
}

TEST("a process that used the pool exits without waiting for its helpers") {
    Child child([] {
        cover(1'000, 4);
        std::exit(3);
    });
    CHECK_EQ(child.join(), 3);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // they reserve the whole address space

TEST("a loop for which no more threads can be started completes with those that exist") {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 64 << 20; // room for a few stacks of 8 MB
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    cover(1'000, 64);
    CHECK(threads_that_run(1'000, 64).size() < 64);
    sigset_t after;
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    CHECK_EQ(sigismember(&after, SIGINT), 0);
}

#endif
