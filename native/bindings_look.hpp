// Look: where a tensor's bytes are and how they are to be read, as it is now. The same object may look different the next
// time: net.double() and `tensor.data = ...` give a torch tensor another storage, t_() and resize_() another shape, and
// numpy arrays have resize() as well. So who copies without asking Python looks first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bindings_arrays.hpp"

namespace memlane {

namespace nb = nanobind;

// The part of DLPack's exchange table (version 1) that tells of a tensor without making anything in Python: 20 ns, where
// data_ptr() alone takes 80. https://dmlc.github.io/dlpack/latest/c_api.html
struct ExchangeTable {
    std::uint32_t major, minor;
    ExchangeTable *older;
    void *allocate, *give, *take;
    int (*describe)(void *object, nb::dlpack::dltensor *description); // may be null; else -1 and an error, or 0
    void *stream;

    // Of a class; null if it has none that we know.
    static const ExchangeTable *of(nb::handle type) {
        nb::object capsule = nb::steal(PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__"));
        if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
            PyErr_Clear();
            return nullptr;
        }
        auto *table = static_cast<ExchangeTable *>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (table != nullptr && table->major > 1)
            table = table->older;
        return table != nullptr && table->major == 1 && table->describe != nullptr ? table : nullptr;
    }
};

class Look {
  public:
    Look() = default;

    // `writeable`: what is not, does not match.
    Look(nb::handle tensor, const ExchangeTable *table, bool writeable) : writeable_(writeable) {
        seen_ = look(tensor, table, *this);
    }

    // Whether a tensor (of the same class) looks like this: contiguous, of this dtype and shape, in memory of this process.
    // If so, `data` becomes where it is.
    bool matches(nb::handle tensor, const ExchangeTable *table, std::byte *&data) const {
        if (!seen_)
            return false;
        if (table != nullptr)
            return matches_described(tensor, table, data);
        PlainArray array;
        if (PlainArray::see(tensor.ptr(), array)) {
            data = array.data;
            return reinterpret_cast<std::uintptr_t>(array.dtype) == dtype_ && (array.writeable || !writeable_) &&
                   std::equal(array.shape.begin(), array.shape.end(), shape_.begin(), shape_.end());
        }
        Look now;
        if (!look(tensor, table, now))
            return false;
        data = now.data_;
        return now.dtype_ == dtype_ && now.shape_ == shape_;
    }

  private:
    static bool look(nb::handle tensor, const ExchangeTable *table, Look &seen) {
        if (table != nullptr) {
            nb::dlpack::dltensor now;
            if (!describe(tensor, table, now))
                return false;
            seen.data_ = begin_of(now);
            seen.dtype_ = key_of(now.dtype);
            seen.shape_.assign(now.shape, now.shape + now.ndim);
            return true;
        }
        PlainArray array;
        if (PlainArray::see(tensor.ptr(), array)) {
            seen.data_ = array.data;
            seen.kept_ = nb::borrow(array.dtype);
            seen.dtype_ = reinterpret_cast<std::uintptr_t>(array.dtype);
            seen.shape_.assign(array.shape.begin(), array.shape.end());
            return true;
        }
        return ask(tensor, seen);
    }

    // A torch tensor without an exchange table: torch before 2.10.
    static bool ask(nb::handle tensor, Look &seen) {
        try {
            if (!nb::hasattr(tensor, "data_ptr") || !nb::cast<bool>(tensor.attr("is_contiguous")()) ||
                !tensor.attr("device").attr("type").equal(nb::str("cpu")) || nb::cast<bool>(tensor.attr("is_complex")()))
                return false;
            seen.data_ = reinterpret_cast<std::byte *>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
            seen.kept_ = tensor.attr("dtype");
            seen.dtype_ = reinterpret_cast<std::uintptr_t>(seen.kept_.ptr());
            for (nb::handle side : tensor.attr("shape"))
                seen.shape_.push_back(nb::cast<std::int64_t>(side));
            return true;
        } catch (nb::python_error &) {
            return false;
        }
    }

    static bool describe(nb::handle tensor, const ExchangeTable *table, nb::dlpack::dltensor &now) {
        if (table->describe(tensor.ptr(), &now) != 0) {
            PyErr_Clear(); // it has no plain memory; the closer look in Python says what it is
            return false;
        }
        // A conjugate has the bytes of what it was made of, and nothing here says so: Python takes the closer look.
        return now.device.device_type == nb::device::cpu::value && is_contiguous(now) &&
               now.dtype.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Complex);
    }

    static bool is_contiguous(const nb::dlpack::dltensor &now) {
        std::int64_t step = 1;
        bool whole = true;
        for (int i = now.ndim - 1; i >= 0 && now.strides != nullptr; --i) {
            if (now.shape[i] == 0)
                return true;
            whole = whole && (now.shape[i] == 1 || now.strides[i] == step);
            step *= now.shape[i];
        }
        return whole;
    }

    bool matches_described(nb::handle tensor, const ExchangeTable *table, std::byte *&data) const {
        nb::dlpack::dltensor now;
        if (!describe(tensor, table, now) || key_of(now.dtype) != dtype_ ||
            !std::equal(now.shape, now.shape + now.ndim, shape_.begin(), shape_.end()))
            return false;
        data = begin_of(now);
        return true;
    }

    static std::byte *begin_of(const nb::dlpack::dltensor &now) {
        return static_cast<std::byte *>(now.data) + now.byte_offset;
    }

    static std::uintptr_t key_of(nb::dlpack::dtype dtype) {
        return static_cast<std::uintptr_t>(dtype.code) << 24 | static_cast<std::uintptr_t>(dtype.bits) << 16 | dtype.lanes;
    }

    bool seen_ = false, writeable_ = false;
    std::byte *data_ = nullptr;
    std::uintptr_t dtype_ = 0;
    nb::object kept_; // so that no other dtype gets this one's address
    std::vector<std::int64_t> shape_;
};

} // namespace memlane
