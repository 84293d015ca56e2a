// Bindings of the core: mappings, signals, atomic words, row copies, processes and the lifeline.

#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "lanes/rows.hpp"
#include "os/lifeline.hpp"
#include "os/process.hpp"
#include "python/gil.hpp"
#include "python/lease.hpp"
#include "python/life.hpp"
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

// Slots of the type and methods in C: Python calls them directly, without nanobind. A `with` block takes 80 ns instead of
// 134.

Lease &lease_of(PyObject *self) {
    if (!nb::inst_ready(self)) [[unlikely]] {
        PyErr_SetString(PyExc_TypeError, "this lease was created by __new__ alone; create it with Lease(segment), or by "
                                         "claim and take of a ring");
        throw nb::python_error();
    }
    return *nb::inst_ptr<Lease>(self);
}

// The result of `body`, or `failed` with a Python error set.
template <class Result, class Body> Result catching(Result failed, Body body) {
    try {
        return body();
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
}

PyObject *lease_subscript(PyObject *self, PyObject *name) {
    return catching<PyObject *>(nullptr, [&] { return lease_of(self).array(name).release().ptr(); });
}

int lease_assign(PyObject *self, PyObject *name, PyObject *value) {
    if (value == nullptr) {
        PyErr_SetString(PyExc_TypeError, "a field of a lease cannot be deleted");
        return -1;
    }
    return catching(-1, [&] {
        guarded (&Lease::assign)(lease_of(self), name, value);
        return 0;
    });
}

Py_ssize_t lease_length(PyObject *self) {
    return catching(Py_ssize_t{-1}, [&] { return PyObject_Size(lease_of(self).layout().ptr()); });
}

int lease_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Lease>(self)->traverse(visit, arg) : 0;
}

int lease_clear(PyObject *self) {
    if (nb::inst_ready(self))
        nb::inst_ptr<Lease>(self)->clear();
    return 0;
}

PyObject *lease_release(PyObject *self, PyObject *) {
    return catching<PyObject *>(nullptr, [&] {
        guarded (&Lease::release)(lease_of(self));
        return Py_NewRef(Py_None);
    });
}
PyObject *lease_enter(PyObject *self, PyObject *) { return Py_NewRef(self); }
PyObject *lease_exit(PyObject *self, PyObject *const *, Py_ssize_t) { return lease_release(self, nullptr); }

PyMethodDef lease_methods[] = {{"release", lease_release, METH_NOARGS,
                                "release($self)\n--\n\nEnd the lease. Calling it again has no effect."},
                               {"__enter__", lease_enter, METH_NOARGS, "__enter__($self)\n--\n\n"},
                               {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lease_exit)),
                                METH_FASTCALL, "__exit__($self, *_)\n--\n\n"},
                               {nullptr, nullptr, 0, nullptr}};

PyType_Slot lease_slots[] = {{Py_tp_methods, lease_methods},
                             {Py_mp_subscript, reinterpret_cast<void *>(lease_subscript)},
                             {Py_mp_ass_subscript, reinterpret_cast<void *>(lease_assign)},
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
        std::make_unique<FieldArrays>(nb::object(window[0]), nb::cast<std::size_t>(window[1]), std::move(layout), writeable);
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

// -------------------------------------------------------------------------------------------------- Processes

// The result of `ask`; its std::system_error as an OSError with the same number.
template <class Ask> std::int64_t or_os_error(Ask ask) {
    try {
        return ask();
    } catch (const std::system_error &error) {
        nb::object os_error = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
        PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(os_error.ptr())), os_error.ptr());
        throw nb::python_error();
    }
}

const char *name_of(ProcessState state) {
    switch (state) {
    case ProcessState::alive:
        return "alive";
    case ProcessState::zombie:
        return "zombie";
    case ProcessState::dead:
        return "dead";
    case ProcessState::recycled:
        return "recycled";
    }
    return "";
}

} // namespace

void bind_core(nb::module_ &m) {
    m.attr("PID_BITS") = pid_bits;
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
        .def("views_in_use", &Lease::views_in_use,
             "The names of the arrays from this lease that are still referenced, directly or through a slice or tensor.\n"
             "In debug mode, each with the line that took it.")
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
        .def_prop_ro("value", guarded(&Signal::value), "The value now.")
        .def_prop_rw(
            "spin_limit_ns", &Signal::spin_limit_ns, &Signal::set_spin_limit_ns,
            "The longest time that a wait of this object spins before it sleeps, in nanoseconds; 0: it never spins.")
        .def("store", guarded(&Signal::store), "value"_a, "Set the value and wake all waiters.")
        .def("add", guarded(&Signal::add), "amount"_a = 1, "Add to the value, wake all waiters, and return the new value.")
        .def("compare_and_swap", guarded(&Signal::compare_and_swap), "expected"_a, "value"_a,
             "Set the value if it is `expected` and wake all waiters. Return whether it was.")
        .def("wait", guarded(&Signal::wait), "until"_a, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple(),
             nb::sig("def wait(self, until: int, timeout: float | None = None, peers: Iterable[Peer] = ()) -> int"),
             "Wait until the value is at least `until` and return it. Raises WaitTimeout after `timeout` seconds and\n"
             "PeerDied soon after the death of one of `peers`.");

    nb::class_<Words>(m, "Words", "A table of atomic 64-bit words.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::size_t, std::string>(), "mapping"_a, "offset"_a, "count"_a,
             "label"_a)
        .def("__len__", &Words::count)
        .def_prop_ro("label", &Words::label)
        .def("load", guarded(&Words::load), "index"_a)
        .def("store", guarded(&Words::store), "index"_a, "value"_a)
        .def("add", guarded(&Words::add), "index"_a, "amount"_a, "Add and return the new value.")
        .def("sum", guarded(&Words::sum), "first"_a, "stride"_a, "Sum every `stride`-th word, beginning with `first`.")
        .def("add_each", guarded(&Words::add_each), "indices"_a, "amount"_a, "Add `amount` to each of these words.")
        .def("compare_and_swap", guarded(&Words::compare_and_swap), "index"_a, "expected"_a, "value"_a)
        .def("unchanged", guarded(&Words::is_unchanged), "index"_a, "seen"_a,
             "Return whether the word still holds `seen`. If so, data copied since it was loaded is not torn.")
        .def("load_into", guarded(&Words::load_into), "indices"_a, "out"_a.noconvert(),
             "Load the words at `indices` into `out`.")
        .def("changed", guarded(&Words::changed), "indices"_a, "seen"_a,
             "Return the positions i for which the word `indices[i]` no longer holds `seen[i]`.");

    m.def(
        "uses_file", [](int fd, std::int64_t process) { return Life(fd).alive(process); }, "fd"_a, "process"_a,
        "Return whether the process with this identity in the life of a segment, whose file is open as `fd`, is alive and\n"
        "uses it. True if that cannot be found out.");

    nb::class_<LifeHandle>(
        m, "Life",
        "Shows which processes use a segment and are alive, also those of other containers.\n\n"
        "``Segment.life`` returns one. A process that holds something in a segment stores its identity there, the integer\n"
        "that ``process()`` returns; when it dies, calls exec or drops the segment, ``alive`` is False for it everywhere.")
        .def(nb::init<std::shared_ptr<Mapping>, std::string>(), "mapping"_a, "label"_a)
        .def("process", &LifeHandle::process,
             "Return the identity of this process in the segment, above 0, and keep it alive from now on. The child of a\n"
             "fork has another.")
        .def("process_if_taken", &LifeHandle::process_if_taken,
             "Return what `process` has returned in this process; 0 if it was not called.")
        .def("alive", &LifeHandle::alive, "process"_a,
             "Return whether the process with this identity is alive. True if that cannot be found out.")
        .def("check", &LifeHandle::check,
             "Raise SegmentError if processes cannot have an identity here: the file system has no locks, for example.");

    nb::class_<Rows>(m, "Rows", "Fields of equal length at fixed addresses, whose rows are copied by index.")
        .def(nb::init<std::int64_t, std::vector<Rows::FieldTuple>>(), "count"_a, "fields"_a)
        .def("gather", &Rows::gather, "indices"_a, "out"_a, "threads"_a,
             "Copy row `indices[i]` of every field to row i of `out`.")
        .def("scatter", &Rows::scatter, "indices"_a, "values"_a, "threads"_a,
             "Copy row i of every field of `values` to row `indices[i]`.");

    m.def(
        "check_timeout", [](nb::handle timeout) { seconds_of(timeout); }, "timeout"_a.none(),
        "Raise TypeError or ValueError unless `timeout` is None or a number of seconds, 0 or more.");

    m.def(
        "fill_holes",
        [](int fd, std::size_t nbytes) {
            for (;;) {
                const int error = fill_holes(fd, nbytes);
                if (error != EINTR)
                    return error;
                if (PyErr_CheckSignals() != 0)
                    throw nb::python_error();
            }
        },
        "fd"_a, "nbytes"_a, "Allocate the holes of a file. Return 0, or errno.");

    m.def(
        "this_process", [] { return or_os_error([] { return this_process(); }); },
        "Pid and start time of this process in one integer, as `Peer.word` has them.");
    m.def(
        "process_of", [](pid_t pid) { return or_os_error([pid] { return process_of(pid); }); }, "pid"_a,
        "Pid and start time, in one integer, of the process that has this pid now; 0 if there is none.");
    m.def(
        "process_state", [](std::int64_t pid, std::int64_t start) { return name_of(process_state(pid, start)); }, "pid"_a,
        "start"_a, "The value of the `PeerState` of the process with this pid and start time.");

    m.def("tie_lifeline", &tie_lifeline, "pidfd"_a, "grace_ns"_a,
          "End this process when the process behind `pidfd` dies: SIGTERM, then SIGKILL `grace_ns` later.");
    m.def("exit_with_parent", &exit_with_parent,
          "Let this process exit when its parent dies, without a thread. Forked children do not inherit it.");
}
