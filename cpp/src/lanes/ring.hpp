// A ring: slots that writers fill and readers take, each exactly once, oldest first.
//
// Who may call: any number of writers and readers in any number of processes. A slot belongs to nobody, to one writer or to
// one reader, and its `state` word is the whole truth about it:
//
//   free           nobody's, content meaningless
//   writing(p)     claimed by process p, which may store into it
//   ready(n)       complete, the n-th that was committed; nobody's, content fixed
//   reading(p)     taken by process p, which may load from it; content fixed
//
//   free -> writing      a writer claims it                      ready -> reading    a reader takes it
//   writing -> ready     it commits                              reading -> free     it releases it
//   writing -> free      it gives up, or it died                 reading -> ready    it died: another one gets it
//   ready -> writing     overflow drop_oldest, no slot was free  ready -> free       overflow drop_oldest, too many unread
//
// So nobody can overwrite a slot that is being read or written, and there is no index that could go round and meet
// another. A process that dies at any line leaves one word that names it; whoever needs a slot next puts that slot back.
// Scanning some words costs nanoseconds at the usual 4 to 64 slots.
//
// Order: the slots of one writer are taken, and dropped, in the order of their commits. Those of several writers are too,
// as far as their commits did not overlap. What a dead reader had taken comes back as old as it was.
//
// Counters: when nobody is at work, written == read + dropped + ready + reading. Each process that is killed can put that
// out by one, because no two words change at once; what it lost is then counted as abandoned by whoever puts its slot back.
//
// If a process dies at a line, the others see:
//   claim    before the exchange nothing, after it `writing`: put back, counted as abandoned, its unread content too
//   commit   before `ready`: as above, a sequence number stays unused; between `ready` and `written`: the slot, which waiters
//            find when their slice ends, `written` lacks one; before the trim: one more unread, until the next commit
//   trim     as claim
//   take     before the exchange nothing, after it `reading`: put back for another reader, counted as returned
//   release  before `free`: as above, and counted as read twice; between `free` and `freed`: a free slot, which waiters find
//            when their slice ends
//   reap     a slot that was put back and not counted
//
// Control block, 64 bytes a line:
//   offset  size  field     written by            when
//   0       64    written   writers               commit (a signal: readers wait for it)
//   64      64    freed     readers, writers      a slot can be claimed (a signal: blocked writers wait for it)
//   128     64    sequence  writers               commit: the number of the last slot that was committed
//   192     64    taken     readers               release: slots read; and their waits
//   256     64    lost      writers               dropped unread, abandoned by the dead, blocked writers
//
// Slot: a head of one line, then the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sync/signal.hpp"
#include "sync/words.hpp"

namespace memlane {

struct RingControl {
    SignalCell written;
    SignalCell freed;
    struct alignas(64) {
        Word last;
    } sequence;
    struct alignas(64) {
        Word read;    // slots that readers released
        Word waited;  // times that a reader found nothing and had to wait
        Word returned; // slots taken back from readers that died
    } taken;
    struct alignas(64) {
        Word dropped;   // unread slots that overflow threw away
        Word blocked;   // times that a writer found no slot and had to wait
        Word abandoned; // claimed slots taken back from writers that died, or given up
        Word next_reap_ns; // monotonic clock: when a writer that would drop asks again who is dead
    } lost;
};
static_assert(sizeof(RingControl) == 320);

struct alignas(64) SlotHead {
    Word state;
    Word sequence;               // which commit this is, counted from 1
    std::int64_t policy_version; // of the weights that made the content
    std::int64_t writer;         // what the writer calls itself
    std::int64_t process;        // the process that wrote it, as one number
    std::int64_t claimed_ns;     // wall clock, when writing began
    std::int64_t committed_ns;   // wall clock, when it ended
    std::int64_t rows;           // how many rows are valid; the writer's to define
};
static_assert(sizeof(SlotHead) == 64);

enum class Overflow { drop_oldest, block };

enum class SlotState : std::int64_t { free = 0, writing = 1, ready = 2, reading = 3 };
constexpr std::int64_t slot_word(SlotState state, std::int64_t detail = 0) {
    return detail << 2 | static_cast<std::int64_t>(state);
}
constexpr SlotState slot_state(std::int64_t word) { return static_cast<SlotState>(word & 3); }
constexpr std::int64_t slot_detail(std::int64_t word) { return word >> 2; }

// A view of a ring in shared memory; has no state of its own.
class Ring {
  public:
    Ring(std::byte *control, std::byte *slots, std::int64_t count, std::size_t stride_bytes, std::int64_t unread_limit,
         Overflow overflow);

    std::int64_t count() const { return count_; }
    RingControl &control() const { return *control_; }
    SlotHead &head(std::int64_t slot) const {
        return *reinterpret_cast<SlotHead *>(slots_ + static_cast<std::size_t>(slot) * stride_bytes_);
    }

    // A slot for this process to fill, or -1.
    std::int64_t try_claim(std::int64_t process);
    // Waits for one. On `reached` the value is the slot.
    WaitResult wait_claim(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin);
    void commit(std::int64_t slot);
    void abandon(std::int64_t slot);

    // The oldest unread slot for this process to read, or -1.
    std::int64_t try_take(std::int64_t process);
    WaitResult wait_take(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin);
    void release(std::int64_t slot);

    std::int64_t unread() const;
    // Puts back what dead processes held; says how many slots that were.
    std::int64_t reap() { return reap(SlotState::writing) + reap(SlotState::reading); }
    std::int64_t reap(SlotState held);

  private:
    struct Oldest {
        std::int64_t slot = -1;
        std::int64_t word = 0;
        std::int64_t ready = 0; // how many are unread in all
    };
    Oldest oldest_ready() const;
    std::int64_t claim_free(std::int64_t process);
    void trim(std::int64_t mine);

    RingControl *control_;
    std::byte *slots_;
    std::int64_t count_;
    std::size_t stride_bytes_;
    std::int64_t unread_limit_;
    Overflow overflow_;
};

} // namespace memlane
