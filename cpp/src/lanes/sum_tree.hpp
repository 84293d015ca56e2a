// A sum tree: a priority for each row, and which row a number falls on when all priorities are laid end to end.
//
// Who may call: any number of processes at once. A leaf is one word, so it changes as a whole:
//
//   leaf    generation << 32 | bits of a float, the priority. The generation says which content of the row is meant: who
//           knows only an older one cannot change it.
//   nodes   floats, each the sum of 16 leaves or of 16 nodes below, side by side on one cache line. Every node is made anew
//           from those below, never added to: rounding does not pile up, and there is nothing to lose but freshness.
//
// Levels, the leaves first, each filled up with zeros to a multiple of 16:
//   count words | ceil(count / 16) floats | ... | at most 16 floats
//
// If a process dies between its change of a leaf and its `refresh`: the nodes above that leaf are out of date, the leaf is
// drawn too often, too seldom or found to be worth nothing (and another number is drawn), until anybody refreshes one of
// its 16 neighbours. No draw depends on the nodes being right.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sync/words.hpp"

namespace memlane {

class SumTree {
  public:
    static constexpr std::int64_t fan_out = 16;
    static std::size_t bytes(std::int64_t count);

    SumTree(std::byte *memory, std::int64_t count);

    std::int64_t count() const { return count_; }
    struct Leaf {
        std::uint32_t generation;
        float priority;
    };
    Leaf at(std::int64_t leaf) const {
        const std::int64_t word = leaves_[leaf].load(std::memory_order_relaxed);
        return {static_cast<std::uint32_t>(word >> 32), priority_of(word)};
    }
    float priority(std::int64_t leaf) const { return at(leaf).priority; }
    std::uint32_t generation(std::int64_t leaf) const { return at(leaf).generation; }

    // The row has new content. Only whoever holds the row.
    void renew(std::int64_t leaf, std::uint32_t generation, float priority);
    // False if the content that is meant is no longer there.
    bool set(std::int64_t leaf, std::uint32_t generation, float priority);
    // The same for content that has a priority above 0, which is to say: that could have been drawn.
    bool change(std::int64_t leaf, std::uint32_t generation, float priority);

    // Makes the nodes above these leaves anew. Whoever changed leaves calls it once for all of them.
    void refresh(std::span<const std::int64_t> leaves);
    void refresh_all();

    double total() const;
    // leaf[i]: on which leaf at[i] falls, in [0, total). -1 where the way down ends at nothing.
    void find(std::span<const double> at, std::span<std::int64_t> leaf) const;

  private:
    using Node = std::atomic<float>;
    struct Level {
        Node *nodes;
        std::int64_t count;
    };

    static float priority_of(std::int64_t word) { return std::bit_cast<float>(static_cast<std::uint32_t>(word)); }
    static std::int64_t word_of(std::uint32_t generation, float priority) {
        return static_cast<std::int64_t>(std::uint64_t{generation} << 32 | std::bit_cast<std::uint32_t>(priority));
    }
    template <class Allowed> bool exchange(std::int64_t leaf, std::uint32_t generation, float priority, Allowed allowed);
    float sum_below(std::size_t level, std::int64_t node) const;
    void refresh_node(std::size_t level, std::int64_t node);
    void children(std::size_t level, std::int64_t node, float (&out)[fan_out]) const;

    Word *leaves_;
    std::int64_t count_;
    std::vector<Level> levels_; // above the leaves, the lowest first
};

} // namespace memlane
