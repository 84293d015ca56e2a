// A contiguous array through Python's buffer protocol.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane {

// The memory of a C-contiguous array, with its format and shape. `held` is false, and no error is set, if the object
// has no such buffer or may not be written.
struct Buffer {
    Buffer(nanobind::handle array, bool writeable) {
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

} // namespace memlane
