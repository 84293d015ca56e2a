// The Python face of the lanes: ring and weights.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "bindings.hpp"
#include "copy.hpp"
#include "process.hpp"
#include "ring.hpp"
#include "weights.hpp"

using namespace nb::literals;
using namespace memlane;

void bind_lanes(nb::module_ &m);

namespace {

// Who this process is, looked up once. A forked child is another process.
std::int64_t me() {
    static std::int64_t known = 0;
    static pid_t known_pid = 0;
    const pid_t pid = getpid();
    if (pid != known_pid) {
        known = this_process();
        known_pid = pid;
    }
    return known;
}

std::int64_t wall_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Pinned parts. The Python class memlane.ipc.tensors.Parts checks the tensors and keeps them alive.
class Parts {
  public:
    using Given = std::tuple<std::size_t, std::uintptr_t, std::size_t>; // offset in the buffer, address, bytes
    explicit Parts(const std::vector<Given> &given) {
        for (const auto &[offset, address, bytes] : given) {
            if (bytes > SIZE_MAX - offset)
                throw nb::value_error("a part ends beyond all memory");
            parts.push_back({offset, reinterpret_cast<std::byte *>(address), bytes});
            reach = std::max(reach, offset + bytes);
        }
    }
    std::vector<Part> parts;
    std::size_t reach = 0; // where the last of them ends
};

class RingHandle {
  public:
    using Head = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

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
        std::int64_t slot = ring_.try_claim(me());
        // Who only ever looks must find what a dead writer held, too.
        if (slot < 0 && timeout && *timeout == 0 && ring_.reap(SlotState::writing) > 0)
            slot = ring_.try_claim(me());
        if (slot < 0) {
            ring_.control().lost.blocked.fetch_add(1, std::memory_order_relaxed);
            slot = wait_in_slices(
                *mapping_, label_, timeout, peers, claim_spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return ring_.wait_claim(me(), deadline_ns, pidfds, spin);
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
        head.process = me();
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
        std::int64_t slot = ring_.try_take(me());
        // Who only ever looks must find what a dead reader held, too.
        if (slot < 0 && timeout && *timeout == 0 && ring_.reap(SlotState::reading) > 0)
            slot = ring_.try_take(me());
        if (slot >= 0)
            return slot;
        if (!timeout || *timeout > 0)
            ring_.control().taken.waited.fetch_add(1, std::memory_order_relaxed);
        return wait_in_slices(
            *mapping_, label_, timeout, peers, take_spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return ring_.wait_take(me(), deadline_ns, pidfds, spin);
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

    // claim, copy, commit.
    void put(const Parts &parts, std::int64_t policy_version, std::int64_t writer, std::int64_t rows,
             std::optional<double> timeout, nb::handle peers) {
        require_inside(parts);
        const std::int64_t slot = claim(timeout, peers);
        copy_without_gil(parts.reach, [&] {
            for (const Part &part : parts.parts)
                copy_bytes(payload(slot) + part.offset, part.data, part.bytes);
        });
        commit(slot, policy_version, writer, rows);
    }

    // take, copy, release.
    Head get(const Parts &parts, std::optional<double> timeout, nb::handle peers) {
        require_inside(parts);
        const std::int64_t slot = take(timeout, peers);
        copy_without_gil(parts.reach, [&] {
            for (const Part &part : parts.parts)
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
    // Letting the GIL go and taking it back costs more than copying a few kilobytes.
    template <class Copy> static void copy_without_gil(std::size_t bytes, Copy copy) {
        if (bytes < 16 * 1024) {
            copy();
            return;
        }
        without_gil(copy);
    }
    std::byte *payload(std::int64_t slot) { return reinterpret_cast<std::byte *>(&ring_.head(slot)) + sizeof(SlotHead); }
    void require_inside(const Parts &parts) const {
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
        if (see(ring_.head(slot).state) != slot_word(state, me())) [[unlikely]]
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

    std::int64_t publish(const Parts &parts) {
        require_inside(parts);
        const std::int64_t process = me();
        const std::int64_t version = without_gil([&] { return weights_.publish(process, parts.parts); });
        if (version < 0)
            raise("MemlaneError", "all " + std::to_string(count_) + " buffers of the " + label_ +
                                      " are the latest or being filled by living writers; make it with more buffers");
        return version;
    }

    std::int64_t read(const Parts &parts) {
        require_inside(parts);
        return without_gil([&] { return weights_.read(parts.parts); });
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
    void require_inside(const Parts &parts) const {
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
        .def("put", &RingHandle::put, "parts"_a, "policy_version"_a, "writer"_a, "rows"_a, "timeout"_a, "peers"_a,
             "Claim a slot, copy into it, commit it.")
        .def("get", &RingHandle::get, "parts"_a, "timeout"_a, "peers"_a, "Take a slot, copy out of it, release it.")
        .def("head", &RingHandle::head, "slot"_a)
        .def("unread", &RingHandle::unread)
        .def("reap", &RingHandle::reap, "Put back what dead processes held; say how many slots that were.")
        .def("counters", &RingHandle::counters);

    nb::class_<Parts>(m, "Parts").def(nb::init<std::vector<Parts::Given>>(), "parts"_a);

    nb::class_<WeightsHandle>(m, "Weights", "The latest version of a block of bytes.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, int, std::size_t, std::string>(), "mapping"_a,
             "control"_a, "buffers"_a, "count"_a, "stride"_a, "label"_a)
        .def_prop_ro("label", &WeightsHandle::label)
        .def("version", &WeightsHandle::version)
        .def("publish", &WeightsHandle::publish, "parts"_a)
        .def("read", &WeightsHandle::read, "parts"_a)
        .def("wait_for", &WeightsHandle::wait_for, "version"_a, "timeout"_a = nb::none(), "peers"_a = nb::tuple())
        .def("retries", &WeightsHandle::retries);
}
