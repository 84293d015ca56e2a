// A replay buffer: rows that writers add into a circular table of slots and that samplers draw at random.
//
// Who may call: any number of writers and samplers in any number of processes, at the same time. Every row that is
// added gets a sequence number, 1, 2, 3, ...; row s lies in slot s % capacity, so the newest rows overwrite the oldest.
// The `state` word of a slot alone says what it holds:
//
//   empty         never used, or given back
//   writing(p)    claimed by process p, which may store into it
//   complete(s)   row s, a transition
//   tail(s)       row s, the final observation of an episode only; never drawn itself
//
//   empty, complete, tail -> writing   a writer claims it           writing(p) -> writing(q)   p is dead
//   writing -> complete, tail          the writer has finished     writing -> empty           no slot for its tail
//
// A writer that finds a slot claimed by another live writer (one that was stopped for a whole round, for example) skips
// it and takes another sequence number; no writer waits. A sampler copies a row and loads the state again: if it
// changed, the copy is discarded and another row is drawn.
//
// Streams: the rows of one environment are linked by sequence numbers, `previous` and `next`. At sample time, n-step
// returns, stacked frames, sequences and the next observation follow these links, so every observation is stored once.
// `next` of row s:
//   -s    no successor yet: the newest row of its stream, or the stream was cut. Not drawn: it has no next observation
//   t     row t follows; or, at the end of an episode, t is its tail
//   s     the episode ended here and no final observation was given
// `next` starts as -s, so a link that is stored late finds another number in a slot that was reused, and changes
// nothing.
//
// If a writer dies after it has ..., the others see:
//   reserved sequence numbers   nothing: the numbers stay unused
//   claimed a slot              `writing`, which a writer of the next round takes over and counts as abandoned
//   published a row             the row. Not drawn if the writer died before it linked the row; not counted if it died
//                               before it increased `added`
//   changed a priority          see sum_tree.hpp
//
// Control block, 64 bytes per field:
//   offset  size  field     written by  when
//   0       64    reserved  writers     before rows are written: the last sequence number
//   64      64    added     writers     after rows are written: transitions (a signal: samplers wait for it)
//   128     64    sampled   samplers    after a batch: rows (a signal: writers wait for it)
//   192     64    admitted  both        the limiter's counts: transitions and samples that were admitted
//   256     64    lost      writers     evicted and abandoned rows, claimed slots that were skipped; stale priorities
//   320     64    drawn     samplers    rows drawn again because they changed or could not be used
//   384     64    priority  samplers    the highest priority so far
//
// Row: a head, then the packed fields. In a replay without streams the head is the state word alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lanes/rows.hpp"
#include "lanes/sum_tree.hpp"
#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

struct ReplayControl {
    struct alignas(64) {
        Word last;
    } reserved;
    SignalCell added;
    SignalCell sampled;
    struct alignas(64) {
        Word inserts;
        Word samples;
        Word held_writers;   // times that the limiter made a writer wait
        Word held_samplers;  // times that the limiter made a sampler wait
        Word largest_insert; // transitions of the largest add so far; the limiter must be able to admit it
        Word largest_sample; // rows of the largest sample so far
    } admitted;
    struct alignas(64) {
        Word evicted;   // transitions overwritten by newer ones
        Word abandoned; // rows whose writer died before it completed them
        Word avoided;   // slots that a writer skipped because another writer held them, or a newer row was there
        Word stale;     // priorities that were set for rows already overwritten
    } lost;
    struct alignas(64) {
        Word redrawn;
    } drawn;
    struct alignas(64) {
        std::atomic<float> highest;
    } priority;
};
static_assert(sizeof(ReplayControl) == 448);

struct RowHead {
    Word state;
    Word next;     // this and the following words exist only if rows are linked
    Word previous; // 0 at the start of an episode or a stream
    Word version;  // version of the policy that acted
};
static_assert(sizeof(RowHead) == 32 && offsetof(RowHead, state) == 0);
constexpr std::size_t head_bytes(bool linked) { return linked ? sizeof(RowHead) : sizeof(Word); }

// More rows than can be added in a thousand years; a file with a larger number is damaged.
inline constexpr std::int64_t max_sequence = std::int64_t{1} << 60;

enum class RowState : std::int64_t { empty = 0, writing = 1, complete = 2, tail = 3 };
constexpr std::int64_t row_word(RowState state, std::int64_t detail = 0) {
    return detail << 2 | static_cast<std::int64_t>(state);
}
constexpr RowState row_state(std::int64_t word) { return static_cast<RowState>(word & 3); }
constexpr std::int64_t row_detail(std::int64_t word) { return word >> 2; }

// The bytes of a field in the packed row. `offset` counts from the end of the head.
struct FieldSlice {
    std::size_t offset;
    std::size_t bytes;
};

// The indices of the fields that n-step returns need. Not used without streams.
struct Transition {
    std::size_t reward;
    std::size_t terminated;
    std::size_t truncated;
    bool reward_is_double;
};

// The rows of one call of Replay::add. The caller has checked all of it.
struct AddRequest {
    std::int64_t count;                     // number of rows, skipped ones included
    std::span<const Field> fields;          // all fields, in the order of the row
    std::int64_t version = 0;               // version of the policy that acted
    std::span<const std::uint8_t> skip;     // per row: 1 to leave it out; empty: none
    std::int64_t *newest = nullptr; // per stream: the sequence number of its last row, or 0. Only if rows are linked
    std::span<const std::int64_t> streams; // per row: its stream
    std::span<const Field> finals; // the final observations, for some of the fields
    std::span<const std::size_t> final_fields; // the indices of those fields
    std::span<const std::uint8_t> has_final; // per row: 1 if it has a final observation; empty: none
};

// Samples per inserted transition. The limiter makes writers or samplers wait to keep the ratio.
struct Limit {
    double ratio = 0; // samples per insert; 0: no limit
    std::int64_t min_size = 1; // transitions before the first sample
    double error_buffer = 0; // samples by which either side may be ahead of the other
};

// The two sides that the limiter can make wait.
enum class Side { writers, samplers };

// A replay in shared memory; the object itself has no state beyond addresses and settings.
class Replay {
  public:
    struct Shape {
        std::int64_t capacity;
        std::size_t stride_bytes;
        bool linked; // whether rows belong to streams
        std::vector<FieldSlice> fields;
        Transition transition;
        Limit limit;
    };
    // `tree` is null if rows are drawn uniformly.
    Replay(std::byte *control, std::byte *rows, std::byte *tree, Shape shape);

    ReplayControl &control() const { return *control_; }
    const Shape &shape() const { return shape_; }
    std::int64_t capacity() const { return shape_.capacity; }
    RowHead &head(std::int64_t slot) const {
        return *reinterpret_cast<RowHead *>(rows_ + static_cast<std::size_t>(slot) * shape_.stride_bytes);
    }
    std::byte *payload(std::int64_t slot) const {
        return rows_ + static_cast<std::size_t>(slot) * shape_.stride_bytes + head_bytes(shape_.linked);
    }
    std::int64_t slot_of(std::int64_t sequence) const { return sequence % shape_.capacity; }
    std::uint32_t generation_of(std::int64_t sequence) const {
        return static_cast<std::uint32_t>(sequence / shape_.capacity);
    }
    // The number of stored transitions. A writer that was killed between its rows and their count makes it differ
    // slightly.
    std::int64_t size() const;

    // Returns how many transitions were added: fewer than requested only if live writers hold every slot.
    std::int64_t add(const AddRequest &request);

    bool prioritised() const { return tree_.has_value(); }
    SumTree &tree() { return *tree_; }
    // Sets the priorities of rows by sequence number. Rows that were overwritten since are skipped and counted as
    // stale. Returns how many were set.
    std::int64_t set_priorities(std::span<const std::int64_t> sequences, std::span<const float> priorities);

    // Whether the limiter admits `count` transitions or samples now; if so, they are counted as admitted.
    bool admit_inserts(std::int64_t count);
    bool admit_samples(std::int64_t count);
    bool admit(Side side, std::int64_t count) { return side == Side::writers ? admit_inserts(count) : admit_samples(count); }
    // Waits until the limiter admits them, for one slice at most. `reached`: they are counted as admitted.
    WaitResult wait_admitted(Side side, std::int64_t count, std::int64_t deadline_ns, std::span<const int> pidfds,
                             Spin &spin);
    // Counts one more wait for the limiter.
    void count_held(Side side);
    // Takes back samples that were admitted and not drawn.
    void refund_samples(std::int64_t count);
    // The smallest error_buffer with which an add of `insert` rows and a sample of `sample` rows (or the largest of
    // each so far) cannot both wait for each other.
    double required_error_buffer(std::int64_t insert, std::int64_t sample) const;

    // Brings `copy` up to date. It must have the same shape, and no other process may use it. Returns how many rows
    // changed.
    std::int64_t save_into(Replay &copy);
    // Whether writers and samplers could have left these counters.
    bool counters_plausible() const;
    // The first slot with contents that no writer leaves, or -1.
    std::int64_t first_implausible() const;

  private:
    struct Claims;
    void write(std::int64_t slot, std::span<const Field> from, std::int64_t row) const;

    ReplayControl *control_;
    std::byte *rows_;
    Shape shape_;
    std::optional<SumTree> tree_;
};

} // namespace memlane
