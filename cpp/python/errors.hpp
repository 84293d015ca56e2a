// Errors of memlane's own classes, and the checks that every handle makes before it touches its mapping.
#pragma once

#include <cstddef>
#include <string>

#include <nanobind/nanobind.h>

#include "os/mapping.hpp"

namespace nb = nanobind;

namespace memlane {

// Raises the class `error` of memlane.core.errors.
[[noreturn]] inline void raise(const char *error, const std::string &message) {
    nb::object type = nb::module_::import_("memlane.core.errors").attr(error);
    PyErr_SetObject(type.ptr(), nb::str(message.c_str(), message.size()).ptr());
    throw nb::python_error();
}

// Raises the exception that `peer.error(waiting)` returns.
[[noreturn]] inline void raise_peer_error(nb::handle peer, const std::string &waiting) {
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
        raise("SegmentError",
              label + " is in a segment that was attached read-only; attach it with writeable=True to change it");
}

// The address of `bytes` bytes at `offset`. Raises SegmentError unless they are inside the mapping and aligned.
inline std::byte *checked_address(const Mapping &mapping, std::size_t offset, std::size_t bytes, std::size_t alignment,
                                  const std::string &label) {
    if (offset > mapping.bytes() || bytes > mapping.bytes() - offset || offset % alignment != 0)
        raise("SegmentError", label + " needs " + std::to_string(bytes) + " bytes at a multiple of " +
                                  std::to_string(alignment) + ", but was placed at offset " + std::to_string(offset) +
                                  " of a mapping of " + std::to_string(mapping.bytes()) + " bytes");
    return mapping.data() + offset;
}

} // namespace memlane
