// The words of a lane that a stray process could overwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sync/words.hpp"

namespace memlane::fuzz {

class Places {
  public:
    // `count` groups of `words` words, `stride_bytes` apart.
    void add(std::byte *first, std::size_t words, std::size_t count = 1, std::size_t stride_bytes = 0) {
        if (words * count > 0)
            groups_.push_back({first, words, count, stride_bytes});
    }

    // A control block: the first words of each cache line, the rest of which is padding.
    void add_control(std::byte *first, std::size_t bytes, std::size_t words_of_a_line) {
        add(first, words_of_a_line, bytes / 64, 64);
    }

    // A word. `choose(bound)` returns a number in [0, bound).
    template <class Choose> Word &pick(Choose choose) const {
        const Group &group = groups_[choose(groups_.size())];
        const std::size_t at = choose(group.count), word = choose(group.words);
        return *reinterpret_cast<Word *>(group.first + at * group.stride_bytes + word * sizeof(Word));
    }

    // Stores a value into the same word of each group that has several.
    void fill(std::size_t word, std::int64_t value) const {
        for (const Group &group : groups_)
            for (std::size_t at = 0; at < group.count && group.count > 1; ++at)
                reinterpret_cast<Word *>(group.first + at * group.stride_bytes)[word % group.words].store(
                    value, std::memory_order_relaxed);
    }

  private:
    struct Group {
        std::byte *first;
        std::size_t words, count, stride_bytes;
    };
    std::vector<Group> groups_;
};

} // namespace memlane::fuzz
