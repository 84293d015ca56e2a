// Atomic 64-bit words in shared memory: all synchronisation between processes goes through them.
//
// Who may call: any process, any thread, at any time. Words that different processes write often belong on different
// cache lines (each SignalCell has its own); a table of words that is mostly read may be dense.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(MEMLANE_FAULTS)
#include "sync/faults.hpp"
#elif defined(MEMLANE_MODEL)
#include "model/atomic.hpp"
#endif

namespace memlane {

// The type of every atomic in shared memory, and of an access to a plain number there. A build for tests puts another
// implementation in its place.
#if defined(MEMLANE_FAULTS)
template <class T> using Atomic = faults::Atomic<T>;
template <class T> using AtomicRef = faults::AtomicRef<T>;
#elif defined(MEMLANE_MODEL)
template <class T> using Atomic = model::Atomic<T>;
template <class T> using AtomicRef = std::atomic_ref<T>; // of numbers that only one process at a time uses
#else
template <class T> using Atomic = std::atomic<T>;
template <class T> using AtomicRef = std::atomic_ref<T>;
#endif

// Every fence, and the line of the sources that asks for a memory order. Model checks weaken the order of one line at a time.
#if defined(MEMLANE_MODEL)
using model::at;
using model::fence;
using model::Where;
#else
[[gnu::always_inline]] inline void fence(std::memory_order order) { std::atomic_thread_fence(order); }
struct Where {
    static constexpr Where current() { return {}; }
};
[[gnu::always_inline]] constexpr std::memory_order at(std::memory_order order, Where) { return order; }
#endif

// Thrown when a word has a value that memlane never stores: a process has overwritten the shared memory. Any process that
// maps a segment can do that, so a word is checked before it becomes an index or an address.
struct StrayWord : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Changes of a word that are lost to another process in a row before a call gives up. Each loss is progress of another
// process, so this many in a row mean that words are changed for no reason.
inline constexpr int max_attempts = 1000;

using Word = Atomic<std::int64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free, "a word must have 8 bytes and be lock-free");

// The value that fetch_add leaves in the word. Atomic addition wraps around; signed overflow of a plain sum is
// undefined.
inline std::int64_t wrapping_sum(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

// PAIR publish/see. `publish` (release) orders every earlier store into the payload before the store of the word; `see`
// (acquire) orders every later load of the payload after the load of the word. Without either, a reader could load the
// new word and then the old payload.
inline void publish(Word &word, std::int64_t value, Where where = Where::current()) {
    word.store(value, at(std::memory_order_release, where));
}
inline std::int64_t see(const Word &word, Where where = Where::current()) {
    return word.load(at(std::memory_order_acquire, where));
}

// PAIR publish/see, for several writers: the store happens only if the word still holds `expected`.
// Sequentially consistent because all processes must see claims on several words in the same order.
// PAIR claim/unchanged, partner: unchanged. The release fence after a successful exchange orders later stores into the
// payload after it.
inline bool publish_if(Word &word, std::int64_t expected, std::int64_t value, Where where = Where::current()) {
    const bool changed = word.compare_exchange_strong(expected, value, at(std::memory_order_seq_cst, where));
    fence(at(std::memory_order_release, where));
    return changed;
}

// PAIR claim/unchanged, partner: publish_if. After copying a payload, a reader checks whether the payload's word still
// holds `seen`. The acquire fence orders the loads of the copy before this second load of the word. Without either
// fence, a torn copy could be accepted: because the second load was done too early, or because the stores of the
// payload became visible before the claim that precedes them.
inline bool unchanged(const Word &word, std::int64_t seen, Where where = Where::current()) {
    fence(at(std::memory_order_acquire, where));
    return word.load(std::memory_order_relaxed) == seen;
}

} // namespace memlane
