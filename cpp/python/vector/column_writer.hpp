// ColumnWriter: stores values of a space into the rows that hold them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "python/buffer.hpp"
#include "python/numpy_arrays.hpp"
#include "python/waits.hpp"

namespace memlane {

// Stores values of a space into one array of rows, or into several that are nested as the space is; parts that no array can
// hold into a dict by row. It holds addresses: its owner keeps the arrays alive.
struct ColumnWriter {
    enum class Kind { array, number, integer, integers, object, dict, tuple } kind;
    // for all kinds but object, dict and tuple
    std::byte *rows = nullptr;
    nb::object dtype;
    std::string format;
    Py_ssize_t item_bytes = 0;
    std::size_t row_bytes = 0;
    std::vector<Py_ssize_t> shape;
    std::int64_t low = 0, high = 0; // bounds of integers, both included
    // for object
    nb::dict values; // by `first_row` + index
    std::int64_t first_row = 0;
    // for dict and tuple
    std::vector<nb::object> keys;
    std::vector<ColumnWriter> parts;

    // A description is ("array" or "number", rows), ("integer" or "integers", rows, low, high), ("dict", [(key, description),
    // ...]), ("tuple", [description, ...]) or ("object", values, first row). A row is an array; a number; an int64; an array of
    // int64; any object.
    explicit ColumnWriter(nb::handle description) {
        const auto name = nb::cast<std::string>(description[0]);
        if (name == "dict") {
            kind = Kind::dict;
            for (nb::handle entry : description[1]) {
                keys.push_back(nb::borrow(entry[0]));
                parts.emplace_back(entry[1]);
            }
        } else if (name == "tuple") {
            kind = Kind::tuple;
            for (nb::handle entry : description[1])
                parts.emplace_back(entry);
        } else if (name == "object") {
            kind = Kind::object;
            values = nb::cast<nb::dict>(description[1]);
            first_row = nb::cast<std::int64_t>(description[2]);
        } else {
            kind = name == "integer"    ? Kind::integer
                   : name == "integers" ? Kind::integers
                   : name == "number"   ? Kind::number
                                        : Kind::array;
            const bool bounded = kind == Kind::integer || kind == Kind::integers;
            if (bounded) {
                low = nb::cast<std::int64_t>(description[2]);
                high = nb::cast<std::int64_t>(description[3]);
            }
            if (PlainArray array; PlainArray::try_view(description[1].ptr(), array))
                dtype = nb::borrow(array.dtype);
            const Buffer buffer(description[1], true);
            const Py_buffer &view = buffer.view;
            if (!buffer.held || view.ndim < 1 || view.shape[0] < 1)
                throw nb::buffer_error("rows must be a contiguous, writeable array of one row or more");
            if (bounded && view.itemsize != sizeof(std::int64_t))
                throw nb::buffer_error("rows of integers must have 8 bytes per item");
            rows = static_cast<std::byte *>(view.buf);
            format = view.format;
            item_bytes = view.itemsize;
            shape.assign(view.shape + 1, view.shape + view.ndim);
            row_bytes = static_cast<std::size_t>(view.itemsize);
            for (const Py_ssize_t extent : shape)
                row_bytes *= static_cast<std::size_t>(extent);
        }
    }

    // Stores `value` in row `index` if it has exactly the expected type, dtype and shape; otherwise false, and the row may be
    // half written.
    bool store(std::size_t index, nb::handle value) const {
        switch (kind) {
        case Kind::array:
            return store_array(index, value);
        case Kind::number:
            return store_number(index, value.ptr());
        case Kind::integer:
            return store_integer(index, value);
        case Kind::integers:
            return store_integers(index, value);
        case Kind::object:
            values[nb::int_(first_row + static_cast<std::int64_t>(index))] = value;
            return true;
        case Kind::dict:
            if (!PyDict_Check(value.ptr()) || static_cast<std::size_t>(PyDict_Size(value.ptr())) != keys.size())
                return false;
            for (std::size_t i = 0; i < keys.size(); ++i) {
                PyObject *part = PyDict_GetItemWithError(value.ptr(), keys[i].ptr());
                if (part == nullptr) {
                    PyErr_Clear();
                    return false;
                }
                if (!parts[i].store(index, part))
                    return false;
            }
            return true;
        case Kind::tuple:
            if (!PyTuple_Check(value.ptr()) || static_cast<std::size_t>(PyTuple_GET_SIZE(value.ptr())) != parts.size())
                return false;
            for (std::size_t i = 0; i < parts.size(); ++i)
                if (!parts[i].store(index, PyTuple_GET_ITEM(value.ptr(), static_cast<Py_ssize_t>(i))))
                    return false;
            return true;
        }
        return false;
    }

    bool has_objects() const {
        return kind == Kind::object ||
               std::ranges::any_of(parts, [](const ColumnWriter &part) { return part.has_objects(); });
    }

  private:
    bool store_array(std::size_t index, nb::handle value) const {
        PlainArray array;
        if (PlainArray::try_view(value.ptr(), array) && dtype.is(array.dtype)) {
            static_assert(sizeof(npy_intp) == sizeof(Py_ssize_t));
            if (!std::ranges::equal(shape, array.shape))
                return false;
            std::memcpy(rows + index * row_bytes, array.data, row_bytes);
            return true;
        }
        // Another dtype object can describe the same dtype: compare the buffers' formats.
        if (!PlainArray::is_array(value.ptr()))
            return false;
        const Buffer buffer(value, false);
        const Py_buffer &view = buffer.view;
        const bool matches = buffer.held && view.itemsize == item_bytes &&
                             static_cast<std::size_t>(view.ndim) == shape.size() &&
                             std::equal(shape.begin(), shape.end(), view.shape) && format == view.format;
        if (matches)
            std::memcpy(rows + index * row_bytes, view.buf, row_bytes);
        return matches;
    }

    template <class Number> void set(std::size_t index, Number number) const {
        std::memcpy(rows + index * sizeof number, &number, sizeof number);
    }

    bool store_number(std::size_t index, PyObject *value) const {
        switch (format[0]) { // none of these formats has a second character
        case 'd':
            if (!is_float64(value) && !is_float32(value))
                return false;
            set(index, PyFloat_AsDouble(value));
            return true;
        case 'f': {
            if (!is_float64(value) && !is_float32(value))
                return false;
            const double exact = PyFloat_AsDouble(value);
            const auto rounded = static_cast<float>(exact);
            if (std::isinf(rounded) && !std::isinf(exact))
                return false;
            set(index, rounded);
            return true;
        }
        case 'l': {
            if (!is_int64(value))
                return false;
            const nb::object integer = nb::steal(PyNumber_Index(value));
            int overflow = 0;
            const std::int64_t number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
            if (overflow == 0)
                set(index, number);
            return overflow == 0;
        }
        case '?':
            if (!is_bool(value))
                return false;
            set(index, PyObject_IsTrue(value) == 1);
            return true;
        }
        return false;
    }

    bool store_integers(std::size_t index, nb::handle value) const {
        PlainArray array;
        if (!PlainArray::try_view(value.ptr(), array) || !dtype.is(array.dtype) || !std::ranges::equal(shape, array.shape))
            return false;
        bool within = true; // no early exit from the loop, so that the compiler vectorizes it
        for (std::size_t at = 0; at < row_bytes; at += sizeof(std::int64_t)) {
            std::int64_t number;
            std::memcpy(&number, array.data + at, sizeof number); // an array may be unaligned
            within &= number >= low && number <= high;
        }
        if (within)
            std::memcpy(rows + index * row_bytes, array.data, row_bytes);
        return within;
    }

    bool store_integer(std::size_t index, nb::handle number) const {
        nb::object integer = nb::steal(PyNumber_Index(number.ptr()));
        if (!integer.is_valid()) {
            PyErr_Clear();
            return false;
        }
        int overflow = 0;
        const std::int64_t value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
        if (overflow != 0 || value < low || value > high)
            return false;
        std::memcpy(rows + index * row_bytes, &value, sizeof value);
        return true;
    }
};

} // namespace memlane
