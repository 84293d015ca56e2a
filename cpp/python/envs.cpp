// The Python face of environments written in C: a host over arrays that Python made.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/module.hpp"
#include "python/buffer.hpp"
#include "python/waits.hpp"
#include "envs/async_steps.hpp"
#include "envs/host.hpp"

using namespace nb::literals;
using namespace memlane;

#define ENV(file) extern "C" const memlane_spec memlane_env_##file;
#include "built_in_envs.inc"
#undef ENV

namespace {

// Below this a step keeps the GIL: to let go of it and to take it back costs 0.1 us, beside a busy Python thread 5 ms.
constexpr double worth_the_gil_ns = 50'000;

// A writeable array in one piece of at least `bytes`. Whoever calls keeps the array.
void *memory_of(nb::handle array, std::size_t bytes, const std::string &name) {
    const Buffer buffer(array, true);
    if (!buffer.held)
        throw nb::buffer_error((name + " must be an array in one piece that can be written").c_str());
    if (static_cast<std::size_t>(buffer.view.len) < bytes)
        throw nb::value_error((name + " must have at least " + std::to_string(bytes) + " bytes, and has " +
                               std::to_string(buffer.view.len)).c_str());
    return buffer.view.buf;
}

// A struct-format letter for each dtype of an action that can be copied as it is.
bool same_type(const Py_buffer &view, std::int32_t dtype) {
    if (view.format == nullptr || view.format[0] == 0 || view.format[1] != 0 ||
        static_cast<std::size_t>(view.itemsize) != item_bytes(dtype))
        return false;
    const char letter = view.format[0];
    switch (dtype) {
    case MEMLANE_FLOAT32:
        return letter == 'f';
    case MEMLANE_FLOAT64:
        return letter == 'd';
    case MEMLANE_BOOL:
        return letter == '?';
    case MEMLANE_INT8:
    case MEMLANE_INT16:
    case MEMLANE_INT32:
    case MEMLANE_INT64:
        return std::strchr("bhilq", letter) != nullptr;
    default:
        return std::strchr("BHILQ", letter) != nullptr;
    }
}

bool same_shape(const Py_buffer &view, std::int64_t rows, const memlane_field &field) {
    if (view.ndim != field.num_dims + 1 || view.shape[0] != rows)
        return false;
    for (std::int32_t dim = 0; dim < field.num_dims; ++dim)
        if (view.shape[dim + 1] != field.shape[dim])
            return false;
    return true;
}

class EnvHost {
  public:
    EnvHost(std::uintptr_t spec, std::int32_t num_envs, int autoreset_mode, std::int32_t max_episode_steps,
            std::vector<double> settings, nb::dict arrays, int num_threads, nb::object keep)
        : arrays_(std::move(arrays)), keep_(std::move(keep)), num_threads_(num_threads) {
        const auto &declared = *reinterpret_cast<const memlane_spec *>(spec);
        const std::size_t envs = static_cast<std::size_t>(num_envs);
        const std::size_t rows = envs * static_cast<std::size_t>(std::max(declared.num_agents, 1));
        const auto one = [&](const char *name, std::size_t bytes) { return memory_of(arrays_[name], bytes, name); };
        const auto fields = [&](const char *name, const memlane_field *of, std::int32_t count) {
            std::vector<void *> places;
            for (std::int32_t i = 0; i < count; ++i)
                places.push_back(memory_of(arrays_[name][i], rows * row_bytes(of[i]), name));
            return places;
        };
        HostBuffers buffers{
            static_cast<std::byte *>(one("state", envs * declared.state_bytes)),
            static_cast<std::uint64_t *>(one("random", envs * 8)),
            static_cast<std::int32_t *>(one("steps", envs * 4)),
            static_cast<std::uint8_t *>(one("ended", envs)),
            static_cast<double *>(one("rewards", rows * 8)),
            static_cast<std::uint8_t *>(one("terminated", rows)),
            static_cast<std::uint8_t *>(one("truncated", rows)),
            static_cast<std::uint8_t *>(one("alive", rows)),
            fields("actions", declared.actions, declared.num_actions),
            fields("observations", declared.observations, declared.num_observations),
            fields("final_observations", declared.observations, declared.num_observations),
            fields("infos", declared.infos, declared.num_infos),
            fields("final_infos", declared.infos, declared.num_infos),
        };
        rows_ = rows;
        host_ = std::make_unique<Host>(declared, num_envs, static_cast<Autoreset>(autoreset_mode), max_episode_steps,
                                       std::move(buffers), std::move(settings));
        errands_ = std::make_unique<AsyncSteps>(*host_, num_threads_ > 0 ? num_threads_ : 2);
    }

    std::optional<std::string> init() {
        const char *wrong = host().init();
        return wrong == nullptr ? std::nullopt : std::optional<std::string>(wrong);
    }

    void reset(nb::handle which) {
        const std::uint8_t *mask = nullptr;
        std::optional<Buffer> buffer;
        if (!which.is_none()) {
            buffer.emplace(which, false);
            if (!buffer->held || buffer->view.itemsize != 1 || buffer->view.len != host().num_envs())
                throw nb::value_error("a mask must be an array of bool with one element for each environment");
            mask = static_cast<const std::uint8_t *>(buffer->view.buf);
        }
        without_gil([&] { host().reset(mask); });
    }

    // How many ended. -1: these are not plainly the actions that are wanted; look closer, in Python. -2: some have ended
    // before, and it is the caller who must reset them. In both cases nothing has been stepped.
    std::int32_t step(nb::handle actions) {
        host();
        const Buffer given(actions, false);
        return are_actions(given) ? step_with(&given) : -1;
    }

    std::int32_t step_with(const Buffer *given) {
        Host &it = host();
        if (it.mode() == Autoreset::disabled &&
            std::memchr(it.buffers().ended, 1, static_cast<std::size_t>(it.num_envs())) != nullptr)
            return -2;
        const double ns = it.step_ns();
        if (ns > 0 && ns < worth_the_gil_ns) // nobody can change the actions meanwhile: they are read where they are
            return it.step(num_threads_, given ? given->view.buf : nullptr);
        if (given && given->view.buf != it.buffers().actions[0])
            std::memcpy(it.buffers().actions[0], given->view.buf, static_cast<std::size_t>(given->view.len));
        return without_gil([&] { return it.step(num_threads_); });
    }

    void send(std::vector<std::int32_t> envs) {
        for (const std::int32_t env : envs)
            if (env < 0 || env >= host().num_envs())
                throw nb::index_error("there is no such environment");
        errands_->send(envs);
    }
    // Those that are back; None when fewer than `at_least` are after `timeout` seconds. Looks at Ctrl-C in between.
    nb::object receive(std::size_t at_least, std::optional<double> timeout) {
        host();
        std::int64_t deadline = forever_ns;
        if (timeout && *timeout < 1e9)
            deadline = now_ns() + static_cast<std::int64_t>(*timeout * 1e9);
        for (;;) {
            const std::int64_t left = std::clamp<std::int64_t>(deadline - now_ns(), 0, slice_ns);
            if (without_gil([&] { return errands_->wait(at_least, std::chrono::nanoseconds(left)); }))
                return nb::cast(errands_->receive());
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            if (now_ns() >= deadline)
                return nb::none();
        }
    }

    void render(std::int32_t index, nb::handle picture) {
        const memlane_spec &spec = host().spec();
        if (spec.render == nullptr)
            throw nb::value_error("this environment has no picture");
        if (index < 0 || index >= host().num_envs())
            throw nb::index_error("there is no such environment");
        const std::size_t bytes =
            3 * static_cast<std::size_t>(spec.render_width) * static_cast<std::size_t>(spec.render_height);
        host().render(index, static_cast<std::uint8_t *>(memory_of(picture, bytes, "the picture")));
    }

    int threads() { return num_threads_ > 0 ? num_threads_ : host().threads_that_pay(); }
    double step_ns() { return host().step_ns(); }

    void close() {
        if (!host_)
            return;
        without_gil([&] { errands_.reset(); });
        host_->close();
        host_.reset();
    }

  private:
    Host &host() {
        if (!host_)
            throw nb::value_error("the environments were closed");
        return *host_;
    }

    bool are_actions(const Buffer &given) {
        const memlane_spec &spec = host_->spec();
        if (spec.num_actions != 1)
            return false;
        const memlane_field &field = spec.actions[0];
        if (field.name != nullptr && field.name[0] != 0) // a dict of one
            return false;
        if (!given.held || !same_type(given.view, field.dtype) ||
            !same_shape(given.view, static_cast<std::int64_t>(rows_), field) ||
            reinterpret_cast<std::uintptr_t>(given.view.buf) % item_bytes(field.dtype) != 0)
            return false;
        return field.kind != MEMLANE_DISCRETE ||
               are_choices(field, static_cast<const std::int64_t *>(given.view.buf), rows_);
    }

    nb::dict arrays_; // keeps the memory
    nb::object keep_; // and what the spec lies in
    int num_threads_;
    std::size_t rows_;
    std::unique_ptr<Host> host_;
    std::unique_ptr<AsyncSteps> errands_; // goes before the host
};

nb::tuple described(const memlane_spec &spec) {
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&spec), spec.max_episode_steps, std::max(spec.num_agents, 1));
}

nb::dict built_in_envs() {
    nb::dict envs;
#define ENV(file) envs[memlane_env_##file.name] = described(memlane_env_##file);
#include "built_in_envs.inc"
#undef ENV
    return envs;
}

} // namespace

void bind_envs(nb::module_ &m) {
    m.attr("ENV_ABI") = MEMLANE_ENV_ABI;
    m.def("built_in_envs", &built_in_envs, "The environments in this module by name: where the spec is, the most steps of an episode, the count of agents.");
    m.def("env_layout", [] {
        return nb::make_tuple(sizeof(memlane_spec), sizeof(memlane_field), sizeof(memlane_setting), sizeof(memlane_envs));
    }, "The bytes of a spec, a field, a setting and of what functions are given.");

    nb::class_<EnvHost>(m, "EnvHost", "Runs the environments of a C library over arrays that Python made.")
        .def(nb::init<std::uintptr_t, std::int32_t, int, std::int32_t, std::vector<double>, nb::dict, int, nb::object>(),
             "spec"_a, "num_envs"_a, "autoreset_mode"_a, "max_episode_steps"_a, "settings"_a, "arrays"_a, "num_threads"_a,
             "keep"_a.none())
        .def("init", &EnvHost::init, "What is wrong, in the environment's words; None if nothing.")
        .def("reset", &EnvHost::reset, "which"_a.none() = nb::none())
        .def("step", &EnvHost::step, "actions"_a,
             "How many ended. -1: these are not plainly actions; -2: some have ended and must be reset first.")
        .def("step_stored", [](EnvHost &it) { return it.step_with(nullptr); }, "With the actions that lie in their array.")
        .def("send", &EnvHost::send, "envs"_a)
        .def("receive", &EnvHost::receive, "at_least"_a, "timeout"_a = nb::none())
        .def("render", &EnvHost::render, "index"_a, "picture"_a)
        .def_prop_ro("threads", &EnvHost::threads)
        .def_prop_ro("step_ns", &EnvHost::step_ns)
        .def("close", &EnvHost::close);
}
