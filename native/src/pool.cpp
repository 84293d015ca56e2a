#include "pool.hpp"

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include "clock.hpp"
#include "signal.hpp"

namespace memlane {

namespace {

using Part = std::function<void(std::size_t, std::size_t)>;

class Pool {
  public:
    explicit Pool(int helpers) : pid_(getpid()) {
        // Helpers must not take the process's signals: Ctrl-C belongs to the thread that Python waits on.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < helpers; ++i)
            threads_.emplace_back([this, i] { help(i); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        quit_ = true;
        signal_add(started_, 1);
        for (auto &thread : threads_)
            thread.join();
    }

    int helpers() const { return static_cast<int>(threads_.size()); }
    bool belongs_here() const { return pid_ == getpid(); }

    void run(std::size_t count, int parts, const Part &part) {
        part_ = &part;
        count_ = count;
        parts_ = parts;
        const std::int64_t all_done = done_.value.load(std::memory_order_relaxed) + helpers();
        signal_add(started_, 1); // PAIR publish/see: the loop's description above stands before the start
        run_range(0);
        while (signal_wait(done_, all_done, forever_ns, {}, spin_).end != WaitEnd::reached) {
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
        Spin spin(default_spin_limit_ns());
        for (std::int64_t round = 1;; ++round) {
            while (signal_wait(started_, round, forever_ns, {}, spin).end != WaitEnd::reached) {
            }
            if (quit_)
                return;
            run_range(index + 1);
            signal_add(done_, 1);
        }
    }

    SignalCell started_{}; // rounds begun
    SignalCell done_{};    // helpers' rounds ended
    Spin spin_{default_spin_limit_ns()};
    const Part *part_ = nullptr;
    std::size_t count_ = 0;
    int parts_ = 0;
    bool quit_ = false;
    pid_t pid_;
    std::vector<std::thread> threads_;
};

std::mutex busy;
// Never destroyed at exit: helpers may be asleep in it, and the process's end is their end.
Pool *pool = nullptr;

// A fork in the middle of another thread's loop would leave `busy` locked in the child for ever.
[[maybe_unused]] const int at_fork = pthread_atfork(
    [] { busy.lock(); }, [] { busy.unlock(); }, [] { busy.unlock(); });

} // namespace

void run_in_parts(std::size_t count, int threads, const Part &part) {
    threads = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    std::unique_lock lock(busy, std::defer_lock);
    if (threads <= 1 || !lock.try_lock()) {
        part(0, count);
        return;
    }
    if (pool != nullptr && !pool->belongs_here())
        pool = nullptr; // a fork's copy: its threads do not exist here, so there is nobody to join
    if (pool == nullptr || pool->helpers() < threads - 1) {
        delete pool;
        pool = new Pool(threads - 1);
    }
    pool->run(count, threads, part);
}

} // namespace memlane
