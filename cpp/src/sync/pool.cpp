#include "sync/pool.hpp"

#include <algorithm>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "os/clock.hpp"
#include "os/own_signals.hpp"
#include "sync/signal.hpp"

namespace memlane {

namespace {

// What a helper needs to begin. It lies beside the signal that starts it, because each cache line that has to come over from
// the caller's core takes its time: a loop took 0.75 us longer than its work, and 1.15 us with all this strewn about.
struct alignas(128) Job {
    SignalCell started{}; // rounds begun
    RangeFunction function = nullptr;
    void *context = nullptr;
    std::size_t count = 0;
    int parts = 0;
    int core = -1; // the caller's
    bool quit = false;
};
static_assert(sizeof(Job) == 128);

// The kernel may wake a helper on its caller's core although another one is idle: seen again and again in a virtual machine
// with two cores, why is not known. The loop is then slower than on one thread (230 instead of 75 us for 4096 rows). So a
// helper that finds itself there keeps off that core, until the caller has moved to the one where the helper is now.
void keep_off(int core) {
    if (sched_getcpu() != core)
        return;
    cpu_set_t others;
    // Of the process's main thread: what was allowed to us may be what an earlier call has left.
    if (sched_getaffinity(getpid(), sizeof others, &others) != 0)
        return;
    CPU_CLR(static_cast<std::size_t>(core), &others);
    if (CPU_COUNT(&others) > 0)
        sched_setaffinity(0, sizeof others, &others);
}

class Pool {
  public:
    explicit Pool(int wanted) : wanted_(wanted) {
        threads_.reserve(static_cast<std::size_t>(wanted));
        const OwnSignals only;
        try {
            for (int i = 0; i < wanted; ++i)
                threads_.emplace_back([this, i] { help(i); });
        } catch (const std::system_error &) {
            // The machine or the container has no thread left to give; those made so far do the work.
        }
    }

    ~Pool() {
        job_.quit = true;
        signal_add(job_.started, 1);
        for (auto &thread : threads_)
            thread.join();
    }

    int helpers() const { return static_cast<int>(threads_.size()); }
    int wanted() const { return wanted_; }

    void run(std::size_t count, int parts, RangeFunction function, void *context) {
        job_.function = function;
        job_.context = context;
        job_.count = count;
        job_.parts = parts;
        job_.core = sched_getcpu();
        const std::int64_t all_done = done_.value.load(std::memory_order_relaxed) + helpers();
        signal_add(job_.started, 1); // PAIR publish/see: the loop's description above stands before the start
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
        if (index >= job_.parts)
            return;
        const auto at = [&](int part) {
            return job_.count * static_cast<std::size_t>(part) / static_cast<std::size_t>(job_.parts);
        };
        job_.function(job_.context, at(index), at(index + 1));
    }

    void help(int index) {
        for (std::int64_t round = 1;; ++round) {
            // A new spin each time: who has just worked is likely to be needed again soon, whatever the pause before was.
            Spin spin(default_spin_limit_ns());
            while (signal_wait(job_.started, round, forever_ns, {}, spin).end != WaitEnd::reached) {
            }
            if (job_.quit)
                return;
            keep_off(job_.core);
            run_range(index + 1);
            signal_add(done_, 1);
        }
    }

    Job job_;
    SignalCell done_{}; // helpers' rounds ended
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

void run_in_parts(std::size_t count, int threads, RangeFunction function, void *context) {
    threads = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    std::unique_lock lock(busy, std::defer_lock);
    if (threads <= 1 || !lock.try_lock()) {
        function(context, 0, count);
        return;
    }
    if (pool == nullptr || pool->wanted() < threads - 1) {
        delete std::exchange(pool, nullptr);
        pool = new Pool(threads - 1);
    }
    pool->run(count, std::min(threads, pool->helpers() + 1), function, context);
}

} // namespace memlane
