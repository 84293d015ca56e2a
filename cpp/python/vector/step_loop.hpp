// StepLoop: a worker's side of a step. It waits for commands and steps the environments, with no Python code but theirs, as
// long as no environment raises and every returned value fits its row as it is. Every other step is exceptional and is
// handed to Python, one environment at a time. A step of 64 no-op environments takes 25 us in two workers, where a loop in
// Python took 52; and 480 us in 64 workers, where it took 810: with many processes on two cores the caches are cold, and every
// object that a step touches costs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "python/quorum.hpp"
#include "python/vector/commands.hpp"
#include "python/vector/step_writer.hpp"
#include "python/waits.hpp"
#include "python/words.hpp"

namespace memlane {

// What an environment's next step is.
enum class EnvState : std::uint8_t {
    running, // a step
    needs_reset, // its episode has ended: a reset instead of the step with autoreset, otherwise exceptional
    pending_truncation, // it was restarted outside of a step: always exceptional, Python truncates its episode
};

// A step that the loop leaves to Python. `returned` and `raised` are both None if the environment was not stepped, which is
// the case when its state is not `running`.
struct ExceptionalStep {
    std::size_t index; // of the environment within its worker
    nb::object returned;
    nb::object raised;
    EnvState state;

    bool needs_reset() const { return state == EnvState::needs_reset; }
    bool pending_truncation() const { return state == EnvState::pending_truncation; }
};

// Owns the state of each environment and the infos of the current command; Python changes and takes them through methods.
// Called by the worker's main thread alone.
class StepLoop {
  public:
    // `requested_step` and `completed_step` count the steps of each environment for `send`. `read_actions` returns the actions
    // of all environments of this worker, `read_action` the action of one. Where a word of `action_formats` (which may be
    // None) is not 0, `read_formatted(begin, end)` returns the actions of a range of environments instead. `envs` is read in
    // every step: the worker may replace its items. `first_env` is the index of the worker's first environment in the batch.
    // `autoreset`: an environment that needs a reset is reset instead of its next step. `wait_for_commands`: false if the
    // parent's thread runs this loop.
    StepLoop(nb::object command, nb::object writer, nb::list quorums, nb::object requested_step, nb::object completed_step,
             nb::callable read_actions, nb::callable read_action, nb::callable read_formatted, nb::object action_formats,
             nb::list envs, std::int64_t first_env, bool autoreset, bool wait_for_commands)
        : owners_{command, writer, quorums, requested_step, completed_step, action_formats},
          command_(nb::cast<CommandWord *>(command)), writer_(nb::cast<StepWriter *>(writer)),
          requested_step_(nb::cast<Words *>(requested_step)), completed_step_(nb::cast<Words *>(completed_step)),
          action_formats_(action_formats.is_none() ? nullptr : nb::cast<Words *>(action_formats)),
          read_actions_(std::move(read_actions)), read_action_(std::move(read_action)),
          read_formatted_(std::move(read_formatted)), envs_(std::move(envs)), states_(writer_->num_envs, EnvState::running),
          first_env_(first_env), autoreset_(autoreset), wait_for_commands_(wait_for_commands),
          first_command_(command_->issued()), last_command_(first_command_) {
        for (nb::handle quorum : quorums)
            quorums_.push_back(nb::cast<Quorum *>(quorum));
        quorum_ = quorums_.at(0);
        if (envs_.size() != writer_->num_envs)
            throw nb::value_error("expected as many rows as environments");
    }

    // Waits for the next command that needs Python, and returns it. A step has begun then: `next_exception` continues it, and
    // for a `send` then `complete_sent` and `step_sent`. Nothing, if all commands are executed and it must not wait.
    std::optional<std::int64_t> next_command() {
        for (;;) {
            if (!wait_for_commands_ && command_->issued() == last_command_)
                return std::nullopt;
            const CommandWord::Content content = command_->wait(++last_command_);
            begun_ns_ = now_ns();
            if (static_cast<std::size_t>(content.cell) >= quorums_.size() || content.command > Command::close) [[unlikely]]
                raise("SegmentError", "the command of a worker is damaged: expected a number up to " +
                                          std::to_string(static_cast<int>(Command::close)) + " for the cell 0 or 1, found " +
                                          std::to_string(static_cast<int>(content.command)) + " for the cell " +
                                          std::to_string(content.cell) + "; a process has overwritten the shared memory");
            quorum_ = quorums_[static_cast<std::size_t>(content.cell)];
            writer_->progress_words[progress::current_env].store(0, std::memory_order_relaxed);
            if (content.command == Command::close)
                return static_cast<std::int64_t>(content.command);
            if (content.command == Command::send) { // also when the word is a later command's
                index_ = end_ = 0;
                if (!step_sent())
                    return static_cast<std::int64_t>(content.command);
                finish(0);
                continue;
            }
            if (content.number != last_command_) {
                finish(0); // This command was a `send`, done with the one before it: the word is a later command's.
                continue;
            }
            if (content.command != Command::step)
                return static_cast<std::int64_t>(content.command);
            // The actions of a step all have the same format.
            start(is_formatted(0) ? read_formatted_(0, writer_->num_envs) : read_actions_());
            if (!run() || has_message())
                return static_cast<std::int64_t>(Command::step);
            finish(static_cast<std::int64_t>(writer_->num_envs));
        }
    }

    // Steps the environments whose step was requested, and arrives for each of them at once, so that the parent need not wait
    // for a slower one in the same worker. False: it stopped at an exceptional step or at one that needs a message.
    bool step_sent() {
        for (std::size_t index = end_; index < writer_->num_envs; ++index) {
            // PAIR publish/see, partner: the parent's addition to `requested_step`. Otherwise the worker could see a step
            // requested and the action of the step before. It may see the request before its command, which then finds
            // nothing to do.
            const auto env = first_env_ + static_cast<std::int64_t>(index);
            if ((sent_step_ = requested_step_->load(env)) == completed_step_->load(env))
                continue;
            writer_->progress_words[progress::current_env].store(static_cast<std::int64_t>(index),
                                                                 std::memory_order_relaxed);
            start_range(is_formatted(index) ? read_formatted_(index, index + 1) : nb::make_tuple(read_action_(index)), index,
                        index + 1);
            if (!run() || has_message())
                return false;
            complete_sent();
        }
        return true;
    }

    // Marks the environment that `step_sent` stepped last as done.
    void complete_sent() {
        const auto env = first_env_ + static_cast<std::int64_t>(end_) - 1;
        // PAIR publish/see, partner: the parent's load of `completed_step`. The rows are written before it.
        completed_step_->store(env, sent_step_);
        quorum_->arrive(1);
    }

    // Starts a step of all environments with these actions; `next_exception` runs it.
    void start(nb::object actions) { start_range(std::move(actions), 0, writer_->num_envs); }

    // Runs the step up to the next exceptional one. Nothing: all environments are stepped.
    std::optional<ExceptionalStep> next_exception() {
        if (!stopped_ && run())
            return std::nullopt;
        stopped_ = false;
        const std::size_t index = index_++;
        return ExceptionalStep{index, std::exchange(returned_, nb::none()), std::exchange(raised_, nb::none()),
                               states_[index]};
    }

    // Finishes the command; `arrivals` environments arrive at the quorum.
    void finish(std::int64_t arrivals) {
        writer_->progress_words[progress::current_env].store(static_cast<std::int64_t>(writer_->num_envs),
                                                             std::memory_order_relaxed);
        Word &busy_ns = writer_->progress_words[progress::busy_ns];
        busy_ns.store(busy_ns.load(std::memory_order_relaxed) + now_ns() - begun_ns_, std::memory_order_relaxed);
        // This word shows the parent which worker is late. That the rows are written, it learns from the quorum.
        writer_->progress_words[progress::commands_finished].store(last_command_ - first_command_,
                                                                   std::memory_order_relaxed);
        if (arrivals > 0)
            quorum_->arrive(arrivals);
    }

    void mark_running(std::size_t index) { states_.at(index) = EnvState::running; }
    void mark_needs_reset(std::size_t index) { states_.at(index) = EnvState::needs_reset; }
    void mark_pending_truncation(std::size_t index) { states_.at(index) = EnvState::pending_truncation; }

    // Adds an environment's info to those of the current command.
    void add_info(std::size_t index, nb::handle info) {
        infos_.append(nb::make_tuple(first_env_ + static_cast<std::int64_t>(index), info));
    }

    // Hands over the infos of the current command: a list of pairs, an environment's index in the batch and its info.
    nb::list take_infos() {
        nb::list infos = std::move(infos_);
        infos_ = nb::list();
        return infos;
    }

  private:
    // The format is published with the action, by the command or by the request.
    bool is_formatted(std::size_t index) const {
        return action_formats_ != nullptr && action_formats_->load(first_env_ + static_cast<std::int64_t>(index)) != 0;
    }

    // Whether Python has to send something about the steps that were made.
    bool has_message() const { return infos_.size() != 0 || writer_->has_objects(); }

    void start_range(nb::object actions, std::size_t begin, std::size_t end) {
        stopped_ = false;
        actions_ = std::move(actions);
        begin_ = index_ = begin;
        end_ = end;
    }

    // False: it stopped at an exceptional step.
    bool run() {
        for (; index_ < end_; ++index_) {
            if (!(states_[index_] == EnvState::running ? step() : reset())) {
                stopped_ = true;
                return false;
            }
        }
        actions_.reset();
        return true;
    }

    bool step() {
        static PyObject *const name = PyUnicode_InternFromString("step");
        const nb::object env = nb::borrow(PyList_GET_ITEM(envs_.ptr(), static_cast<Py_ssize_t>(index_)));
        const nb::object action = nb::steal(PySequence_GetItem(actions_.ptr(), static_cast<Py_ssize_t>(index_ - begin_)));
        if (!action.is_valid())
            throw nb::python_error();
        PyObject *const arguments[]{env.ptr(), action.ptr()};
        nb::object result = call(name, arguments);
        return result.is_valid() && write(std::move(result));
    }

    // Resets instead of a step. False without any call if Python has to decide what the step is.
    [[gnu::noinline]] bool reset() {
        static PyObject *const name = PyUnicode_InternFromString("reset");
        if (!autoreset_ || states_[index_] == EnvState::pending_truncation)
            return false;
        states_[index_] = EnvState::running;
        const nb::object env = nb::borrow(envs_[index_]);
        PyObject *const arguments[]{env.ptr()};
        const nb::object result = call(name, arguments);
        if (!result.is_valid())
            return false;
        const nb::object pair = keep_error(PySequence_Tuple(result.ptr())); // Python unpacks any sequence, so do we
        if (!pair.is_valid())
            return false;
        if (PyTuple_GET_SIZE(pair.ptr()) != 2) {
            PyErr_Format(PyExc_ValueError, "reset() must return observation, info; found %zd values",
                         PyTuple_GET_SIZE(pair.ptr()));
            keep_error(nullptr);
            return false;
        }
        return write(nb::make_tuple(pair[0], 0.0, false, false, pair[1]));
    }

    // Calls a method of an environment; an invalid object if it raised.
    nb::object call(PyObject *name, std::span<PyObject *const> arguments) {
        return keep_error(PyObject_VectorcallMethod(name, arguments.data(), arguments.size(), nullptr));
    }

    // Takes what a Python function returned. If it raised an Exception, that is kept for `next_exception`; other
    // BaseExceptions end the process.
    nb::object keep_error(PyObject *returned) {
        if (returned == nullptr) {
            nb::python_error error;
            if (!error.matches(PyExc_Exception))
                throw error;
            raised_ = nb::borrow(error.value());
            if (error.traceback().is_valid())
                PyException_SetTraceback(raised_.ptr(), error.traceback().ptr());
        }
        return nb::steal(returned);
    }

    // Writes what an environment returned, or keeps it for `next_exception`.
    bool write(nb::object result) {
        const bool written = write_rows(result.ptr());
        if (!written)
            returned_ = std::move(result);
        return written;
    }

    // Not inlined, nor is `reset`: `run` with both in it took 14.3 us for 64 no-op environments in one worker, without 13.0.
    [[gnu::noinline]] bool write_rows(PyObject *result) {
        if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5)
            return false;
        const int terminated = truth(PyTuple_GET_ITEM(result, 2)), truncated = truth(PyTuple_GET_ITEM(result, 3));
        const bool ended = terminated == 1 || truncated == 1;
        if (terminated < 0 || truncated < 0 || (ended && !autoreset_) || !PyDict_CheckExact(PyTuple_GET_ITEM(result, 4)))
            return false;
        nb::object info;
        if (!writer_->write_info(index_, PyTuple_GET_ITEM(result, 4), info) ||
            !writer_->write_step(index_, PyTuple_GET_ITEM(result, 0), PyTuple_GET_ITEM(result, 1), terminated == 1,
                                 truncated == 1))
            return false;
        if (ended)
            states_[index_] = EnvState::needs_reset;
        if (info.is_valid())
            add_info(index_, info);
        return true;
    }

    // 1 or 0, or -1 for an object that is no flag: an array of two, or a text, which would be true also if it says "no".
    static int truth(PyObject *flag) {
        if (PyUnicode_Check(flag) || PyBytes_Check(flag))
            return -1;
        const int is_true = PyObject_IsTrue(flag);
        if (is_true < 0)
            PyErr_Clear();
        return is_true;
    }

    std::array<nb::object, 6> owners_; // keep the pointers below alive
    CommandWord *command_;
    StepWriter *writer_;
    std::vector<Quorum *> quorums_;
    Quorum *quorum_; // where this command's arrivals go
    Words *requested_step_, *completed_step_;
    Words *action_formats_; // may be null
    nb::callable read_actions_, read_action_, read_formatted_;
    nb::list envs_;
    std::vector<EnvState> states_;
    nb::list infos_;
    std::int64_t first_env_;
    bool autoreset_;
    bool wait_for_commands_;
    std::int64_t begun_ns_ = 0; // when the current command came
    std::int64_t first_command_, last_command_; // values of `go`: before the first command, and of the last
    nb::object actions_; // of the environments from `begin_` on
    std::size_t begin_ = 0, index_ = 0, end_ = 0;
    std::int64_t sent_step_ = 0; // the requested step of the environment that `step_sent` steps
    bool stopped_ = false; // at `index_`, with what it returned or raised
    nb::object returned_ = nb::none(), raised_ = nb::none(); // of the exceptional step that is to be handed over next
};

} // namespace memlane
