// TensorParts: the addresses of some tensors and their offsets in a block of shared memory. Kept from call to call,
// because checking a tensor in Python takes longer than copying a few kilobytes.
//
// Who may call: any thread with the GIL. Threads may share an object: what a call copies is in its own BoundParts, so
// that another call can bind other tensors while the first one waits or copies without the GIL.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "lanes/weights.hpp"
#include "python/dlpack.hpp"

namespace memlane {

// What one call copies: the addresses of its tensors, and references that keep them alive. Lives on the call's stack.
class BoundParts {
  public:
    BoundParts() = default;
    BoundParts(const BoundParts &) = delete;
    BoundParts &operator=(const BoundParts &) = delete;
    ~BoundParts() {
        for (std::size_t i = 0; i < size_; ++i)
            Py_DECREF(owners_[i]);
    }

    std::span<const Part> parts() const { return {parts_, size_}; }
    std::size_t end_offset() const { return end_offset_; } // the largest offset + bytes of all parts

  private:
    friend class TensorParts;

    void begin(std::size_t count, std::size_t end_offset) {
        end_offset_ = end_offset;
        if (count <= near_count)
            return;
        far_parts_ = std::make_unique_for_overwrite<Part[]>(count);
        far_owners_ = std::make_unique_for_overwrite<PyObject *[]>(count);
        parts_ = far_parts_.get();
        owners_ = far_owners_.get();
    }
    void add(const Part &part, nb::handle owner) {
        parts_[size_] = part;
        owners_[size_] = owner.inc_ref().ptr();
        ++size_;
    }

    static constexpr std::size_t near_count = 16; // the tensors of a small policy; more need two allocations
    std::array<Part, near_count> near_parts_;
    std::array<PyObject *, near_count> near_owners_;
    std::unique_ptr<Part[]> far_parts_;
    std::unique_ptr<PyObject *[]> far_owners_;
    Part *parts_ = near_parts_.data();
    PyObject **owners_ = near_owners_.data();
    std::size_t size_ = 0;
    std::size_t end_offset_ = 0;
    std::uint64_t binding_ = 0; // of the TensorParts; 0 if these tensors are not those that it has now
};

// The Python class memlane.lanes.tensors.TensorParts checks the tensors and finds their addresses the first time. After
// that, `same` and `bind` check only what can have changed. A tensor that cannot be copied directly (on another device,
// or not contiguous) has a staging copy, which the caller updates before a publication or copies from after a read;
// parts with staging copies must not be shared between threads.
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
            end_offset_ = std::max(end_offset_, offset + bytes);
            const ExchangeTable *table = ExchangeTable::of(tensor.type());
            const bool is_staged = !source.is(tensor);
            entries_.push_back({name,
                                is_staged ? source : nb::object(),
                                table,
                                TensorView(source, table, writeable),
                                data_ptr(tensor),
                                tensor,
                                Storage(tensor),
                                {offset, reinterpret_cast<std::byte *>(address), bytes}});
            direct_ = direct_ && !is_staged;
        }
    }

    // Whether these are the same tensors as before, with the same dtypes, shapes and addresses.
    bool same(nb::handle tensors) const {
        return all_of(tensors, [&](std::size_t i, nb::handle tensor) { return is_same(entries_[i], tensor); });
    }

    // Whether these tensors have the same names, dtypes and shapes and are contiguous; if so, `bound` has them, and `same`
    // compares with them from now on. A needless false costs the caller only the slower check in Python.
    bool bind(nb::handle tensors, BoundParts &bound) {
        bound.begin(entries_.size(), end_offset_);
        std::uint64_t expected = binding_;
        const bool fits = all_of(tensors, [&](std::size_t i, nb::handle tensor) {
            Entry &entry = entries_[i];
            if (entry.is_staged()) {
                if (!is_same(entry, tensor))
                    return false;
                bound.add(entry.part, entry.staging);
                return true;
            }
            Part part = entry.part;
            if (!tensor.type().is(entry.tensor.type()) || !entry.view.matches(tensor, entry.table, part.data))
                return false;
            if (!tensor.is(entry.tensor) || part.data != entry.part.data) {
                Storage storage;
                if (entry.storage.exists()) { // torch, not numpy
                    storage = Storage(tensor);
                    if (!storage.has(part.data, part.bytes) || is_negated(tensor))
                        return false;
                }
                rebind(entry, tensor, std::move(storage), part.data);
                ++expected;
            } else if (entry.storage.shrank())
                return false;
            bound.add(part, tensor);
            return true;
        });
        // A comparison can run other Python code, and so another thread, which has bound other tensors.
        bound.binding_ = binding_ == expected ? expected : 0;
        return fits;
    }

    // Binds the tensors of the last successful `bind`, or those that the object was made with.
    void bind(BoundParts &bound) const {
        bound.begin(entries_.size(), end_offset_);
        for (const Entry &entry : entries_)
            bound.add(entry.part, entry.is_staged() ? entry.staging : entry.tensor);
        bound.binding_ = binding_;
    }

    // Whether no tensor has a staging copy: all bytes are copied from or to the tensors themselves.
    bool direct() const { return direct_; }

    // The version that the tensors were last read with; 0 if none, or if others were bound since.
    std::int64_t version() const { return version_; }
    std::int64_t version(const BoundParts &bound) const { return bound.binding_ == binding_ ? version_ : 0; }
    void remember(const BoundParts &bound, std::int64_t version) {
        if (bound.binding_ == binding_) // otherwise another thread has bound other tensors meanwhile
            version_ = version;
    }

  private:
    struct Entry {
        nb::object name;
        nb::object staging; // none if the tensor is copied directly
        const ExchangeTable *table;
        TensorView view;     // of the staging copy, or of the tensor
        nb::object data_ptr; // of the first tensor; None for a numpy array, whose memory cannot be exchanged
        nb::object tensor;   // the last one
        Storage storage;     // of that tensor
        Part part;           // of the staging copy, or of that tensor

        bool is_staged() const { return staging.is_valid(); }
    };

    // Releasing the old objects can run other Python code, and so another thread: after the exchange.
    void rebind(Entry &entry, nb::handle tensor, Storage storage, std::byte *data) {
        nb::object old = std::exchange(entry.tensor, nb::borrow(tensor));
        std::swap(entry.storage, storage);
        entry.part.data = data;
        ++binding_;
        version_ = 0;
    }

    static bool is_same(const Entry &entry, nb::handle tensor) {
        std::byte *data = nullptr;
        if (!tensor.is(entry.tensor) || entry.storage.shrank())
            return false;
        // A staging copy depends on the tensor's dtype and shape only, not on its strides or device.
        return entry.is_staged() ? matches_staging_copy(entry)
                                 : entry.view.matches(tensor, entry.table, data) && data == entry.part.data;
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
            const nb::object kept = nb::borrow(tensor); // another thread may take it out of the dict during a comparison
            if (name != entries_[i].name.ptr() && PyObject_RichCompareBool(name, entries_[i].name.ptr(), Py_EQ) != 1) {
                PyErr_Clear();
                return false;
            }
            if (!holds(i, kept))
                return false;
        }
        return true;
    }

    static bool matches_staging_copy(const Entry &entry) {
        return entry.tensor.attr("dtype").equal(entry.staging.attr("dtype")) &&
               entry.tensor.attr("shape").equal(entry.staging.attr("shape")) && data_ptr(entry.tensor).equal(entry.data_ptr);
    }

    static nb::object data_ptr(nb::handle tensor) {
        return nb::hasattr(tensor, "data_ptr") ? nb::object(tensor.attr("data_ptr")()) : nb::none();
    }

    // Whether torch negates the data lazily, when it is read: DLPack and data_ptr() do not show that.
    static bool is_negated(nb::handle tensor) { return nb::cast<bool>(tensor.attr("is_neg")()); }

    bool direct_ = true;
    std::size_t end_offset_ = 0;
    std::uint64_t binding_ = 1; // grows when other tensors are bound
    std::int64_t version_ = 0;
    std::vector<Entry> entries_;
};

} // namespace memlane
