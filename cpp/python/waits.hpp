// What the binding files share: errors of memlane's own classes, checks, and the loop around every wait.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "os/clock.hpp"
#include "os/mapping.hpp"
#include "sync/signal.hpp"

namespace nb = nanobind;

namespace memlane {

using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void raise(const char *error, const std::string &message) {
    nb::object type = nb::module_::import_("memlane.core.errors").attr(error);
    PyErr_SetObject(type.ptr(), nb::str(message.c_str(), message.size()).ptr());
    throw nb::python_error();
}

// What a peer says of itself.
[[noreturn]] inline void raise_for(nb::handle peer, const std::string &waiting) {
    nb::object error = peer.attr("error")(waiting);
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
}

inline void require_open(const Mapping &mapping, const std::string &label) {
    if (mapping.closed()) [[unlikely]]
        raise("SegmentClosed", label + " was used after its segment was closed; use it before close(), or attach again");
}

inline void require_writeable(const Mapping &mapping, const std::string &label) {
    if (!mapping.writeable()) [[unlikely]]
        raise("SegmentError", label + " lies in a segment that was attached read-only; attach it with writeable=True to change it");
}

// A cell of `bytes` bytes, aligned to `alignment`, at `offset`.
inline std::byte *place(const Mapping &mapping, std::size_t offset, std::size_t bytes, std::size_t alignment,
                 const std::string &label) {
    if (offset > mapping.bytes() || bytes > mapping.bytes() - offset || offset % alignment != 0)
        raise("SegmentError", label + " needs " + std::to_string(bytes) + " bytes at a multiple of " +
                                  std::to_string(alignment) + ", but was placed at offset " + std::to_string(offset) +
                                  " of a mapping of " + std::to_string(mapping.bytes()) + " bytes");
    return mapping.data() + offset;
}

// Runs `work` without the GIL. Not nanobind's gil_scoped_release: when the interpreter ends while a
// thread is in here, taking the GIL back unwinds that thread, and unwinding through a destructor aborts the process. The
// thread stays here instead; the process's end is its end.
template <class Work> auto without_gil(Work work) {
    PyThreadState *state = PyEval_SaveThread();
    const auto restore = [&] {
        try {
            PyEval_RestoreThread(state);
        } catch (...) {
            for (;;)
                pause();
        }
    };
    try {
        if constexpr (std::is_void_v<decltype(work())>) {
            work();
            restore();
        } else {
            const auto result = work();
            restore();
            return result;
        }
    } catch (...) { // by work: memory or threads ran out
        restore();
        throw;
    }
}

// `without_gil` for copies of so many bytes that it pays: beside a busy Python thread, to get the GIL back takes that
// thread's whole time slice of 5 ms, in which a few kilobytes have been copied a thousand times.
template <class Work> auto without_gil_for(std::size_t bytes, Work work) {
    return bytes < 64 * 1024 ? work() : without_gil(work);
}

// The memory of an array in one piece, with its format and shape. Not `held`: it has none, or may not be written.
struct Buffer {
    Buffer(nb::handle array, bool writeable) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writeable ? PyBUF_WRITABLE : 0);
        held = PyObject_GetBuffer(array.ptr(), &view, flags) == 0;
        if (!held)
            PyErr_Clear();
    }
    ~Buffer() {
        if (held)
            PyBuffer_Release(&view);
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    Py_buffer view;
    bool held;
};

inline bool is_empty_tuple(nb::handle object) { return PyTuple_CheckExact(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 0; }

// A wait as Python sees it. `step` waits without the GIL for a slice at most; between slices Ctrl-C is looked at, and
// whether the segment was closed. `wanted` says in words what was waited for.
template <class Step, class Wanted>
std::int64_t wait_in_slices(const Mapping &mapping, const std::string &label, std::optional<double> timeout,
                            nb::handle peers, Spin &learned, Step step, Wanted wanted) {
    std::int64_t deadline_ns = forever_ns;
    if (timeout) {
        if (!(*timeout >= 0))
            throw nb::value_error("timeout must be None (wait for ever) or a number of seconds, 0 or more");
        if (*timeout < 1e9)
            deadline_ns = now_ns() + static_cast<std::int64_t>(std::ceil(*timeout * 1e9));
    }
    const auto waited = [&] { return "waited" + (timeout ? nb::cast<std::string>(nb::str(" {:g} s").attr("format")(*timeout)) : "") + " for " + wanted(); };
    if (timeout && *timeout == 0)
        raise("WaitTimeout", waited());
    std::vector<nb::object> watched;
    std::vector<int> pidfds;
    if (!is_empty_tuple(peers)) {
        for (nb::handle peer : peers)
            watched.push_back(nb::borrow(peer));
        // Many peers that are watched again and again keep their descriptors at hand: asking 64 of them takes 20 us.
        if (nb::object known = nb::getattr(peers, "pidfds", nb::none()); !known.is_none())
            pidfds = nb::cast<std::vector<int>>(known);
        else
            for (const nb::object &peer : watched)
                pidfds.push_back(nb::cast<int>(peer.attr("fileno")()));
    }
    // A spin learns from its own waits and belongs to one thread; two Python threads may share a handle.
    Spin spin = learned;
    for (;;) {
        const WaitResult result =
            without_gil([&] { return step(deadline_ns, std::span<const int>(pidfds), spin); });
        if (learned.limit_ns() == spin.limit_ns()) // else it was set anew while we waited
            learned = spin;
        switch (result.end) {
        case WaitEnd::reached:
            return result.value;
        case WaitEnd::timed_out:
            raise("WaitTimeout", waited());
        case WaitEnd::peer_died:
            raise_for(watched[static_cast<std::size_t>(result.peer)], "waited for " + wanted());
        case WaitEnd::paused:
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(mapping, label);
            // A peer can have failed without being dead yet: a collector that has reported, and is slow to end.
            for (const nb::object &peer : watched)
                if (nb::cast<bool>(nb::getattr(peer, "failed", nb::bool_(false))))
                    raise_for(peer, "waited for " + wanted());
        }
    }
}

} // namespace memlane
