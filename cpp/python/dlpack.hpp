// TensorView: where a tensor's bytes are and how they are to be read, as it is now. The same object may look different the next
// time: net.double() and `tensor.data = ...` give a torch tensor another storage, t_() and resize_() another shape, and
// numpy arrays have resize() as well. So who copies without asking Python looks first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "python/numpy_arrays.hpp"

namespace memlane {

namespace nb = nanobind;

// The part of DLPack's exchange table (version 1) that tells of a tensor without making anything in Python: some 100 ns for
// all of it, where data_ptr() alone takes 80, and shape, strides and dtype as much each.
// https://dmlc.github.io/dlpack/latest/c_api.html
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

class TensorView {
  public:
    // `writeable`: what is not, does not match.
    TensorView(nb::handle tensor, const ExchangeTable *table, bool writeable) : writeable_(writeable) {
        Now now;
        if (!(seen_ = see(tensor, table, now)))
            return;
        dtype_ = now.dtype;
        kept_ = std::move(now.kept);
        shape_.assign(now.shape.begin(), now.shape.end());
    }

    // Whether a tensor (of the same class) looks like this: contiguous, of this dtype and shape, in memory of this process.
    // If so, `data` becomes where it is.
    bool matches(nb::handle tensor, const ExchangeTable *table, std::byte *&data) const {
        Now now;
        if (!seen_ || !see(tensor, table, now) || now.dtype != dtype_ || (writeable_ && !now.writeable) ||
            !std::equal(now.shape.begin(), now.shape.end(), shape_.begin(), shape_.end()))
            return false;
        data = now.data;
        return true;
    }

  private:
    // A tensor at this moment; the shape is its own, for as long as nobody changes it.
    struct Now {
        std::byte *data = nullptr;
        std::uintptr_t dtype = 0; // a number that no other dtype has
        nb::object kept;          // whose address that number is, if it is one
        std::span<const std::int64_t> shape;
        bool writeable = true;
        std::vector<std::int64_t> asked; // the shape, where it had to be asked for
    };

    static bool see(nb::handle tensor, const ExchangeTable *table, Now &now) {
        if (table != nullptr)
            return see_described(tensor, table, now);
        PlainArray array;
        if (!PlainArray::see(tensor.ptr(), array))
            return ask(tensor, now);
        static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
        now.data = array.data;
        now.shape = {reinterpret_cast<const std::int64_t *>(array.shape.data()), array.shape.size()};
        now.writeable = array.writeable;
        name_dtype(nb::borrow(array.dtype), now);
        return true;
    }

    // A torch tensor without an exchange table: torch before 2.10.
    static bool ask(nb::handle tensor, Now &now) {
        try {
            if (!nb::hasattr(tensor, "data_ptr") || !nb::cast<bool>(tensor.attr("is_contiguous")()) ||
                !tensor.attr("device").attr("type").equal(nb::str("cpu")) || nb::cast<bool>(tensor.attr("is_complex")()))
                return false;
            now.data = reinterpret_cast<std::byte *>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
            for (nb::handle side : tensor.attr("shape"))
                now.asked.push_back(nb::cast<std::int64_t>(side));
            now.shape = now.asked;
            name_dtype(tensor.attr("dtype"), now);
            return true;
        } catch (nb::python_error &) {
            return false;
        }
    }

    static bool see_described(nb::handle tensor, const ExchangeTable *table, Now &now) {
        nb::dlpack::dltensor found;
        if (table->describe(tensor.ptr(), &found) != 0) {
            PyErr_Clear(); // it has no plain memory; the closer look in Python says what it is
            return false;
        }
        now.data = static_cast<std::byte *>(found.data) + found.byte_offset;
        now.dtype = static_cast<std::uintptr_t>(found.dtype.code) << 24 |
                    static_cast<std::uintptr_t>(found.dtype.bits) << 16 | found.dtype.lanes;
        now.shape = {found.shape, static_cast<std::size_t>(found.ndim)};
        // A conjugate has the bytes of what it was made of, and nothing here says so: Python takes the closer look.
        return found.device.device_type == nb::device::cpu::value && is_contiguous(found) &&
               found.dtype.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Complex);
    }

    static void name_dtype(nb::object dtype, Now &now) {
        now.dtype = reinterpret_cast<std::uintptr_t>(dtype.ptr());
        now.kept = std::move(dtype);
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

    bool seen_ = false, writeable_;
    std::uintptr_t dtype_ = 0;
    nb::object kept_; // so that no other dtype gets this one's address
    std::vector<std::int64_t> shape_;
};

} // namespace memlane
