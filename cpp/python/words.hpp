// The Python handle of a table of atomic 64-bit words.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lanes/rows.hpp"
#include "python/errors.hpp"
#include "python/numpy_arrays.hpp"
#include "sync/words.hpp"

namespace memlane {

class Words {
  public:
    Words(std::shared_ptr<Mapping> mapping, std::size_t offset, std::size_t count, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), count_(count) {
        if (count > mapping_->bytes() / sizeof(Word))
            raise("SegmentError", label_ + " has more words than its segment has room for");
        words_ = reinterpret_cast<Word *>(checked_address(*mapping_, offset, count * sizeof(Word), alignof(Word), label_));
    }

    std::size_t count() const { return count_; }
    const std::string &label() const { return label_; }
    Mapping &mapping() const { return *mapping_; }

    std::int64_t load(std::int64_t index) const { return see(at(index)); }
    // The sum of the words `first`, `first + stride` and so on.
    std::int64_t sum(std::int64_t first, std::int64_t stride) const {
        if (stride < 1)
            throw nb::value_error(("stride must be 1 or more, found " + std::to_string(stride)).c_str());
        std::int64_t total = 0;
        for (std::int64_t index = first; index < static_cast<std::int64_t>(count_); index += stride)
            total = wrapping_sum(total, load(index));
        return total;
    }
    void store(std::int64_t index, std::int64_t value) { publish(writeable_at(index), value); }
    std::int64_t add(std::int64_t index, std::int64_t amount) {
        return wrapping_sum(writeable_at(index).fetch_add(amount, std::memory_order_seq_cst), amount);
    }
    void add_each(const Indices &indices, std::int64_t amount) {
        require_in_range(indices);
        require_writeable(*mapping_, label_);
        for (std::size_t i = 0; i < indices.shape(0); ++i)
            words_[indices(i)].fetch_add(amount, std::memory_order_seq_cst);
    }
    bool compare_and_swap(std::int64_t index, std::int64_t expected, std::int64_t value) {
        return publish_if(writeable_at(index), expected, value);
    }
    bool is_unchanged(std::int64_t index, std::int64_t seen) const { return unchanged(at(index), seen); }

    // The positions i for which the word indices[i] no longer holds seen[i].
    std::vector<std::size_t> changed(const Indices &indices, const Indices &seen) const {
        require_same_length(indices.shape(0), "seen", seen.shape(0));
        require_in_range(indices);
        std::vector<std::size_t> positions;
        for (std::size_t i = 0; i < indices.shape(0); ++i)
            if (!unchanged(words_[indices(i)], seen(i)))
                positions.push_back(i);
        return positions;
    }

    void load_into(const Indices &indices, nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) const {
        require_same_length(indices.shape(0), "out", out.shape(0));
        require_in_range(indices);
        for (std::size_t i = 0; i < indices.shape(0); ++i)
            out(i) = see(words_[indices(i)]);
    }

  private:
    static void require_same_length(std::size_t indices, const char *other, std::size_t length) {
        if (indices != length)
            throw nb::value_error(("indices and " + std::string(other) + " must have the same length, found " +
                                   std::to_string(indices) + " and " + std::to_string(length))
                                      .c_str());
    }
    [[noreturn]] void out_of_range(std::int64_t index) const {
        throw nb::index_error(
            (label_ + " has " + std::to_string(count_) + " words, there is no word " + std::to_string(index)).c_str());
    }
    void require_in_range(const Indices &indices) const {
        require_open(*mapping_, label_);
        const std::int64_t bad = first_out_of_range({indices.data(), indices.shape(0)}, static_cast<std::int64_t>(count_));
        if (bad >= 0)
            out_of_range(indices(static_cast<std::size_t>(bad)));
    }
    Word &at(std::int64_t index) const {
        require_open(*mapping_, label_);
        if (index < 0 || static_cast<std::size_t>(index) >= count_)
            out_of_range(index);
        return words_[index];
    }
    Word &writeable_at(std::int64_t index) const {
        Word &word = at(index);
        require_writeable(*mapping_, label_);
        return word;
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    std::size_t count_;
    Word *words_;
};

} // namespace memlane
