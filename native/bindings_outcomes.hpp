// Outcomes: a worker's pen for what a step of one of its environments returns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "bindings_arrays.hpp"
#include "words.hpp"

namespace memlane {

// A worker's words about itself, for the parent and for whoever reads them after its death: environments of this command
// that are through; steps since its start; messages that it has announced; commands that it has finished. The same numbers
// are in memlane.vector.steps.
namespace progress {
enum : std::size_t { through, steps, told, finished };
}

// Where values of a space go: one array of rows, or several, nested as the space is. Whoever made it keeps the arrays alive.
struct Place {
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
    std::vector<Place> parts;

    // ("array" or "number", rows), ("whole" or "wholes", rows, low, high), ("dict", [(key, place), ...]) or
    // ("tuple", [place, ...]). A row is an array; a number; a whole number of 8 bytes; an array of those.
    explicit Place(nb::handle description) {
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
            if (PlainArray array; PlainArray::see(description[1].ptr(), array))
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
        if (PlainArray::see(value.ptr(), array) && dtype.is(array.dtype)) {
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
        if (!PlainArray::see(value.ptr(), array) || !dtype.is(array.dtype) || !std::ranges::equal(shape, array.shape))
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

// What one environment's step leaves, written in one call: 0.1 us where numpy's assignments take 0.8. The Python class
// memlane.vector.outcomes.Outcomes checks the arrays and keeps them alive. Whatever is not plainly right is left to it.
class Outcomes {
  public:
    Outcomes(nb::handle place, std::uintptr_t rewards, std::uintptr_t terminated, std::uintptr_t truncated,
             std::uintptr_t progress, std::size_t count, nb::list declared)
        : words(reinterpret_cast<Word *>(progress)), count(count), rewards_(reinterpret_cast<double *>(rewards)),
          terminated_(reinterpret_cast<bool *>(terminated)), truncated_(reinterpret_cast<bool *>(truncated)) {
        if (!place.is_none())
            place_.emplace(place);
        for (nb::handle one : declared)
            declared_.push_back({nb::borrow(one[0]), Place(one[1]), reinterpret_cast<bool *>(nb::cast<std::uintptr_t>(one[2]))});
    }

    // False: look closer, in Python.
    bool put(std::size_t index, nb::handle observation, nb::handle reward, bool terminated, bool truncated) {
        if (index >= count)
            throw nb::index_error("there is no such environment here");
        double amount;
        if (PyFloat_CheckExact(reward.ptr())) {
            amount = PyFloat_AS_DOUBLE(reward.ptr());
        } else {
            if (PlainArray::is_array(reward.ptr()))
                return false;
            amount = PyFloat_AsDouble(reward.ptr());
            if (amount == -1.0 && PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
        }
        if (!put_observation(index, observation))
            return false;
        rewards_[index] = amount;
        terminated_[index] = terminated;
        truncated_[index] = truncated;
        // Only for whoever reads them after this process's death, so no order is needed.
        words[progress::through].store(static_cast<std::int64_t>(index) + 1, std::memory_order_relaxed);
        Word &steps = words[progress::steps];
        steps.store(steps.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return true;
    }

    // The same with flags of any kind.
    bool put_any(std::size_t index, nb::handle observation, nb::handle reward, nb::handle terminated, nb::handle truncated) {
        return put(index, observation, reward, truth(terminated), truth(truncated));
    }

    bool put_observation(std::size_t index, nb::handle observation) {
        return place_ && index < count && place_->store(index, observation);
    }

    // What of an info is declared is written; what is left of it is returned. Nothing: look closer, in Python.
    std::optional<nb::dict> put_info(std::size_t index, nb::dict info) {
        if (!place_) // Python writes the observation, and the rest with it
            return std::nullopt;
        std::size_t found = 0;
        for (const Declared &one : declared_) {
            PyObject *const value = PyDict_GetItemWithError(info.ptr(), one.key.ptr());
            if (value == nullptr && PyErr_Occurred()) {
                PyErr_Clear();
                return std::nullopt;
            }
            if (value != nullptr && !one.place.store(index, value))
                return std::nullopt;
            one.told[index] = value != nullptr;
            found += value != nullptr;
        }
        if (found == 0)
            return info;
        nb::dict rest;
        if (found < info.size()) {
            PyDict_Update(rest.ptr(), info.ptr());
            for (const Declared &one : declared_)
                if (one.told[index])
                    PyDict_DelItem(rest.ptr(), one.key.ptr());
        }
        return rest;
    }

    Word *const words; // of its progress
    const std::size_t count;

  private:
    static bool truth(nb::handle flag) {
        const int is_true = PyObject_IsTrue(flag.ptr());
        if (is_true < 0)
            throw nb::python_error();
        return is_true == 1;
    }

    double *rewards_;
    bool *terminated_;
    bool *truncated_;
    std::optional<Place> place_;
    struct Declared {
        nb::object key;
        Place place;
        bool *told; // by each environment, in its last step
    };
    std::vector<Declared> declared_;
};

} // namespace memlane
