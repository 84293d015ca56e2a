// TensorParts: the addresses of some tensors and their offsets in a block of shared memory. Kept from call to call,
// because checking a tensor in Python takes longer than copying a few kilobytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "lanes/weights.hpp"
#include "python/dlpack.hpp"

namespace memlane {

// The Python class memlane.lanes.tensors.TensorParts checks the tensors and finds their addresses the first time. After
// that, `same` and `fits` check only what can have changed. A tensor that cannot be copied directly (on another device,
// or not contiguous) has a staging copy, which the caller updates before a publication or copies from after a read.
class TensorParts {
  public:
    // Name, tensor, offset in the block, source (the tensor or its staging copy), address of the source, bytes.
    using PartTuple = std::tuple<nb::object, nb::object, std::size_t, nb::object, std::uintptr_t, std::size_t>;

    TensorParts(const std::vector<PartTuple> &tuples, bool writeable) {
        for (const auto &[name, tensor, offset, source, address, bytes] : tuples) {
            if (bytes > SIZE_MAX - offset)
                throw nb::value_error(("a part of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                                       " ends beyond the address space")
                                          .c_str());
            parts.push_back({offset, reinterpret_cast<std::byte *>(address), bytes});
            end_offset = std::max(end_offset, offset + bytes);
            const ExchangeTable *table = ExchangeTable::of(tensor.type());
            entries_.push_back(
                {name, tensor, source, table, TensorView(source, table, writeable), Storage(tensor), data_ptr(tensor)});
            direct_ = direct_ && source.is(tensor);
        }
    }

    // Whether these are the same tensors as before, with the same dtypes, shapes and addresses.
    bool same(nb::handle tensors) const {
        return all_of(tensors, [&](std::size_t i, nb::handle tensor) { return is_same(i, tensor); });
    }

    // Whether these tensors have the same names, dtypes and shapes and are contiguous; if so, they replace the ones
    // before. A needless false costs the caller only the slower check in Python.
    bool fits(nb::handle tensors) {
        return all_of(tensors, [&](std::size_t i, nb::handle tensor) {
            Entry &entry = entries_[i];
            if (entry.is_staged())
                return is_same(i, tensor);
            std::byte *data = nullptr;
            if (!tensor.type().is(entry.tensor.type()) || !entry.view.matches(tensor, entry.table, data))
                return false;
            if (tensor.is(entry.tensor) && data == parts[i].data)
                return !entry.storage.shrank();
            if (entry.storage.exists()) { // torch, not numpy
                Storage storage(tensor);
                if (!storage.has(data, parts[i].bytes) || is_negated(tensor))
                    return false;
                entry.storage = std::move(storage);
            }
            entry.tensor = entry.source = nb::borrow(tensor);
            parts[i].data = data;
            return true;
        });
    }

    // Whether no tensor has a staging copy: all bytes are copied from or to the tensors themselves.
    bool direct() const { return direct_; }

    std::vector<Part> parts;
    std::size_t end_offset = 0; // the largest offset + bytes of all parts

  private:
    struct Entry {
        nb::object name, tensor, source;
        const ExchangeTable *table;
        TensorView view;     // of the source
        Storage storage;     // of the tensor
        nb::object data_ptr; // of the tensor; None for a numpy array, whose memory cannot be exchanged

        bool is_staged() const { return !source.is(tensor); }
    };

    bool is_same(std::size_t i, nb::handle tensor) const {
        const Entry &entry = entries_[i];
        std::byte *data = nullptr;
        if (!tensor.is(entry.tensor) || entry.storage.shrank())
            return false;
        // A staging copy depends on the tensor's dtype and shape only, not on its strides or device.
        return entry.is_staged() ? matches_staging_copy(entry)
                                 : entry.view.matches(tensor, entry.table, data) && data == parts[i].data;
    }

    // Whether `tensors` is a dict with the same names in the same order, and `holds(i, tensor)` is true for each
    // tensor.
    template <class Holds> bool all_of(nb::handle tensors, Holds holds) const {
        if (!PyDict_Check(tensors.ptr()) || static_cast<std::size_t>(PyDict_Size(tensors.ptr())) != entries_.size())
            return false;
        PyObject *name, *tensor;
        Py_ssize_t at = 0;
        for (std::size_t i = 0; i < entries_.size(); ++i) {
            if (!PyDict_Next(tensors.ptr(), &at, &name, &tensor))
                return false;
            if (name != entries_[i].name.ptr() && PyObject_RichCompareBool(name, entries_[i].name.ptr(), Py_EQ) != 1) {
                PyErr_Clear();
                return false;
            }
            if (!holds(i, nb::handle(tensor)))
                return false;
        }
        return true;
    }

    static bool matches_staging_copy(const Entry &entry) {
        return entry.tensor.attr("dtype").equal(entry.source.attr("dtype")) &&
               entry.tensor.attr("shape").equal(entry.source.attr("shape")) && data_ptr(entry.tensor).equal(entry.data_ptr);
    }

    static nb::object data_ptr(nb::handle tensor) {
        return nb::hasattr(tensor, "data_ptr") ? nb::object(tensor.attr("data_ptr")()) : nb::none();
    }

    // Whether torch negates the data lazily, when it is read: DLPack and data_ptr() do not show that.
    static bool is_negated(nb::handle tensor) { return nb::cast<bool>(tensor.attr("is_neg")()); }

    bool direct_ = true;
    std::vector<Entry> entries_;
};

} // namespace memlane
