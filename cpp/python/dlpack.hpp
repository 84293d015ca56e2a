// TensorView: the dtype and shape of a tensor, and a fast check whether a tensor still has them and where its bytes
// are. The same object can change between two calls: net.double() and `tensor.data = ...` give a torch tensor another
// storage, t_() and resize_() another shape, and numpy arrays have resize(). So native code checks each tensor before
// it copies.
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

// DLPack's C exchange API, version 1 (DLPackExchangeAPI). Its dltensor_from_py_object_no_sync describes a tensor
// without creating a Python object: about 100 ns, where data_ptr() alone takes 80, and shape, strides and dtype as much
// each. https://dmlc.github.io/dlpack/latest/c_api.html
struct ExchangeTable {
    std::uint32_t major, minor;
    ExchangeTable *older;
    void *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
    int (*describe)(void *object,
                    nb::dlpack::dltensor *description); // may be null; returns 0, or -1 with a Python error set
    void *current_work_stream;

    // The table of a tensor class; null if it has none of version 1.
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

// The storage of a torch tensor, which can be smaller than the tensor's shape: FSDP resizes the storages of parameters
// that it does not need to 0 bytes. DLPack does not show that. While this object exists no other storage gets the
// memory, so a tensor at the same address as before still has this storage. A numpy array has none.
class Storage {
  public:
    Storage() = default; // of no tensor
    explicit Storage(nb::handle tensor) {
        static PyObject *const method = PyUnicode_InternFromString("untyped_storage");
        object_ = call(tensor, method);
        length_ = length();
    }

    bool exists() const { return object_.is_valid(); }

    // Whether the storage is smaller than when this object was made. About 12 ns.
    bool shrank() const { return length() < length_; }

    // Whether the storage has these bytes.
    bool has(const std::byte *data, std::size_t bytes) const {
        if (!exists() || bytes == 0)
            return exists();
        static PyObject *const method = PyUnicode_InternFromString("data_ptr");
        const nb::object address = call(object_, method); // fails for a tensor that only wraps others
        const auto begin = address.is_valid() ? nb::cast<std::uintptr_t>(address) : 0;
        const std::size_t before = reinterpret_cast<std::uintptr_t>(data) - begin;
        const auto size = static_cast<std::size_t>(length_);
        return begin != 0 && before <= size && bytes <= size - before;
    }

  private:
    // What a method without arguments returns; nothing if it fails.
    static nb::object call(nb::handle object, PyObject *name) {
        nb::object result = nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name));
        if (!result.is_valid())
            PyErr_Clear();
        return result;
    }

    Py_ssize_t length() const {
        const Py_ssize_t length = exists() ? PyObject_Size(object_.ptr()) : 0;
        if (length < 0)
            PyErr_Clear();
        return std::max<Py_ssize_t>(length, 0);
    }

    nb::object object_;
    Py_ssize_t length_ = 0;
};

class TensorView {
  public:
    // With `writeable`, read-only tensors do not match.
    TensorView(nb::handle tensor, const ExchangeTable *table, bool writeable) : writeable_(writeable) {
        Description now;
        if (!(valid_ = describe(tensor, table, now)))
            return;
        dtype_ = now.dtype;
        dtype_object_ = std::move(now.dtype_object);
        shape_.assign(now.shape.begin(), now.shape.end());
    }

    // Whether a tensor of the same class has this dtype and shape, is contiguous and lies in this process's memory. If
    // so, `data` is set to its address. False also for tensors that need a slower check in Python.
    bool matches(nb::handle tensor, const ExchangeTable *table, std::byte *&data) const {
        Description now;
        if (!valid_ || !describe(tensor, table, now) || now.dtype != dtype_ || (writeable_ && !now.writeable) ||
            !std::equal(now.shape.begin(), now.shape.end(), shape_.begin(), shape_.end()))
            return false;
        data = now.data;
        return true;
    }

  private:
    // A tensor at this moment. `shape` points into the tensor itself and is valid until the tensor changes.
    struct Description {
        std::byte *data = nullptr;
        std::uintptr_t dtype = 0;  // identifies the dtype: its DLPack code, or the address of `dtype_object`
        nb::object dtype_object;   // keeps the dtype alive, so that no other dtype gets its address
        std::span<const std::int64_t> shape;
        bool writeable = true;
        std::vector<std::int64_t> shape_copy; // owns the shape of a tensor that describe_torch read
    };

    static bool describe(nb::handle tensor, const ExchangeTable *table, Description &now) {
        if (table != nullptr)
            return describe_by_table(tensor, table, now);
        PlainArray array;
        if (!PlainArray::try_view(tensor.ptr(), array))
            return describe_torch(tensor, now);
        static_assert(sizeof(npy_intp) == sizeof(std::int64_t));
        now.data = array.data;
        now.shape = {reinterpret_cast<const std::int64_t *>(array.shape.data()), array.shape.size()};
        now.writeable = array.writeable;
        set_dtype(nb::borrow(array.dtype), now);
        return true;
    }

    // For torch before 2.10, which has no exchange table.
    static bool describe_torch(nb::handle tensor, Description &now) {
        try {
            if (!nb::hasattr(tensor, "data_ptr") || !nb::cast<bool>(tensor.attr("is_contiguous")()) ||
                !tensor.attr("device").attr("type").equal(nb::str("cpu")) || nb::cast<bool>(tensor.attr("is_complex")()))
                return false;
            now.data = reinterpret_cast<std::byte *>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
            for (nb::handle side : tensor.attr("shape"))
                now.shape_copy.push_back(nb::cast<std::int64_t>(side));
            now.shape = now.shape_copy;
            set_dtype(tensor.attr("dtype"), now);
            return true;
        } catch (nb::python_error &) {
            return false;
        }
    }

    static bool describe_by_table(nb::handle tensor, const ExchangeTable *table, Description &now) {
        nb::dlpack::dltensor found;
        if (table->describe(tensor.ptr(), &found) != 0) {
            PyErr_Clear(); // DLPack cannot describe it; the slower check in Python reports what it is
            return false;
        }
        now.data = static_cast<std::byte *>(found.data) + found.byte_offset;
        now.dtype = static_cast<std::uintptr_t>(found.dtype.code) << 24 |
                    static_cast<std::uintptr_t>(found.dtype.bits) << 16 | found.dtype.lanes;
        now.shape = {found.shape, static_cast<std::size_t>(found.ndim)};
        // Not complex: a lazily conjugated tensor has the bytes of the original, and DLPack does not say so. Python
        // checks it.
        return found.device.device_type == nb::device::cpu::value && is_contiguous(found) &&
               found.dtype.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Complex);
    }

    static void set_dtype(nb::object dtype, Description &now) {
        now.dtype = reinterpret_cast<std::uintptr_t>(dtype.ptr());
        now.dtype_object = std::move(dtype);
    }

    static bool is_contiguous(const nb::dlpack::dltensor &tensor) {
        std::int64_t step = 1;
        bool contiguous = true;
        for (int i = tensor.ndim - 1; i >= 0 && tensor.strides != nullptr; --i) {
            if (tensor.shape[i] == 0)
                return true;
            contiguous = contiguous && (tensor.shape[i] == 1 || tensor.strides[i] == step);
            step *= tensor.shape[i];
        }
        return contiguous;
    }

    bool valid_ = false; // whether the tensor could be described
    bool writeable_;
    std::uintptr_t dtype_ = 0;
    nb::object dtype_object_; // keeps the dtype alive, so that no other dtype gets its address
    std::vector<std::int64_t> shape_;
};

} // namespace memlane
