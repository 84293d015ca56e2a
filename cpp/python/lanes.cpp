// Bindings of two lanes: ring and weights.

#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <tuple>

#include <nanobind/operators.h>
#include <nanobind/stl/tuple.h>

#include "lanes/ring.hpp"
#include "lanes/weights.hpp"
#include "os/process.hpp"
#include "python/module.hpp"
#include "python/tensor_parts.hpp"
#include "python/waits.hpp"
#include "sync/copy.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

std::int64_t wall_ns() {
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
    RingHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t slots, std::int64_t count,
               std::size_t stride, std::int64_t unread_limit, bool block, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), payload_bytes_(stride - sizeof(SlotHead)),
          ring_(checked_address(*mapping_, control, sizeof(RingControl), alignof(RingControl), label_),
                checked_address(*mapping_, slots, static_cast<std::size_t>(count) * stride, alignof(SlotHead), label_),
                count, stride, unread_limit, block ? Overflow::block : Overflow::drop_oldest),
          claim_spin_(default_spin_limit_ns()), take_spin_(default_spin_limit_ns()) {}

    const std::string &label() const { return label_; }

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

    // Claims a slot, copies the tensors into it and commits it. False, and nothing done, if the tensors do not fit
    // `parts`. `tensors` is None if `parts` was made of them right before.
    bool put(TensorParts *parts, nb::handle tensors, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
             nb::handle timeout, nb::handle peers) {
        if (parts == nullptr || !(tensors.is_none() || parts->fits(tensors)))
            return false;
        require_inside(*parts);
        const std::int64_t slot = claim(timeout, peers);
        without_gil_for(parts->end_offset, [&] {
            for (const Part &part : parts->parts)
                copy_bytes(payload(slot) + part.offset, part.data, part.bytes);
        });
        commit(slot, policy_version, writer, rows);
        return true;
    }

    // Takes a slot, copies it into the tensors and releases it. Nothing if the tensors do not fit `parts`. `tensors` is
    // None if `parts` was made of them right before.
    std::optional<Head> get(TensorParts *parts, nb::handle tensors, nb::handle timeout, nb::handle peers) {
        if (parts == nullptr || !(tensors.is_none() || parts->fits(tensors)))
            return std::nullopt;
        require_inside(*parts);
        const std::int64_t slot = take(timeout, peers);
        without_gil_for(parts->end_offset, [&] {
            for (const Part &part : parts->parts)
                copy_bytes(part.data, payload(slot) + part.offset, part.bytes);
        });
        const Head result = head(slot);
        release(slot);
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

  private:
    std::byte *payload(std::int64_t slot) { return reinterpret_cast<std::byte *>(&ring_.head(slot)) + sizeof(SlotHead); }
    void require_inside(const TensorParts &parts) const {
        if (parts.end_offset > payload_bytes_)
            raise("MemlaneError", "parts that end at byte " + std::to_string(parts.end_offset) +
                                      " do not fit into a slot of " + std::to_string(payload_bytes_) + " bytes of the " +
                                      label_);
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
    std::size_t payload_bytes_;
    Ring ring_;
    Spin claim_spin_;
    Spin take_spin_;
};

class WeightsHandle {
  public:
    WeightsHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t buffers, int count, std::size_t stride,
                  std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), count_(count), stride_(stride),
          weights_(checked_address(*mapping_, control, sizeof(WeightsControl), alignof(WeightsControl), label_),
                   checked_address(*mapping_, buffers, static_cast<std::size_t>(count) * stride, 64, label_), count, stride),
          spin_(default_spin_limit_ns()) {}

    const std::string &label() const { return label_; }

    std::int64_t version() const {
        require_open(*mapping_, label_);
        return version_of(see(weights_.control().latest.value));
    }

    // Publishes these tensors and returns the version; 0 if they do not fit `parts` or need staging copies.
    std::int64_t publish_tensors(TensorParts *parts, nb::handle tensors) {
        return parts != nullptr && parts->direct() && parts->fits(tensors) ? publish(*parts) : 0;
    }

    // Reads into these tensors unless the latest version is `known`, and returns the version; -1 if they are not the
    // tensors of `parts` or need staging copies.
    std::int64_t read_new(const TensorParts *parts, nb::handle tensors, std::int64_t known) {
        if (parts == nullptr || !parts->direct() || !parts->same(tensors))
            return -1;
        return version() == known ? known : read(*parts);
    }

    std::int64_t publish(const TensorParts &parts) {
        require_inside(parts);
        const std::int64_t process = this_process();
        const std::int64_t version =
            without_gil_for(parts.end_offset, [&] { return weights_.publish(process, parts.parts); });
        if (version < 0)
            raise("MemlaneError",
                  "each of the " + std::to_string(count_) + " buffers of the " + label_ +
                      " is the latest version or being filled by a live writer; create it with more buffers");
        return version;
    }

    std::int64_t read(const TensorParts &parts) {
        require_inside(parts);
        return without_gil_for(parts.end_offset, [&] { return weights_.read(parts.parts); });
    }

    std::int64_t wait_for(std::int64_t version, nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        require_open(*mapping_, label_);
        SignalCell &latest = weights_.control().latest;
        const std::int64_t until = version << 8;
        std::int64_t value = see(latest.value);
        if (value < until)
            value = wait_in_slices(
                *mapping_, label_, timeout, peers, spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return signal_wait(latest, until, deadline_ns, pidfds, spin);
                },
                [&] {
                    return "version " + std::to_string(version) + " of the " + label_ + "; the latest is " +
                           std::to_string(version_of(see(latest.value)));
                });
        return version_of(value);
    }

    std::int64_t retries() const {
        require_open(*mapping_, label_);
        return see(weights_.control().retries);
    }

  private:
    void require_inside(const TensorParts &parts) const {
        require_open(*mapping_, label_);
        if (parts.end_offset > stride_)
            raise("MemlaneError", "parts that end at byte " + std::to_string(parts.end_offset) +
                                      " do not fit into a buffer of " + std::to_string(stride_) + " bytes of the " + label_);
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    int count_;
    std::size_t stride_;
    Weights weights_;
    Spin spin_;
};

} // namespace

void bind_lanes(nb::module_ &m) {
    m.attr("RING_CONTROL_BYTES") = sizeof(RingControl);
    m.attr("SLOT_HEAD_BYTES") = sizeof(SlotHead);
    m.attr("WEIGHTS_CONTROL_BYTES") = sizeof(WeightsControl);
    m.attr("MAX_BUFFERS") = max_buffers;

    nb::class_<Head>(m, "SlotHead", "The metadata of a slot, as its writer left it.")
        .def_ro("sequence", &Head::sequence, "Number of the commit in the ring, counted from 1.")
        .def_ro("policy_version", &Head::policy_version, "Version of the weights that produced the content.")
        .def_ro("writer", &Head::writer, "Number that the writer was created with.")
        .def_ro("process", &Head::process, "Process that wrote the slot, as Peer.word.")
        .def_ro("claimed_ns", &Head::claimed_ns, "Wall clock in nanoseconds when the slot was claimed.")
        .def_ro("committed_ns", &Head::committed_ns, "Wall clock in nanoseconds when the slot was committed.")
        .def_ro("rows", &Head::rows, "Number of valid rows, if the writer sets it.")
        .def(
            "__eq__", [](const Head &head, const Head &other) { return head == other; }, "other"_a, nb::is_operator())
        .def("__hash__", [](const Head &head) { return nb::hash(nb::cast(head.as_tuple())); })
        .def("__repr__",
             [](const Head &head) {
                 return nb::str("SlotHead(sequence={}, policy_version={}, writer={}, process={}, claimed_ns={}, "
                                "committed_ns={}, rows={})")
                     .attr("format")(*nb::cast(head.as_tuple()));
             })
        .def("__getstate__", &Head::as_tuple)
        .def(
            "__setstate__",
            [](Head &head, const Head::Tuple &state) {
                new (&head) Head{std::get<0>(state), std::get<1>(state), std::get<2>(state), std::get<3>(state),
                                 std::get<4>(state), std::get<5>(state), std::get<6>(state)};
            },
            "state"_a);

    nb::class_<RingHandle>(m, "Ring", "Slots that writers fill and readers take, each exactly once, oldest first.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::int64_t, std::size_t, std::int64_t, bool,
                      std::string>(),
             "mapping"_a, "control"_a, "slots"_a, "count"_a, "stride"_a, "unread_limit"_a, "block"_a, "label"_a)
        .def_prop_ro("label", &RingHandle::label)
        .def("claim", &RingHandle::claim, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple(),
             "Wait for a slot to write and return its index.")
        .def("commit", &RingHandle::commit, "slot"_a, "policy_version"_a, "writer"_a, "rows"_a,
             "Make a claimed slot ready for readers.")
        .def("abandon", &RingHandle::abandon, "slot"_a, "Give a claimed slot back without committing it.")
        .def("take", &RingHandle::take, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple(),
             "Wait for the oldest unread slot and return its index.")
        .def("release", &RingHandle::release, "slot"_a, "Free a slot that was taken.")
        .def("put", &RingHandle::put, "parts"_a.none(), "tensors"_a.none(), "policy_version"_a, "writer"_a, "rows"_a,
             "timeout"_a.none(), "peers"_a,
             "Claim a slot, copy the tensors into it and commit it. False if the tensors do not fit `parts`.")
        .def("get", &RingHandle::get, "parts"_a.none(), "tensors"_a.none(), "timeout"_a.none(), "peers"_a,
             "Take a slot, copy it into the tensors and release it. None if the tensors do not fit `parts`.")
        .def("head", &RingHandle::head, "slot"_a)
        .def("unread", &RingHandle::unread, "Return the number of unread slots.")
        .def("reap", &RingHandle::reap, "Reclaim the slots that dead processes hold and return their number.")
        .def("counters", &RingHandle::counters);

    nb::class_<TensorParts>(m, "TensorParts", "The addresses of some tensors and their offsets in a block.")
        .def(nb::init<std::vector<TensorParts::PartTuple>, bool>(), "parts"_a, "writeable"_a)
        .def("same", &TensorParts::same, "tensors"_a,
             "Return whether these are the same tensors as before, with the same dtypes, shapes and addresses.")
        .def("fits", &TensorParts::fits, "tensors"_a,
             "Return whether these tensors have the same names, dtypes and shapes and are contiguous; if so, use them from "
             "now on.");

    nb::class_<WeightsHandle>(m, "Weights",
                              "The latest version of a block of bytes, published by writers and read by any process.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, int, std::size_t, std::string>(), "mapping"_a,
             "control"_a, "buffers"_a, "count"_a, "stride"_a, "label"_a)
        .def_prop_ro("label", &WeightsHandle::label)
        .def("version", &WeightsHandle::version, "Return the latest version; 0 before the first publication.")
        .def("publish", &WeightsHandle::publish, "parts"_a, "Publish a copy of the parts and return its version.")
        .def("publish_tensors", &WeightsHandle::publish_tensors, "parts"_a.none(), "tensors"_a.none(),
             "Like `publish`, for these tensors; 0 if they do not fit `parts` or need staging copies.")
        .def(
            "read_new", &WeightsHandle::read_new, "parts"_a.none(), "tensors"_a.none(), "known"_a,
            "Like `read`, but copy nothing if the latest version is `known`; -1 if these are not the tensors of `parts` or\n"
            "need staging copies.")
        .def("read", &WeightsHandle::read, "parts"_a,
             "Copy the latest version into the parts and return it; 0 if there is none.")
        .def("wait_for", &WeightsHandle::wait_for, "version"_a, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple(),
             "Wait until this version or a later one is published and return the latest version.")
        .def("retries", &WeightsHandle::retries,
             "Return how many copies were overwritten while they were made, and repeated.");
}
