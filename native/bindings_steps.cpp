// The Python face of what vector environments need: a quorum, and the worker's pen for one environment's step.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "quorum.hpp"

using namespace nb::literals;
using namespace memlane;

void bind_steps(nb::module_ &m);

namespace {

class Quorum {
  public:
    Quorum(std::shared_ptr<Mapping> mapping, std::size_t offset, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), spin_(default_spin_limit_ns()),
          cell_(reinterpret_cast<QuorumCell *>(
              place(*mapping_, offset, sizeof(QuorumCell), alignof(QuorumCell), label_))) {}

    std::int64_t arrived() const {
        require_open(*mapping_, label_);
        return see(cell_->arrived.value);
    }
    std::int64_t arrive(std::int64_t many) {
        require_open(*mapping_, label_);
        return quorum_arrive(*cell_, many);
    }
    std::int64_t wait(std::int64_t until, std::optional<double> timeout, nb::handle peers) {
        const std::int64_t value = arrived();
        if (value >= until)
            return value;
        return wait_in_slices(
            *mapping_, label_, timeout, peers, spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return quorum_wait(*cell_, until, deadline_ns, pidfds, spin);
            },
            [&] {
                return label_ + ": " + std::to_string(until - see(cell_->arrived.value)) + " have not arrived";
            });
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    Spin spin_;
    QuorumCell *cell_;
};

// Where the observations of some environments go: one array of rows, or several, nested as the space is.
struct Place {
    enum class Kind { array, whole, dict, tuple } kind;
    // array and whole
    std::byte *rows = nullptr;
    std::string format;
    Py_ssize_t item_bytes = 0;
    std::size_t row_bytes = 0;
    std::vector<Py_ssize_t> shape;
    std::int64_t low = 0, high = 0; // a whole number from low up to high, both included
    // dict and tuple
    std::vector<nb::object> keys;
    std::vector<Place> parts;

    // ("array", rows), ("whole", rows, low, high), ("dict", [(key, place), ...]) or ("tuple", [place, ...])
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
            kind = name == "whole" ? Kind::whole : Kind::array;
            if (kind == Kind::whole) {
                low = nb::cast<std::int64_t>(description[2]);
                high = nb::cast<std::int64_t>(description[3]);
            }
            const Buffer buffer(description[1], true);
            if (!buffer.held)
                throw nb::buffer_error("rows for observations must be an array in one piece that can be written");
            const Py_buffer &view = buffer.view;
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
    bool store(std::size_t index, nb::handle value, nb::handle array_type) const {
        switch (kind) {
        case Kind::array:
            return store_array(index, value, array_type);
        case Kind::whole:
            return store_whole(index, value);
        case Kind::dict:
            if (!PyDict_Check(value.ptr()) || static_cast<std::size_t>(PyDict_Size(value.ptr())) != keys.size())
                return false;
            for (std::size_t i = 0; i < keys.size(); ++i) {
                PyObject *part = PyDict_GetItemWithError(value.ptr(), keys[i].ptr());
                if (part == nullptr) {
                    PyErr_Clear();
                    return false;
                }
                if (!parts[i].store(index, part, array_type))
                    return false;
            }
            return true;
        case Kind::tuple:
            if (!PyTuple_Check(value.ptr()) || static_cast<std::size_t>(PyTuple_GET_SIZE(value.ptr())) != parts.size())
                return false;
            for (std::size_t i = 0; i < parts.size(); ++i)
                if (!parts[i].store(index, PyTuple_GET_ITEM(value.ptr(), static_cast<Py_ssize_t>(i)), array_type))
                    return false;
            return true;
        }
        return false;
    }

  private:
    bool store_array(std::size_t index, nb::handle array, nb::handle array_type) const {
        if (!array.type().is(array_type))
            return false;
        const Buffer buffer(array, false);
        const Py_buffer &view = buffer.view;
        const bool matches = buffer.held && view.itemsize == item_bytes && static_cast<std::size_t>(view.ndim) == shape.size() &&
                             std::equal(shape.begin(), shape.end(), view.shape) && format == view.format;
        if (matches)
            std::memcpy(rows + index * row_bytes, view.buf, row_bytes);
        return matches;
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

// What one environment's step leaves, written in one call: 0.2 us where numpy's assignments take 0.8. The Python class
// memlane.vector.outcomes.Outcomes checks the arrays and keeps them alive. Whatever is not plainly right is left to it.
class Outcomes {
  public:
    Outcomes(nb::handle place, std::uintptr_t rewards, std::uintptr_t terminated, std::uintptr_t truncated,
             std::uintptr_t progress, std::size_t count, nb::type_object array_type)
        : rewards_(reinterpret_cast<double *>(rewards)), terminated_(reinterpret_cast<bool *>(terminated)),
          truncated_(reinterpret_cast<bool *>(truncated)), progress_(reinterpret_cast<std::int64_t *>(progress)),
          count_(count), array_type_(std::move(array_type)) {
        if (!place.is_none())
            place_.emplace(place);
    }

    // False: look closer, in Python.
    bool put(std::size_t index, nb::handle observation, nb::handle reward, nb::handle terminated, nb::handle truncated) {
        if (index >= count_)
            throw nb::index_error("there is no such environment here");
        double amount;
        if (PyFloat_CheckExact(reward.ptr())) {
            amount = PyFloat_AS_DOUBLE(reward.ptr());
        } else {
            if (reward.type().is(array_type_))
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
        terminated_[index] = truth(terminated);
        truncated_[index] = truth(truncated);
        // Only for whoever reads them after this process's death, so no order is needed.
        progress_[0] = static_cast<std::int64_t>(index) + 1;
        progress_[1] += 1;
        return true;
    }

    bool put_observation(std::size_t index, nb::handle observation) {
        return place_ && index < count_ && place_->store(index, observation, array_type_);
    }

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
    std::int64_t *progress_; // environments of this round that are through; steps in all
    std::size_t count_;
    nb::type_object array_type_;
    std::optional<Place> place_;
};

// Whether all numbers of an array of whole 8-byte numbers lie within the bounds, both included. None: not such an array.
nb::object all_within(nb::handle array, std::int64_t low, std::int64_t high) {
    const Buffer buffer(array, false);
    const Py_buffer &view = buffer.view;
    if (!buffer.held || view.itemsize != 8 || (view.format[0] != 'l' && view.format[0] != 'q') || view.format[1] != 0)
        return nb::none();
    const auto *numbers = static_cast<const std::int64_t *>(view.buf);
    bool within = true;
    for (std::int64_t i = 0; i < view.len / 8; ++i)
        within &= numbers[i] >= low && numbers[i] <= high;
    return nb::bool_(within);
}

} // namespace

void bind_steps(nb::module_ &m) {
    m.attr("QUORUM_BYTES") = sizeof(QuorumCell);

    nb::class_<Quorum>(m, "Quorum", "A count that many advance and one waits for.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::string>(), "mapping"_a, "offset"_a, "label"_a)
        .def_prop_ro("arrived", &Quorum::arrived)
        .def("arrive", &Quorum::arrive, "many"_a = 1)
        .def("wait", &Quorum::wait, "until"_a, "timeout"_a = nb::none(), "peers"_a = nb::tuple());

    m.def("all_within", &all_within, "array"_a, "low"_a, "high"_a,
          "Whether all of an array of int64 lie within the bounds, both included; None if it is no such array.");

    nb::class_<Outcomes>(m, "Outcomes", "What one environment's step leaves, written in one call.")
        .def(nb::init<nb::handle, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t,
                      nb::type_object>(),
             "place"_a.none(), "rewards"_a, "terminated"_a, "truncated"_a, "progress"_a, "count"_a, "array_type"_a)
        .def("put", &Outcomes::put, "index"_a, "observation"_a, "reward"_a, "terminated"_a, "truncated"_a)
        .def("put_observation", &Outcomes::put_observation, "index"_a, "observation"_a);
}
