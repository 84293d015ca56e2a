// A host for the environments of tests, over buffers between guard pages.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "envs/host.hpp"
#include "support/processes.hpp"

// Allocations of this process, counted by operator new in host_test.cpp. Not under sanitizers, which replace operator
// new themselves.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define COUNTS_ALLOCATIONS
extern std::atomic<std::int64_t> allocations;
extern std::atomic<std::size_t> largest_allocation;
#endif

// Zeroed memory between two guard pages: it ends at the one behind, or begins after the one in front.
enum class Fence { behind, in_front };

class Fenced {
  public:
    Fenced(std::size_t bytes, Fence fence) : bytes_(bytes) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t room = (bytes + page - 1) / page * page;
        mapped_ = room + 2 * page;
        void *memory = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(), "mmap");
        base_ = static_cast<std::byte *>(memory);
        if (room > 0 && mprotect(base_ + page, room, PROT_READ | PROT_WRITE) != 0)
            throw std::system_error(errno, std::generic_category(), "mprotect");
        data_ = base_ + page + (fence == Fence::behind ? room - bytes : 0);
    }
    ~Fenced() {
        if (base_ != nullptr)
            munmap(base_, mapped_);
    }
    Fenced(Fenced &&other) noexcept
        : base_(std::exchange(other.base_, nullptr)), data_(other.data_), bytes_(other.bytes_), mapped_(other.mapped_) {}
    Fenced &operator=(Fenced &&) = delete;

    template <class T = std::byte> T *as() const { return reinterpret_cast<T *>(data_); }
    std::size_t bytes() const { return bytes_; }

  private:
    std::byte *base_, *data_;
    std::size_t bytes_, mapped_;
};

inline memlane_field field(std::int32_t dtype, std::initializer_list<std::int32_t> shape = {}, const char *name = nullptr) {
    memlane_field field{};
    field.name = name;
    field.dtype = dtype;
    field.num_dims = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), field.shape);
    return field;
}

inline memlane_field choices(double low, double high, std::initializer_list<std::int32_t> shape = {}) {
    memlane_field choice = field(MEMLANE_INT64, shape);
    choice.kind = MEMLANE_DISCRETE;
    choice.low = low, choice.high = high;
    return choice;
}

// A host with its buffers, initialised and reset.
class Hosted {
    std::vector<Fenced> memory_; // before the host, which uses it until its end
    Fence fence_;

  public:
    explicit Hosted(const memlane_spec &spec, std::int32_t num_envs, memlane::Autoreset mode = memlane::Autoreset::next_step,
                    std::int32_t limit = 0, Fence fence = Fence::behind)
        : fence_(fence), host(spec, num_envs, mode, limit, make_buffers(spec, num_envs), settings_of(spec)) {
        for (std::int32_t i = 0; i < num_envs; ++i)
            host.buffers().random[i] = 7919 * static_cast<std::uint64_t>(i) + 1;
        CHECK(host.init() == nullptr);
        host.reset(nullptr);
    }

    memlane::Host host;

    template <class T> T *observations(std::size_t of = 0) const { return at<T>(host.buffers().observations, of); }
    template <class T> T *last_observations(std::size_t of = 0) const {
        return at<T>(host.buffers().final_observations, of);
    }
    template <class T> T *infos(std::size_t of = 0) const { return at<T>(host.buffers().infos, of); }
    template <class T> T *last_infos(std::size_t of = 0) const { return at<T>(host.buffers().final_infos, of); }
    template <class T = std::int64_t> T *actions(std::size_t of = 0) const { return at<T>(host.buffers().actions, of); }

    // Whether all buffers of both are equal, bit by bit.
    bool same_as(const Hosted &other) const {
        if (memory_.size() != other.memory_.size())
            return false;
        for (std::size_t i = 0; i < memory_.size(); ++i)
            if (memory_[i].bytes() != other.memory_[i].bytes() ||
                (memory_[i].bytes() > 0 && std::memcmp(memory_[i].as(), other.memory_[i].as(), memory_[i].bytes()) != 0))
                return false;
        return true;
    }

  private:
    template <class T> static T *at(const std::vector<void *> &arrays, std::size_t of) {
        return static_cast<T *>(arrays.at(of));
    }

    template <class T> T *zeros(std::size_t count, std::size_t each = sizeof(T)) {
        memory_.emplace_back(count * each, fence_);
        return memory_.back().as<T>();
    }

    memlane::HostBuffers make_buffers(const memlane_spec &spec, std::int32_t num_envs) {
        const auto envs = static_cast<std::size_t>(num_envs);
        const std::size_t rows = envs * static_cast<std::size_t>(std::max(spec.num_agents, 1));
        const auto fields = [&](const memlane_field *of, std::int32_t count) {
            std::vector<void *> arrays;
            for (std::int32_t i = 0; i < count; ++i)
                arrays.push_back(zeros<std::byte>(rows, memlane::row_bytes(of[i])));
            return arrays;
        };
        return {zeros<std::byte>(envs, spec.state_bytes),
                zeros<std::uint64_t>(envs),
                zeros<std::int32_t>(envs),
                zeros<std::uint8_t>(envs),
                zeros<double>(rows),
                zeros<std::uint8_t>(rows),
                zeros<std::uint8_t>(rows),
                zeros<std::uint8_t>(rows),
                fields(spec.actions, spec.num_actions),
                fields(spec.observations, spec.num_observations),
                fields(spec.observations, spec.num_observations),
                fields(spec.infos, spec.num_infos),
                fields(spec.infos, spec.num_infos)};
    }

    static std::vector<double> settings_of(const memlane_spec &spec) {
        std::vector<double> values;
        for (std::int32_t i = 0; i < spec.num_settings; ++i)
            values.push_back(spec.settings[i].value);
        return values;
    }
};

// Random actions that the spec allows, for every row.
inline void choose_actions(const Hosted &hosted, Rng &rng) {
    const memlane_spec &spec = hosted.host.spec();
    const std::size_t rows =
        static_cast<std::size_t>(hosted.host.num_envs()) * static_cast<std::size_t>(std::max(spec.num_agents, 1));
    for (std::int32_t f = 0; f < spec.num_actions; ++f) {
        const memlane_field &of = spec.actions[f];
        const auto where = static_cast<std::size_t>(f);
        const std::size_t each = memlane::row_bytes(of) / memlane::item_bytes(of.dtype);
        for (std::size_t i = 0; i < rows * each; ++i) {
            const double low = of.lows ? of.lows[i % each] : of.low, high = of.highs ? of.highs[i % each] : of.high;
            if (of.kind == MEMLANE_DISCRETE)
                hosted.actions(where)[i] = rng.between(static_cast<std::int64_t>(low), static_cast<std::int64_t>(high));
            else // float: the only other type of action in memlane's environments and in these tests
                hosted.actions<float>(where)[i] =
                    static_cast<float>(low + (high - low) * static_cast<double>(rng.between(0, 1000)) / 1000);
        }
    }
}
