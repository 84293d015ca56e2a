// The loop around every wait that Python calls: slices without the GIL, and between them Ctrl-C, closed segments and
// failed peers.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "os/clock.hpp"
#include "os/mapping.hpp"
#include "python/errors.hpp"
#include "python/gil.hpp"
#include "sync/signal.hpp"

namespace memlane {

inline bool is_empty_tuple(nb::handle object) {
    return PyTuple_CheckExact(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 0;
}

// The seconds of an argument `timeout`; nothing for None, which means no limit. Raises TypeError or ValueError for all
// but None and numbers from 0 on. Every wait calls it first: an invalid timeout is an error even if there is nothing to
// wait for.
inline std::optional<double> seconds_of(nb::handle timeout) {
    if (timeout.is_none())
        return std::nullopt;
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (seconds >= 0)
        return seconds;
    const bool is_number = !PyErr_Occurred();
    if (!is_number && !PyErr_ExceptionMatches(PyExc_TypeError))
        throw nb::python_error();
    PyErr_Clear();
    const std::string message = "timeout must be None (wait for ever) or a number of seconds, 0 or more, found " +
                                nb::cast<std::string>(nb::repr(timeout));
    if (is_number)
        throw nb::value_error(message.c_str());
    throw nb::type_error(message.c_str());
}

// When a wait that begins now ends.
inline std::int64_t deadline_ns_of(std::optional<double> timeout) {
    return timeout && *timeout < 1e9 ? now_ns() + static_cast<std::int64_t>(std::ceil(*timeout * 1e9)) : forever_ns;
}

// A spin with the limit of an attribute `spin_limit_ns`.
inline Spin checked_spin(std::int64_t limit_ns) {
    if (limit_ns < 0)
        throw nb::value_error(("spin_limit_ns must be 0 (never spin) or more, found " + std::to_string(limit_ns)).c_str());
    return Spin(limit_ns);
}

// The processes that a wait watches.
struct Watched {
    std::vector<nb::object> peers;
    std::vector<int> pidfds;

    explicit Watched(nb::handle argument) {
        if (is_empty_tuple(argument))
            return;
        const nb::object iterator = nb::steal(PyObject_GetIter(argument.ptr()));
        if (!iterator.is_valid()) {
            PyErr_Clear();
            refuse("a list or tuple of", argument);
        }
        for (nb::handle peer : nb::borrow<nb::iterator>(iterator))
            peers.push_back(nb::borrow(peer));
        // A collection of peers may have the attribute `pidfds`: calling fileno() of 64 peers takes 20 us.
        if (nb::object known = nb::getattr(argument, "pidfds", nb::none()); !known.is_none()) {
            pidfds = nb::cast<std::vector<int>>(known);
            return;
        }
        for (const nb::object &peer : peers) {
            if (!nb::hasattr(peer, "fileno") || !nb::hasattr(peer, "error"))
                refuse("", peer);
            pidfds.push_back(nb::cast<int>(peer.attr("fileno")()));
        }
    }

  private:
    [[noreturn]] static void refuse(const std::string &collection, nb::handle found) {
        throw nb::type_error(("peers must be " + collection + (collection.empty() ? "" : " ") +
                              "Peer objects, such as Peer.of(pid), found " +
                              nb::cast<std::string>(found.type().attr("__name__")))
                                 .c_str());
    }
};

// Waits until `wait_slice` returns `reached`, and returns its value. Raises WaitTimeout after `timeout` seconds, and
// the error of a peer soon after its death. `wait_slice(deadline_ns, pidfds, spin)` waits for one slice at most and is
// called without the GIL; between two slices Ctrl-C, the mapping and the peers are checked. `describe()` says what is
// waited for, for the error text.
template <class WaitSlice, class Describe>
std::int64_t wait_in_slices(const Mapping &mapping, const std::string &label, std::optional<double> timeout,
                            nb::handle peers, Spin &learned, WaitSlice wait_slice, Describe describe) {
    const std::int64_t deadline_ns = deadline_ns_of(timeout);
    const auto waited = [&] {
        return "waited" + (timeout ? nb::cast<std::string>(nb::str(" {:g} s").attr("format")(*timeout)) : "") + " for " +
               describe();
    };
    if (timeout && *timeout == 0)
        raise("WaitTimeout", waited());
    const Watched watched(peers);
    // A copy: a Spin belongs to one thread, and two Python threads may share a handle.
    Spin spin = learned;
    for (;;) {
        const WaitResult result = [&] {
            try {
                return without_gil([&] { return wait_slice(deadline_ns, std::span<const int>(watched.pidfds), spin); });
            } catch (const std::system_error &error) {
                // Not describe(): it may read the memory, which may be gone.
                raise("SegmentError", "cannot wait in the memory of " + label + ": " + error.what() +
                                          "; the memory is gone, or a sandbox forbids the system call");
            }
        }();
        if (learned.limit_ns() == spin.limit_ns()) // otherwise another thread has set a new limit meanwhile
            learned = spin;
        switch (result.end) {
        case WaitEnd::reached:
            return result.value;
        case WaitEnd::timed_out:
            raise("WaitTimeout", waited());
        case WaitEnd::peer_died:
            raise_peer_error(watched.peers[static_cast<std::size_t>(result.peer)], "waited for " + describe());
        case WaitEnd::paused:
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(mapping, label);
            // A peer can have failed without being dead yet: a collector that has reported an error and is still
            // exiting.
            for (const nb::object &peer : watched.peers)
                if (nb::cast<bool>(nb::getattr(peer, "failed", nb::bool_(false))))
                    raise_peer_error(peer, "waited for " + describe());
        }
    }
}

} // namespace memlane
