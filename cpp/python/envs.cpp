// Python bindings of the host of environments written in C, on arrays that Python allocated.

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

// A shorter step keeps the GIL: releasing and reacquiring it takes 0.1 us, or 5 ms beside a busy Python thread.
constexpr double release_gil_above_ns = 50'000;

// Results of EnvHost::step that are not a count: nothing has been stepped.
constexpr std::int32_t needs_conversion = -1; // the actions are not an array that the host can read
constexpr std::int32_t needs_reset = -2; // episodes have ended, and with Autoreset::disabled the caller must reset them

// The memory of a contiguous writable array of at least `bytes`. The caller keeps the array alive.
void *memory_of(nb::handle array, std::size_t bytes, const std::string &name) {
    const Buffer buffer(array, true);
    if (!buffer.held)
        throw nb::buffer_error((name + " must be a contiguous writable array").c_str());
    if (static_cast<std::size_t>(buffer.view.len) < bytes)
        throw nb::value_error(
            (name + " must have at least " + std::to_string(bytes) + " bytes, found " + std::to_string(buffer.view.len))
                .c_str());
    return buffer.view.buf;
}

// Whether the elements of a buffer have this dtype, so that they can be read without conversion.
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
            std::vector<double> settings, nb::dict arrays, int num_threads, nb::object keep_alive)
        : arrays_(std::move(arrays)), keep_alive_(std::move(keep_alive)), num_threads_(num_threads) {
        const auto &declared = *reinterpret_cast<const memlane_spec *>(spec);
        const std::size_t envs = static_cast<std::size_t>(num_envs);
        const std::size_t rows = envs * static_cast<std::size_t>(std::max(declared.num_agents, 1));
        const auto array = [&](const char *name, std::size_t bytes) { return memory_of(arrays_[name], bytes, name); };
        const auto fields = [&](const char *name, const memlane_field *of, std::int32_t count) {
            std::vector<void *> pointers;
            for (std::int32_t i = 0; i < count; ++i)
                pointers.push_back(memory_of(arrays_[name][i], rows * row_bytes(of[i]), name));
            return pointers;
        };
        HostBuffers buffers{
            static_cast<std::byte *>(array("state", envs * declared.state_bytes)),
            static_cast<std::uint64_t *>(array("random", envs * 8)),
            static_cast<std::int32_t *>(array("steps", envs * 4)),
            static_cast<std::uint8_t *>(array("ended", envs)),
            static_cast<double *>(array("rewards", rows * 8)),
            static_cast<std::uint8_t *>(array("terminated", rows)),
            static_cast<std::uint8_t *>(array("truncated", rows)),
            static_cast<std::uint8_t *>(array("alive", rows)),
            fields("actions", declared.actions, declared.num_actions),
            fields("observations", declared.observations, declared.num_observations),
            fields("final_observations", declared.observations, declared.num_observations),
            fields("infos", declared.infos, declared.num_infos),
            fields("final_infos", declared.infos, declared.num_infos),
        };
        rows_ = rows;
        host_ = std::make_unique<Host>(declared, num_envs, static_cast<Autoreset>(autoreset_mode), max_episode_steps,
                                       std::move(buffers), std::move(settings));
        async_steps_ = std::make_unique<AsyncSteps>(*host_, num_threads_ > 0 ? num_threads_ : 2);
    }

    std::optional<std::string> init() {
        const char *error = host().init();
        return error == nullptr ? std::nullopt : std::optional<std::string>(error);
    }

    void reset(nb::handle mask) {
        const std::uint8_t *flags = nullptr;
        std::optional<Buffer> buffer;
        if (!mask.is_none()) {
            buffer.emplace(mask, false);
            if (!buffer->held || buffer->view.itemsize != 1 || buffer->view.len != host().num_envs())
                throw nb::value_error("a mask must be an array of bool with one element per environment");
            flags = static_cast<const std::uint8_t *>(buffer->view.buf);
        }
        without_gil([&] { host().reset(flags); });
    }

    // The number of episodes that ended, or needs_conversion or needs_reset.
    std::int32_t step(nb::handle actions) {
        host();
        const Buffer buffer(actions, false);
        return are_actions(buffer) ? step_with(&buffer) : needs_conversion;
    }

    // `actions` nullptr: those in the array of the host.
    std::int32_t step_with(const Buffer *actions) {
        Host &it = host();
        if (it.mode() == Autoreset::disabled &&
            std::memchr(it.buffers().ended, 1, static_cast<std::size_t>(it.num_envs())) != nullptr)
            return needs_reset;
        const double ns = it.step_ns();
        if (ns > 0 && ns < release_gil_above_ns) // with the GIL held the actions cannot change: no copy is needed
            return it.step(num_threads_, actions ? actions->view.buf : nullptr);
        if (actions && actions->view.buf != it.buffers().actions[0])
            std::memcpy(it.buffers().actions[0], actions->view.buf, static_cast<std::size_t>(actions->view.len));
        return without_gil([&] { return it.step(num_threads_); });
    }

    void send(std::vector<std::int32_t> envs) {
        for (const std::int32_t env : envs)
            check_index(env);
        async_steps_->send(envs);
    }
    // The environments whose step is complete, or None if fewer than `min_completed` are after `timeout` seconds. Checks
    // for Ctrl-C while it waits.
    nb::object receive(std::size_t min_completed, nb::handle timeout) {
        const std::int64_t deadline = deadline_ns_of(seconds_of(timeout));
        host();
        for (;;) {
            const std::int64_t left = std::clamp<std::int64_t>(deadline - now_ns(), 0, slice_ns);
            if (without_gil([&] { return async_steps_->wait(min_completed, std::chrono::nanoseconds(left)); }))
                return nb::cast(async_steps_->receive());
            if (PyErr_CheckSignals() != 0)
                throw nb::python_error();
            if (now_ns() >= deadline)
                return nb::none();
        }
    }

    void render(std::int32_t index, nb::handle image) {
        const memlane_spec &spec = host().spec();
        if (spec.render == nullptr)
            throw nb::value_error("this environment has no render function");
        check_index(index);
        const std::size_t bytes =
            3 * static_cast<std::size_t>(spec.render_width) * static_cast<std::size_t>(spec.render_height);
        host().render(index, static_cast<std::uint8_t *>(memory_of(image, bytes, "the image")));
    }

    int threads() { return num_threads_ > 0 ? num_threads_ : host().auto_threads(); }
    double step_ns() { return host().step_ns(); }

    void close() {
        if (!host_)
            return;
        without_gil([&] { async_steps_.reset(); });
        host_->close();
        host_.reset();
    }

  private:
    Host &host() {
        if (!host_)
            throw nb::value_error("the environments are closed");
        return *host_;
    }

    void check_index(std::int32_t env) {
        const std::int32_t count = host().num_envs();
        if (env < 0 || env >= count)
            throw nb::index_error(
                ("there is no environment " + std::to_string(env) + ", only 0 to " + std::to_string(count - 1)).c_str());
    }

    // Whether the host can read the actions from this buffer.
    bool are_actions(const Buffer &actions) {
        const memlane_spec &spec = host_->spec();
        if (spec.num_actions != 1)
            return false;
        const memlane_field &field = spec.actions[0];
        if (field.name != nullptr && field.name[0] != 0) // a dict with one member
            return false;
        if (!actions.held || !same_type(actions.view, field.dtype) ||
            !same_shape(actions.view, static_cast<std::int64_t>(rows_), field) ||
            reinterpret_cast<std::uintptr_t>(actions.view.buf) % item_bytes(field.dtype) != 0)
            return false;
        return field.kind != MEMLANE_DISCRETE ||
               within_bounds(field, static_cast<const std::int64_t *>(actions.view.buf), rows_);
    }

    nb::dict arrays_; // keeps the memory of the buffers alive
    nb::object keep_alive_; // keeps the spec alive
    int num_threads_;
    std::size_t rows_;
    std::unique_ptr<Host> host_;
    std::unique_ptr<AsyncSteps> async_steps_; // destroyed before the host
};

nb::tuple describe(const memlane_spec &spec) {
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&spec), spec.max_episode_steps, std::max(spec.num_agents, 1));
}

nb::dict built_in_envs() {
    nb::dict envs;
#define ENV(file) envs[memlane_env_##file.name] = describe(memlane_env_##file);
#include "built_in_envs.inc"
#undef ENV
    return envs;
}

} // namespace

void bind_envs(nb::module_ &m) {
    m.attr("ENV_ABI") = MEMLANE_ENV_ABI;
    m.attr("AUTORESET_NEXT_STEP") = static_cast<int>(Autoreset::next_step);
    m.attr("AUTORESET_SAME_STEP") = static_cast<int>(Autoreset::same_step);
    m.attr("AUTORESET_DISABLED") = static_cast<int>(Autoreset::disabled);
    m.attr("STEP_NEEDS_CONVERSION") = needs_conversion;
    m.attr("STEP_NEEDS_RESET") = needs_reset;
    m.def("built_in_envs", &built_in_envs,
          "The built-in environments by name: address of the spec, max_episode_steps, num_agents.");
    m.def(
        "env_layout",
        [] {
            return nb::make_tuple(sizeof(memlane_spec), sizeof(memlane_field), sizeof(memlane_setting),
                                  sizeof(memlane_envs));
        },
        "The sizes in bytes of memlane_spec, memlane_field, memlane_setting and memlane_envs.");

    nb::class_<EnvHost>(m, "EnvHost",
                        "Runs the environments of a C library on arrays that Python allocated. One thread at a time.")
        .def(nb::init<std::uintptr_t, std::int32_t, int, std::int32_t, std::vector<double>, nb::dict, int, nb::object>(),
             "spec"_a, "num_envs"_a, "autoreset_mode"_a, "max_episode_steps"_a, "settings"_a, "arrays"_a, "num_threads"_a,
             "keep_alive"_a.none())
        .def("init", &EnvHost::init, "Call the environment's init; return its error message, or None.")
        .def("reset", &EnvHost::reset, "mask"_a.none() = nb::none(),
             "Start new episodes where the mask is True, or everywhere.")
        .def("step", &EnvHost::step, "actions"_a,
             "Step all environments; return how many episodes ended, or STEP_NEEDS_CONVERSION or STEP_NEEDS_RESET.")
        .def(
            "step_stored", [](EnvHost &it) { return it.step_with(nullptr); },
            "Like step(), with the actions that are in the host's array.")
        .def("send", &EnvHost::send, "envs"_a, "Start a step of these environments on background threads.")
        .def("receive", &EnvHost::receive, "min_completed"_a, "timeout"_a.none() = nb::none(),
             "The environments whose step is complete, at least min_completed of them; None after timeout seconds.")
        .def("render", &EnvHost::render, "index"_a, "image"_a,
             "Draw an environment into an array of shape (height, width, 3).")
        .def_prop_ro("threads", &EnvHost::threads, "The number of threads that the next step uses.")
        .def_prop_ro("step_ns", &EnvHost::step_ns, "Measured duration of a step of all environments on one thread, in ns.")
        .def("close", &EnvHost::close, "Stop the background threads and call the environment's close.");
}
