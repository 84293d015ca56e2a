// Bindings of two lanes: ring and weights.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include <nanobind/operators.h>
#include <nanobind/stl/tuple.h>

#include "lanes/weights.hpp"
#include "python/life.hpp"
#include "python/module.hpp"
#include "python/ring.hpp"
#include "python/tensor_parts.hpp"
#include "python/waits.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

class WeightsHandle {
  public:
    // `if_full` and `if_overtaken` say what to do where no buffer is free, and where no copy ends in time.
    WeightsHandle(std::shared_ptr<Mapping> mapping, std::size_t control, std::size_t buffers, int count, std::size_t stride,
                  std::string label, std::string if_full, std::string if_overtaken)
        : mapping_(std::move(mapping)), label_(std::move(label)), if_full_(std::move(if_full)),
          if_overtaken_(std::move(if_overtaken)), count_(count), stride_(stride),
          weights_(checked_address(*mapping_, control, sizeof(WeightsControl), alignof(WeightsControl), label_),
                   checked_address(*mapping_, buffers, checked_count(count, label_), stride, 64, label_), count, stride,
                   mapping_->life()),
          spin_(default_spin_limit_ns()) {}

    const std::string &label() const { return label_; }
    Mapping &mapping() const { return *mapping_; }

    std::int64_t version() const {
        require_open(*mapping_, label_);
        return checking_words(label_, [&] { return version_of(weights_.latest()); });
    }

    // Publishes these tensors and returns the version; 0 if they do not fit `parts` or need staging copies.
    std::int64_t publish_tensors(TensorParts *parts, nb::handle tensors) {
        BoundParts bound;
        return parts != nullptr && parts->direct() && parts->bind(tensors, bound) ? publish(bound) : 0;
    }

    std::int64_t publish_parts(const TensorParts &parts) {
        BoundParts bound;
        parts.bind(bound);
        return publish(bound);
    }

    // Reads into these tensors, unless they have the latest version since the last read, and returns the version; -1 if
    // they do not fit `parts` or need staging copies.
    std::int64_t read_tensors(TensorParts *parts, nb::handle tensors) {
        BoundParts bound;
        if (parts == nullptr || !parts->direct() || !parts->bind(tensors, bound))
            return -1;
        return read(*parts, bound);
    }

    std::int64_t read_parts(TensorParts &parts) {
        BoundParts bound;
        parts.bind(bound);
        return read(parts, bound);
    }

    std::int64_t wait_for(std::int64_t version, nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        require_open(*mapping_, label_);
        SignalCell &latest = weights_.control().latest;
        // `<<` would wrap around for later versions, which cannot exist.
        const std::int64_t until = std::clamp<std::int64_t>(version, 0, max_version) << 8;
        if (this->version() < version)
            wait_in_slices(
                *mapping_, label_, timeout, peers, spin_,
                [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                    return signal_wait(latest, until, deadline_ns, pidfds, spin);
                },
                [&] {
                    return "version " + std::to_string(version) + " of the " + label_ + "; the latest is " +
                           std::to_string(version_of(see(latest.value)));
                });
        return this->version();
    }

    std::int64_t retries() const {
        require_open(*mapping_, label_);
        return see(weights_.control().retries);
    }

  private:
    static std::size_t checked_count(int count, const std::string &label) {
        if (count < 2 || count > max_buffers)
            raise("SegmentError",
                  label + " needs 2 to " + std::to_string(max_buffers) + " buffers, found " + std::to_string(count));
        return static_cast<std::size_t>(count);
    }
    std::int64_t publish(const BoundParts &bound) {
        require_inside(bound);
        const std::int64_t process = process_in(*mapping_, label_);
        const MappingUse use(*mapping_);
        const std::int64_t version = checking_words(label_, [&] {
            return without_gil_for(bound.end_offset(), [&] { return weights_.publish(process, bound.parts()); });
        });
        if (version < 0)
            raise("MemlaneError", "each of the " + std::to_string(count_) + " buffers of the " + label_ +
                                      " is the latest version or being filled by a live writer; " + if_full_);
        return version;
    }

    // `bound` has the tensors of `parts`, which remember the version.
    std::int64_t read(TensorParts &parts, const BoundParts &bound) {
        require_inside(bound);
        if (const std::int64_t known = parts.version(bound); known != 0 && known == version())
            return known;
        // A copy takes about as long as the publications that overtake it, so a thousand in a row do not happen by chance.
        for (int attempt = 0; attempt < max_attempts; ++attempt) {
            const std::int64_t version = checking_words(label_, [&] {
                return without_gil_for(bound.end_offset(), [&] { return weights_.try_read(bound.parts()); });
            });
            if (version >= 0) [[likely]] {
                parts.remember(bound, version);
                return version;
            }
            parts.remember(bound, 0); // the tensors are torn
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(*mapping_, label_);
        }
        raise("MemlaneError", "writers have overtaken each of " + std::to_string(max_attempts) + " copies of the " + label_ +
                                  "; " + if_overtaken_);
    }

    void require_inside(const BoundParts &bound) const {
        require_open(*mapping_, label_);
        if (bound.end_offset() > stride_)
            raise("MemlaneError", "parts that end at byte " + std::to_string(bound.end_offset()) +
                                      " do not fit into a buffer of " + std::to_string(stride_) + " bytes of the " + label_);
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_, if_full_, if_overtaken_;
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
        .def_ro("process", &Head::process, "Process that wrote the slot, as Peer.word in its own pid namespace.")
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
                      std::string, nb::object, nb::object>(),
             "mapping"_a, "control"_a, "slots"_a, "count"_a, "stride"_a, "unread_limit"_a, "block"_a, "label"_a, "layout"_a,
             "watch"_a.none())
        .def_prop_ro("label", &RingHandle::label)
        .def("commit", guarded(&RingHandle::commit), "slot"_a, "policy_version"_a, "writer"_a, "rows"_a,
             "Make a claimed slot ready for readers.")
        .def("abandon", guarded(&RingHandle::abandon), "slot"_a, "Give a claimed slot back without committing it.")
        .def("release", guarded(&RingHandle::release), "slot"_a, "Free a slot that was taken.")
        .def("unread", guarded(&RingHandle::unread), "Return the number of unread slots.")
        .def("reap", guarded(&RingHandle::reap), "Reclaim the slots that dead processes hold and return their number.")
        .def("counters", guarded(&RingHandle::counters));

    nb::class_<SlotLease, Lease>(m, "SlotLease", "A slot of a ring that this process may use until `release`.")
        .def_prop_ro("index", &SlotLease::index, "Number of the slot in the ring, from 0.");

    nb::class_<WriteSlot, SlotLease>(
        m, "WriteSlot",
        "A claimed slot: a mapping of field names to writeable arrays.\n\n"
        "``commit`` hands it to the readers. A release without commit, as by an exception in a ``with`` block, abandons it.")
        .def_prop_ro("writer", &WriteSlot::writer, "Number that the writer was created with.")
        .def("commit", guarded(&WriteSlot::commit), nb::kw_only(), "policy_version"_a = 0, "rows"_a = 0,
             "Hand the slot to the readers. Arrays taken from it must not be used afterwards.");

    nb::class_<ReadSlot, SlotLease>(m, "ReadSlot",
                                    "A taken slot: a mapping of field names to read-only arrays, valid until ``release``.")
        .def_prop_ro("head", &ReadSlot::head, nb::rv_policy::copy, "The metadata of the slot.")
        .def_prop_ro(
            "sequence", [](const ReadSlot &slot) { return slot.head().sequence; },
            "Number of this commit in the ring, counted from 1.")
        .def_prop_ro(
            "policy_version", [](const ReadSlot &slot) { return slot.head().policy_version; },
            "Version of the weights that produced the content, as the writer gave it.")
        .def_prop_ro(
            "writer", [](const ReadSlot &slot) { return slot.head().writer; }, "Number of the writer.")
        .def_prop_ro(
            "rows", [](const ReadSlot &slot) { return slot.head().rows; }, "Number of valid rows, as the writer gave it.");

    nb::class_<RingWriter>(m, "RingWriter", "The native part of a ring's writer.")
        .def(nb::init<nb::handle_t<RingHandle>, std::int64_t>(), "ring"_a, "writer"_a)
        .def_prop_ro("writer", &RingWriter::writer, "Number that its slots carry.")
        .def("claim", guarded(&RingWriter::claim), "timeout"_a = nb::none(), "peers"_a = nb::tuple(),
             "Return a free slot to fill in place, then ``commit``.\n\n"
             "Waits while no slot is free (with ``overflow=\"block\"``, also while ``num_slots`` are unread): at most\n"
             "``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies (``PeerDied``).")
        .def("_put", guarded(&RingWriter::put), "parts"_a.none(), "tensors"_a.none(), "policy_version"_a, "rows"_a,
             "timeout"_a.none(), "peers"_a,
             "Claim a slot, copy the tensors into it and commit it. False if the tensors do not fit `parts`.")
        .def("_put_parts", guarded(&RingWriter::put_parts), "parts"_a, "policy_version"_a, "rows"_a, "timeout"_a.none(),
             "peers"_a, "Claim a slot, copy the tensors of `parts` into it and commit it.");

    nb::class_<RingReader>(m, "RingReader", "The native part of a ring's reader.")
        .def(nb::init<nb::handle_t<RingHandle>>(), "ring"_a)
        .def("take", guarded(&RingReader::take), "timeout"_a = nb::none(), "peers"_a = nb::tuple(),
             "Take the oldest unread slot, to be read in place until it is released.\n\n"
             "Waits until there is one: at most ``timeout`` seconds (``WaitTimeout``), and until one of ``peers`` dies\n"
             "(``PeerDied``).")
        .def("_get", guarded(&RingReader::get), "parts"_a.none(), "tensors"_a.none(), "timeout"_a.none(), "peers"_a,
             "Take a slot, copy it into the tensors and release it. None if the tensors do not fit `parts`.")
        .def("_get_parts", guarded(&RingReader::get_parts), "parts"_a, "timeout"_a.none(), "peers"_a,
             "Take a slot, copy it into the tensors of `parts` and release it.");

    nb::class_<TensorParts>(m, "TensorParts", "The addresses of some tensors and their offsets in a block.")
        .def(nb::init<std::vector<TensorParts::PartTuple>, bool>(), "parts"_a, "writeable"_a)
        .def("same", &TensorParts::same, "tensors"_a,
             "Return whether these are the same tensors as before, with the same dtypes, shapes and addresses.")
        .def(
            "fits",
            [](TensorParts &parts, nb::handle tensors) {
                BoundParts bound;
                return parts.bind(tensors, bound);
            },
            "tensors"_a,
            "Return whether these tensors have the same names, dtypes and shapes and are contiguous; if so, use them from "
            "now on.")
        .def_prop_ro("version", nb::overload_cast<>(&TensorParts::version, nb::const_),
                     "Version that the tensors were last read with; 0 if none, or if others were used since.");

    nb::class_<WeightsHandle>(m, "Weights",
                              "The latest version of a block of bytes, published by writers and read by any process.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, int, std::size_t, std::string, std::string,
                      std::string>(),
             "mapping"_a, "control"_a, "buffers"_a, "count"_a, "stride"_a, "label"_a,
             "if_full"_a = "create it with more buffers",
             "if_overtaken"_a = "create it with more buffers, or publish less often")
        .def_prop_ro("label", &WeightsHandle::label)
        .def("version", guarded(&WeightsHandle::version), "Return the latest version; 0 before the first publication.")
        .def("publish", guarded(&WeightsHandle::publish_parts), "parts"_a,
             "Publish a copy of the parts and return its version.")
        .def("publish_tensors", guarded(&WeightsHandle::publish_tensors), "parts"_a.none(), "tensors"_a.none(),
             "Like `publish`, for these tensors; 0 if they do not fit `parts` or need staging copies.")
        .def("read_tensors", guarded(&WeightsHandle::read_tensors), "parts"_a.none(), "tensors"_a,
             "Like `read`, for these tensors; -1 if they do not fit `parts` or need staging copies.")
        .def("read", guarded(&WeightsHandle::read_parts), "parts"_a,
             "Copy the latest version into the parts, unless they have it, and return it; 0 if there is none.")
        .def("wait_for", guarded(&WeightsHandle::wait_for), "version"_a, "timeout"_a.none() = nb::none(),
             "peers"_a = nb::tuple(), "Wait until this version or a later one is published and return the latest version.")
        .def("retries", guarded(&WeightsHandle::retries),
             "Return how many copies were overwritten while they were made, and repeated.");
}
