// TensorParts: where the bytes of some tensors are, and where in a block they belong. Kept from call to call, because looking
// a tensor up in Python takes longer than copying a few kilobytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/waits.hpp"
#include "python/dlpack.hpp"
#include "lanes/weights.hpp"

namespace memlane {

// The Python class memlane.lanes.tensors.TensorParts checks the tensors and finds their addresses the first time. After that,
// `same` and `fits` look only for what can have changed.
class TensorParts {
  public:
    // name, tensor, offset in the block, the tensor or its twin, the address of that, bytes.
    using Given = std::tuple<nb::object, nb::object, std::size_t, nb::object, std::uintptr_t, std::size_t>;

    TensorParts(const std::vector<Given> &given, bool writeable) {
        for (const auto &[name, tensor, offset, source, address, bytes] : given) {
            if (bytes > SIZE_MAX - offset)
                throw nb::value_error("a part ends beyond all memory");
            parts.push_back({offset, reinterpret_cast<std::byte *>(address), bytes});
            reach = std::max(reach, offset + bytes);
            const ExchangeTable *table = ExchangeTable::of(tensor.type());
            known_.push_back({name, tensor, source, table, TensorView(source, table, writeable), place_of(tensor)});
            plain_ = plain_ && source.is(tensor);
        }
    }

    // Whether these are the tensors of the last time, in the same places.
    bool same(nb::handle tensors) const {
        return all(tensors, [&](std::size_t i, nb::handle tensor) { return is_same(i, tensor); });
    }

    // Whether these are tensors of the same names, dtypes and shapes, each in one piece; they are used from now on. A false
    // "no" costs the caller a closer look.
    bool fits(nb::handle tensors) {
        return all(tensors, [&](std::size_t i, nb::handle tensor) {
            Known &known = known_[i];
            if (known.has_twin())
                return is_same(i, tensor);
            std::byte *data = nullptr;
            if (!tensor.type().is(known.tensor.type()) || !known.look.matches(tensor, known.table, data))
                return false;
            if (!tensor.is(known.tensor) || data != parts[i].data) {
                if (is_negated(tensor))
                    return false;
                known.tensor = known.source = nb::borrow(tensor);
                parts[i].data = data;
            }
            return true;
        });
    }

    // Whether all bytes lie in the tensors themselves; else somebody has to copy to or from twins.
    bool plain() const { return plain_; }

    std::vector<Part> parts;
    std::size_t reach = 0; // where the last of them ends

  private:
    struct Known {
        nb::object name, tensor, source;
        const ExchangeTable *table;
        TensorView look; // of the source
        nb::object place; // of the tensor; None for an array, whose storage is not exchanged

        bool has_twin() const { return !source.is(tensor); }
    };

    bool is_same(std::size_t i, nb::handle tensor) const {
        const Known &known = known_[i];
        std::byte *data = nullptr;
        if (!tensor.is(known.tensor))
            return false;
        // A twin is made for a dtype and a shape; how the tensor itself lies in memory does not matter.
        return known.has_twin() ? is_like_its_twin(known)
                                : known.look.matches(tensor, known.table, data) && data == parts[i].data;
    }

    template <class Holds> bool all(nb::handle tensors, Holds holds) const {
        if (!PyDict_Check(tensors.ptr()) || static_cast<std::size_t>(PyDict_Size(tensors.ptr())) != known_.size())
            return false;
        PyObject *name, *tensor;
        Py_ssize_t at = 0;
        for (std::size_t i = 0; i < known_.size(); ++i) {
            if (!PyDict_Next(tensors.ptr(), &at, &name, &tensor))
                return false;
            if (name != known_[i].name.ptr() && PyObject_RichCompareBool(name, known_[i].name.ptr(), Py_EQ) != 1) {
                PyErr_Clear();
                return false;
            }
            if (!holds(i, nb::handle(tensor)))
                return false;
        }
        return true;
    }

    static bool is_like_its_twin(const Known &known) {
        return known.tensor.attr("dtype").equal(known.source.attr("dtype")) &&
               known.tensor.attr("shape").equal(known.source.attr("shape")) && place_of(known.tensor).equal(known.place);
    }

    static nb::object place_of(nb::handle tensor) {
        return nb::hasattr(tensor, "data_ptr") ? nb::object(tensor.attr("data_ptr")()) : nb::none();
    }

    // Whether torch has yet to negate the data when it is read: that is said beside the data, not in it.
    static bool is_negated(nb::handle tensor) {
        return nb::hasattr(tensor, "is_neg") && nb::cast<bool>(tensor.attr("is_neg")());
    }

    bool plain_ = true;
    std::vector<Known> known_;
};

} // namespace memlane
