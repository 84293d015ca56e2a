#include "pool.hpp"

#include <algorithm>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>
#include <signal.h>

#include "clock.hpp"
#include "signal.hpp"

namespace memlane {

namespace {

using Part = std::function<void(std::size_t, std::size_t)>;

// The kernel may wake a helper on its caller's core although another one is idle: seen again and again in a virtual machine
// with two cores, why is not known. The loop is then slower than on one thread (230 instead of 75 us for 4096 rows). So a helper that finds itself there keeps
// off that core, until the caller has moved to the one where the helper is now.
void keep_off(int core, const cpu_set_t &allowed) {
    if (sched_getcpu() != core)
        return;
    cpu_set_t others = allowed;
    CPU_CLR(static_cast<std::size_t>(core), &others);
    if (CPU_COUNT(&others) > 0)
        sched_setaffinity(0, sizeof others, &others);
}

class Pool {
  public:
    explicit Pool(int wanted) : wanted_(wanted) {
        threads_.reserve(static_cast<std::size_t>(wanted));
        // Helpers must not take the process's signals: Ctrl-C belongs to the thread that Python waits on. Those that a
        // thread causes itself stay: a blocked SIGSEGV kills without the handler that could say where.
        sigset_t others, before;
        sigfillset(&others);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
            sigdelset(&others, own);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        try {
            for (int i = 0; i < wanted; ++i)
                threads_.emplace_back([this, i] { help(i); });
        } catch (const std::system_error &) {
            // The machine or the container has no thread left to give; those made so far do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        quit_ = true;
        signal_add(started_, 1);
        for (auto &thread : threads_)
            thread.join();
    }

    int helpers() const { return static_cast<int>(threads_.size()); }
    int wanted() const { return wanted_; }

    void run(std::size_t count, int parts, const Part &part) {
        part_ = &part;
        core_ = sched_getcpu();
        sched_getaffinity(0, sizeof allowed_, &allowed_);
        count_ = count;
        parts_ = parts;
        const std::int64_t all_done = done_.value.load(std::memory_order_relaxed) + helpers();
        signal_add(started_, 1); // PAIR publish/see: the loop's description above stands before the start
        const std::int64_t begin = now_ns();
        run_range(0);
        // The others' parts are as large as ours: waiting awake for as long as ours took costs less than to be woken, on
        // this core or, worse, on theirs.
        Spin spin(std::max(default_spin_limit_ns(), now_ns() - begin));
        while (signal_wait(done_, all_done, forever_ns, {}, spin).end != WaitEnd::reached) {
        }
    }

  private:
    void run_range(int index) {
        if (index >= parts_)
            return;
        const std::size_t begin = count_ * static_cast<std::size_t>(index) / static_cast<std::size_t>(parts_);
        const std::size_t end = count_ * static_cast<std::size_t>(index + 1) / static_cast<std::size_t>(parts_);
        (*part_)(begin, end);
    }

    void help(int index) {
        for (std::int64_t round = 1;; ++round) {
            // A new spin each time: who has just worked is likely to be needed again soon, whatever the pause before was.
            Spin spin(default_spin_limit_ns());
            while (signal_wait(started_, round, forever_ns, {}, spin).end != WaitEnd::reached) {
            }
            if (quit_)
                return;
            keep_off(core_, allowed_);
            run_range(index + 1);
            signal_add(done_, 1);
        }
    }

    SignalCell started_{}; // rounds begun
    SignalCell done_{};    // helpers' rounds ended
    const Part *part_ = nullptr;
    std::size_t count_ = 0;
    int core_ = -1;       // the caller's
    cpu_set_t allowed_{}; // to the caller
    int parts_ = 0;
    bool quit_ = false;
    int wanted_;
    std::vector<std::thread> threads_;
};

std::mutex busy;
// Never destroyed at exit: helpers may be asleep in it, and the process's end is their end.
Pool *pool = nullptr;

// A fork in the middle of another thread's loop would leave `busy` locked in the child for ever.
[[maybe_unused]] const int at_fork = pthread_atfork(
    [] { busy.lock(); }, [] { busy.unlock(); },
    [] {
        pool = nullptr; // its threads do not exist here, so there is nobody to join; a pid could not tell (namespaces)
        busy.unlock();
    });

} // namespace

void run_in_parts(std::size_t count, int threads, const Part &part) {
    threads = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    std::unique_lock lock(busy, std::defer_lock);
    if (threads <= 1 || !lock.try_lock()) {
        part(0, count);
        return;
    }
    if (pool == nullptr || pool->wanted() < threads - 1) {
        delete std::exchange(pool, nullptr);
        pool = new Pool(threads - 1);
    }
    pool->run(count, std::min(threads, pool->helpers() + 1), part);
}

} // namespace memlane
