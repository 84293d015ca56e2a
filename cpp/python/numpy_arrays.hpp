// Arrays: a numpy array's memory without the buffer protocol, which makes a description of the array for every look (150 ns;
// this takes 5). Only what is plain is seen: an array of exactly numpy's class, of one of numpy's own dtypes, in one piece.
#pragma once

#include <span>

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>

namespace memlane {

// A class of numpy's; the same for as long as the process lives.
inline PyTypeObject *numpy_type(const char *name) {
    return reinterpret_cast<PyTypeObject *>(nanobind::object(nanobind::module_::import_("numpy").attr(name)).release().ptr());
}

// Of exactly these classes: what users derive from them is kept as it is.
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

    // Whether `object` is an array of exactly numpy's class.
    static bool is_array(PyObject *object) {
        static PyTypeObject *const array = numpy_type("ndarray");
        return Py_TYPE(object) == array;
    }

    // Whether `object` is such an array in one piece; if so, it is seen.
    static bool see(PyObject *object, PlainArray &array) {
        if (!is_array(object))
            return false;
        // What numpy's macros of the same names do; its functions would need its whole table of them.
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
