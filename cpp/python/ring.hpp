// The handle of a ring, and its slots as leases.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "lanes/ring.hpp"
#include "os/process.hpp"
#include "python/lease.hpp"
#include "python/life.hpp"
#include "python/tensor_parts.hpp"
#include "python/waits.hpp"
#include "sync/copy.hpp"

namespace memlane {

inline std::int64_t wall_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// A copy of a slot's head. Its numbers become Python objects when they are read: creating all seven takes as long as
// copying 4 KB.
struct Head {
    std::int64_t sequence, policy_version, writer, process, claimed_ns, committed_ns, rows;
    bool operator==(const Head &) const = default;
    auto as_tuple() const { return std::tuple(sequence, policy_version, writer, process, claimed_ns, committed_ns, rows); }
    using Tuple =
        std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
};

class RingHandle {
  public:
    // `layout` is that of a slot. `watch(slot, writeable, label)` returns the memlane.core.lease.Watch of a lease; None
    // without debug mode.
    RingHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t slots, std::int64_t count,
               std::size_t stride, std::int64_t unread_limit, bool block, std::string label, nb::object layout,
               nb::object watch)
        : mapping_(std::move(mapping)), label_(std::move(label)), first_payload_(slots + sizeof(SlotHead)), stride_(stride),
          layout_(std::move(layout)), watch_(std::move(watch)),
          ring_(checked_address(*mapping_, control, sizeof(RingControl), alignof(RingControl), label_),
                checked_address(*mapping_, slots, static_cast<std::size_t>(count), stride, alignof(SlotHead), label_), count,
                stride, unread_limit, block ? Overflow::block : Overflow::drop_oldest, mapping_->life()),
          leasable_(static_cast<std::size_t>(count)), // after `ring_`, which checks the count
          claim_spin_(default_spin_limit_ns()), take_spin_(default_spin_limit_ns()) {}
    RingHandle(const RingHandle &) = delete; // leases refer to its arrays
    RingHandle &operator=(const RingHandle &) = delete;

    const std::string &label() const { return label_; }
    Mapping &mapping() const { return *mapping_; }

    std::int64_t claim(nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        require_open(*mapping_, label_);
        const std::int64_t process = process_in(*mapping_, label_);
        std::int64_t slot = ring_.try_claim(process);
        if (slot < 0 && timeout && *timeout == 0)
            slot = without_waiting([&](Spin &spin) { return ring_.wait_claim(process, 0, {}, spin); });
        if (slot < 0) {
            ring_.control().lost.blocked.fetch_add(1, std::memory_order_relaxed);
            const MappingUse use(*mapping_);
            Ring::Waiter waiter(ring_, Ring::Side::writers);
            slot = wait_in_slices(
                *mapping_, label_, timeout, peers, claim_spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return ring_.wait_claim(mapping_->life().process(), deadline_ns, pidfds, spin, waiter);
                },
                [&] { return "a slot to write in the " + label_ + "; unread slots: " + std::to_string(ring_.unread()); });
        }
        ring_.head(slot).claimed_ns = wall_ns();
        return slot;
    }

    void commit(std::int64_t slot, std::int64_t policy_version, std::int64_t writer, std::int64_t rows) {
        require_state(slot, SlotState::writing, "commit");
        SlotHead &head = ring_.head(slot);
        head.policy_version = policy_version;
        head.writer = writer;
        head.process = this_process();
        head.committed_ns = wall_ns();
        head.rows = rows;
        ring_.commit(slot);
    }

    void abandon(std::int64_t slot) {
        require_state(slot, SlotState::writing, "abandon");
        ring_.abandon(slot);
    }

    std::int64_t take(nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        require_open(*mapping_, label_);
        const std::int64_t process = process_in(*mapping_, label_);
        std::int64_t slot = ring_.try_take(process);
        if (slot < 0 && timeout && *timeout == 0)
            slot = without_waiting([&](Spin &spin) { return ring_.wait_take(process, 0, {}, spin); });
        if (slot >= 0)
            return slot;
        if (!timeout || *timeout > 0)
            ring_.control().taken.waited.fetch_add(1, std::memory_order_relaxed);
        const MappingUse use(*mapping_);
        Ring::Waiter waiter(ring_, Ring::Side::readers);
        return wait_in_slices(
            *mapping_, label_, timeout, peers, take_spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return ring_.wait_take(mapping_->life().process(), deadline_ns, pidfds, spin, waiter);
            },
            [&] {
                return "a slot to read in the " + label_ +
                       "; slots written so far: " + std::to_string(see(ring_.control().written.value));
            });
    }

    void release(std::int64_t slot) {
        require_state(slot, SlotState::reading, "release");
        ring_.release(slot);
    }

    // Gives a slot back that was neither committed nor released: a claimed one is abandoned, a taken one is offered to the
    // readers again. Does nothing if this process does not hold it: the child of a fork has copies of its parent's leases.
    // Also after the segment was closed, because other processes may still use it.
    bool give_back(std::int64_t slot, SlotState held) {
        const TruncationGuard guard(*mapping_);
        if (!is_held_here(slot, held))
            return false;
        held == SlotState::writing ? ring_.abandon(slot) : ring_.give_back(slot);
        return true;
    }

    // A slot that this process holds, given back at the end of the scope unless it was handed over before.
    class Hold {
      public:
        Hold(RingHandle &ring, std::int64_t slot, SlotState held) : ring_(ring), slot_(slot), held_(held) {}
        Hold(const Hold &) = delete;
        Hold &operator=(const Hold &) = delete;
        ~Hold() {
            if (slot_ >= 0)
                ring_.give_back(slot_, held_);
        }
        void hand_over() { slot_ = -1; }

      private:
        RingHandle &ring_;
        std::int64_t slot_;
        SlotState held_;
    };

    // Claims a slot, copies the tensors into it and commits it.
    void put(const BoundParts &bound, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
             nb::handle timeout, nb::handle peers) {
        require_inside(bound);
        const std::int64_t slot = claim(timeout, peers);
        Hold hold(*this, slot, SlotState::writing);
        copy_without_gil(bound, [&] {
            for (const Part &part : bound.parts())
                copy_bytes(payload(slot) + part.offset, part.data, part.bytes);
        });
        commit(slot, policy_version, writer, rows);
        hold.hand_over();
    }

    // Takes a slot, copies it into the tensors and releases it.
    Head get(const BoundParts &bound, nb::handle timeout, nb::handle peers) {
        require_inside(bound);
        const std::int64_t slot = take(timeout, peers);
        Hold hold(*this, slot, SlotState::reading);
        copy_without_gil(bound, [&] {
            for (const Part &part : bound.parts())
                copy_bytes(part.data, payload(slot) + part.offset, part.bytes);
        });
        const Head result = head(slot);
        release(slot);
        hold.hand_over();
        return result;
    }

    Head head(std::int64_t slot) const {
        require_slot(slot);
        const SlotHead &head = ring_.head(slot);
        return {head.sequence,   head.policy_version, head.writer, head.process,
                head.claimed_ns, head.committed_ns,   head.rows};
    }

    std::int64_t unread() const {
        require_open(*mapping_, label_);
        return ring_.unread();
    }

    std::int64_t reap() {
        require_open(*mapping_, label_);
        return ring_.reap();
    }

    nb::dict counters() const {
        require_open(*mapping_, label_);
        const RingControl &control = ring_.control();
        nb::dict counters;
        counters["written"] = see(control.written.value);
        counters["read"] = see(control.taken.read);
        counters["dropped"] = see(control.lost.dropped);
        counters["abandoned"] = see(control.lost.abandoned);
        counters["returned"] = see(control.taken.returned);
        counters["blocked"] = see(control.lost.blocked);
        counters["waited"] = see(control.taken.waited);
        return counters;
    }

    // What leases of a slot have in common, created by the first.
    struct Leasable {
        nb::object label;
        std::unique_ptr<FieldArrays> for_writing, for_reading;
    };
    const Leasable &leasable(std::int64_t slot, bool writeable) {
        Leasable &leasable = leasable_[static_cast<std::size_t>(slot)];
        if (!leasable.label.is_valid())
            leasable.label = nb::cast("slot " + std::to_string(slot) + " of the " + label_);
        std::unique_ptr<FieldArrays> &arrays = writeable ? leasable.for_writing : leasable.for_reading;
        if (!arrays)
            arrays =
                std::make_unique<FieldArrays>(nb::cast(mapping_), first_payload_ + static_cast<std::size_t>(slot) * stride_,
                                              layout_, writeable);
        return leasable;
    }
    nb::object watch(std::int64_t slot, bool writeable) const {
        return watch_.is_none() ? nb::none() : watch_(slot, writeable, leasable_[static_cast<std::size_t>(slot)].label);
    }

  private:
    // Without the GIL, another thread can close the segment: the use keeps the slot.
    template <class Copy> void copy_without_gil(const BoundParts &bound, Copy copy) const {
        if (bound.end_offset() < min_bytes_without_gil)
            return copy();
        const MappingUse use(*mapping_);
        without_gil(copy);
    }
    // A call with timeout 0: a wait whose deadline has passed. It tries after those who wait, and reclaims the slots of dead
    // processes. Returns the slot or -1.
    template <class Wait> static std::int64_t without_waiting(Wait wait) {
        Spin never(0);
        return wait(never).value;
    }

    std::byte *payload(std::int64_t slot) { return reinterpret_cast<std::byte *>(&ring_.head(slot)) + sizeof(SlotHead); }
    void require_inside(const BoundParts &bound) const {
        if (bound.end_offset() > stride_ - sizeof(SlotHead))
            raise("MemlaneError", "parts that end at byte " + std::to_string(bound.end_offset()) +
                                      " do not fit into a slot of " + std::to_string(stride_ - sizeof(SlotHead)) +
                                      " bytes of the " + label_);
    }
    void require_slot(std::int64_t slot) const {
        require_open(*mapping_, label_);
        if (slot < 0 || slot >= ring_.count())
            throw nb::index_error(
                (label_ + " has " + std::to_string(ring_.count()) + " slots, there is no slot " + std::to_string(slot))
                    .c_str());
    }
    // Whether this process holds the slot through this handle's mapping. Takes no token: a process without one holds nothing.
    bool is_held_here(std::int64_t slot, SlotState held) const {
        const std::int64_t process = mapping_->life().process_if_taken();
        return process != 0 && see(ring_.head(slot).state) == slot_word(held, process);
    }
    void require_state(std::int64_t slot, SlotState state, const char *action) const {
        require_slot(slot);
        if (!is_held_here(slot, state)) [[unlikely]]
            raise("MemlaneError",
                  "cannot " + std::string(action) + " slot " + std::to_string(slot) + " of the " + label_ +
                      ": this process does not hold it; use a slot only in the process that claimed or took it, "
                      "and release it once");
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    std::size_t first_payload_; // offset of slot 0 in the mapping
    std::size_t stride_;
    nb::object layout_;
    nb::object watch_;
    Ring ring_;
    std::vector<Leasable> leasable_; // by slot
    Spin claim_spin_;
    Spin take_spin_;
};

// A claimed or taken slot of a ring. Keeps the ring's handle alive, which owns the arrays.
//
// A lease that is dropped without commit or release gives its slot back, as soon as no array of it is in use any more.
class SlotLease : public Lease {
  public:
    std::int64_t index() const { return index_; }
    // From now on this object is responsible for the slot.
    void begin_hold(RingHandle::Hold &hold, MappingUse &use) {
        use_ = std::move(use);
        hold.hand_over();
    }
    ~SlotLease() override {
        if (use_.mapping() != nullptr)
            drop();
    }

  protected:
    SlotLease(nb::handle_t<RingHandle> ring, std::int64_t index, bool writeable)
        : SlotLease(ring, nb::inst_ptr<RingHandle>(ring)->leasable(index, writeable), index, writeable) {}

    RingHandle &ring() const { return *nb::inst_ptr<RingHandle>(lane()); }

    // Called before the slot is committed, abandoned or released. Those refuse a closed segment: then the slot is given
    // back when the lease is dropped.
    void end_hold() {
        if (use_.mapping() != nullptr && !use_.mapping()->closed())
            use_.end();
    }

  private:
    SlotLease(nb::handle_t<RingHandle> ring, const RingHandle::Leasable &leasable, std::int64_t index, bool writeable)
        : Lease(nb::borrow(ring), *(writeable ? leasable.for_writing : leasable.for_reading), leasable.label,
                nb::inst_ptr<RingHandle>(ring)->watch(index, writeable)),
          index_(index), state_(writeable ? SlotState::writing : SlotState::reading) {}

    // Gives the slot back when the last copy is gone.
    struct LastUse {
        LastUse(nb::handle of, std::int64_t index, SlotState held, MappingUse holds)
            : ring(nb::borrow(of)), slot(index), state(held), use(std::move(holds)) {}
        ~LastUse() { nb::inst_ptr<RingHandle>(ring)->give_back(slot, state); }
        nb::object ring;
        std::int64_t slot;
        SlotState state;
        MappingUse use;
    };

    void drop() noexcept {
        if (!nb::is_alive()) // the process ends: the other processes reclaim the slot
            return;
        const nb::error_scope keep_error;
        try {
            // A program that closes its segment is done with all slots, and a release after that is an error by itself.
            const bool warns = !released() && !mapping().closed();
            const std::string text = label();
            const auto last = std::make_shared<LastUse>(lane(), index_, state_, std::move(use_));
            for (const auto &[name, reference] : stop())
                if (nb::object array = reference(); !array.is_none())
                    nb::module_::import_("weakref").attr("finalize")(array, nb::cpp_function([last] {}));
            if (warns && PyErr_WarnFormat(PyExc_ResourceWarning, 1,
                                          state_ == SlotState::writing
                                              ? "%s was claimed and dropped without commit; it is abandoned. Use `with`"
                                              : "%s was taken and dropped without release; it is offered to the readers "
                                                "again. Use `with`",
                                          text.c_str()) != 0)
                PyErr_WriteUnraisable(nullptr);
        } catch (nb::python_error &error) {
            error.discard_as_unraisable("a dropped lease");
        } catch (...) {
            // out of memory: the slot is reclaimed when this process ends
        }
    }

    std::int64_t index_;
    SlotState state_;
    MappingUse use_; // while the slot is held
};

class WriteSlot final : public SlotLease {
  public:
    WriteSlot(nb::handle_t<RingHandle> ring, std::int64_t index, std::int64_t writer)
        : SlotLease(ring, index, true), writer_(writer) {}

    std::int64_t writer() const { return writer_; }

    void commit(std::int64_t policy_version, std::int64_t rows) {
        if (released())
            raise("StaleView", label() + " was committed or abandoned before; claim another slot");
        committed_ = true;
        policy_version_ = policy_version;
        rows_ = rows;
        end();
    }

  protected:
    void after_release() override {
        end_hold();
        if (committed_)
            ring().commit(index(), policy_version_, writer_, rows_);
        else
            ring().abandon(index());
    }

  private:
    std::int64_t writer_;
    bool committed_ = false;
    std::int64_t policy_version_ = 0, rows_ = 0;
};

class ReadSlot final : public SlotLease {
  public:
    ReadSlot(nb::handle_t<RingHandle> ring, std::int64_t index)
        : SlotLease(ring, index, false), head_(this->ring().head(index)) {}

    const Head &head() const { return head_; }

  protected:
    void after_release() override {
        end_hold();
        ring().release(index());
    }

  private:
    Head head_;
};

// A new Python object of the class T. nb::cast would allocate the C++ object separately.
template <class T, class... Arguments> nb::object new_object(Arguments &&...arguments) {
    static const nb::handle type = nb::type<T>();
    nb::object object = nb::inst_alloc(type);
    new (nb::inst_ptr<T>(object)) T(std::forward<Arguments>(arguments)...);
    nb::inst_mark_ready(object);
    return object;
}

// The base of the Python class memlane.lanes.Writer. Keeps the ring's handle alive.
class RingWriter {
  public:
    RingWriter(nb::handle_t<RingHandle> ring, std::int64_t writer) : ring_(nb::borrow(ring)), writer_(writer) {}

    std::int64_t writer() const { return writer_; }
    Mapping &mapping() const { return ring().mapping(); }
    const std::string &label() const { return ring().label(); }

    nb::object claim(nb::handle timeout, nb::handle peers) {
        const std::int64_t slot = ring().claim(timeout, peers);
        MappingUse use(mapping());
        RingHandle::Hold hold(ring(), slot, SlotState::writing);
        require_end(mapping(), label()); // nothing guards the caller's accesses to the arrays of the slot
        nb::object lease = new_object<WriteSlot>(nb::handle_t<RingHandle>(ring_), slot, writer_);
        nb::inst_ptr<WriteSlot>(lease)->begin_hold(hold, use);
        return lease;
    }
    // Does nothing and returns false if the tensors do not fit `parts`.
    bool put(TensorParts *parts, nb::handle tensors, std::int64_t policy_version, std::int64_t rows, nb::handle timeout,
             nb::handle peers) {
        BoundParts bound;
        if (parts == nullptr || !parts->bind(tensors, bound))
            return false;
        ring().put(bound, policy_version, writer_, rows, timeout, peers);
        return true;
    }
    void put_parts(const TensorParts &parts, std::int64_t policy_version, std::int64_t rows, nb::handle timeout,
                   nb::handle peers) {
        BoundParts bound;
        parts.bind(bound);
        ring().put(bound, policy_version, writer_, rows, timeout, peers);
    }

  private:
    RingHandle &ring() const { return *nb::inst_ptr<RingHandle>(ring_); }

    nb::object ring_;
    std::int64_t writer_;
};

// The base of the Python class memlane.lanes.Reader. Keeps the ring's handle alive.
class RingReader {
  public:
    explicit RingReader(nb::handle_t<RingHandle> ring) : ring_(nb::borrow(ring)) {}

    Mapping &mapping() const { return ring().mapping(); }
    const std::string &label() const { return ring().label(); }

    nb::object take(nb::handle timeout, nb::handle peers) {
        const std::int64_t slot = ring().take(timeout, peers);
        MappingUse use(mapping());
        RingHandle::Hold hold(ring(), slot, SlotState::reading);
        require_end(mapping(), label()); // nothing guards the caller's accesses to the arrays of the slot
        nb::object lease = new_object<ReadSlot>(nb::handle_t<RingHandle>(ring_), slot);
        nb::inst_ptr<ReadSlot>(lease)->begin_hold(hold, use);
        return lease;
    }
    // Does nothing and returns nullopt if the tensors do not fit `parts`.
    std::optional<Head> get(TensorParts *parts, nb::handle tensors, nb::handle timeout, nb::handle peers) {
        BoundParts bound;
        if (parts == nullptr || !parts->bind(tensors, bound))
            return std::nullopt;
        return ring().get(bound, timeout, peers);
    }
    Head get_parts(const TensorParts &parts, nb::handle timeout, nb::handle peers) {
        BoundParts bound;
        parts.bind(bound);
        return ring().get(bound, timeout, peers);
    }

  private:
    RingHandle &ring() const { return *nb::inst_ptr<RingHandle>(ring_); }

    nb::object ring_;
};

} // namespace memlane
