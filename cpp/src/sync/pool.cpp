#include "sync/pool.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "os/clock.hpp"
#include "os/mapping.hpp"
#include "os/own_signals.hpp"
#include "sync/signal.hpp"

namespace memlane {

namespace {

// All that a helper thread needs to begin, beside the signal that starts it. Each cache line that the caller has changed
// must be transferred from its core, which took 0.06 or 0.25 us, depending on where the host had placed the two cores. So
// `set` leaves a field that has its value already: the helpers still have the line. Together with the result in `done_`
// and a host that writes nothing else that helpers read, a step of 1024 CartPoles takes 1.97 instead of 2.02 us (4.7
// instead of 4.9 us where a transfer takes 0.25 us), one of 1024 Pendulums 2.95 instead of 3.02 us (4.3 instead of 4.6).
struct alignas(128) Job {
    SignalCell started{}; // loops started
    RangeFunction function = nullptr;
    void *context = nullptr;
    std::size_t count = 0;
    int parts = 0;
    int caller_core = -1;
    const TruncationGuard *guards = nullptr; // of the caller
    bool quit = false;
};
static_assert(sizeof(Job) == 128);

template <class Value> void set(Value &field, Value value) {
    if (field != value)
        field = value;
}

// What a helper adds to `done_` after its range, beside what the range returned: one number, so that the caller receives
// both with one transfer.
constexpr std::int64_t arrival = std::int64_t{1} << 31;

// The kernel may wake a helper on its caller's core although another core is idle: seen repeatedly in a virtual machine
// with two cores, for unknown reasons. The loop is then slower than on one thread (230 instead of 75 us for 4096 rows).
// So a helper on its caller's core excludes that core from its affinity, until the caller has moved to the helper's new
// core.
void leave_core(int core) {
    if (sched_getcpu() != core)
        return;
    cpu_set_t others;
    // The affinity of the main thread, not of this thread, which an earlier call may have narrowed.
    if (sched_getaffinity(getpid(), sizeof others, &others) != 0)
        return;
    CPU_CLR(static_cast<std::size_t>(core), &others);
    if (CPU_COUNT(&others) > 0)
        sched_setaffinity(0, sizeof others, &others);
}

class Pool {
  public:
    explicit Pool(int requested) : requested_(requested) {
        threads_.reserve(static_cast<std::size_t>(requested));
        const OwnSignals signals;
        try {
            for (int i = 0; i < requested; ++i)
                threads_.emplace_back([this, i] { helper_loop(i); });
        } catch (const std::system_error &) {
            // The machine or the container allows no more threads; those started so far do the work.
        }
    }

    ~Pool() {
        job_.quit = true;
        signal_add(job_.started, 1);
        for (auto &thread : threads_)
            thread.join();
    }

    int helpers() const { return static_cast<int>(threads_.size()); }
    int requested() const { return requested_; }

    std::uint32_t run(std::size_t count, int parts, RangeFunction function, void *context) {
        set(job_.function, function);
        set(job_.context, context);
        set(job_.count, count);
        set(job_.parts, parts);
        set(job_.caller_core, sched_getcpu());
        set(job_.guards, TruncationGuard::innermost());
        // relaxed: no helper changes it between two loops, and PAIR publish/see ordered this load after the last change.
        std::int64_t before = done_.value.load(std::memory_order_relaxed);
        if (before > std::numeric_limits<std::int64_t>::max() / 2)
            done_.value.store(before = 0, std::memory_order_relaxed);
        const std::int64_t all_done = before + helpers() * arrival;
        // PAIR publish/see, partner: helper_loop. The job's fields are stored before the start: otherwise a helper could
        // run with the fields of the loop before.
        signal_add(job_.started, 1);
        const std::int64_t begin = now_ns();
        // The last range: hardware prefetchers run past the end of a range, so the thread before this one takes cache lines
        // at its start, and this thread, which starts first and waits for the others, has time to get them back. Small:
        // two threads in lock-step took 4.3 instead of 4.4 us for 1024 CartPoles, and no less for 1024 Pendulums.
        const std::uint32_t own = run_range(parts - 1);
        // The helpers' ranges are as large as this one: spinning for as long as this range took costs less than a
        // wake-up, on this core or, worse, on a helper's core.
        Spin spin(std::max(default_spin_limit_ns(), now_ns() - begin));
        for (;;) {
            // PAIR publish/see, partner: helper_loop. All that the helpers stored is visible when this function returns.
            const WaitResult wait = signal_wait(done_, all_done, forever_ns, {}, spin);
            if (wait.end == WaitEnd::reached)
                return own + static_cast<std::uint32_t>(wait.value - all_done);
        }
    }

  private:
    std::uint32_t run_range(int index) {
        const auto at = [&](int part) {
            return job_.count * static_cast<std::size_t>(part) / static_cast<std::size_t>(job_.parts);
        };
        return job_.function(job_.context, at(index), at(index + 1));
    }

    void helper_loop(int index) {
        for (std::int64_t loop = 1;; ++loop) {
            // A new Spin each time: a helper that has just worked is likely to be needed again soon, however long the
            // pause before was.
            Spin spin(default_spin_limit_ns());
            // PAIR publish/see, partner: run. The job's fields are loaded after the start.
            while (signal_wait(job_.started, loop, forever_ns, {}, spin).end != WaitEnd::reached) {
            }
            if (job_.quit)
                return;
            leave_core(job_.caller_core);
            const std::int64_t result = [&]() -> std::int64_t {
                const GuardsOfCaller guards(job_.guards);
                return index < job_.parts - 1 ? run_range(index) : 0;
            }();
            signal_add(done_, arrival + result); // PAIR publish/see, partner: run. The range's stores come before it.
        }
    }

    Job job_;
    SignalCell done_{}; // `arrival` per helper that has finished, and the sum of their results, over all loops
    int requested_;
    std::vector<std::thread> threads_;
};

std::mutex pool_mutex;
// Never destroyed at exit: helpers may be asleep in it, and end with the process.
Pool *pool = nullptr;

// A fork during another thread's loop would leave `pool_mutex` locked in the child for ever.
[[maybe_unused]] const int at_fork = pthread_atfork(
    [] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
    [] {
        pool = nullptr; // its threads do not exist in the child; comparing pids would not be enough (pid namespaces)
        pool_mutex.unlock();
    });

} // namespace

std::uint32_t run_in_parts(std::size_t count, int threads, RangeFunction function, void *context) {
    threads = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    std::unique_lock lock(pool_mutex, std::defer_lock);
    if (threads <= 1 || !lock.try_lock())
        return function(context, 0, count);
    if (pool == nullptr || pool->requested() < threads - 1) {
        delete std::exchange(pool, nullptr);
        pool = new Pool(threads - 1);
    }
    return pool->run(count, std::min(threads, pool->helpers() + 1), function, context);
}

} // namespace memlane
