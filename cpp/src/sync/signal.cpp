#include "sync/signal.hpp"

#include <algorithm>
#include <vector>

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include "os/clock.hpp"
#include "os/futex.hpp"

namespace memlane {

namespace {

// Waking a sleeper took 12 to 300 us on the machines measured, so spinning for up to 50 us is cheaper on average.
constexpr std::int64_t spin_limit_ns = 50'000;
// A spin shorter than this costs less than the system call that it may save. Budgets never fall below it.
constexpr std::int64_t spin_floor_ns = 1'000;
// A yield on an idle core takes well under a microsecond; a longer one means that another thread ran.
constexpr std::int64_t yield_contended_ns = 5'000;
// A yield without another runnable thread returns faster than this.
constexpr std::int64_t yield_alone_ns = 1'000;

// A thread that ran for longer than this during a yield is not one that is waited for: it computes, or it spins itself.
constexpr std::int64_t foreign_ns = 500'000;

// One wait in this many is a probe: it spins for the full limit, whatever the budget is. Two processes that wait for each
// other and both sleep make each other's waits long: without a probe they would never find out that spinning pays. Costs
// 50 us in 16 waits.
constexpr std::uint32_t min_waits_per_probe = 16;
// A probe on a core that an unrelated thread wants costs that thread's time slice, which is milliseconds, and a sleeper would
// have been woken meanwhile. So each yield to such a thread doubles the number of waits to the next probe.
constexpr std::uint32_t max_waits_per_probe = 4096;

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int dead_peer(std::span<const int> pidfds) {
    if (pidfds.empty())
        return -1;
    std::vector<pollfd> polls;
    polls.reserve(pidfds.size());
    for (int fd : pidfds)
        polls.push_back({fd, POLLIN, 0});
    if (poll(polls.data(), polls.size(), 0) <= 0)
        return -1;
    for (std::size_t i = 0; i < polls.size(); ++i)
        if (polls[i].revents != 0)
            return static_cast<int>(i);
    return -1;
}

// PAIR change/sleep, partner: signal_wait. The waker changes `value`, then loads `gate`; the sleeper sets bit 0 of
// `gate`, then loads `value`. Both sides are sequentially consistent, so at least one sees the other: either the
// sleeper finds the new value and does not sleep, or the waker finds bit 0 and wakes it. The reordering that this
// prevents is the waker's load of `gate` moving before its store of `value` (which even x86 does with plain stores): a
// lost wake-up.
void wake_sleepers(SignalCell &cell) {
    std::uint32_t gate = cell.gate.load(std::memory_order_seq_cst);
    // If the exchange fails, another waker has incremented the gate since and wakes everything that sleeps on it.
    if ((gate & 1u) != 0 && cell.gate.compare_exchange_strong(gate, gate + 1, std::memory_order_seq_cst))
        futex_wake_all(cell.gate);
}

} // namespace

std::int64_t default_spin_limit_ns() {
    // The cores of the machine, not those that this process may use: two processes with one core each gain most from
    // spinning, and two that share one core notice it (shares_core_). Read once: sysconf reads a file, which takes 6 us.
    static const std::int64_t limit_ns = sysconf(_SC_NPROCESSORS_ONLN) < 2 ? 0 : spin_limit_ns;
    return limit_ns;
}

Spin::Spin(std::int64_t limit_ns) : limit_ns_(limit_ns), budget_ns_(limit_ns), waits_per_probe_(min_waits_per_probe) {}

bool Spin::until(const SignalCell &cell, std::int64_t until, std::int64_t deadline_ns) {
    if (limit_ns_ == 0)
        return false;
    const bool probing = ++waits_ >= waits_per_probe_;
    if (probing)
        waits_ = 0;
    std::int64_t budget_ns = probing ? limit_ns_ : budget_ns_;
    std::int64_t begin = now_ns();
    std::int64_t now = begin;
    bool contended = false; // another thread ran on this core
    bool foreign = false;   // and it was not one that is waited for
    if (shares_core_) { // the last wait ended in a yield that let the awaited process run: yield first
        sched_yield();
        now = now_ns();
        const std::int64_t yielded_ns = now - begin;
        contended = foreign = yielded_ns > foreign_ns;
        shares_core_ = yielded_ns > yield_alone_ns && !foreign;
        if (see(cell.value) >= until)
            return true;
        if (yielded_ns > yield_contended_ns) {
            // Another thread ran. If it was one of several awaited workers, the others will be done in about the same
            // time, and sleeping now would cost a wake-up from another core: with two workers of 32 CartPoles each,
            // where the one on the other core was later, that took 40 us, and takes 9 us with this spin. If it was an
            // unrelated thread, the next yield shows it.
            budget_ns = yielded_ns;
            begin = now;
        }
    }
    while (now - begin < budget_ns && now < deadline_ns && !contended) {
        for (int i = 0; i < 24; ++i) { // about 1 us between two readings of the clock
            if (see(cell.value) >= until) {
                budget_ns_ = std::min(limit_ns_, std::max(budget_ns_, now - begin) * 2);
                if (probing)
                    waits_per_probe_ = min_waits_per_probe;
                return true;
            }
            pause_core();
        }
        // Offer the core to other runnable threads. This keeps spinning harmless when there are more runnable processes
        // than cores: the awaited process may be in the run queue of this core.
        const std::int64_t before = now_ns();
        if (before - begin > 2'000)
            sched_yield();
        now = now_ns();
        const std::int64_t yielded_ns = now - before;
        contended = yielded_ns > yield_contended_ns;
        foreign = yielded_ns > foreign_ns;
        if (yielded_ns > yield_alone_ns && !foreign && see(cell.value) >= until) {
            shares_core_ = true;
            return true;
        }
    }
    budget_ns_ = std::max(std::min(spin_floor_ns, limit_ns_), contended ? spin_floor_ns : budget_ns_ / 2);
    if (foreign)
        waits_per_probe_ = std::min(waits_per_probe_ * 2, max_waits_per_probe);
    else if (probing)
        waits_per_probe_ = min_waits_per_probe;
    return see(cell.value) >= until;
}

void signal_store(SignalCell &cell, std::int64_t value) {
    // PAIR change/sleep and PAIR publish/see, partner of both: signal_wait
    cell.value.store(value, std::memory_order_seq_cst);
    wake_sleepers(cell);
}

std::int64_t signal_add(SignalCell &cell, std::int64_t amount) {
    // PAIR change/sleep and PAIR publish/see, partner of both: signal_wait
    const std::int64_t before = cell.value.fetch_add(amount, std::memory_order_seq_cst);
    wake_sleepers(cell);
    return wrapping_sum(before, amount);
}

bool signal_compare_and_swap(SignalCell &cell, std::int64_t expected, std::int64_t value) {
    // Sequentially consistent. PAIR change/sleep and PAIR publish/see, partner of both: signal_wait
    if (!publish_if(cell.value, expected, value))
        return false;
    wake_sleepers(cell);
    return true;
}

void signal_wake(SignalCell &cell) {
    // PAIR change/sleep, partner: signal_wait. The caller has changed `value`; the fence orders that before the wake-up.
    fence(std::memory_order_seq_cst);
    wake_sleepers(cell);
}

WaitResult signal_wait(SignalCell &cell, std::int64_t until, std::int64_t deadline_ns, std::span<const int> pidfds,
                       Spin &spin) {
    // PAIR publish/see, partners: signal_store, signal_add, signal_compare_and_swap. All stores before the signal are
    // visible after the wait.
    std::int64_t value = see(cell.value);
    if (value >= until)
        return {WaitEnd::reached, value};
    if (spin.until(cell, until, deadline_ns))
        return {WaitEnd::reached, see(cell.value)};

    const int peer = dead_peer(pidfds);
    // PAIR change/sleep, partner: wake_sleepers. The gate is set before the value is loaded.
    const std::uint32_t gate = cell.gate.fetch_or(1u, std::memory_order_seq_cst) | 1u;
    value = cell.value.load(std::memory_order_seq_cst);
    if (value >= until)
        return {WaitEnd::reached, value};
    if (peer >= 0) // checked before the value was loaded: a value that the peer stored right before its death is not missed
        return {WaitEnd::peer_died, value, peer};
    const std::int64_t left_ns = deadline_ns == forever_ns ? slice_ns : deadline_ns - now_ns();
    if (left_ns <= 0)
        return {WaitEnd::timed_out, value};
    futex_wait(cell.gate, gate, std::min(left_ns, slice_ns));
    value = see(cell.value);
    return {value >= until ? WaitEnd::reached : WaitEnd::paused, value};
}

} // namespace memlane
