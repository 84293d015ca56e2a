// Direct access to numpy arrays and scalars, without the buffer protocol, which describes the array again at every
// access (150 ns; this takes 5). Only plain arrays: of exactly the class numpy.ndarray and C-contiguous.
#pragma once

#include <cstdint>
#include <span>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>

namespace memlane {

using Indices = nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// The class numpy.<name>. The reference is never released.
inline PyTypeObject *numpy_type(const char *name) {
    return reinterpret_cast<PyTypeObject *>(
        nanobind::object(nanobind::module_::import_("numpy").attr(name)).release().ptr());
}

// Whether a value is of exactly these classes; subclasses do not count.
inline bool is_float64(PyObject *value) {
    static PyTypeObject *const float64 = numpy_type("float64");
    return PyFloat_CheckExact(value) || Py_TYPE(value) == float64;
}

inline bool is_float32(PyObject *value) {
    static PyTypeObject *const float32 = numpy_type("float32");
    return Py_TYPE(value) == float32;
}

inline bool is_int64(PyObject *value) {
    static PyTypeObject *const int64 = numpy_type("int64");
    return PyLong_CheckExact(value) || Py_TYPE(value) == int64;
}

inline bool is_bool(PyObject *value) {
    static PyTypeObject *const numpy_bool = numpy_type("bool_");
    return PyBool_Check(value) || Py_TYPE(value) == numpy_bool;
}

struct PlainArray {
    std::byte *data;
    std::span<const npy_intp> shape;
    PyObject *dtype;
    bool writeable;

    // Whether `object` is of exactly the class numpy.ndarray.
    static bool is_array(PyObject *object) {
        static PyTypeObject *const array = numpy_type("ndarray");
        return Py_TYPE(object) == array;
    }

    // Sets `array` and returns true if `object` is a plain array.
    static bool try_view(PyObject *object, PlainArray &array) {
        if (!is_array(object))
            return false;
        // As numpy's accessor macros do; its functions would need numpy's whole C API table.
        const auto *fields = reinterpret_cast<PyArrayObject_fields *>(object);
        if ((fields->flags & NPY_ARRAY_C_CONTIGUOUS) == 0)
            return false;
        array = {reinterpret_cast<std::byte *>(fields->data),
                 {fields->dimensions, static_cast<std::size_t>(fields->nd)},
                 reinterpret_cast<PyObject *>(fields->descr),
                 (fields->flags & NPY_ARRAY_WRITEABLE) != 0};
        return true;
    }
};

} // namespace memlane
