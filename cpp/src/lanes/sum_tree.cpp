#include "lanes/sum_tree.hpp"

#include <algorithm>

#include "sync/copy.hpp"

namespace memlane {

namespace {

// Sums again while other processes change the 16 children, but not for ever: a node that is out of date is repaired by
// the next refresh of any of its children.
constexpr int max_sums = 1000;

std::int64_t padded(std::int64_t count) { return (count + SumTree::fan_out - 1) / SumTree::fan_out * SumTree::fan_out; }

} // namespace

std::size_t SumTree::bytes(std::int64_t count) {
    std::size_t bytes = static_cast<std::size_t>(padded(count)) * sizeof(Word);
    do {
        count = (count + fan_out - 1) / fan_out;
        bytes += static_cast<std::size_t>(padded(count)) * sizeof(Node);
    } while (count > fan_out);
    return bytes;
}

SumTree::SumTree(std::byte *memory, std::int64_t count) : leaves_(reinterpret_cast<Word *>(memory)), count_(count) {
    memory += static_cast<std::size_t>(padded(count)) * sizeof(Word);
    do {
        count = (count + fan_out - 1) / fan_out;
        levels_.push_back({reinterpret_cast<Node *>(memory), count});
        memory += static_cast<std::size_t>(padded(count)) * sizeof(Node);
    } while (count > fan_out);
}

void SumTree::replace(std::int64_t leaf, std::uint32_t generation, float priority) {
    leaves_[leaf].store(word_of(generation, priority), std::memory_order_relaxed);
}

template <class Allowed>
bool SumTree::exchange(std::int64_t leaf, std::uint32_t generation, float priority, Allowed allowed) {
    std::int64_t word = leaves_[leaf].load(std::memory_order_relaxed);
    do {
        if (static_cast<std::uint32_t>(word >> 32) != generation || !allowed(priority_of(word)))
            return false;
    } while (!leaves_[leaf].compare_exchange_weak(word, word_of(generation, priority), std::memory_order_relaxed));
    return true;
}

bool SumTree::set(std::int64_t leaf, std::uint32_t generation, float priority) {
    return exchange(leaf, generation, priority, [](float) { return true; });
}

bool SumTree::set_if_drawable(std::int64_t leaf, std::uint32_t generation, float priority) {
    return exchange(leaf, generation, priority, [](float before) { return before > 0; });
}

// The priorities of the 16 leaves, or the 16 nodes, below node `node` of `level`: one cache line of floats, or two of
// words.
void SumTree::children(std::size_t level, std::int64_t node, float (&out)[fan_out]) const {
    if (level > 0) {
        copy_bytes(reinterpret_cast<std::byte *>(out),
                   reinterpret_cast<const std::byte *>(levels_[level - 1].nodes + node * fan_out), sizeof out);
        return;
    }
    std::int64_t words[fan_out];
    copy_bytes(reinterpret_cast<std::byte *>(words), reinterpret_cast<const std::byte *>(leaves_ + node * fan_out),
               sizeof words);
    for (std::int64_t i = 0; i < fan_out; ++i)
        out[i] = priority_of(words[i]);
}

float SumTree::sum_below(std::size_t level, std::int64_t node) const {
    float values[fan_out];
    // Always in the same order, pairwise: two processes that load the same 16 values compute the same sum.
    const auto sum = [&] {
        for (std::int64_t width = fan_out / 2; width > 0; width /= 2)
            for (std::int64_t i = 0; i < width; ++i)
                values[i] += values[i + width];
        return values[0];
    };
    children(level, node, values);
    if (const float fast = sum(); counts(fast) || fast == 0) [[likely]]
        return fast;
    // A value that does not count is among them. Looked for only now: to check each of them took 10 % of an update.
    children(level, node, values);
    for (float &value : values)
        value = counts(value) ? value : 0;
    return sum();
}

void SumTree::refresh_node(std::size_t level, std::int64_t node) {
    Node &stored_sum = levels_[level].nodes[node];
    for (int attempt = 0; attempt < max_sums; ++attempt) {
        const float sum = sum_below(level, node);
        // PAIR refresh/refresh, both sides are this line. Two processes changed two of the 16 children. The exchange of
        // the later one loads the sum of the earlier one (acquire), so its second sum_below sees the child that the
        // earlier one had changed before its exchange (release), and it sums again. This prevents an outdated sum,
        // computed before the other's change, from staying in the node.
        stored_sum.exchange(sum, std::memory_order_acq_rel);
        if (sum_below(level, node) == sum) // never NaN, see `counts`
            return;
    }
}

void SumTree::refresh(std::span<const std::int64_t> leaves) {
    std::int64_t width = 1; // leaves under a node
    for (std::size_t level = 0; level < levels_.size(); ++level) {
        width *= fan_out;
        // A level with fewer nodes than changed leaves: refresh each node once.
        if (levels_[level].count <= static_cast<std::int64_t>(leaves.size())) {
            for (std::int64_t node = 0; node < levels_[level].count; ++node)
                refresh_node(level, node);
            continue;
        }
        std::int64_t last = -1;
        for (const std::int64_t leaf : leaves) {
            if (leaf / width != last) // leaves of rows that were added together are neighbours
                refresh_node(level, leaf / width);
            last = leaf / width;
        }
    }
}

void SumTree::refresh_all() {
    for (std::size_t level = 0; level < levels_.size(); ++level)
        for (std::int64_t node = 0; node < levels_[level].count; ++node)
            refresh_node(level, node);
}

double SumTree::total() const {
    double total = 0;
    const Level &top = levels_.back();
    for (std::int64_t node = 0; node < top.count; ++node)
        if (const float value = top.nodes[node].load(std::memory_order_relaxed); counts(value))
            total += static_cast<double>(value);
    return total;
}

void SumTree::find(std::span<const double> prefix_sums, std::span<std::int64_t> leaves) const {
    // One level for a block of searches, then the next level: the cache lines of the next level are prefetched
    // meanwhile.
    constexpr std::size_t block = 64;
    double rest[block];
    for (std::size_t begin = 0; begin < prefix_sums.size(); begin += block) {
        const std::size_t count = std::min(block, prefix_sums.size() - begin);
        std::int64_t *found = leaves.data() + begin; // the node of the current level, at last the leaf
        std::copy_n(prefix_sums.data() + begin, count, rest);
        std::fill_n(found, count, 0);
        for (std::size_t level = levels_.size() + 1; level-- > 0;) {
            for (std::size_t i = 0; i < count; ++i) {
                if (found[i] < 0)
                    continue;
                float values[fan_out];
                children(level, found[i], values);
                std::int64_t child = -1;
                for (std::int64_t k = 0; k < fan_out; ++k) {
                    if (!counts(values[k]))
                        continue;
                    const auto value = static_cast<double>(values[k]);
                    child = k; // where rounding leads past the end: the last child with a priority above 0
                    if (rest[i] < value)
                        break;
                    rest[i] -= value;
                }
                // The padding of a level is never a node, whatever a damaged file contains.
                const std::int64_t size_below = level > 0 ? levels_[level - 1].count : count_;
                found[i] = child < 0 || found[i] * fan_out + child >= size_below ? -1 : found[i] * fan_out + child;
                if (level > 0 && found[i] >= 0) {
                    const auto *below =
                        level > 1 ? reinterpret_cast<const std::byte *>(levels_[level - 2].nodes + found[i] * fan_out)
                                  : reinterpret_cast<const std::byte *>(leaves_ + found[i] * fan_out);
                    __builtin_prefetch(below);
                    if (level == 1)
                        __builtin_prefetch(below + 64);
                }
            }
        }
    }
}

} // namespace memlane
