// A sampler: draws rows of a replay at random and copies the specified fields of each into one row of a batch.
//
// Who may call: one thread at a time per sampler; any number of samplers and writers at the same time. Another row is
// drawn instead of a row that was overwritten while it was copied, whose next observation is not stored yet, or whose
// stacked frames are partly overwritten. So every row of a batch is consistent and of one episode.
//
// Which rows are drawn depends on the random state and on the stored rows, never on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lanes/replay.hpp"
#include "lanes/rng.hpp"

namespace memlane {

// Contiguous bytes of a stored row and where in a row of the batch they go.
struct FieldCopy {
    std::size_t from;  // offset in the stored row
    std::size_t bytes;
    std::size_t to;    // offset in the batch row
    int stack;         // number of stacked rows of the stream, oldest first; the first row of an episode is repeated
    bool from_next;    // whether to copy from the row that the n steps lead to instead of the drawn row
};

// The contents of a batch row. Each of the members after `length` is an offset in the batch row; -1: not written.
struct SampleSpec {
    std::vector<FieldCopy> copies;
    std::size_t row_bytes;        // size of a batch row
    int steps = 0;                // n of the n-step return; 0: copy the drawn row only, without following links
    double gamma = 1;
    int length = 1;               // batch rows per draw: a sequence of rows that follow each other in their stream
    std::int64_t reward = -1;     // in the type of the reward field: the discounted sum over the steps
    std::int64_t terminated = -1; // bool: whether the last step terminated
    std::int64_t truncated = -1;  // bool: whether the last step was truncated
    std::int64_t discount = -1;   // float: the factor of the next observation's value; 0 if the last step terminated
    std::int64_t horizon = -1;    // int32: the number of steps, at most n
    std::int64_t key = -1;        // int64: the row's sequence number, for set_priorities
    std::int64_t version = -1;    // int64: the version of the policy that acted
    std::int64_t weight = -1;     // float: the importance weight, 1 for the row that was least likely to be drawn
    std::int64_t valid = -1;      // bool: false for the padding of a sequence that ended early
};

class Sampler {
  public:
    Sampler(Replay &replay, SampleSpec spec, Rng &rng);

    const SampleSpec &spec() const { return spec_; }

    // Draws `count` rows (sequences, if spec.length is above 1) into `out`. If the replay has priorities, rows are
    // drawn in proportion to them and get importance weights with exponent `beta`. False if no row can be drawn.
    bool sample(std::int64_t count, std::byte *out, double beta, int threads);

  private:
    struct Row {
        std::int64_t sequence;
        const RowHead *head;
        const std::byte *payload;
    };

    // A row and its state when its copy began.
    struct Seen {
        const RowHead *head;
        std::int64_t word;
    };
    // All rows that one batch row is copied from. The batch row is valid if none of them changed until the end of the
    // copy.
    using Chain = std::vector<Seen>;

    Row row(std::int64_t sequence) const;
    Row drawn(std::size_t i) const;
    bool add_to_chain(const Row &row, bool tails, Chain &chain) const;
    bool flag(const Row &row, std::size_t field) const;
    bool copy_field(const FieldCopy &copy, const Row &row, std::byte *to, Chain &chain) const;
    bool walk_steps(const Row &first, Row &next_row, std::byte *out, Chain &chain) const;
    void copy_plain(std::size_t begin, std::size_t end, std::byte *out);
    bool copy_row(const Row &row, std::byte *out, Chain &chain) const;
    bool copy_sequence(const Row &first, std::byte *out, Chain &chain) const;
    std::int64_t successor(const Row &row) const;
    bool is_newest(const Row &row) const;
    void prefetch(std::int64_t slot) const;
    template <Word RowHead::*link> void prefetch_linked(std::int64_t &slot) const;

    void draw_uniformly(std::size_t i, std::int64_t last);
    void draw_by_priority(std::span<const double> prefix_sums, double total, std::size_t begin);
    // The rows that can be drawn, found by looking at all slots, for the rest of a batch.
    struct Scan {
        bool done = false;
        std::vector<std::int64_t> slots;
        std::vector<double> prefix_sums; // of their priorities
    };
    void scan_slots(std::size_t i, std::byte *out, Chain &chain, Scan &scan);
    bool draw_by_scan(std::size_t i, std::byte *out, Chain &chain, Scan &scan);
    void write_weights(std::int64_t count, std::byte *out, double beta) const;

    Replay &replay_;
    SampleSpec spec_;
    Rng &rng_;
    bool linked_; // whether a batch row needs other rows than the drawn one
    bool plain_;  // whether a batch row is one contiguous copy of one row, with at most its key besides
    // Scratch memory for the current batch; kept, so that drawing a batch allocates nothing.
    std::vector<std::int64_t> slots_;     // the drawn slots
    std::vector<std::int64_t> sequences_; // the row expected in that slot; 0: any row; -1: none, draw again
    std::vector<std::uint8_t> copied_;    // whether the batch row holds a valid copy
    std::vector<double> prefix_sums_, probabilities_;
    std::vector<std::int64_t> slots_after_, slots_before_; // per batch row: how far along its stream rows were prefetched
};

} // namespace memlane
