// A signal: an atomic counter that one side advances and others wait for.
//
// Who may call: any process that maps the cell. `value` is 64 bits and usually only grows. `gate` is what sleepers
// sleep on: bit 0 says "somebody may be asleep", the bits above count the wake-ups.
//
//   offset  size  field  written by            when
//   0       8     value  whoever signals       store, add, compare_and_swap
//   8       4     gate   sleepers and wakers   before a sleep (bit 0 set), at a wake-up (+1 clears it and counts)
//   12      52    -      nobody                keeps the next signal off this cache line
//
// If a process dies at any line, the others see: before the change of `value`: nothing; between the change and the
// wake-up: the new value, at the latest when their slice ends (`slice_ns`); asleep: bit 0 stays set, which costs the next
// signaller one needless system call and nothing more. No line leaves anything locked.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "sync/words.hpp"

namespace memlane {

struct alignas(64) SignalCell {
    Word value;
    std::atomic<std::uint32_t> gate;
};
static_assert(sizeof(SignalCell) == 64 && offsetof(SignalCell, value) == 0 && offsetof(SignalCell, gate) == 8);

// How long one wait sleeps in the kernel before it looks around (at its peers, its deadline, Ctrl-C). A peer's death is
// noticed within this time; ten looks a second cost an idle waiter nothing that can be measured.
inline constexpr std::int64_t slice_ns = 100'000'000;

// How long a waiter spins before it sleeps. Belongs to one waiting thread, not to the shared cell: it learns from its
// own waits. A wait that ends while spinning earns a longer spin the next time, one that spins in vain a shorter one,
// one that finds others queueing for its core sleeps at once, and one whose peer runs when it yields yields first, and may
// spin for as long as that took.
class Spin {
  public:
    explicit Spin(std::int64_t limit_ns) : limit_ns_(limit_ns), budget_ns_(limit_ns) {}
    std::int64_t limit_ns() const { return limit_ns_; }
    // True when the cell reached `until` while spinning.
    bool until(const SignalCell &cell, std::int64_t until, std::int64_t deadline_ns);

  private:
    std::int64_t limit_ns_;
    std::int64_t budget_ns_;
    std::uint32_t waits_ = 0;
    bool shares_core_ = false; // with the process that it waits for
};

// The most that a wait spins unless told otherwise; nothing on a machine with one core.
std::int64_t default_spin_limit_ns();

void signal_store(SignalCell &cell, std::int64_t value);
std::int64_t signal_add(SignalCell &cell, std::int64_t amount); // returns the new value
bool signal_compare_and_swap(SignalCell &cell, std::int64_t expected, std::int64_t value);
void signal_wake(SignalCell &cell); // after a change made by other means

enum class WaitEnd {
    reached,   // the value is at or past what was asked for
    timed_out, // the deadline came first
    peer_died, // `peer` says which of the watched ones; the value was looked at once more after the death
    paused,    // a slice ended or a signal came in: the caller may look around and wait again
};

struct WaitResult {
    WaitEnd end;
    std::int64_t value;
    int peer = -1;
};

// Waits until the value is at least `until`. `pidfds` are the processes whose death ends the wait.
WaitResult signal_wait(SignalCell &cell, std::int64_t until, std::int64_t deadline_ns, std::span<const int> pidfds,
                       Spin &spin);

} // namespace memlane
