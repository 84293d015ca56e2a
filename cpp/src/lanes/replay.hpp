// A replay buffer: rows that writers add into a circular table of slots and that samplers draw at random.
//
// Who may call: any number of writers and samplers in any number of processes, at the same time. Every row that is
// added gets a sequence number, 1, 2, 3, ...; row s lies in slot s % capacity, so the newest rows overwrite the oldest.
// The `state` word of a slot alone says what it holds; a process is named by its life token (os/life.hpp):
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
//   published a row             the row. Not drawn if the writer died before it linked the row; not counted in `added` and
//                               `evicted` if it died before it increased them, but in `size`
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
// Stored: one bit per slot, 1 if the slot holds a transition. The bit is right whenever the slot is not `writing`: a
// writer sets it before it publishes a transition, and clears it before it publishes anything else. A writer that dies
// in between leaves one wrong bit, or two if the row has a tail, until its slots are claimed again. `size` counts the bits.
//
// Row: a head, then the packed fields. In a replay without streams the head is the state word alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "lanes/rows.hpp"
#include "lanes/sum_tree.hpp"
#include "os/life.hpp"
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
        Atomic<float> highest;
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

// More rows than can be added in a thousand years; a larger number comes from a damaged file or a stray store.
inline constexpr std::int64_t max_sequence = std::int64_t{1} << 60;
inline bool is_sequence(std::int64_t number) { return number > 0 && number <= max_sequence; }

// A word of the replay has a value that no writer or sampler stores.
class ReplayDamaged : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class RowState : std::int64_t { empty = 0, writing = 1, complete = 2, tail = 3 };
constexpr std::int64_t row_word(RowState state, std::int64_t detail = 0) {
    return detail << 2 | static_cast<std::int64_t>(state);
}
constexpr RowState row_state(std::int64_t word) { return static_cast<RowState>(word & 3); }
constexpr std::int64_t row_detail(std::int64_t word) { return word >> 2; }

// Sequence numbers from slots and generations. A generation counts the rounds through all slots; the leaves of the sum
// tree store only its lower 32 bits, which a replay of 8 rows has used up after 10 hours of a million rows per second. The
// upper bits are those of the newest row: no stored row is 2^32 rounds older.
class Generations {
  public:
    // `last` is the last sequence number that was reserved.
    Generations(std::int64_t capacity, std::int64_t last)
        : capacity_(static_cast<std::uint64_t>(capacity)), newest_(static_cast<std::uint64_t>(last) / capacity_) {}
    // The sequence number of the newest row in `slot` whose generation has these lower bits. Not the number of a row if
    // that row was reserved after `last`.
    std::int64_t sequence(std::int64_t slot, std::uint32_t generation) const {
        const std::uint32_t rounds_ago = static_cast<std::uint32_t>(newest_) - generation;
        return static_cast<std::int64_t>((newest_ - rounds_ago) * capacity_ + static_cast<std::uint64_t>(slot));
    }

  private:
    std::uint64_t capacity_, newest_;
};

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
    // `tree` is null if rows are drawn uniformly. `life` shows which processes are alive; it belongs to the file of the
    // replay and outlives this object.
    Replay(std::byte *control, std::byte *stored, std::byte *rows, std::byte *tree, Shape shape, Life &life);
    // The bytes of `stored`.
    static std::size_t stored_bytes(std::int64_t capacity) {
        return (static_cast<std::size_t>(capacity) + 63) / 64 * sizeof(StoredWord);
    }

    ReplayControl &control() const { return *control_; }
    const Shape &shape() const { return shape_; }
    std::int64_t capacity() const { return shape_.capacity; }
    RowHead &head(std::int64_t slot) const {
        return *reinterpret_cast<RowHead *>(rows_ + static_cast<std::size_t>(slot) * shape_.stride_bytes);
    }
    std::byte *payload(std::int64_t slot) const {
        return rows_ + static_cast<std::size_t>(slot) * shape_.stride_bytes + head_bytes(shape_.linked);
    }
    // A slot for any number: links are read from shared memory, and a stray store may leave a negative one.
    std::int64_t slot_of(std::int64_t sequence) const {
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(sequence) % static_cast<std::uint64_t>(shape_.capacity));
    }
    std::uint32_t generation_of(std::int64_t sequence) const {
        return static_cast<std::uint32_t>(sequence / shape_.capacity);
    }
    // The number of stored transitions, counted slot by slot: 8 us for a million slots. Slots that are being overwritten
    // count as long as the new row is not published.
    std::int64_t size() const;

    // Returns how many transitions were added: fewer than requested only if live writers hold every slot. Throws
    // ReplayDamaged if the next sequence number is none; rows that were added before are counted. Throws std::system_error,
    // and adds nothing, if this process has no life token and cannot take one.
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
    std::int64_t save_into(Replay &copy) {
        const std::int64_t changed = save_rows(copy, 0, shape_.capacity);
        save_counters(copy);
        return changed;
    }
    // The two parts of save_into. A caller that divides the slots must save all of them before the counters.
    std::int64_t save_rows(Replay &copy, std::int64_t begin, std::int64_t end);
    void save_counters(Replay &copy);
    // Whether writers and samplers could have left these counters.
    bool counters_plausible() const;
    // The first of these slots with contents that no writer leaves, or -1.
    std::int64_t first_implausible(std::int64_t begin, std::int64_t end) const;
    std::int64_t first_implausible() const { return first_implausible(0, shape_.capacity); }

  private:
    struct Claims;
    using StoredWord = Atomic<std::uint64_t>;
    bool is_stored(std::int64_t slot) const {
        return (stored_[slot / 64].load(std::memory_order_relaxed) >> slot % 64 & 1) != 0;
    }
    // Corrects the bit of a slot that this process holds. Most rows overwrite a row of the same kind: then one load is
    // all. Relaxed: `size` needs no order, and a writer of the slot sees this bit because it sees the later state.
    void mark_stored(std::int64_t slot, bool stored) const {
        if (is_stored(slot) == stored) [[likely]]
            return;
        StoredWord &word = stored_[slot / 64];
        const std::uint64_t bit = std::uint64_t{1} << slot % 64;
        if (stored)
            word.fetch_or(bit, std::memory_order_relaxed);
        else
            word.fetch_and(~bit, std::memory_order_relaxed);
    }
    void write(std::int64_t slot, std::span<const Field> from, std::int64_t row) const;

    ReplayControl *control_;
    StoredWord *stored_;
    std::byte *rows_;
    Shape shape_;
    Life *life_;
    std::optional<SumTree> tree_;
};

} // namespace memlane
