// Bindings of the core: mappings, signals, atomic words, row copies and the lifeline.

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "lanes/rows.hpp"
#include "os/lifeline.hpp"
#include "python/gil.hpp"
#include "python/lease.hpp"
#include "python/module.hpp"
#include "python/numpy_arrays.hpp"
#include "python/signal.hpp"
#include "python/waits.hpp"
#include "python/words.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

// ---------------------------------------------------------------------------------------------------- Mapping

int mapping_buffer(PyObject *self, Py_buffer *view, int flags) {
    auto *mapping = nb::inst_ptr<Mapping>(self);
    return PyBuffer_FillInfo(view, self, mapping->data(), static_cast<Py_ssize_t>(mapping->bytes()),
                             mapping->writeable() ? 0 : 1, flags);
}

PyType_Slot mapping_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(mapping_buffer)}, {0, nullptr}};

// ------------------------------------------------------------------------------------------------------ Lease

// Slots of the type, not methods: Python calls them without looking up a method.
PyObject *lease_subscript(PyObject *self, PyObject *name) {
    try {
        return nb::inst_ptr<Lease>(self)->array(name).release().ptr();
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

Py_ssize_t lease_length(PyObject *self) { return PyObject_Size(nb::inst_ptr<Lease>(self)->layout().ptr()); }

int lease_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Lease>(self)->traverse(visit, arg) : 0;
}

int lease_clear(PyObject *self) {
    nb::inst_ptr<Lease>(self)->clear();
    return 0;
}

PyType_Slot lease_slots[] = {{Py_mp_subscript, reinterpret_cast<void *>(lease_subscript)},
                             {Py_mp_length, reinterpret_cast<void *>(lease_length)},
                             {Py_tp_traverse, reinterpret_cast<void *>(lease_traverse)},
                             {Py_tp_clear, reinterpret_cast<void *>(lease_clear)},
                             {0, nullptr}};

void init_lease(Lease *self, nb::object segment, nb::object layout, std::int64_t offset, bool writeable,
                nb::object on_release, nb::object debug, nb::object label) {
    if (layout.is_none())
        layout = segment.attr("layout");
    const auto bytes = nb::cast<std::int64_t>(layout.attr("nbytes"));
    if (label.is_none())
        label = nb::str("bytes {} to {} of {}").attr("format")(offset, offset + bytes, segment.attr("label"));
    nb::object window = segment.attr("window")(offset, bytes, "writeable"_a = writeable);
    nb::module_ module = nb::module_::import_("memlane.core.lease");
    nb::object watch = nb::none();
    if (nb::cast<bool>(debug.is_none() ? module.attr("debug_mode")() : debug))
        watch =
            module.attr("Watch")(segment.attr("alias")(offset, bytes, "writeable"_a = writeable), layout, writeable, label);
    auto arrays =
        std::make_shared<FieldArrays>(nb::object(window[0]), nb::cast<std::size_t>(window[1]), std::move(layout), writeable);
    new (self) Lease(std::move(arrays), std::move(label), std::move(watch), std::move(on_release));
}

// A view of a mapping of collections.abc: KeysView, ValuesView or ItemsView.
nb::object mapping_view(const char *kind, nb::handle mapping) {
    return nb::module_::import_("collections.abc").attr(kind)(mapping);
}

// ------------------------------------------------------------------------------------------------------- Rows

// Rows at fixed addresses. The Python class memlane.core.Rows checks the arrays, keeps them alive and passes their
// addresses.
class Rows {
  public:
    using FieldTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t>; // address, stride, row bytes
    Rows(std::int64_t count, const std::vector<FieldTuple> &fields) : count_(count) {
        for (const auto &[address, stride, row] : fields) {
            fields_.push_back({reinterpret_cast<std::byte *>(address), stride, row});
            row_bytes_ += row;
        }
    }

    void gather(const Indices &indices, const Rows &out, int threads) const {
        check(indices, count_, out.count_, "out");
        without_gil_for(row_bytes_ * indices.shape(0),
                        [&] { memlane::gather(fields_, {indices.data(), indices.shape(0)}, out.fields_, threads); });
    }

    void scatter(const Indices &indices, const Rows &values, int threads) const {
        check(indices, count_, values.count_, "values");
        without_gil_for(row_bytes_ * indices.shape(0),
                        [&] { memlane::scatter(values.fields_, {indices.data(), indices.shape(0)}, fields_, threads); });
    }

  private:
    static void check(const Indices &indices, std::int64_t rows, std::int64_t other_rows, const char *other) {
        const auto count = static_cast<std::int64_t>(indices.shape(0));
        if (other_rows != count)
            throw nb::value_error(("there are " + std::to_string(count) + " indices, but " + other + " has " +
                                   std::to_string(other_rows) + " rows")
                                      .c_str());
        const std::int64_t bad = first_out_of_range({indices.data(), indices.shape(0)}, rows);
        if (bad >= 0)
            throw nb::index_error(("indices[" + std::to_string(bad) + "] must be at least 0 and below " +
                                   std::to_string(rows) + ", found " +
                                   std::to_string(indices(static_cast<std::size_t>(bad))))
                                      .c_str());
    }

    std::int64_t count_;
    std::vector<Field> fields_;
    std::size_t row_bytes_ = 0; // bytes of one row over all fields
};

} // namespace

void bind_core(nb::module_ &m) {
    m.attr("SIGNAL_BYTES") = sizeof(SignalCell);
    m.attr("SIGNAL_OFFSETS") = nb::make_tuple(offsetof(SignalCell, value), offsetof(SignalCell, gate));
    m.attr("SLICE_SECONDS") = slice_ns / 1e9;

    nb::class_<Mapping>(m, "Mapping", nb::type_slots(mapping_slots), nb::is_weak_referenceable(),
                        "A range of a file mapped into this process. Supports the buffer protocol.")
        .def(nb::init<int, std::size_t, std::size_t, bool>(), "fd"_a, "offset"_a, "nbytes"_a, "writeable"_a)
        .def_prop_ro("nbytes", &Mapping::bytes)
        .def_prop_ro("closed", &Mapping::closed)
        .def("close", &Mapping::close,
             "Refuse new operations. The memory is unmapped when the last object that uses it is gone.")
        .def("retire", &Mapping::retire,
             "Close, and replace the shared pages by private ones with every bit set: stale views read NaN and -1.");

    nb::class_<Lease> lease(
        m, "Lease", nb::type_slots(lease_slots), nb::is_weak_referenceable(),
        "Temporary zero-copy access to fields in a segment: a mapping from field name to array, until ``release``.\n\n"
        "Lanes return leases of their slots, for example from ``claim`` and ``take`` of a ring. Create one directly to\n"
        "access a plain segment. One thread at a time uses and releases a lease; ``with`` releases it at the end.\n\n"
        "After the end of the lease its arrays may show other data at any time: copy what must outlive it. In debug mode,\n"
        "using such an array raises ``StaleView``. If the process dies with an active lease, the lane that issued it\n"
        "reclaims the slot; a lease over a plain segment owns nothing that would have to be reclaimed.\n\n"
        "Args:\n"
        "    segment: The segment to access.\n"
        "    layout: The fields to access; by default those of the segment.\n"
        "    offset: Where ``layout`` begins, in bytes from the segment's first field.\n"
        "    writeable: Whether the arrays may be written.\n"
        "    on_release: Called once when the lease ends.\n"
        "    debug: Whether to detect stale arrays; by default if ``MEMLANE_DEBUG`` is set.\n"
        "    label: The name of the lease in messages.");
    lease
        .def("__init__", &init_lease, "segment"_a, "layout"_a = nb::none(), "offset"_a = 0, nb::kw_only(),
             "writeable"_a = true, "on_release"_a = nb::none(), "debug"_a = nb::none(), "label"_a = nb::none())
        .def_prop_ro("layout", &Lease::layout, "The fields of the lease.")
        .def_prop_ro("label", &Lease::label, "The name of the lease in messages.")
        .def_prop_ro("released", &Lease::released, "Whether the lease has ended.")
        .def("release", &Lease::release, "End the lease. Calling it again has no effect.")
        .def("views_in_use", &Lease::views_in_use,
             "The names of the arrays from this lease that are still referenced, directly or through a slice or tensor.\n"
             "In debug mode, each with the line that took it.")
        .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
        .def("__exit__", [](Lease &lease, const nb::args &) { lease.release(); })
        .def("__iter__", [](const Lease &lease) { return nb::iter(lease.layout().attr("fields")); })
        .def(
            "__contains__",
            [](const Lease &lease, nb::handle key) { return nb::cast<bool>(lease.layout().attr("__contains__")(key)); },
            "key"_a)
        .def(
            "get",
            [](Lease &lease, nb::handle key, nb::object otherwise) {
                return nb::cast<bool>(lease.layout().attr("__contains__")(key)) ? lease.array(key) : otherwise;
            },
            "key"_a, "default"_a = nb::none(), "The field as an array; `default` if there is no such field.")
        .def(
            "keys", [](nb::handle self) { return mapping_view("KeysView", self); }, "The names of the fields.")
        .def(
            "values", [](nb::handle self) { return mapping_view("ValuesView", self); }, "The fields as arrays.")
        .def(
            "items", [](nb::handle self) { return mapping_view("ItemsView", self); },
            "The names of the fields, with their arrays.")
        .def("__repr__",
             [](const Lease &lease) { return "<Lease of " + lease.label() + (lease.released() ? ", released>" : ">"); });
    nb::module_::import_("collections.abc").attr("Mapping").attr("register")(lease);

    nb::class_<Signal>(
        m, "Signal",
        "An atomic counter in a segment that one side advances and others wait for.\n\n"
        "``Segment.signal(name)`` returns one. Any process and thread that maps the segment may call any\n"
        "method. Stores into the segment before the signal are visible after the wait for it. When a process\n"
        "dies, the value stays; a wait that names the process in ``peers`` raises ``PeerDied``.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::string>(), "mapping"_a, "offset"_a, "label"_a)
        .def_prop_ro("label", &Signal::label, "The name of the signal in error messages.")
        .def_prop_ro("value", &Signal::value, "The value now.")
        .def_prop_rw(
            "spin_limit_ns", &Signal::spin_limit_ns, &Signal::set_spin_limit_ns,
            "The longest time that a wait of this object spins before it sleeps, in nanoseconds; 0: it never spins.")
        .def("store", &Signal::store, "value"_a, "Set the value and wake all waiters.")
        .def("add", &Signal::add, "amount"_a = 1, "Add to the value, wake all waiters, and return the new value.")
        .def("compare_and_swap", &Signal::compare_and_swap, "expected"_a, "value"_a,
             "Set the value if it is `expected` and wake all waiters. Return whether it was.")
        .def("wait", &Signal::wait, "until"_a, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple(),
             nb::sig("def wait(self, until: int, timeout: float | None = None, peers: Iterable[Peer] = ()) -> int"),
             "Wait until the value is at least `until` and return it. Raises WaitTimeout after `timeout` seconds and\n"
             "PeerDied soon after the death of one of `peers`.");

    nb::class_<Words>(m, "Words", "A table of atomic 64-bit words.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::string>(), "mapping"_a, "offset"_a, "count"_a,
             "label"_a)
        .def("__len__", &Words::count)
        .def_prop_ro("label", &Words::label)
        .def("load", &Words::load, "index"_a)
        .def("store", &Words::store, "index"_a, "value"_a)
        .def("add", &Words::add, "index"_a, "amount"_a, "Add and return the new value.")
        .def("sum", &Words::sum, "first"_a, "stride"_a, "Sum every `stride`-th word, beginning with `first`.")
        .def("add_each", &Words::add_each, "indices"_a, "amount"_a, "Add `amount` to each of these words.")
        .def("compare_and_swap", &Words::compare_and_swap, "index"_a, "expected"_a, "value"_a)
        .def("unchanged", &Words::is_unchanged, "index"_a, "seen"_a,
             "Return whether the word still holds `seen`. If so, data copied since it was loaded is not torn.")
        .def("load_into", &Words::load_into, "indices"_a, "out"_a.noconvert(), "Load the words at `indices` into `out`.")
        .def("changed", &Words::changed, "indices"_a, "seen"_a,
             "Return the positions i for which the word `indices[i]` no longer holds `seen[i]`.");

    nb::class_<Rows>(m, "Rows", "Fields of equal length at fixed addresses, whose rows are copied by index.")
        .def(nb::init<std::int64_t, std::vector<Rows::FieldTuple>>(), "count"_a, "fields"_a)
        .def("gather", &Rows::gather, "indices"_a, "out"_a, "threads"_a,
             "Copy row `indices[i]` of every field to row i of `out`.")
        .def("scatter", &Rows::scatter, "indices"_a, "values"_a, "threads"_a,
             "Copy row i of every field of `values` to row `indices[i]`.");

    m.def(
        "check_timeout", [](nb::handle timeout) { seconds_of(timeout); }, "timeout"_a.none(),
        "Raise TypeError or ValueError unless `timeout` is None or a number of seconds, 0 or more.");

    m.def("tie_lifeline", &tie_lifeline, "pidfd"_a, "grace_ns"_a,
          "End this process when the process behind `pidfd` dies: SIGTERM, then SIGKILL `grace_ns` later.");
}
