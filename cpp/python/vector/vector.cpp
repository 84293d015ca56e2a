// The Python face of what vector environments need: a quorum, commands, and the worker's rounds of steps.

#include <memory>
#include <string>

#include <nanobind/stl/tuple.h>

#include "python/module.hpp"
#include "python/buffer.hpp"
#include "python/waits.hpp"
#include "python/vector/info_packing.hpp"
#include "python/vector/step_writer.hpp"
#include "python/quorum.hpp"
#include "python/vector/step_loop.hpp"

using namespace nb::literals;
using namespace memlane;

namespace {

// Whether all numbers of an array of whole 8-byte numbers lie within the bounds, both included. None: not such an array.
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

    nb::class_<Quorum>(m, "Quorum", "A count that several processes advance and one waits for.")
        .def(nb::init<std::shared_ptr<Mapping>, std::size_t, std::string>(), "mapping"_a, "offset"_a, "label"_a)
        .def_prop_ro("arrived", &Quorum::arrived)
        .def("arrive", &Quorum::arrive, "count"_a = 1,
             "Add to the count, wake the waiter if that completes what it waits for, and return the new count.")
        .def("wait", &Quorum::wait, "until"_a, "timeout"_a = nb::none(), "peers"_a = nb::tuple());

    m.def("all_within", &all_within, "array"_a, "low"_a, "high"_a,
          "Whether all of an array of int64 lie within the bounds, both included; None if it is no such array.");

    m.def("pack_floats", &pack_floats, "infos"_a,
          "Infos that all have the same keys and only floats: the keys, their dtypes, the first environment, the floats; or None.");

    nb::class_<ColumnWriter>(m, "ColumnWriter", "Where values of a space go. Whoever made it keeps the arrays alive.")
        .def(nb::init<nb::handle>(), "description"_a)
        .def("store", [](const ColumnWriter &place, nb::handle value) { return place.store(0, value); }, "value"_a.none(),
             "Store a value in the first row if it is plainly right; otherwise False.");

    nb::class_<StepWriter>(m, "StepWriter", "What one environment's step leaves, written in one call.")
        .def(nb::init<nb::handle, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t, nb::list>(),
             "place"_a.none(), "rewards"_a, "terminated"_a, "truncated"_a, "progress"_a, "count"_a, "declared"_a)
        .def("put", &StepWriter::put_any, "index"_a, "observation"_a.none(), "reward"_a.none(), "terminated"_a.none(),
             "truncated"_a.none())
        .def("put_observation", &StepWriter::put_observation, "index"_a, "observation"_a.none());

    nb::class_<Command>(m, "Command", "What a worker is asked to do.")
        .def(nb::init<nb::object, std::shared_ptr<Mapping>, std::size_t>(), "go"_a, "mapping"_a, "offset"_a)
        .def_prop_ro("given", &Command::given, "How many commands were given to those who have had this place.")
        .def("give", &Command::give, "cell"_a, "order"_a, "Tell the worker.");

    nb::class_<Commands>(m, "Commands", "The commands of all workers, given together.")
        .def(nb::init<nb::list, std::vector<int>>(), "commands"_a, "cores"_a)
        .def("give", &Commands::give, "workers"_a, "cell"_a, "order"_a, "Tell these workers, those on other cores first.")
        .def("give_all", &Commands::give_all, "cell"_a, "order"_a, "Tell all of them.");

    nb::class_<StepLoop>(m, "StepLoop", "A worker's side of the steps: plain ones are made without Python.")
        .def(nb::init<nb::object, nb::object, nb::list, nb::object, nb::object, nb::callable, nb::callable, nb::list,
                      nb::list, nb::dict, nb::list, std::int64_t, bool>(),
             "command"_a, "outcomes"_a, "quorums"_a, "asked"_a, "answered"_a, "take_actions"_a, "take_action"_a, "envs"_a,
             "due"_a, "owed"_a, "infos"_a, "first"_a, "resets"_a)
        .def("next", &StepLoop::next, "Wait for the next command that Python has to do something for; its order.")
        .def("start", &StepLoop::start, "actions"_a, "All environments are to be stepped; `special` does it.")
        .def("special", &StepLoop::special,
             "Step on, up to the next environment that needs a closer look: which, what it returned, what it raised.")
        .def("answer", &StepLoop::answer, "The environment that was stepped last, of those that were sent, is through.")
        .def("step_sent", &StepLoop::step_sent,
             "Step the next of those that were sent; False at one that needs a closer look.")
        .def("finish", &StepLoop::finish, "arrivals"_a, "The command is done, and so many environments arrive.");
}
