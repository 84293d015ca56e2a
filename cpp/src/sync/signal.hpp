// A signal: an atomic counter that one side advances and others wait for.
//
// Who may call: any process that maps the cell. `value` has 64 bits and usually only grows. `gate` is the futex word:
// bit 0 means that a waiter may be asleep, the bits above count the wake-ups.
//
//   offset  size  field  written by            when
//   0       8     value  signalling processes  store, add, compare_and_swap
//   8       4     gate   waiters, signallers   before a sleep (sets bit 0), at a wake-up (+1 clears bit 0 and counts)
//   12      52    -      (padding)             keeps the next signal off this cache line
//
// If a process dies, the others see:
//   before the change of `value`            nothing
//   between the change and the wake-up      the new value, at the latest when their slice ends (`slice_ns`)
//   asleep                                  bit 0 stays set; this costs the next signaller one needless system call
// No line leaves anything locked.
#pragma once

#include <cstdint>
#include <span>

#include "sync/words.hpp"

namespace memlane {

struct alignas(64) SignalCell {
    Word value;
    Atomic<std::uint32_t> gate;
};
static_assert(sizeof(SignalCell) == 64 && offsetof(SignalCell, value) == 0 && offsetof(SignalCell, gate) == 8);

// The longest that a wait sleeps in the kernel before it checks its peers, its deadline and Ctrl-C. A peer's death is
// noticed within this time; ten checks a second cost an idle waiter nothing that can be measured.
inline constexpr std::int64_t slice_ns = 100'000'000;

// How long a waiter spins before it sleeps. Belongs to one waiting thread, not to the shared cell, and adapts to that
// thread's waits:
//   a wait that ended while spinning       the next spin may be longer
//   a spin in vain                         the next spin is shorter
//   other threads queue for this core      the wait sleeps at once; if they run for long, so do the next ones
//   a yield let the awaited process run    the next wait yields first, and may spin for as long as that yield took
class Spin {
  public:
    explicit Spin(std::int64_t limit_ns);
    std::int64_t limit_ns() const { return limit_ns_; }
    // Spins; true if the cell reached `until` meanwhile.
    bool until(const SignalCell &cell, std::int64_t until, std::int64_t deadline_ns);

  private:
    std::int64_t limit_ns_;
    std::int64_t budget_ns_;
    std::uint32_t waits_ = 0; // since the last probe
    std::uint32_t waits_per_probe_;
    bool shares_core_ = false; // whether the awaited process runs on the waiter's core
};

// The default of Spin's limit_ns; 0 on a machine with one core.
std::int64_t default_spin_limit_ns();

void signal_store(SignalCell &cell, std::int64_t value);
std::int64_t signal_add(SignalCell &cell, std::int64_t amount); // returns the new value
bool signal_compare_and_swap(SignalCell &cell, std::int64_t expected, std::int64_t value);
void signal_wake(SignalCell &cell); // wakes all waiters, after `value` was changed by other means

enum class WaitEnd {
    reached,   // the value is at least `until`
    timed_out, // the deadline passed
    peer_died, // `peer` is the index of the dead process; the value was loaded once more after its death
    paused,    // a slice ended, a wake-up or a POSIX signal came: the caller may check other conditions and wait again
};

struct WaitResult {
    WaitEnd end;
    std::int64_t value;
    int peer = -1;
};

// Waits until the value is at least `until`, for one slice at most. The death of a process of `pidfds` ends the wait.
// Throws std::system_error if the kernel cannot sleep on the cell.
WaitResult signal_wait(SignalCell &cell, std::int64_t until, std::int64_t deadline_ns, std::span<const int> pidfds,
                       Spin &spin);

} // namespace memlane
