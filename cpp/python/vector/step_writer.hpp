// StepWriter: writes what a step of one of a worker's environments returned into its rows of the step segment.
#pragma once

#include <optional>
#include <vector>

#include "python/numpy_arrays.hpp"
#include "python/vector/column_writer.hpp"
#include "python/vector/commands.hpp"
#include "sync/words.hpp"

namespace memlane {

// One call per step: 0.1 us where numpy's assignments take 0.8. The Python class memlane.vector.step_writer.StepWriter
// checks the arrays, keeps them alive, and handles the values that this class refuses.
class StepWriter {
  public:
    // `observations` describes a ColumnWriter, or is None if Python writes observations. The next four are addresses. `infos`
    // are the declared infos: (key, description of a ColumnWriter, address of the presence flags).
    StepWriter(nb::handle observations, std::uintptr_t rewards, std::uintptr_t terminated, std::uintptr_t truncated,
               std::uintptr_t progress, std::size_t num_envs, nb::list infos)
        : progress_words(reinterpret_cast<Word *>(progress)), num_envs(num_envs),
          rewards_(reinterpret_cast<double *>(rewards)), terminated_(reinterpret_cast<bool *>(terminated)),
          truncated_(reinterpret_cast<bool *>(truncated)) {
        if (!observations.is_none())
            has_objects_ = observations_.emplace(observations).has_objects();
        for (nb::handle info : infos)
            infos_.push_back(
                {nb::borrow(info[0]), ColumnWriter(info[1]), reinterpret_cast<bool *>(nb::cast<std::uintptr_t>(info[2]))});
    }

    // False: Python has to convert or refuse a value.
    bool write_step(std::size_t index, nb::handle observation, nb::handle reward, bool terminated, bool truncated) {
        if (index >= num_envs)
            throw nb::index_error("the worker has no environment with this index");
        double number;
        if (PyFloat_CheckExact(reward.ptr())) {
            number = PyFloat_AS_DOUBLE(reward.ptr());
        } else {
            if (PlainArray::is_array(reward.ptr()))
                return false;
            number = PyFloat_AsDouble(reward.ptr());
            if (number == -1.0 && PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
        }
        if (!write_observation(index, observation))
            return false;
        rewards_[index] = number;
        terminated_[index] = terminated;
        truncated_[index] = truncated;
        // Relaxed: the parent needs these words only for the text of an error after this process's death.
        progress_words[progress::current_env].store(static_cast<std::int64_t>(index) + 1, std::memory_order_relaxed);
        Word &steps = progress_words[progress::steps];
        steps.store(steps.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return true;
    }

    // The same with flags of any type.
    bool write_step_any(std::size_t index, nb::handle observation, nb::handle reward, nb::handle terminated,
                        nb::handle truncated) {
        return write_step(index, observation, reward, truth(terminated), truth(truncated));
    }

    bool write_observation(std::size_t index, nb::handle observation) {
        return observations_ && index < num_envs && observations_->store(index, observation);
    }

    // Writes the declared keys of an info. `rest` becomes a dict of the other keys, if there are any. False: Python has to
    // convert or refuse a value.
    bool write_info(std::size_t index, PyObject *info, nb::object &rest) {
        if (!observations_) // Python writes the observation, and the info with it
            return false;
        Py_ssize_t written = 0;
        for (const DeclaredInfo &declared : infos_) {
            PyObject *const value = PyDict_GetItemWithError(info, declared.key.ptr());
            if (value == nullptr && PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
            if (value != nullptr && !declared.values.store(index, value))
                return false;
            declared.present[index] = value != nullptr;
            written += value != nullptr;
        }
        if (written == PyDict_GET_SIZE(info))
            return true;
        rest = nb::borrow(info);
        if (written != 0) {
            rest = nb::steal(PyDict_Copy(info));
            for (const DeclaredInfo &declared : infos_)
                if (declared.present[index])
                    PyDict_DelItem(rest.ptr(), declared.key.ptr());
        }
        return true;
    }

    // Whether a part of an observation is an object, which Python has to send in a message.
    bool has_objects() const { return has_objects_; }

    Word *const progress_words; // by the indices of namespace progress
    const std::size_t num_envs;

  private:
    static bool truth(nb::handle flag) {
        const int is_true = PyObject_IsTrue(flag.ptr());
        if (is_true < 0)
            throw nb::python_error();
        return is_true == 1;
    }

    struct DeclaredInfo {
        nb::object key;
        ColumnWriter values;
        bool *present; // whether each environment's last info had the key
    };

    double *rewards_;
    bool *terminated_;
    bool *truncated_;
    std::optional<ColumnWriter> observations_;
    bool has_objects_ = false;
    std::vector<DeclaredInfo> infos_;
};

} // namespace memlane
