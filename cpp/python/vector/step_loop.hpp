// StepLoop: a worker's side of the steps. It waits for commands and steps the environments itself as long as all is plain: no
// environment has raised, and what it returned fits its rows as it is. Whatever is not comes to Python, one
// environment at a time. A step of 64 environments that do nothing takes 25 us in two workers, where a loop in Python took
// 52; and 480 us in 64 workers, where it took 810: many processes on two cores find cold caches, and pay for all that they
// touch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "python/waits.hpp"
#include "python/vector/commands.hpp"
#include "python/vector/step_writer.hpp"
#include "python/quorum.hpp"
#include "python/words.hpp"

namespace memlane {

class StepLoop {
  public:
    // `asked` and `answered` count the steps of each environment that were sent and that were made. `take_actions` has the
    // actions of all of this worker's environments, `take_action` that of one. `envs` and `due` (which have ended and are
    // to be reset; Python resets those in `owed`) are looked at anew in every round, `infos` is what infos are added to.
    // `first` is the number of this worker's first environment. `resets`: one that has ended is reset in the place of its
    // next step.
    StepLoop(nb::object command, nb::object outcomes, nb::list quorums, nb::object asked, nb::object answered,
           nb::callable take_actions, nb::callable take_action, nb::list envs, nb::list due, nb::dict owed, nb::list infos,
           std::int64_t first, bool resets)
        : kept_{command, outcomes, quorums, asked, answered}, command_(nb::cast<Command *>(command)),
          outcomes_(nb::cast<StepWriter *>(outcomes)), asked_(nb::cast<Words *>(asked)),
          answered_(nb::cast<Words *>(answered)), take_actions_(std::move(take_actions)),
          take_action_(std::move(take_action)), envs_(std::move(envs)), due_(std::move(due)), owed_(std::move(owed)),
          infos_(std::move(infos)), first_(first), resets_(resets), begin_(command_->given()), seen_(begin_) {
        for (nb::handle quorum : quorums)
            quorums_.push_back(nb::cast<Quorum *>(quorum));
        quorum_ = quorums_.at(0);
        if (envs_.size() != outcomes_->count || due_.size() != outcomes_->count)
            throw nb::value_error("a worker has as many rows as environments");
    }

    // Waits for the next command that Python has to do something for, and says which. Steps have begun then: `special`
    // has the rest, and after it, for those that were sent, `answer` and `step_sent`.
    std::int64_t next() {
        for (;;) {
            const Command::Content now = command_->wait(++seen_);
            quorum_ = quorums_.at(static_cast<std::size_t>(now.cell));
            outcomes_->words[progress::through].store(0, std::memory_order_relaxed);
            if (now.order == Order::close)
                return static_cast<std::int64_t>(now.order);
            if (now.order == Order::send) { // also when the word is a later command's
                at_ = end_ = 0;
                if (!step_sent())
                    return static_cast<std::int64_t>(now.order);
                finish(0);
                continue;
            }
            if (now.number != seen_) {
                finish(0); // It was a `send`, done with the one before it: the word is a later command's.
                continue;
            }
            if (now.order != Order::step)
                return static_cast<std::int64_t>(now.order);
            start(take_actions_());
            if (!run() || infos_.size() != 0)
                return static_cast<std::int64_t>(Order::step);
            finish(static_cast<std::int64_t>(outcomes_->count));
        }
    }

    // Steps those environments that were asked, and arrives for each at once: nobody waits for a straggler beside it. False:
    // it stopped at one that needs a closer look.
    bool step_sent() {
        for (std::size_t k = end_; k < outcomes_->count; ++k) {
            // PAIR publish/see, with the parent's addition to `asked`: it prevents that we see a step asked for and the
            // action of the one before. We may see it before its command, which then finds nothing to do.
            const auto env = first_ + static_cast<std::int64_t>(k);
            if ((number_ = asked_->load(env)) == answered_->load(env))
                continue;
            outcomes_->words[progress::through].store(static_cast<std::int64_t>(k), std::memory_order_relaxed);
            start_some(nb::make_tuple(take_action_(k)), k, k + 1);
            if (!run() || infos_.size() != 0)
                return false;
            answer();
        }
        return true;
    }

    // The environment that was stepped last is through.
    void answer() {
        const auto env = first_ + static_cast<std::int64_t>(end_) - 1;
        answered_->store(env, number_); // PAIR publish/see, with the parent's look: what came of it first
        quorum_->arrive(1);
    }

    // All environments are to be stepped with these actions; `special` does it.
    void start(nb::object actions) { start_some(std::move(actions), 0, outcomes_->count); }

    // Steps on, up to the next environment that needs a closer look: which one, what its step returned and what it raised;
    // neither if it is due. None: all are through.
    nb::object special() {
        if (!stopped_ && run())
            return nb::none();
        stopped_ = false;
        return nb::make_tuple(at_++, std::move(returned_), std::move(raised_));
    }

    // The command is done, and so many environments arrive.
    void finish(std::int64_t arrivals) {
        outcomes_->words[progress::through].store(static_cast<std::int64_t>(outcomes_->count), std::memory_order_relaxed);
        // The parent looks at this to know who is late; that the outcomes are there it learns from the quorum.
        outcomes_->words[progress::finished].store(seen_ - begin_, std::memory_order_relaxed);
        if (arrivals > 0)
            quorum_->arrive(arrivals);
    }

  private:
    // Those from `begin` up to `end`.
    void start_some(nb::object actions, std::size_t begin, std::size_t end) {
        stopped_ = false;
        actions_ = std::move(actions);
        actions_from_ = at_ = begin;
        end_ = end;
    }

    // False when it stopped at an environment that needs a closer look.
    bool run() {
        for (; at_ < end_; ++at_) {
            returned_ = raised_ = nb::none();
            if (!(due_[at_].is(Py_True) ? reset() : step())) {
                stopped_ = true;
                return false;
            }
        }
        actions_.reset();
        return true;
    }

    bool step() {
        static PyObject *const name = PyUnicode_InternFromString("step");
        const nb::object env = nb::borrow(envs_[at_]);
        const nb::object action = nb::steal(PySequence_GetItem(actions_.ptr(), static_cast<Py_ssize_t>(at_ - actions_from_)));
        if (!action.is_valid())
            throw nb::python_error();
        PyObject *const arguments[]{env.ptr(), action.ptr()};
        nb::object result = call(name, arguments);
        return result.is_valid() && take(std::move(result));
    }

    // In the place of a step. Where that is not what is to be done, nothing is begun: Python has the due ones then.
    bool reset() {
        static PyObject *const name = PyUnicode_InternFromString("reset");
        if (!resets_ || owed_.contains(nb::int_(at_)))
            return false;
        due_[at_] = nb::bool_(false);
        const nb::object env = nb::borrow(envs_[at_]);
        PyObject *const arguments[]{env.ptr()};
        const nb::object result = call(name, arguments);
        if (!result.is_valid())
            return false;
        const nb::object pair = caught(PySequence_Tuple(result.ptr())); // what Python unpacks may be any sequence
        if (!pair.is_valid())
            return false;
        if (PyTuple_GET_SIZE(pair.ptr()) != 2) {
            PyErr_SetString(PyExc_ValueError, "reset() must return an observation and an info");
            caught(nullptr);
            return false;
        }
        return take(nb::make_tuple(pair[0], 0.0, false, false, pair[1]));
    }

    // A method of an environment; nothing if it raised.
    nb::object call(PyObject *name, std::span<PyObject *const> arguments) {
        return caught(PyObject_VectorcallMethod(name, arguments.data(), arguments.size(), nullptr));
    }

    // What Python returned. If it raised, that is kept for `special`, unless it is to end the process.
    nb::object caught(PyObject *returned) {
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

    // What an environment returned is written, or kept for `special`.
    bool take(nb::object result) {
        const bool plain = put(result.ptr());
        if (!plain)
            returned_ = std::move(result);
        return plain;
    }

    bool put(PyObject *result) {
        if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5)
            return false;
        const int over = truth(PyTuple_GET_ITEM(result, 2)), cut = truth(PyTuple_GET_ITEM(result, 3));
        const bool ended = over == 1 || cut == 1;
        if (over < 0 || cut < 0 || (ended && !resets_) || !PyDict_CheckExact(PyTuple_GET_ITEM(result, 4)))
            return false;
        const auto info = outcomes_->put_info(at_, nb::borrow<nb::dict>(PyTuple_GET_ITEM(result, 4)));
        if (!info || !outcomes_->put(at_, PyTuple_GET_ITEM(result, 0), PyTuple_GET_ITEM(result, 1), over == 1, cut == 1))
            return false;
        if (ended)
            due_[at_] = nb::bool_(true);
        if (info->size() != 0)
            infos_.append(nb::make_tuple(first_ + static_cast<std::int64_t>(at_), *info));
        return true;
    }

    // 1 or 0; -1 for an object that cannot say whether it is true, which is not plain.
    static int truth(PyObject *flag) {
        const int is_true = PyObject_IsTrue(flag);
        if (is_true < 0)
            PyErr_Clear();
        return is_true;
    }

    std::array<nb::object, 5> kept_; // keep what the pointers point to
    Command *command_;
    StepWriter *outcomes_;
    std::vector<Quorum *> quorums_;
    Quorum *quorum_; // where this command's arrivals go
    Words *asked_, *answered_;
    nb::callable take_actions_, take_action_;
    nb::list envs_, due_;
    nb::dict owed_;
    nb::list infos_;
    std::int64_t first_;
    bool resets_;
    std::int64_t begin_, seen_; // values of `go`: before the first command, and of the last
    nb::object actions_;        // of the environments from `actions_from_` on
    std::size_t actions_from_ = 0, at_ = 0, end_ = 0;
    std::int64_t number_ = 0; // of the step that was sent to the environment at hand
    bool stopped_ = false; // at `at_`, with what it returned or raised
    nb::object returned_, raised_;
};

} // namespace memlane
