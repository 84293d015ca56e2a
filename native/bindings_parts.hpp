// Parts: where the bytes of some tensors are, and where in a block they belong. Kept from call to call, because looking
// a tensor up in Python takes longer than copying a few kilobytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "weights.hpp"

namespace memlane {

// The Python class memlane.ipc.tensors.Parts checks the tensors and finds their addresses the first time. After that,
// `same` and `fits` look only for what can have changed.
class Parts {
  public:
    // name, tensor, offset in the block, address, bytes, whether the address is the tensor's own (not a twin's).
    using Given = std::tuple<nb::object, nb::object, std::size_t, std::uintptr_t, std::size_t, bool>;

    Parts(const std::vector<Given> &given, bool writeable) : writeable_(writeable) {
        for (const auto &[name, tensor, offset, address, bytes, own] : given) {
            if (bytes > SIZE_MAX - offset)
                throw nb::value_error("a part ends beyond all memory");
            parts.push_back({offset, reinterpret_cast<std::byte *>(address), bytes});
            reach = std::max(reach, offset + bytes);
            known_.push_back({name, tensor, own, ask_of(tensor)});
            plain_ = plain_ && own;
        }
    }

    // Whether these are the tensors of the last time, in the same places. An array's address never changes while somebody
    // else (we) refers to it; a torch tensor's can.
    bool same(nb::handle tensors) const {
        return all(tensors, [&](std::size_t i, nb::handle tensor) { return is_same(i, tensor); });
    }

    // Whether these are tensors of the same names, dtypes and shapes, each in one piece; they are used from now on. A false
    // "no" costs the caller a closer look.
    bool fits(nb::handle tensors) {
        return all(tensors, [&](std::size_t i, nb::handle tensor) {
            if (is_same(i, tensor))
                return true;
            if (!known_[i].own || !tensor.type().is(known_[i].tensor.type()))
                return false;
            std::byte *address = known_[i].ask.is_valid() ? matching_tensor(tensor, known_[i].tensor)
                                                          : matching_array(tensor, known_[i].tensor);
            if (address == nullptr)
                return false;
            known_[i].tensor = nb::borrow(tensor);
            known_[i].ask = ask_of(tensor);
            parts[i].data = address;
            return true;
        });
    }

    // Whether all bytes lie in the tensors themselves; else somebody has to copy to or from twins.
    bool plain() const { return plain_; }

    std::vector<Part> parts;
    std::size_t reach = 0; // where the last of them ends

  private:
    struct Known {
        nb::object name, tensor;
        bool own;
        nb::object ask; // of a torch tensor: its bound method data_ptr, which saves looking it up
    };

    static nb::object ask_of(nb::handle tensor) {
        return nb::hasattr(tensor, "data_ptr") ? nb::object(tensor.attr("data_ptr")) : nb::object();
    }

    bool is_same(std::size_t i, nb::handle tensor) const {
        const Known &known = known_[i];
        return tensor.is(known.tensor) && (!known.ask.is_valid() || !known.own || answer(known.ask) == parts[i].data);
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

    static std::byte *answer(nb::handle ask) {
        nb::object address = nb::steal(PyObject_CallNoArgs(ask.ptr()));
        if (!address.is_valid())
            throw nb::python_error();
        return reinterpret_cast<std::byte *>(PyLong_AsSize_t(address.ptr()));
    }

    // A tensor's address if it is like `known`; otherwise, or when it cannot be asked, null.
    static std::byte *matching_tensor(nb::handle tensor, nb::handle known) {
        try {
            if (!tensor.attr("dtype").is(known.attr("dtype")) || !tensor.attr("shape").equal(known.attr("shape")) ||
                !tensor.attr("device").equal(known.attr("device")))
                return nullptr;
            // Bits that say "negated" and "conjugated" stand beside the data, not in it.
            if (!nb::cast<bool>(tensor.attr("is_contiguous")()) || nb::cast<bool>(tensor.attr("is_neg")()) ||
                nb::cast<bool>(tensor.attr("is_conj")()))
                return nullptr;
            return answer(tensor.attr("data_ptr"));
        } catch (nb::python_error &) {
            return nullptr;
        }
    }

    // Some dtypes (dates) have no buffer: null, and they are looked up in Python.
    std::byte *matching_array(nb::handle array, nb::handle known) const {
        Buffer given(array, writeable_), old(known, false);
        if (!given.held || !old.held || given.view.ndim != old.view.ndim || given.view.itemsize != old.view.itemsize ||
            std::strcmp(given.view.format, old.view.format) != 0 ||
            !std::equal(given.view.shape, given.view.shape + given.view.ndim, old.view.shape))
            return nullptr;
        return static_cast<std::byte *>(given.view.buf);
    }

    bool writeable_;
    bool plain_ = true;
    std::vector<Known> known_;
};

} // namespace memlane
