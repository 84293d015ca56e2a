// A ring: slots that writers fill and readers take, each exactly once, oldest first.
//
// Who may call: any number of writers and readers in any number of processes. At any time a slot is held by one writer,
// by one reader, or by no process; its `state` word alone says which. A process is named by its life token (os/life.hpp):
//
//   free           held by no process; the content is meaningless
//   writing(p)     claimed by process p, which may store into it
//   ready(n)       complete, the n-th commit; held by no process, the content is fixed
//   reading(p)     taken by process p, which may load from it; the content is fixed
//
//   free -> writing    a writer claims it                      ready -> reading   a reader takes it
//   writing -> ready   the writer commits it                   reading -> free    the reader releases it
//   writing -> free    the writer abandons it, or is dead      reading -> ready   the reader is dead
//   ready -> writing   overflow drop_oldest: no slot was free  ready -> free      overflow drop_oldest: too many unread
//
// So no process can overwrite a slot that is being read or written, and there are no head and tail indices that could
// meet. A process that dies at any line leaves at most one word that names it; the next process that needs a slot
// reclaims that slot (`reap`). Scanning the state words costs nanoseconds at the usual 4 to 64 slots.
//
// Order: the slots of one writer are taken, and dropped, in the order of their commits. So are those of several writers
// whose commits did not overlap in time. A slot reclaimed from a dead reader keeps its place in the order.
//
// Waiting: a writer or reader that finds no slot joins the wait queue of its side (sync/wait_queue.hpp), and each slot that
// becomes free, or ready, wakes one of them. Free slots are for the writers that wait, first come, first served; another
// writer may be faster a few times in a row (WaitQueue::max_overtakes). Readers are woken in this order too, but whichever
// looks first takes a slot: to them, all slots are one stream. A process holds up its queue for a slice at most. The signals
// `freed` and `written` wake, all at once, those that found all places of their queue taken, and writers of a ring with
// drop_oldest, which wait if every slot is being written or read.
//
// Counters: while no call is running, written == read + dropped + ready + reading. Each killed process can make this
// wrong by one, because no two words change at once; the process that reclaims its slot then counts the loss as
// abandoned.
//
// If a process dies in a call, the others see:
//   claim    before the exchange: nothing. After it: `writing`; the slot is reclaimed and counted as abandoned,
//            together with its unread content if the claim dropped one
//   commit   before `ready`: as after the claim, and a sequence number stays unused. Between `ready` and `written`: a
//            ready slot, which waiters find when their slice ends; `written` lacks one. Before the trim: one unread
//            slot too many, until the next commit
//   offer    between the signal and the call of a waiter: as before the signal
//   trim     as claim
//   take     before the exchange: nothing. After it: `reading`; the slot is reclaimed for another reader and counted as
//            returned
//   release  before `free`: as after the take, and the slot is counted as read twice. Between `free` and `freed`: a
//            free slot, which waiters find when their slice ends
//   reap     a slot that was reclaimed and not counted
//   wait     as sync/wait_queue.hpp says: no slot is lost, and the others wait for a slice at most; for two if it dies with its
//            slot before it has left the queue: one until the slot is reclaimed, one until its place counts as stuck
//
// Control block:
//   offset  size   field     written by            when
//   0       64     written   writers               commit (a signal: a reader spins until it changes)
//   64      64     freed     readers, writers      a slot can be claimed (a signal: a writer spins until it changes)
//   128     64     sequence  writers               commit: the sequence number of the last committed slot
//   192     64     taken     readers               release: slots read; and counters of the readers
//   256     64     lost      writers               slots dropped unread or abandoned; and counters of the writers
//   320     10368  writers   waiting writers       the wait queue of the writers; callers are those who free slots
//   10688   10368  readers   waiting readers       the wait queue of the readers; callers are those who commit slots
//
// Slot: a head of one cache line, then the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "os/life.hpp"
#include "sync/signal.hpp"
#include "sync/wait_queue.hpp"
#include "sync/words.hpp"

namespace memlane {

struct RingControl {
    SignalCell written;
    SignalCell freed;
    struct alignas(64) {
        Word last;
    } sequence;
    struct alignas(64) {
        Word read; // slots that readers released
        Word waited; // times that a reader found no slot and had to wait
        Word returned; // slots that their reader gave back unread, or that were reclaimed from a dead reader
    } taken;
    struct alignas(64) {
        Word dropped; // unread slots dropped by drop_oldest
        Word blocked; // times that a writer found no slot and had to wait
        Word abandoned; // claimed slots that their writer gave up, or that were reclaimed from a dead writer
        Word next_reap_ns; // monotonic clock: when a writer checks for dead processes again before it drops a slot
    } lost;
    WaitQueue writers;
    WaitQueue readers;
};
static_assert(sizeof(WaitQueue) == 10368 && sizeof(RingControl) == 320 + 2 * sizeof(WaitQueue));

struct alignas(64) SlotHead {
    Word state;
    Word sequence; // number of the commit, from 1
    std::int64_t policy_version; // version of the weights that produced the content
    std::int64_t writer; // number that the writer was created with
    std::int64_t process; // identity of the process that wrote it (os/process.hpp)
    std::int64_t claimed_ns; // wall clock at the claim
    std::int64_t committed_ns; // wall clock at the commit
    std::int64_t rows; // number of valid rows, as the writer defines them
};
static_assert(sizeof(SlotHead) == 64);

enum class Overflow { drop_oldest, block };

enum class SlotState : std::int64_t { free = 0, writing = 1, ready = 2, reading = 3 };
constexpr std::int64_t slot_word(SlotState state, std::int64_t detail = 0) {
    return detail << 2 | static_cast<std::int64_t>(state);
}
constexpr SlotState slot_state(std::int64_t word) { return static_cast<SlotState>(word & 3); }
constexpr std::int64_t slot_detail(std::int64_t word) { return word >> 2; }

// A ring in shared memory; the object itself has no state beyond addresses and settings.
class Ring {
  public:
    // `life` shows which processes are alive; it belongs to the file of the ring and outlives this object.
    Ring(std::byte *control, std::byte *slots, std::int64_t count, std::size_t stride_bytes, std::int64_t unread_limit,
         Overflow overflow, Life &life);

    std::int64_t count() const { return count_; }
    RingControl &control() const { return *control_; }
    SlotHead &head(std::int64_t slot) const {
        return *reinterpret_cast<SlotHead *>(slots_ + static_cast<std::size_t>(slot) * stride_bytes_);
    }

    enum class Side { writers, readers };

    // The place of one waiting call in the queue of its side. Pass it to each slice of the wait; it leaves the queue when it
    // is destroyed. Belongs to one thread.
    class Waiter {
      public:
        Waiter(Ring &ring, Side side) : ring_(ring), side_(side) {}
        ~Waiter() {
            if (place_.index >= 0)
                ring_.leave(*this);
        }
        Waiter(const Waiter &) = delete;
        Waiter &operator=(const Waiter &) = delete;

      private:
        friend class Ring;
        Ring &ring_;
        Side side_;
        WaitPlace place_;
    };

    // Claims a slot for `process`, an identity of `life`, to fill; -1 if none can be claimed, or if what is free is for writers that wait.
    std::int64_t try_claim(std::int64_t process);
    // Waits for a slot to claim, for one slice at most. On `reached` the value is the slot. If the deadline has passed, it
    // tries once, after those who wait. Without `waiter`, the place in the queue is given up at the end of the slice.
    WaitResult wait_claim(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                          Waiter &waiter);
    WaitResult wait_claim(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
        Waiter waiter(*this, Side::writers);
        return wait_claim(process, deadline_ns, pidfds, spin, waiter);
    }
    void commit(std::int64_t slot);
    void abandon(std::int64_t slot);

    // Takes the oldest unread slot for `process` to read; -1 if there is none.
    std::int64_t try_take(std::int64_t process);
    // Waits for a slot to take, as wait_claim does for a slot to claim.
    WaitResult wait_take(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin,
                         Waiter &waiter);
    WaitResult wait_take(std::int64_t process, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
        Waiter waiter(*this, Side::readers);
        return wait_take(process, deadline_ns, pidfds, spin, waiter);
    }
    void release(std::int64_t slot);
    // Offers a taken slot to the readers again, unread.
    void give_back(std::int64_t slot);

    std::int64_t unread() const;
    // Reclaims the slots that dead processes hold and returns their number; with `held`, only those in that state.
    std::int64_t reap() { return reap(SlotState::writing) + reap(SlotState::reading); }
    std::int64_t reap(SlotState held);

  private:
    struct Oldest {
        std::int64_t slot = -1;
        std::int64_t word = 0;
        std::int64_t ready = 0; // number of unread slots
    };
    Oldest oldest_ready() const;
    std::int64_t claim_free(std::int64_t process);
    std::int64_t claim_or_drop(std::int64_t process);
    void trim(std::int64_t claim_word);
    bool reap_is_due();

    WaitQueue &queue(Side side) const { return side == Side::writers ? control_->writers : control_->readers; }
    SignalCell &changed(Side side) const { return side == Side::writers ? control_->freed : control_->written; }
    std::int64_t count_available(Side side, std::int64_t limit) const;
    void offer(Side side, std::int64_t amount);
    void call_waiters(Side side);
    template <class Get> std::int64_t get_as_newcomer(Side side, Get get);
    template <class Get> std::int64_t get_in_turn(Waiter &waiter, Get get);
    template <class Get, class Reap>
    WaitResult wait_in_turn(Waiter &waiter, std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin, Get get,
                            Reap reap);
    void leave(Waiter &waiter);

    RingControl *control_;
    std::byte *slots_;
    std::int64_t count_;
    std::size_t stride_bytes_;
    std::int64_t unread_limit_;
    Overflow overflow_;
    Life *life_;
};

} // namespace memlane
