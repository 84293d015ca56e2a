// A model checker for the lanes: runs a scenario in every way that the C++ memory model allows, within bounds.
//
// A scenario is a function that makes shared memory, starts threads (which stand for processes), joins them and checks
// the result. Its threads run as fibers in one thread of the operating system. The explorer decides at each access of shared
// memory, one choice after the other:
//
//   schedule    which thread makes the next access. Leaving a thread that could go on is a preemption
//   death       whether the thread ends right before the access, if it is mortal
//   value       which store a load reads: any that coherence and happens-before allow. Another than the newest is stale
//   position    where in the word's modification order a store is put. Another than the end counts as stale, too
//
// Sleeping threads wake after a slice only if no other thread can run. If no process has died, that is a lost wake-up, and
// the run fails (unless the scenario allows it, `let_slices_end`).
//
// An exhaustive search goes through all choices within the bounds, depth first, and starts the scenario anew for each. It
// leaves out what it has seen: two sequences of accesses that leave every thread with the same history and memory with the
// same stores have the same future. It also does not preempt a thread before it loads what no thread changes while others
// run: the others may as well run after it. A random search draws the choices. Both repeat a run from the list of its choices.
//
// The memory model is that of C++20 in its operational form with views (as in Kang et al., POPL 2017, without promises). Each
// word has its stores in modification order. A view says for each word which store, at least, its owner must see; it is
// passed on by release stores and fences, through read-modify-writes (release sequences), to acquire loads and fences.
// Sequentially consistent accesses and fences have one order, that of their execution. Two things that C++20 allows are not
// explored: a load that reads a store which the same execution makes later (load buffering), and an order of the sequentially
// consistent accesses that contradicts happens-before (possible only where they are mixed with weaker accesses of the same
// word).
//
// What a scenario must obey: its threads share data only through this file and the lanes, because the explorer knows a
// thread by what it has loaded. Results of a thread belong to that thread; the body combines them after `join`. Memory
// that a scenario allocates is taken back as a whole after each run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "model/atomic.hpp"

namespace memlane::model {

inline constexpr int max_threads = 6; // with the body of the scenario, which is thread 0

// ------------------------------------------------------------------------------------------------- for scenarios

// Shared memory of this run, all zero, on its own cache lines.
std::byte *shared_bytes(std::size_t bytes);
template <class T> T &shared() { return *reinterpret_cast<T *>(shared_bytes(sizeof(T))); }
// Copies access these bytes in words of 4 bytes instead of 8.
void narrow_words(const void *begin, std::size_t bytes);
// A name for the trace.
void name_word(const void *word, std::string name);

enum class Mortal { no, yes };
// Starts a thread and returns the identity of the process that it stands for.
std::int64_t start(const char *name, std::function<void()> run, Mortal mortal = Mortal::no);
// Waits until all threads have ended. What they stored is visible afterwards.
void join();
// Whether the process died. Only after `join`.
bool died(std::int64_t process);
// The identity of the calling thread's process.
std::int64_t self();
// A descriptor that poll() reports as readable once the process is dead, as a pidfd.
inline int pidfd_of(std::int64_t process) { return 1000 + static_cast<int>(process); }
inline std::int64_t process_of_pidfd(int pidfd) { return pidfd - 1000; }

// A number below `options`: a choice of the scenario. Every one is explored.
int pick(int options);

// Fails the run unless `holds`.
void require(bool holds, const char *what);

// A result of the run, for Outcome::observed.
void observe(const std::string &result);

// From here to the end of the run, all threads may sleep until a slice ends, as after a death: for what is promised after a
// slice only.
void let_slices_end();

// Advances the clock. Only while no other thread runs: it stands still otherwise, except for slices.
void let_time_pass(std::int64_t nanoseconds);

// Non-atomic memory that must not race: an access that is not ordered with a conflicting one fails the run.
std::uint64_t read_plain(const void *word, Where where = Where::current());
void write_plain(void *word, std::uint64_t value, Where where = Where::current());
struct Plain {
    std::uint64_t raw;
    std::uint64_t read(Where where = Where::current()) const { return read_plain(&raw, where); }
    void write(std::uint64_t value, Where where = Where::current()) { write_plain(&raw, value, where); }
};

// --------------------------------------------------------------------------------------------------- for the driver

// How many choices other than the first of their kind one execution may have.
struct Bounds {
    int preemptions;
    int stale;
    int deaths;
};

enum class AccessKind { load, store, change, fence };

// A line of the sources with an access that is stronger than relaxed.
struct Site {
    std::string file; // from cpp/src, or as the compiler was called
    std::uint32_t line, column;
    AccessKind kind;
    std::memory_order order;
};
// All that were executed so far in this process, in the order of their first execution.
const std::vector<Site> &sites();
// Whether the site was executed since the last call of forget_covered.
bool covered(std::size_t site);
void forget_covered();

struct Mutant {
    std::size_t site;
    bool removed; // a fence is left out; otherwise `order` replaces the order of the site
    std::memory_order order;
};

struct Search {
    Bounds bounds;
    std::int64_t max_executions; // of an exhaustive search: it ends incomplete. Of a random one: its number
    std::int64_t max_seconds = 100'000; // as max_executions
    bool random = false;
    std::uint64_t seed = 1;
    std::span<const Mutant> mutants = {};
    bool trace = false; // one execution only, that of `replay`, with a trace
    std::vector<int> replay = {}; // its choices; the first option for those that follow
};

struct Outcome {
    std::int64_t executions = 0; // that ran to their end
    std::int64_t merged = 0; // that ended early, in a state that had been seen
    std::int64_t states = 0;
    bool complete = false; // every execution within the bounds was seen
    std::set<std::string> observed;
    std::string failure; // empty if none
    std::vector<int> choices; // of the failed execution
    std::string trace; // of a search with `trace`
};

Outcome explore(const std::function<void()> &body, const Search &search);

// -------------------------------------------------------------------------------- for the operating system's stand-ins

bool alive(std::int64_t process);
// The clock of the run; 0 outside a run.
std::int64_t clock_ns();
// 0, EAGAIN or ETIMEDOUT.
int futex_sleep(const void *word, std::uint32_t expected);
void futex_wake(const void *word);

} // namespace memlane::model
