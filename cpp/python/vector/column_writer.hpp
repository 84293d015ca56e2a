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

// Where values of a space go: one array of rows, or several, nested as the space is. Whoever made it keeps the arrays alive.
struct ColumnWriter {
    enum class Kind { array, number, whole, wholes, dict, tuple } kind;
    // all but dict and tuple
    std::byte *rows = nullptr;
    nb::object dtype;
    std::string format;
    Py_ssize_t item_bytes = 0;
    std::size_t row_bytes = 0;
    std::vector<Py_ssize_t> shape;
    std::int64_t low = 0, high = 0; // of whole numbers: from low up to high, both included
    // dict and tuple
    std::vector<nb::object> keys;
    std::vector<ColumnWriter> parts;

    // ("array" or "number", rows), ("whole" or "wholes", rows, low, high), ("dict", [(key, place), ...]) or
    // ("tuple", [place, ...]). A row is an array; a number; a whole number of 8 bytes; an array of those.
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
        } else {
            kind = name == "whole"    ? Kind::whole
                   : name == "wholes" ? Kind::wholes
                   : name == "number" ? Kind::number
                                      : Kind::array;
            const bool bounded = kind == Kind::whole || kind == Kind::wholes;
            if (bounded) {
                low = nb::cast<std::int64_t>(description[2]);
                high = nb::cast<std::int64_t>(description[3]);
            }
            if (PlainArray array; PlainArray::try_view(description[1].ptr(), array))
                dtype = nb::borrow(array.dtype);
            const Buffer buffer(description[1], true);
            const Py_buffer &view = buffer.view;
            if (!buffer.held || view.ndim < 1 || view.shape[0] < 1)
                throw nb::buffer_error("rows must be an array in one piece that can be written");
            if (bounded && view.itemsize != sizeof(std::int64_t))
                throw nb::buffer_error("rows for whole numbers must be of 8 bytes each");
            rows = static_cast<std::byte *>(view.buf);
            format = view.format;
            item_bytes = view.itemsize;
            shape.assign(view.shape + 1, view.shape + view.ndim);
            row_bytes = static_cast<std::size_t>(view.itemsize);
            for (const Py_ssize_t extent : shape)
                row_bytes *= static_cast<std::size_t>(extent);
        }
    }

    // Stores `value` in row `index` if it is plainly right; otherwise false, and the row may be half written.
    bool store(std::size_t index, nb::handle value) const {
        switch (kind) {
        case Kind::array:
            return store_array(index, value);
        case Kind::number:
            return store_number(index, value.ptr());
        case Kind::whole:
            return store_whole(index, value);
        case Kind::wholes:
            return store_wholes(index, value);
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
        // numpy has one object for each of its dtypes; that is not the only way to say the same thing.
        if (!PlainArray::is_array(value.ptr()))
            return false;
        const Buffer buffer(value, false);
        const Py_buffer &view = buffer.view;
        const bool matches = buffer.held && view.itemsize == item_bytes && static_cast<std::size_t>(view.ndim) == shape.size() &&
                             std::equal(shape.begin(), shape.end(), view.shape) && format == view.format;
        if (matches)
            std::memcpy(rows + index * row_bytes, view.buf, row_bytes);
        return matches;
    }

    template <class Number> void set(std::size_t index, Number number) const {
        std::memcpy(rows + index * sizeof number, &number, sizeof number);
    }

    bool store_number(std::size_t index, PyObject *value) const {
        switch (format[0]) { // none of these has a second character
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
            const nb::object whole = nb::steal(PyNumber_Index(value));
            int overflow = 0;
            const std::int64_t number = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
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

    bool store_wholes(std::size_t index, nb::handle value) const {
        PlainArray array;
        if (!PlainArray::try_view(value.ptr(), array) || !dtype.is(array.dtype) || !std::ranges::equal(shape, array.shape))
            return false;
        bool within = true; // without a branch that would leave the loop early: it is done on several at a time
        for (std::size_t at = 0; at < row_bytes; at += sizeof(std::int64_t)) {
            std::int64_t number;
            std::memcpy(&number, array.data + at, sizeof number); // an array may begin at any byte
            within &= number >= low && number <= high;
        }
        if (within)
            std::memcpy(rows + index * row_bytes, array.data, row_bytes);
        return within;
    }

    bool store_whole(std::size_t index, nb::handle number) const {
        nb::object whole = nb::steal(PyNumber_Index(number.ptr()));
        if (!whole.is_valid()) {
            PyErr_Clear();
            return false;
        }
        int overflow = 0;
        const std::int64_t value = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
        if (overflow != 0 || value < low || value > high)
            return false;
        std::memcpy(rows + index * row_bytes, &value, sizeof value);
        return true;
    }
};

} // namespace memlane
