// The Python face of the lanes: ring and weights.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include <nanobind/operators.h>
#include <nanobind/stl/tuple.h>

#include "python/module.hpp"
#include "python/waits.hpp"
#include "python/tensor_parts.hpp"
#include "sync/copy.hpp"
#include "os/process.hpp"
#include "lanes/ring.hpp"
#include "lanes/weights.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

std::int64_t wall_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// A copy of a slot's head. Numbers become Python objects when somebody asks for them: seven of them at once take as long
// as copying 4 KB.
struct Head {
    std::int64_t sequence, policy_version, writer, process, claimed_ns, committed_ns, rows;
    bool operator==(const Head &) const = default;
    auto as_tuple() const { return std::tuple(sequence, policy_version, writer, process, claimed_ns, committed_ns, rows); }
    using Tuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
};

class RingHandle {
  public:
    RingHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t slots, std::int64_t count,
               std::size_t stride, std::int64_t unread_limit, bool block, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), payload_bytes_(stride - sizeof(SlotHead)),
          ring_(place(*mapping_, control, sizeof(RingControl), alignof(RingControl), label_),
                place(*mapping_, slots, static_cast<std::size_t>(count) * stride, alignof(SlotHead), label_), count, stride,
                unread_limit, block ? Overflow::block : Overflow::drop_oldest),
          claim_spin_(default_spin_limit_ns()), take_spin_(default_spin_limit_ns()) {}

    const std::string &label() const { return label_; }

    std::int64_t claim(std::optional<double> timeout, nb::handle peers) {
        require_open(*mapping_, label_);
        std::int64_t slot = ring_.try_claim(this_process());
        // Who only ever looks must find what a dead writer held, too.
        if (slot < 0 && timeout && *timeout == 0 && ring_.reap(SlotState::writing) > 0)
            slot = ring_.try_claim(this_process());
        if (slot < 0) {
            ring_.control().lost.blocked.fetch_add(1, std::memory_order_relaxed);
            slot = wait_in_slices(
                *mapping_, label_, timeout, peers, claim_spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return ring_.wait_claim(this_process(), deadline_ns, pidfds, spin);
                },
                [&] { return "a slot to write in the " + label_ + "; " + std::to_string(ring_.unread()) + " are unread"; });
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
        require_state(slot, SlotState::writing, "give up");
        ring_.abandon(slot);
    }

    std::int64_t take(std::optional<double> timeout, nb::handle peers) {
        require_open(*mapping_, label_);
        std::int64_t slot = ring_.try_take(this_process());
        // Who only ever looks must find what a dead reader held, too.
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
                return "a slot to read in the " + label_ + "; " + std::to_string(see(ring_.control().written.value)) +
                       " have been written since the start";
            });
    }

    void release(std::int64_t slot) {
        require_state(slot, SlotState::reading, "release");
        ring_.release(slot);
    }

    // claim, copy, commit; or false if the tensors are not what `parts` knows. None: it was made of them just now.
    bool put(TensorParts *parts, nb::handle tensors, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
             std::optional<double> timeout, nb::handle peers) {
        if (parts == nullptr || !(tensors.is_none() || parts->fits(tensors)))
            return false;
        require_inside(*parts);
        const std::int64_t slot = claim(timeout, peers);
        without_gil_for(parts->reach, [&] {
            for (const Part &part : parts->parts)
                copy_bytes(payload(slot) + part.offset, part.data, part.bytes);
        });
        commit(slot, policy_version, writer, rows);
        return true;
    }

    // take, copy, release; or nothing if the tensors are not what `parts` knows. None: it was made of them just now.
    std::optional<Head> get(TensorParts *parts, nb::handle tensors, std::optional<double> timeout, nb::handle peers) {
        if (parts == nullptr || !(tensors.is_none() || parts->fits(tensors)))
            return std::nullopt;
        require_inside(*parts);
        const std::int64_t slot = take(timeout, peers);
        without_gil_for(parts->reach, [&] {
            for (const Part &part : parts->parts)
                copy_bytes(part.data, payload(slot) + part.offset, part.bytes);
        });
        const Head found = head(slot);
        release(slot);
        return found;
    }

    Head head(std::int64_t slot) const {
        require_slot(slot);
        const SlotHead &head = ring_.head(slot);
        return {head.sequence, head.policy_version, head.writer, head.process, head.claimed_ns, head.committed_ns, head.rows};
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
        if (parts.reach > payload_bytes_)
            raise("MemlaneError", "parts that end at byte " + std::to_string(parts.reach) + " do not fit into a slot of " +
                                      std::to_string(payload_bytes_) + " bytes of the " + label_);
    }
    void require_slot(std::int64_t slot) const {
        require_open(*mapping_, label_);
        if (slot < 0 || slot >= ring_.count())
            throw nb::index_error((label_ + " has " + std::to_string(ring_.count()) + " slots, there is no slot " +
                                   std::to_string(slot)).c_str());
    }
    void require_state(std::int64_t slot, SlotState state, const char *deed) const {
        require_slot(slot);
        if (see(ring_.head(slot).state) != slot_word(state, this_process())) [[unlikely]]
            raise("MemlaneError", "cannot " + std::string(deed) + " slot " + std::to_string(slot) + " of the " + label_ +
                                      ": this process does not hold it (any more)");
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
    WeightsHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t buffers, int count,
                  std::size_t stride, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), count_(count), stride_(stride),
          weights_(place(*mapping_, control, sizeof(WeightsControl), alignof(WeightsControl), label_),
                   place(*mapping_, buffers, static_cast<std::size_t>(count) * stride, 64, label_), count, stride),
          spin_(default_spin_limit_ns()) {}

    const std::string &label() const { return label_; }

    std::int64_t version() const {
        require_open(*mapping_, label_);
        return version_of(see(weights_.control().latest.value));
    }

    // 0 if the tensors are not what `parts` knows.
    std::int64_t publish_these(TensorParts *parts, nb::handle tensors) {
        return parts != nullptr && parts->plain() && parts->fits(tensors) ? publish(*parts) : 0;
    }

    // Like read, but not what was read last into the same tensors. -1 if the tensors are not what `parts` knows.
    std::int64_t read_new(const TensorParts *parts, nb::handle tensors, std::int64_t known) {
        if (parts == nullptr || !parts->plain() || !parts->same(tensors))
            return -1;
        return version() == known ? known : read(*parts);
    }

    std::int64_t publish(const TensorParts &parts) {
        require_inside(parts);
        const std::int64_t process = this_process();
        const std::int64_t version = without_gil_for(parts.reach, [&] { return weights_.publish(process, parts.parts); });
        if (version < 0)
            raise("MemlaneError", "all " + std::to_string(count_) + " buffers of the " + label_ +
                                      " are the latest or being filled by living writers; make it with more buffers");
        return version;
    }

    std::int64_t read(const TensorParts &parts) {
        require_inside(parts);
        return without_gil_for(parts.reach, [&] { return weights_.read(parts.parts); });
    }

    std::int64_t wait_for(std::int64_t version, std::optional<double> timeout, nb::handle peers) {
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
        if (parts.reach > stride_)
            raise("MemlaneError", "parts that end at byte " + std::to_string(parts.reach) + " do not fit into a buffer of " +
                                      std::to_string(stride_) + " bytes of the " + label_);
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
    m.attr("MOST_BUFFERS") = most_buffers;

    nb::class_<Head>(m, "SlotHead", "What stands at the head of a slot.")
        .def_ro("sequence", &Head::sequence, "Which commit of the ring this is, counted from 1.")
        .def_ro("policy_version", &Head::policy_version, "Of the weights that made the content.")
        .def_ro("writer", &Head::writer, "What the writer calls itself.")
        .def_ro("process", &Head::process, "The process that wrote it, as Peer.word.")
        .def_ro("claimed_ns", &Head::claimed_ns, "Wall clock, when writing began.")
        .def_ro("committed_ns", &Head::committed_ns, "Wall clock, when it ended.")
        .def_ro("rows", &Head::rows, "How many rows are valid, where the writer counts them.")
        .def("__eq__", [](const Head &head, const Head &other) { return head == other; }, "other"_a, nb::is_operator())
        .def("__hash__", [](const Head &head) { return nb::hash(nb::cast(head.as_tuple())); })
        .def("__repr__",
             [](const Head &head) {
                 return nb::str("SlotHead(sequence={}, policy_version={}, writer={}, process={}, claimed_ns={}, "
                                "committed_ns={}, rows={})")
                     .attr("format")(*nb::cast(head.as_tuple()));
             })
        .def("__getstate__", &Head::as_tuple)
        .def("__setstate__", [](Head &head, const Head::Tuple &state) {
            new (&head) Head{std::get<0>(state), std::get<1>(state), std::get<2>(state), std::get<3>(state),
                             std::get<4>(state), std::get<5>(state), std::get<6>(state)};
        }, "state"_a);

    nb::class_<RingHandle>(m, "Ring", "Slots that writers fill and readers take, each once, oldest first.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::int64_t, std::size_t, std::int64_t, bool,
                      std::string>(),
             "mapping"_a, "control"_a, "slots"_a, "count"_a, "stride"_a, "unread_limit"_a, "block"_a, "label"_a)
        .def_prop_ro("label", &RingHandle::label)
        .def("claim", &RingHandle::claim, "timeout"_a = nb::none(), "peers"_a = nb::tuple())
        .def("commit", &RingHandle::commit, "slot"_a, "policy_version"_a, "writer"_a, "rows"_a)
        .def("abandon", &RingHandle::abandon, "slot"_a)
        .def("take", &RingHandle::take, "timeout"_a = nb::none(), "peers"_a = nb::tuple())
        .def("release", &RingHandle::release, "slot"_a)
        .def("put", &RingHandle::put, "parts"_a.none(), "tensors"_a.none(), "policy_version"_a, "writer"_a, "rows"_a, "timeout"_a,
             "peers"_a, "Claim a slot, copy into it, commit it; or False if the tensors are not what `parts` knows.")
        .def("get", &RingHandle::get, "parts"_a.none(), "tensors"_a.none(), "timeout"_a, "peers"_a,
             "Take a slot, copy out of it, release it; or None if the tensors are not what `parts` knows.")
        .def("head", &RingHandle::head, "slot"_a)
        .def("unread", &RingHandle::unread)
        .def("reap", &RingHandle::reap, "Put back what dead processes held; say how many slots that were.")
        .def("counters", &RingHandle::counters);

    nb::class_<TensorParts>(m, "TensorParts", "Where the bytes of some tensors are, and where in a block they belong.")
        .def(nb::init<std::vector<TensorParts::Given>, bool>(), "parts"_a, "writeable"_a)
        .def("same", &TensorParts::same, "tensors"_a, "Whether these are the tensors of the last time, in the same places.")
        .def("fits", &TensorParts::fits, "tensors"_a, "Whether these can take their place; then they do.");

    nb::class_<WeightsHandle>(m, "Weights", "The latest version of a block of bytes.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, int, std::size_t, std::string>(), "mapping"_a,
             "control"_a, "buffers"_a, "count"_a, "stride"_a, "label"_a)
        .def_prop_ro("label", &WeightsHandle::label)
        .def("version", &WeightsHandle::version)
        .def("publish", &WeightsHandle::publish, "parts"_a)
        .def("publish_these", &WeightsHandle::publish_these, "parts"_a.none(), "tensors"_a,
             "`publish`, or 0 if the tensors are not what `parts` knows.")
        .def("read_new", &WeightsHandle::read_new, "parts"_a.none(), "tensors"_a, "known"_a,
             "`read` unless it is the known version; -1 if the tensors are not what `parts` knows.")
        .def("read", &WeightsHandle::read, "parts"_a)
        .def("wait_for", &WeightsHandle::wait_for, "version"_a, "timeout"_a = nb::none(), "peers"_a = nb::tuple())
        .def("retries", &WeightsHandle::retries);
}
