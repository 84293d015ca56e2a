// Atomic 64-bit words in shared memory: the only thing that processes change under each other's eyes.
//
// Who may call: any process, any thread, any time. Words that different processes write often belong on different
// cache lines (a Signal has one of its own); a table of words that is mostly read may be dense.
#pragma once

#include <atomic>
#include <cstdint>

namespace memlane {

using Word = std::atomic<std::int64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free, "a word is eight bytes and needs no lock");

// What fetch_add leaves behind: atomics wrap around, plain sums must not.
inline std::int64_t wrapping_sum(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

// PAIR publish/see. `publish` (release) keeps every earlier store of the payload in front of the word's change;
// `see` (acquire) keeps every later load of the payload behind the word's reading. Without either, a reader could
// find the new word and the old payload.
inline void publish(Word &word, std::int64_t value) { word.store(value, std::memory_order_release); }
inline std::int64_t see(const Word &word) { return word.load(std::memory_order_acquire); }

// PAIR publish/see, for one of several writers: the change happens only if the word still holds `expected`.
// Sequentially consistent because claims on several words must look the same to all processes.
// PAIR claim/unchanged: the release fence after a successful change keeps later stores into the payload behind it.
inline bool publish_if(Word &word, std::int64_t expected, std::int64_t value) {
    const bool changed = word.compare_exchange_strong(expected, value, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_release);
    return changed;
}

// PAIR claim/unchanged. A reader that copied a payload asks whether the word that named it still holds `seen`. The
// acquire fence keeps the loads of the copy in front of this second reading; its partner is the fence in publish_if.
// Without either, a copy that was overwritten while it was made could be blessed by a second reading taken too early
// (or by a claim that became visible after the stores that it was to announce).
inline bool unchanged(const Word &word, std::int64_t seen) {
    std::atomic_thread_fence(std::memory_order_acquire);
    return word.load(std::memory_order_relaxed) == seen;
}

} // namespace memlane
