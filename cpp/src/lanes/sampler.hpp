// A sampler: draws rows of a replay at random and copies what is wanted of each into one row of a batch.
//
// Who may call: one thread at a time for each sampler; any number of samplers beside any number of writers. A row that was
// overwritten while it was copied, one whose next observation is not there yet and one whose stacked frames are partly gone
// are drawn again, so what comes out is always whole and of one episode.
//
// Which rows are drawn depends on the dice and on what is stored, never on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lanes/rng.hpp"
#include "lanes/replay.hpp"

namespace memlane {

// A piece of a row's fields, and where in a drawn row it goes.
struct FieldCopy {
    std::size_t from;
    std::size_t bytes;
    std::size_t to;
    int stack;  // so many rows of the stream, the oldest first; before an episode's begin, its first row again
    bool after; // not of the row itself, but of the one to which its n steps lead
};

// What is wanted of each row. Places are offsets in a drawn row; -1: not wanted.
struct SampleSpec {
    std::vector<FieldCopy> takes;
    std::size_t row_bytes;       // of a drawn row
    int steps = 0;               // n of the n-step return; 0: the row alone, whatever it is linked to
    double gamma = 1;
    int length = 1;              // of a sequence: so many drawn rows, which follow each other in their stream
    std::int64_t reward = -1;    // the sum over the steps, in the type of the field
    std::int64_t terminated = -1; // of the last of the steps
    std::int64_t truncated = -1;
    std::int64_t discount = -1;  // float: what the value after the steps counts; 0 if the last one terminated
    std::int64_t horizon = -1;   // int32: how many steps there were
    std::int64_t key = -1;       // int64: the row's number, for set_priorities
    std::int64_t version = -1;   // int64: of the policy that acted
    std::int64_t weight = -1;    // float: importance, 1 for the row that was least likely to be drawn
    std::int64_t valid = -1;     // bool: false for what fills up a sequence that ended early
};

class Sampler {
  public:
    Sampler(Replay &replay, SampleSpec wish, Rng &dice);

    const SampleSpec &wish() const { return wish_; }

    // `count` rows (each of `length`) into `out`; by priority, with importance weights to the power of `beta`, if the replay
    // keeps any. False if no row at all can be drawn.
    bool sample(std::int64_t count, std::byte *out, double beta, int threads);

  private:
    // A row that was copied from, and its state then.
    struct Seen {
        const Word *state;
        std::int64_t word;
    };
    using Chain = std::vector<Seen>;

    struct Row {
        std::int64_t sequence;
        const RowHead *head;
        const std::byte *payload;
    };

    Row row(std::int64_t sequence) const;
    Row drawn(std::size_t i) const;
    bool look(const Row &row, bool tails, Chain &chain) const;
    bool flag(const Row &row, std::size_t field) const;
    bool take(const FieldCopy &take, Row row, std::byte *to, Chain &chain) const;
    bool walk(const Row &first, Row &after, std::byte *out, Chain &chain) const;
    void copy_plain(std::size_t begin, std::size_t end, std::byte *out);
    bool copy(const Row &row, std::byte *out, Chain &chain) const;
    bool copy_run(const Row &first, std::byte *out, Chain &chain) const;
    std::int64_t follower(const Row &row) const;
    void prefetch(std::int64_t slot) const;
    void prefetch_follower(std::int64_t &slot) const;

    void draw_alike(std::size_t i, std::int64_t last);
    void draw_by_priority(std::span<const double> at, double total, std::size_t begin);
    bool look_everywhere(std::size_t i, std::byte *out, Chain &chain);
    void weigh(std::int64_t count, std::byte *out, double beta) const;

    Replay &replay_;
    SampleSpec wish_;
    Rng &dice_;
    bool linked_; // whether a drawn row has something of other rows
    bool plain_;  // whether it is one piece of one row, and nothing else but its key
    // Of the batch that is drawn; kept, so that a batch allocates nothing.
    std::vector<std::int64_t> slots_;     // that were drawn
    std::vector<std::int64_t> sequences_; // the row that is meant there; 0: whichever it is; -1: none
    std::vector<std::uint8_t> good_;
    std::vector<double> at_, shares_;
    std::vector<std::int64_t> walking_; // where in its stream the asking for each row is
};

} // namespace memlane
