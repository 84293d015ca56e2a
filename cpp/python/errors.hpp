// Errors of memlane's own classes, and the checks that every handle makes before it touches its mapping.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "os/mapping.hpp"
#include "sync/words.hpp"

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

// Raises SegmentError if the mapping's file was found to be truncated.
inline void require_whole(const Mapping &mapping, const std::string &label) {
    if (mapping.truncated()) [[unlikely]]
        raise("SegmentError", label +
                                  " has lost memory: its file was truncated while it was mapped; what was in it is gone: "
                                  "close it in all processes and create another");
}

inline void require_open(const Mapping &mapping, const std::string &label) {
    if (mapping.closed()) [[unlikely]]
        raise("SegmentClosed", label + " was used after its segment was closed; use it before close(), or attach again");
    require_whole(mapping, label);
}

// Finds a truncated file before a call relies on its memory: a file is truncated from its end. Under a guard.
inline void require_end(const Mapping &mapping, const std::string &label) {
    if (mapping.can_shrink()) [[unlikely]] {
        mapping.touch_end();
        require_whole(mapping, label);
    }
}

// Raises SegmentError in place of an error that follows from a truncated file: what was read of it was zeros. Not in place of
// Ctrl-C.
[[gnu::cold]] inline void require_whole_after(const std::exception &error, const Mapping &mapping,
                                              const std::string &label) {
    const auto *raised = dynamic_cast<const nb::python_error *>(&error);
    if (raised == nullptr || raised->matches(PyExc_Exception))
        require_whole(mapping, label);
}

// A method of a handle, as a function that raises SegmentError if the file of the handle's mapping turns out to be truncated.
template <class Method, class Result, class Handle, class... Arguments> auto guarded_call(Method method) {
    return [method](Handle &handle, Arguments... arguments) -> Result {
        const TruncationGuard guard(handle.mapping());
        try {
            if constexpr (std::is_void_v<Result>) {
                (handle.*method)(static_cast<Arguments &&>(arguments)...);
                if (handle.mapping().truncated()) [[unlikely]]
                    require_whole(handle.mapping(), handle.label());
            } else {
                Result result = (handle.*method)(static_cast<Arguments &&>(arguments)...);
                if (handle.mapping().truncated()) [[unlikely]]
                    require_whole(handle.mapping(), handle.label());
                return result;
            }
        } catch (const std::exception &error) {
            require_whole_after(error, handle.mapping(), handle.label());
            throw;
        }
    };
}
template <class Result, class Handle, class... Arguments> auto guarded(Result (Handle::*method)(Arguments...)) {
    return guarded_call<decltype(method), Result, Handle, Arguments...>(method);
}
template <class Result, class Handle, class... Arguments> auto guarded(Result (Handle::*method)(Arguments...) const) {
    return guarded_call<decltype(method), Result, Handle, Arguments...>(method);
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

// The address of `count` blocks of `stride` bytes each. Divides, because the product of two numbers from elsewhere can wrap
// around to one that fits.
inline std::byte *checked_address(const Mapping &mapping, std::size_t offset, std::size_t count, std::size_t stride,
                                  std::size_t alignment, const std::string &label) {
    if (count == 0 || stride == 0 || count > mapping.bytes() / stride)
        raise("SegmentError", label + " needs " + std::to_string(count) + " blocks of " + std::to_string(stride) +
                                  " bytes, but its mapping has " + std::to_string(mapping.bytes()) + " bytes");
    return checked_address(mapping, offset, count * stride, alignment, label);
}

// Runs `work`, which reads shared words. A stray one is a SegmentError that names the lane.
template <class Work> auto checking_words(const std::string &label, Work work) {
    try {
        return work();
    } catch (const StrayWord &stray) {
        raise("SegmentError", "the " + label + " is damaged: " + stray.what() +
                                  "; a process has overwritten its memory: close it in all processes and create another");
    }
}

} // namespace memlane
