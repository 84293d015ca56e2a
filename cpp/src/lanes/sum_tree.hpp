// A sum tree: the priority of each row, and a search for the leaf that contains a given prefix sum of the priorities.
//
// Who may call: any number of processes at the same time. A leaf is one word, so it is never torn:
//
//   leaf    generation << 32 | bits of a float, the priority. The generation identifies the content of the row: a
//           process that knows only an older generation cannot change the leaf.
//   nodes   floats, each the sum of 16 leaves or of 16 nodes of the level below, adjacent on one cache line. A node is
//           always recomputed from its 16 children, never incremented: rounding errors do not accumulate, and a lost
//           update leaves a node out of date, never wrong for good.
//
// Levels, leaves first, each padded with zeros to a multiple of 16:
//   count words | ceil(count / 16) floats | ... | at most 16 floats
//
// If a process dies between its change of a leaf and its `refresh`, the nodes above that leaf are out of date. Until
// any process refreshes one of its 16 neighbours, the leaf is drawn too often or too seldom, or a draw ends at a leaf
// with priority 0 and is repeated. No draw relies on the nodes being up to date.
#pragma once

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
    // Whether a priority or a sum counts. A file or a stray store may leave any number; one that is negative, infinite or
    // NaN is taken as 0, so that it spoils neither the sums above it nor the draws.
    // As an integer, it is one comparison.
    static bool counts(float value) { return std::bit_cast<std::uint32_t>(value) - 1 < 0x7F7FFFFF; }
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

    // Overwrites a leaf, for new content of its row. Only the process that holds the row.
    void replace(std::int64_t leaf, std::uint32_t generation, float priority);
    // Sets the priority; false if the leaf has another generation.
    bool set(std::int64_t leaf, std::uint32_t generation, float priority);
    // Like `set`, but also false if the priority is 0: only rows that could have been drawn are changed.
    bool set_if_drawable(std::int64_t leaf, std::uint32_t generation, float priority);

    // Recomputes the nodes above these leaves. To be called once after changing any number of leaves.
    void refresh(std::span<const std::int64_t> leaves);
    void refresh_all();

    double total() const;
    // leaves[i] is the leaf that contains prefix_sums[i], a number in [0, total); -1 where the search ends at no leaf.
    void find(std::span<const double> prefix_sums, std::span<std::int64_t> leaves) const;

  private:
    using Node = Atomic<float>;
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
    std::vector<Level> levels_; // the levels above the leaves, lowest first
};

} // namespace memlane
