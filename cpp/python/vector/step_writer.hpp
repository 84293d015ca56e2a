// StepWriter: a worker's pen for what a step of one of its environments returns.
#pragma once

#include <optional>
#include <vector>

#include "python/numpy_arrays.hpp"
#include "python/vector/column_writer.hpp"
#include "sync/words.hpp"

namespace memlane {

// A worker's words about itself, for the parent and for whoever reads them after its death: environments of this command
// that are through; steps since its start; messages that it has announced; commands that it has finished. The same numbers
// are in memlane.vector.step_segment.
namespace progress {
enum : std::size_t { through, steps, told, finished };
}

// What one environment's step leaves, written in one call: 0.1 us where numpy's assignments take 0.8. The Python class
// memlane.vector.step_writer.StepWriter checks the arrays and keeps them alive. Whatever is not plainly right is left to it.
class StepWriter {
  public:
    StepWriter(nb::handle place, std::uintptr_t rewards, std::uintptr_t terminated, std::uintptr_t truncated,
             std::uintptr_t progress, std::size_t count, nb::list declared)
        : words(reinterpret_cast<Word *>(progress)), count(count), rewards_(reinterpret_cast<double *>(rewards)),
          terminated_(reinterpret_cast<bool *>(terminated)), truncated_(reinterpret_cast<bool *>(truncated)) {
        if (!place.is_none())
            place_.emplace(place);
        for (nb::handle one : declared)
            declared_.push_back({nb::borrow(one[0]), ColumnWriter(one[1]), reinterpret_cast<bool *>(nb::cast<std::uintptr_t>(one[2]))});
    }

    // False: look closer, in Python.
    bool put(std::size_t index, nb::handle observation, nb::handle reward, bool terminated, bool truncated) {
        if (index >= count)
            throw nb::index_error("there is no such environment here");
        double amount;
        if (PyFloat_CheckExact(reward.ptr())) {
            amount = PyFloat_AS_DOUBLE(reward.ptr());
        } else {
            if (PlainArray::is_array(reward.ptr()))
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
        terminated_[index] = terminated;
        truncated_[index] = truncated;
        // Only for whoever reads them after this process's death, so no order is needed.
        words[progress::through].store(static_cast<std::int64_t>(index) + 1, std::memory_order_relaxed);
        Word &steps = words[progress::steps];
        steps.store(steps.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return true;
    }

    // The same with flags of any kind.
    bool put_any(std::size_t index, nb::handle observation, nb::handle reward, nb::handle terminated, nb::handle truncated) {
        return put(index, observation, reward, truth(terminated), truth(truncated));
    }

    bool put_observation(std::size_t index, nb::handle observation) {
        return place_ && index < count && place_->store(index, observation);
    }

    // What of an info is declared is written; what is left of it is returned. Nothing: look closer, in Python.
    std::optional<nb::dict> put_info(std::size_t index, nb::dict info) {
        if (!place_) // Python writes the observation, and the rest with it
            return std::nullopt;
        std::size_t found = 0;
        for (const Declared &one : declared_) {
            PyObject *const value = PyDict_GetItemWithError(info.ptr(), one.key.ptr());
            if (value == nullptr && PyErr_Occurred()) {
                PyErr_Clear();
                return std::nullopt;
            }
            if (value != nullptr && !one.place.store(index, value))
                return std::nullopt;
            one.told[index] = value != nullptr;
            found += value != nullptr;
        }
        if (found == 0)
            return info;
        nb::dict rest;
        if (found < info.size()) {
            PyDict_Update(rest.ptr(), info.ptr());
            for (const Declared &one : declared_)
                if (one.told[index])
                    PyDict_DelItem(rest.ptr(), one.key.ptr());
        }
        return rest;
    }

    Word *const words; // of its progress
    const std::size_t count;

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
    std::optional<ColumnWriter> place_;
    struct Declared {
        nb::object key;
        ColumnWriter place;
        bool *told; // by each environment, in its last step
    };
    std::vector<Declared> declared_;
};

} // namespace memlane
