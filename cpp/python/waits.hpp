// The loop around every wait that Python calls: slices without the GIL, and between them Ctrl-C, closed segments and
// failed peers.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
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

// Waits until `wait_slice` returns `reached`, and returns its value. Raises WaitTimeout after `timeout` seconds, and
// the error of a peer soon after its death. `wait_slice(deadline_ns, pidfds, spin)` waits for one slice at most and is
// called without the GIL; between two slices Ctrl-C, the mapping and the peers are checked. `describe()` says what is
// waited for, for the error text.
template <class WaitSlice, class Describe>
std::int64_t wait_in_slices(const Mapping &mapping, const std::string &label, std::optional<double> timeout,
                            nb::handle peers, Spin &learned, WaitSlice wait_slice, Describe describe) {
    std::int64_t deadline_ns = forever_ns;
    if (timeout) {
        if (!(*timeout >= 0))
            throw nb::value_error(("timeout must be None (wait for ever) or a number of seconds, 0 or more, found " +
                                   nb::cast<std::string>(nb::str("{:g}").attr("format")(*timeout)))
                                      .c_str());
        if (*timeout < 1e9)
            deadline_ns = now_ns() + static_cast<std::int64_t>(std::ceil(*timeout * 1e9));
    }
    const auto waited = [&] {
        return "waited" + (timeout ? nb::cast<std::string>(nb::str(" {:g} s").attr("format")(*timeout)) : "") + " for " +
               describe();
    };
    if (timeout && *timeout == 0)
        raise("WaitTimeout", waited());
    std::vector<nb::object> watched;
    std::vector<int> pidfds;
    if (!is_empty_tuple(peers)) {
        for (nb::handle peer : peers)
            watched.push_back(nb::borrow(peer));
        // A collection of peers may have the attribute `pidfds`: calling fileno() of 64 peers takes 20 us.
        if (nb::object known = nb::getattr(peers, "pidfds", nb::none()); !known.is_none())
            pidfds = nb::cast<std::vector<int>>(known);
        else
            for (const nb::object &peer : watched)
                pidfds.push_back(nb::cast<int>(peer.attr("fileno")()));
    }
    // A copy: a Spin belongs to one thread, and two Python threads may share a handle.
    Spin spin = learned;
    for (;;) {
        const WaitResult result = without_gil([&] { return wait_slice(deadline_ns, std::span<const int>(pidfds), spin); });
        if (learned.limit_ns() == spin.limit_ns()) // otherwise another thread has set a new limit meanwhile
            learned = spin;
        switch (result.end) {
        case WaitEnd::reached:
            return result.value;
        case WaitEnd::timed_out:
            raise("WaitTimeout", waited());
        case WaitEnd::peer_died:
            raise_peer_error(watched[static_cast<std::size_t>(result.peer)], "waited for " + describe());
        case WaitEnd::paused:
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            require_open(mapping, label);
            // A peer can have failed without being dead yet: a collector that has reported an error and is still
            // exiting.
            for (const nb::object &peer : watched)
                if (nb::cast<bool>(nb::getattr(peer, "failed", nb::bool_(false))))
                    raise_peer_error(peer, "waited for " + describe());
        }
    }
}

} // namespace memlane
