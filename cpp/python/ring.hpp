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
                stride, unread_limit, block ? Overflow::block : Overflow::drop_oldest),
          leasable_(static_cast<std::size_t>(count)), // after `ring_`, which checks the count
          claim_spin_(default_spin_limit_ns()), take_spin_(default_spin_limit_ns()) {}
    RingHandle(const RingHandle &) = delete; // leases refer to its arrays
    RingHandle &operator=(const RingHandle &) = delete;

    const std::string &label() const { return label_; }
    Mapping &mapping() const { return *mapping_; }

    std::int64_t claim(nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        require_open(*mapping_, label_);
        std::int64_t slot = ring_.try_claim(this_process());
        // A call with timeout 0 never gets to the wait, which reclaims slots of dead writers: do it here.
        if (slot < 0 && timeout && *timeout == 0 && ring_.reap(SlotState::writing) > 0)
            slot = ring_.try_claim(this_process());
        if (slot < 0) {
            ring_.control().lost.blocked.fetch_add(1, std::memory_order_relaxed);
            slot = wait_in_slices(
                *mapping_, label_, timeout, peers, claim_spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return ring_.wait_claim(this_process(), deadline_ns, pidfds, spin);
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
        std::int64_t slot = ring_.try_take(this_process());
        // A call with timeout 0 never gets to the wait, which reclaims slots of dead readers: do it here.
        if (slot < 0 && timeout && *timeout == 0 && ring_.reap(SlotState::reading) > 0)
            slot = ring_.try_take(this_process());
        if (slot >= 0)
            return slot;
        if (!timeout || *timeout > 0)
            ring_.control().taken.waited.fetch_add(1, std::memory_order_relaxed);
        return wait_in_slices(
            *mapping_, label_, timeout, peers, take_spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return ring_.wait_take(this_process(), deadline_ns, pidfds, spin);
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

    // Claims a slot, copies the tensors of `parts` into it and commits it.
    void put_parts(const TensorParts &parts, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
                   nb::handle timeout, nb::handle peers) {
        require_inside(parts);
        const std::int64_t slot = claim(timeout, peers);
        without_gil_for(parts.end_offset, [&] {
            for (const Part &part : parts.parts)
                copy_bytes(payload(slot) + part.offset, part.data, part.bytes);
        });
        commit(slot, policy_version, writer, rows);
    }

    // Like put_parts, for `tensors`. Does nothing and returns false if they do not fit `parts`.
    bool put(TensorParts *parts, nb::handle tensors, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
             nb::handle timeout, nb::handle peers) {
        if (parts == nullptr || !parts->fits(tensors))
            return false;
        put_parts(*parts, policy_version, writer, rows, timeout, peers);
        return true;
    }

    // Takes a slot, copies it into the tensors of `parts` and releases it.
    Head get_parts(const TensorParts &parts, nb::handle timeout, nb::handle peers) {
        require_inside(parts);
        const std::int64_t slot = take(timeout, peers);
        without_gil_for(parts.end_offset, [&] {
            for (const Part &part : parts.parts)
                copy_bytes(part.data, payload(slot) + part.offset, part.bytes);
        });
        const Head result = head(slot);
        release(slot);
        return result;
    }

    // Like get_parts, into `tensors`. Does nothing and returns nullopt if they do not fit `parts`.
    std::optional<Head> get(TensorParts *parts, nb::handle tensors, nb::handle timeout, nb::handle peers) {
        if (parts == nullptr || !parts->fits(tensors))
            return std::nullopt;
        return get_parts(*parts, timeout, peers);
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
    std::byte *payload(std::int64_t slot) { return reinterpret_cast<std::byte *>(&ring_.head(slot)) + sizeof(SlotHead); }
    void require_inside(const TensorParts &parts) const {
        if (parts.end_offset > stride_ - sizeof(SlotHead))
            raise("MemlaneError", "parts that end at byte " + std::to_string(parts.end_offset) +
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
    void require_state(std::int64_t slot, SlotState state, const char *action) const {
        require_slot(slot);
        if (see(ring_.head(slot).state) != slot_word(state, this_process())) [[unlikely]]
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
class SlotLease : public Lease {
  public:
    std::int64_t index() const { return index_; }

  protected:
    SlotLease(nb::handle_t<RingHandle> ring, std::int64_t index, bool writeable)
        : SlotLease(ring, nb::inst_ptr<RingHandle>(ring)->leasable(index, writeable), index, writeable) {}

    RingHandle &ring() const { return *nb::inst_ptr<RingHandle>(lane()); }

  private:
    SlotLease(nb::handle_t<RingHandle> ring, const RingHandle::Leasable &leasable, std::int64_t index, bool writeable)
        : Lease(nb::borrow(ring), *(writeable ? leasable.for_writing : leasable.for_reading), leasable.label,
                nb::inst_ptr<RingHandle>(ring)->watch(index, writeable)),
          index_(index) {}

    std::int64_t index_;
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
    void after_release() override { ring().release(index()); }

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

// Nothing guards the caller's accesses to the arrays of a slot: a truncated file is found here, before they begin.
inline void require_end(const RingHandle &ring) {
    if (ring.mapping().can_shrink()) [[unlikely]] {
        ring.mapping().touch_end();
        require_whole(ring.mapping(), ring.label());
    }
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
        require_end(ring());
        return new_object<WriteSlot>(nb::handle_t<RingHandle>(ring_), slot, writer_);
    }
    bool put(TensorParts *parts, nb::handle tensors, std::int64_t policy_version, std::int64_t rows, nb::handle timeout,
             nb::handle peers) {
        return ring().put(parts, tensors, policy_version, writer_, rows, timeout, peers);
    }
    void put_parts(const TensorParts &parts, std::int64_t policy_version, std::int64_t rows, nb::handle timeout,
                   nb::handle peers) {
        ring().put_parts(parts, policy_version, writer_, rows, timeout, peers);
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
        require_end(ring());
        return new_object<ReadSlot>(nb::handle_t<RingHandle>(ring_), slot);
    }
    std::optional<Head> get(TensorParts *parts, nb::handle tensors, nb::handle timeout, nb::handle peers) {
        return ring().get(parts, tensors, timeout, peers);
    }
    Head get_parts(const TensorParts &parts, nb::handle timeout, nb::handle peers) {
        return ring().get_parts(parts, timeout, peers);
    }

  private:
    RingHandle &ring() const { return *nb::inst_ptr<RingHandle>(ring_); }

    nb::object ring_;
};

} // namespace memlane
