// Python bindings of what vector environments need: the quorum, command words, and the worker's step loop.

#include <memory>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "python/module.hpp"
#include "python/buffer.hpp"
#include "python/quorum.hpp"
#include "python/vector/info_packing.hpp"
#include "python/vector/step_loop.hpp"
#include "python/vector/step_writer.hpp"
#include "python/waits.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

// Whether all numbers of an int64 array lie within the bounds, both included. None: it is not an int64 array.
nb::object all_within(nb::handle array, std::int64_t low, std::int64_t high) {
    const Buffer buffer(array, false);
    const Py_buffer &view = buffer.view;
    if (!buffer.held || view.itemsize != 8 || (view.format[0] != 'l' && view.format[0] != 'q') || view.format[1] != 0)
        return nb::none();
    const auto *numbers = static_cast<const std::int64_t *>(view.buf);
    bool within = true;
    for (std::int64_t i = 0; i < view.len / 8; ++i)
        within &= numbers[i] >= low && numbers[i] <= high;
    return nb::bool_(within);
}

} // namespace

void bind_vector(nb::module_ &m) {
    m.attr("QUORUM_BYTES") = sizeof(QuorumCell);
    m.attr("COMMAND_STEP") = static_cast<std::int64_t>(Command::step);
    m.attr("COMMAND_SEND") = static_cast<std::int64_t>(Command::send);
    m.attr("COMMAND_MESSAGE") = static_cast<std::int64_t>(Command::message);
    m.attr("COMMAND_CLOSE") = static_cast<std::int64_t>(Command::close);
    m.attr("PROGRESS_CURRENT_ENV") = static_cast<std::size_t>(progress::current_env);
    m.attr("PROGRESS_STEPS") = static_cast<std::size_t>(progress::steps);
    m.attr("PROGRESS_MESSAGES_SENT") = static_cast<std::size_t>(progress::messages_sent);
    m.attr("PROGRESS_BUSY_NS") = static_cast<std::size_t>(progress::busy_ns);
    m.attr("PROGRESS_FLOAT_INFOS") = static_cast<std::size_t>(progress::float_infos);
    m.attr("PROGRESS_FLOAT_FORMS") = static_cast<std::size_t>(progress::float_forms);
    m.attr("PROGRESS_COMMANDS_FINISHED") = static_cast<std::size_t>(progress::commands_finished);

    nb::class_<Quorum>(m, "Quorum", "A count that several processes advance and one waits for.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::string>(), "mapping"_a, "offset"_a, "label"_a)
        .def_prop_rw("spin_limit_ns", &Quorum::spin_limit_ns, &Quorum::set_spin_limit_ns,
                     "How long a wait spins at most before it sleeps.")
        .def_prop_ro("arrived", &Quorum::arrived)
        .def("arrive", &Quorum::arrive, "count"_a = 1,
             "Add to the count, wake the waiter if that completes what it waits for, and return the new count.")
        .def("wait", &Quorum::wait, "until"_a, "timeout"_a.none() = nb::none(), "peers"_a = nb::tuple());

    m.def("all_within", &all_within, "array"_a, "low"_a, "high"_a,
          "Whether all numbers of an int64 array lie within the bounds, both included; None if it is not an int64 array.");

    m.def("pack_floats", &pack_floats, "infos"_a,
          "Pack infos that all have the same keys and only floats: keys, types, first environment, floats; else None.");

    nb::class_<ColumnWriter>(m, "ColumnWriter", "Stores values of a space into rows. Its owner keeps the arrays alive.")
        .def(nb::init<nb::handle>(), "description"_a)
        .def(
            "store", [](const ColumnWriter &writer, nb::handle value) { return writer.store(0, value); }, "value"_a.none(),
            "Store a value in the first row if it has exactly the expected type, dtype and shape; otherwise False.");

    nb::class_<StepWriter>(m, "StepWriter", "Writes what a step of an environment returned into its rows.")
        .def(nb::init<nb::handle, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t, nb::list>(),
             "observations"_a.none(), "rewards"_a, "terminated"_a, "truncated"_a, "progress"_a, "num_envs"_a, "infos"_a)
        .def("write_step", &StepWriter::write_step_any, "index"_a, "observation"_a.none(), "reward"_a.none(),
             "terminated"_a.none(), "truncated"_a.none(), "Write a step; False if a value must be converted or refused.")
        .def("write_observation", &StepWriter::write_observation, "index"_a, "observation"_a.none(),
             "Write an observation; False if it must be converted or refused.");

    nb::class_<CommandWord>(m, "CommandWord", "The command of one worker: the parent issues, the worker's StepLoop waits.")
        .def(nb::init<nb::object, std::shared_ptr<Mapping>, std::size_t>(), "go"_a, "mapping"_a, "offset"_a)
        .def_prop_ro("issued", &CommandWord::issued, "Commands issued so far, also to processes that this worker replaced.")
        .def("issue", &CommandWord::issue, "cell"_a, "command"_a,
             "Issue a command; the worker arrives in this cell of the quorum.");

    nb::class_<CommandWords>(m, "CommandWords", "The commands of all workers, issued in one call.")
        .def(nb::init<nb::list, std::vector<int>>(), "words"_a, "cores"_a)
        .def("issue", &CommandWords::issue, "workers"_a, "cell"_a, "command"_a,
             "Issue a command to these workers, a worker on this core last.")
        .def("issue_all", &CommandWords::issue_all, "cell"_a, "command"_a,
             "Issue a command to all workers. True when the placement of the workers is to be looked at.");

    nb::class_<ExceptionalStep>(m, "ExceptionalStep", "A step that StepLoop leaves to Python.")
        .def_ro("index", &ExceptionalStep::index, "Index of the environment within its worker.")
        .def_ro("returned", &ExceptionalStep::returned, "What the environment returned, or None.")
        .def_ro("raised", &ExceptionalStep::raised, "What the environment raised, or None.")
        .def_prop_ro("needs_reset", &ExceptionalStep::needs_reset,
                     "The episode had ended, so the environment was not stepped.")
        .def_prop_ro("pending_truncation", &ExceptionalStep::pending_truncation,
                     "The environment was restarted and not stepped; its episode is to be truncated.");

    nb::class_<StepLoop>(m, "StepLoop", "A worker's side of a step. Owns the state of its environments and their infos.")
        .def(nb::init<nb::object, nb::object, nb::list, nb::object, nb::object, nb::callable, nb::callable, nb::callable,
                      nb::object, nb::list, std::int64_t, bool, bool>(),
             "command"_a, "writer"_a, "quorums"_a, "requested_step"_a, "completed_step"_a, "read_actions"_a, "read_action"_a,
             "read_formatted"_a, "action_formats"_a.none(), "envs"_a, "first_env"_a, "autoreset"_a, "wait_for_commands"_a)
        .def("next_command", &StepLoop::next_command,
             "Wait for the next command that needs Python. None if there is none and the loop must not wait.")
        .def("start", &StepLoop::start, "actions"_a, "Start a step of all environments; `next_exception` runs it.")
        .def("next_exception", &StepLoop::next_exception,
             "Run the step up to the next exceptional one. None: all environments are stepped.")
        .def("complete_sent", &StepLoop::complete_sent, "Mark the environment that `step_sent` stepped last as done.")
        .def("step_sent", &StepLoop::step_sent,
             "Step the environments whose step was requested. False: Python has to finish the step of one of them.")
        .def("finish", &StepLoop::finish, "arrivals"_a, "Finish the command; this many environments arrive at the quorum.")
        .def("mark_running", &StepLoop::mark_running, "index"_a,
             "The episode continues: the next step steps the environment.")
        .def("mark_needs_reset", &StepLoop::mark_needs_reset, "index"_a,
             "The episode has ended: the next step is a reset with autoreset, otherwise exceptional.")
        .def("mark_pending_truncation", &StepLoop::mark_pending_truncation, "index"_a,
             "The environment was restarted: its next step is exceptional.")
        .def("add_info", &StepLoop::add_info, "index"_a, "info"_a, "Add an environment's info to those of this command.")
        .def("take_infos", &StepLoop::take_infos,
             "Hand over the infos of this command: pairs (index of the environment in the batch, info).");
}
