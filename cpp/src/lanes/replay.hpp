// A replay: rows that writers add one after the other, over and over the same slots, and that samplers draw at random.
//
// Who may call: any number of writers and samplers in any number of processes, at once. Every row that is added gets a
// sequence number, 1, 2, 3, ...; number s lies in slot s % capacity, so the newest rows overwrite the oldest. The `state` word
// of a slot is the whole truth about it:
//
//   empty         never used
//   writing(p)    held by process p, which may store into it
//   complete(s)   row s, a transition
//   tail(s)       row s, only the observation after an episode's last transition; never drawn itself
//
//   empty, complete, tail -> writing   a writer claims it           writing(p) -> writing(q)   p is dead
//   writing -> complete, tail          it is done
//
// A writer that meets a slot which another living one still holds (stopped for a whole round, say) leaves it and takes another
// number; nobody waits. A sampler copies a row and looks at the state again: if it changed, the copy is thrown away and
// another row is drawn.
//
// Streams: rows of one environment are linked, `previous` and `next`, by sequence numbers. That is how n-step returns, stacked
// frames, sequences and the next observation are found at sample time, with every observation stored once. `next` of row s:
//   -s    nobody yet: the newest row of its stream, or the stream was cut; not drawn, for there is no next observation
//   t     row t follows; or, after an episode's end, t is its tail
//   s     the episode ended here and no last observation was given
// It starts as -s, so a link that comes late finds another number in a slot that was used again, and changes nothing.
//
// If a writer dies at a line, the others see:
//   reserve   numbers that nobody will see
//   claim     `writing`, which the next round takes over: counted as abandoned
//   publish   the row; before it is linked, one that is not drawn; before `added`, one that is not counted
//   priority  see sum_tree.hpp
//
// Control block, 64 bytes a line:
//   offset  size  field     written by  when
//   0       64    reserved  writers     before rows are written: the last number
//   64      64    added     writers     after they are written: transitions (a signal: samplers that are held back wait)
//   128     64    sampled   samplers    after a batch (a signal: writers that are held back wait)
//   192     64    admitted  both        the limiter's two accounts: transitions let in, samples let out
//   256     64    lost      writers     evicted, abandoned by the dead, slots that were left to their holder; stale priorities
//   320     64    drawn     samplers    rows drawn again because they changed or could not be used
//   384     64    priority  samplers    the highest so far, as the bits of a float
//
// Row: a head, then the packed fields. Of a replay without streams the head is the state alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lanes/rows.hpp"
#include "sync/signal.hpp"
#include "lanes/sum_tree.hpp"
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
        Word held_writers; // times that the limiter made somebody wait
        Word held_samplers;
        Word largest_insert; // of all calls so far: what the limiter must be able to let pass
        Word largest_sample;
    } admitted;
    struct alignas(64) {
        Word evicted;   // transitions that newer ones overwrote
        Word abandoned; // rows that their writer did not live to complete
        Word avoided;   // slots that a writer found held and left alone
        Word stale;     // priorities that came for rows no longer there
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
    Word next; // from here on: only where rows are linked
    Word previous; // 0 at the begin of an episode or a stream
    Word version;  // of the policy that acted
};
static_assert(sizeof(RowHead) == 32 && offsetof(RowHead, state) == 0);
constexpr std::size_t head_bytes(bool linked) { return linked ? sizeof(RowHead) : sizeof(Word); }

// More than anybody adds in a thousand years; a file that says so is damaged.
inline constexpr std::int64_t most_numbers = std::int64_t{1} << 60;

enum class RowState : std::int64_t { empty = 0, writing = 1, complete = 2, tail = 3 };
constexpr std::int64_t row_word(RowState state, std::int64_t detail = 0) {
    return detail << 2 | static_cast<std::int64_t>(state);
}
constexpr RowState row_state(std::int64_t word) { return static_cast<RowState>(word & 3); }
constexpr std::int64_t row_detail(std::int64_t word) { return word >> 2; }

// A field's place in the packed row, counted from behind the head.
struct FieldPlace {
    std::size_t offset;
    std::size_t bytes;
};

// Which fields say how an episode went on. Without streams, nobody asks for them.
struct Transition {
    std::size_t reward;
    std::size_t terminated;
    std::size_t truncated;
    bool reward_is_double;
};

// What a writer adds. Everything in it was checked before.
struct Addition {
    std::int64_t count;                     // rows, also those that are skipped
    std::span<const Field> fields;          // all fields, in the order of the row
    std::int64_t version = 0;               // of the policy that acted
    std::span<const std::uint8_t> skip;     // rows to leave out; empty: none
    std::int64_t *newest = nullptr;         // of each stream: the number of its last row, or 0. Only if rows are linked
    std::span<const std::int64_t> streams;  // of each row
    std::span<const Field> finals;          // the observation after an episode's last transition, for some of the fields
    std::span<const std::size_t> final_fields; // which those are
    std::span<const std::uint8_t> has_final;   // which rows have one; empty: none
};

// How many samples there may be for each transition; both sides are held back to keep to it.
struct Limit {
    double ratio = 0;       // samples per insert; 0: no limit
    std::int64_t least = 1; // transitions before the first sample
    double slack = 0;       // by how many samples either side may be ahead
};

// Whom the limiter holds back.
enum class Side { writers, samplers };

// A view of a replay in shared memory; has no state of its own.
class Replay {
  public:
    struct Shape {
        std::int64_t capacity;
        std::size_t stride_bytes;
        bool linked; // whether rows belong to streams
        std::vector<FieldPlace> fields;
        Transition transition;
        Limit limit;
    };
    // `tree` is null where all rows are drawn alike.
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
    // Transitions that are stored, as far as those who count them live.
    std::int64_t size() const;

    // How many transitions were added. Fewer than asked for only if every slot is held by a living writer.
    std::int64_t add(const Addition &addition);

    bool prioritised() const { return tree_.has_value(); }
    SumTree &tree() { return *tree_; }
    // Priorities for rows as they were when they were drawn, by their numbers. Returns how many were still there.
    std::int64_t set_priorities(std::span<const std::int64_t> sequences, std::span<const float> priorities);

    // Whether so many may come in or go out now; if so, they are on the account.
    bool admit_inserts(std::int64_t count);
    bool admit_samples(std::int64_t count);
    bool admit(Side side, std::int64_t count) {
        return side == Side::writers ? admit_inserts(count) : admit_samples(count);
    }
    // Waits for that, a slice at most. `reached`: they are on the account.
    WaitResult wait_for_leave(Side side, std::int64_t count, std::int64_t deadline_ns, std::span<const int> pidfds,
                              Spin &spin);
    // One more wait begins.
    void count_held(Side side);
    // Samples that were let out and not made after all.
    void refund_samples(std::int64_t count);
    // With less slack than this, one who adds so many rows and one who draws so many, or as many as anybody has so far,
    // could each wait for the other.
    double slack_needed(std::int64_t insert, std::int64_t sample) const;

    // Brings `copy`, of the same shape and used by nobody else, up to date. Returns how many rows had changed.
    std::int64_t save_into(Replay &copy);
    // Whether the counters are such as writers and samplers could have left.
    bool counters_plausible() const;
    // The first slot that no writer could have left like this, or -1.
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
