// Lease: temporary zero-copy access to the fields of a block of shared memory.
//
// Who may call: one thread at a time per lease, with the GIL. A block is leased once at a time; a lane sees to that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "os/mapping.hpp"
#include "python/errors.hpp"
#include "python/gil.hpp"
#include "python/numpy_arrays.hpp"

namespace memlane {

// The fields of a block of a mapping as numpy arrays. An array is created when it is first asked for and lent again by
// the next lease of the block.
//
// Between two leases, nothing but this object references an array, and the array is as it was created: `take_back` gives
// up all others.
class FieldArrays {
  public:
    // `layout` is a memlane.core.Layout that begins at byte `base` of the mapping.
    FieldArrays(nb::object mapping, std::size_t base, nb::object layout, bool writeable)
        : mapping_(std::move(mapping)), base_(base), layout_(std::move(layout)), writeable_(writeable) {}

    Mapping &mapping() const { return *nb::inst_ptr<Mapping>(mapping_); }
    nb::handle layout() const { return layout_; }

    nb::object array(nb::handle name) {
        for (const Entry &entry : entries_) // Python has one object for a name that occurs in several places of a program
            if (entry.name.is(name)) [[likely]]
                return nb::borrow(entry.array());
        if (PyObject *array = PyDict_GetItemWithError(by_name_.ptr(), name.ptr()))
            return nb::borrow(array);
        if (PyErr_Occurred() != nullptr)
            throw nb::python_error();
        nb::object array = layout_[name].attr("view")(mapping_, base_);
        if (!writeable_)
            array.attr("setflags")(nb::arg("write") = false);
        by_name_[name] = array;
        entries_.emplace_back(nb::borrow(name), array.ptr());
        return array;
    }

    // array(name)[...] = value. An array of the same dtype and shape is copied without numpy, whose way to its copy takes
    // 150 ns.
    void assign(nb::handle name, nb::handle value) {
        nb::object to = array(name);
        if (to.is(value)) // lease[name] += 1 has changed the array already
            return;
        const auto entry = std::ranges::find(entries_, to.ptr(), &Entry::array);
        if (const std::byte *data = entry->data_of_equal(value))
            without_gil_for(entry->bytes(), [&] { std::memmove(entry->data(), data, entry->bytes()); });
        else
            set_all(to, name, value);
    }

    static void set_all(nb::handle array, nb::handle name, nb::handle value) {
        if (!is_known(value.ptr()))
            require_memory(name, value);
        if (PyObject_SetItem(array.ptr(), Py_Ellipsis, value.ptr()) != 0)
            throw nb::python_error();
    }

    // The names of the arrays that are referenced by others, directly or through a slice or tensor.
    nb::list names_in_use() const {
        nb::list names;
        for (const Entry &entry : entries_)
            if (entry.in_use())
                names.append(entry.name);
        return names;
    }

    // Gives up the arrays that are still in use, or whose shape or flags were changed in place. Returns those in use as
    // (name, weak reference).
    using Outliving = std::vector<std::pair<nb::object, nb::object>>;
    Outliving take_back() {
        Outliving outliving;
        if (std::all_of(entries_.begin(), entries_.end(), [](const Entry &entry) { return entry.is_as_created(); }))
            [[likely]]
            return outliving;
        std::erase_if(entries_, [&](const Entry &entry) {
            if (entry.is_as_created())
                return false;
            if (entry.in_use())
                outliving.emplace_back(entry.name, nb::steal(PyWeakref_NewRef(entry.array(), nullptr)));
            nb::del(by_name_[entry.name]);
            return true;
        });
        return outliving;
    }

  private:
    // Whether a value is of a usual class that is no tensor: to look for an attribute takes 20 ns.
    static bool is_known(PyObject *value) {
        return is_float64(value) || PlainArray::is_array(value) || is_float32(value) || is_int64(value) || is_bool(value);
    }
    // A torch tensor may have less memory than its shape says, and numpy does not ask. Nothing else has this attribute.
    [[gnu::noinline]] static void require_memory(nb::handle name, nb::handle value) {
        static PyObject *const untyped_storage = nb::str("untyped_storage").release().ptr();
        if (PyObject_HasAttr(value.ptr(), untyped_storage))
            nb::module_::import_("memlane.core.tensor_memory")
                .attr("require_memory")(nb::str("the value of field {!r}").attr("format")(name), value);
    }

    class Entry {
      public:
        Entry(nb::object name_, PyObject *array) : name(std::move(name_)), fields_(as_fields(array)) {
            data_ = fields_->data;
            dtype_ = fields_->descr;
            flags_ = fields_->flags;
            shape_.assign(fields_->dimensions, fields_->dimensions + fields_->nd);
            strides_.assign(fields_->strides, fields_->strides + fields_->nd);
            bytes_ = nb::cast<std::size_t>(nb::handle(array).attr("nbytes"));
        }

        nb::object name;

        PyObject *array() const { return reinterpret_cast<PyObject *>(fields_); }
        // The one reference is that of `by_name_`. The count is never too low: CPython 3.14 borrows a reference only from a
        // variable, which has one. It may be too high, and then the array is given up for nothing.
        bool in_use() const { return Py_REFCNT(array()) > 1; }
        bool is_as_created() const { return !in_use() && is_unchanged(); }

        char *data() const { return data_; }
        std::size_t bytes() const { return bytes_; }
        // The data of `value`, if it is a plain array of this dtype and shape, and this array can be written and is as it
        // was created; otherwise null.
        const std::byte *data_of_equal(nb::handle value) const {
            PlainArray from;
            return (flags_ & NPY_ARRAY_WRITEABLE) != 0 && is_unchanged() && PlainArray::try_view(value.ptr(), from) &&
                           from.dtype == reinterpret_cast<PyObject *>(dtype_) && std::ranges::equal(from.shape, shape_)
                       ? from.data
                       : nullptr;
        }

      private:
        bool is_unchanged() const {
            return fields_->data == data_ && fields_->descr == dtype_ && fields_->flags == flags_ &&
                   static_cast<std::size_t>(fields_->nd) == shape_.size() &&
                   std::equal(shape_.begin(), shape_.end(), fields_->dimensions) &&
                   std::equal(strides_.begin(), strides_.end(), fields_->strides);
        }
        static PyArrayObject_fields *as_fields(PyObject *array) { return reinterpret_cast<PyArrayObject_fields *>(array); }

        PyArrayObject_fields *fields_; // borrowed from `by_name_`
        char *data_;
        PyArray_Descr *dtype_;
        int flags_;
        std::vector<npy_intp> shape_, strides_;
        std::size_t bytes_;
    };

    nb::object mapping_;
    std::size_t base_;
    nb::object layout_;
    bool writeable_;
    nb::dict by_name_;
    std::vector<Entry> entries_; // of the arrays in `by_name_`
};

// The Python class memlane.core.Lease. In debug mode, `watch` (memlane.core.lease.Watch) creates the arrays, and knows
// which are in use and when they are stale; otherwise it is None.
class Lease {
  public:
    // `on_release` is called without arguments when the lease ends, unless it is None.
    Lease(std::unique_ptr<FieldArrays> arrays, nb::object label, nb::object watch, nb::object on_release)
        : own_arrays_(std::move(arrays)), arrays_(*own_arrays_), label_(std::move(label)), watch_(std::move(watch)),
          on_release_(std::move(on_release)) {}
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;
    virtual ~Lease() {
        if (!released_) // the arrays stay with the block, as after a release
            arrays_.take_back();
    }

    nb::object array(nb::handle name) {
        require_active(name);
        return watch_.is_none() ? arrays_.array(name) : watch_.attr("view")(name);
    }

    void assign(nb::handle name, nb::handle value) {
        require_active(name);
        if (watch_.is_none()) [[likely]]
            arrays_.assign(name, value);
        else
            FieldArrays::set_all(watch_.attr("view")(name), name, value);
    }

    void release() {
        if (!released_)
            end();
    }

    nb::list views_in_use() const {
        if (!watch_.is_none())
            return nb::list(watch_.attr("in_use")());
        if (!released_)
            return arrays_.names_in_use();
        nb::list names;
        for (const auto &[name, reference] : outliving_)
            if (!reference().is_none())
                names.append(name);
        return names;
    }

    bool released() const { return released_; }
    nb::handle layout() const { return arrays_.layout(); }
    Mapping &mapping() const { return arrays_.mapping(); }
    std::string label() const { return nb::cast<std::string>(label_); }

    // For the garbage collector: `on_release` may reference the lease.
    int traverse(visitproc visit, void *arg) {
        Py_VISIT(on_release_.ptr());
        return 0;
    }
    void clear() { on_release_ = nb::none(); }

  protected:
    // A lease of arrays that `lane` owns.
    Lease(nb::object lane, FieldArrays &arrays, nb::object label, nb::object watch)
        : lane_(std::move(lane)), arrays_(arrays), label_(std::move(label)), watch_(std::move(watch)),
          on_release_(nb::none()) {}

    nb::handle lane() const { return lane_; }

    // Called once, when the lease has ended and its arrays must not be used any more. Slots of lanes override it.
    virtual void after_release() {
        if (!on_release_.is_none())
            on_release_();
    }

    // Ends a lease that is dropped, without `after_release`. Returns the arrays that are still in use; in debug mode they
    // are stale from now on.
    FieldArrays::Outliving stop() {
        released_ = true;
        if (!watch_.is_none())
            watch_.attr("expire")();
        return arrays_.take_back();
    }

    // An exception of `after_release` reaches the caller; the lease has ended in any case.
    void end() {
        released_ = true;
        if (watch_.is_none()) [[likely]] {
            outliving_ = arrays_.take_back();
            after_release();
            return;
        }
        nb::object in_use = watch_.attr("in_use")();
        watch_.attr("expire")();
        after_release();
        watch_.attr("warn")(in_use);
    }

  private:
    void require_active(nb::handle name) const {
        if (released_) [[unlikely]]
            raise("StaleView", "the lease of " + label() + " has ended; access field " +
                                   nb::cast<std::string>(nb::repr(name)) + " before release()");
        if (arrays_.mapping().closed()) [[unlikely]]
            raise("SegmentClosed", label() + " was used after its segment was closed; use it before close()");
    }

    nb::object lane_;
    std::unique_ptr<FieldArrays> own_arrays_;
    FieldArrays &arrays_; // of the lane, or this lease's own
    nb::object label_;
    nb::object watch_;
    nb::object on_release_;
    FieldArrays::Outliving outliving_;
    bool released_ = false;
};

} // namespace memlane
