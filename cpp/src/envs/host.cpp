#include "envs/host.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include <sched.h>

#include "os/clock.hpp"
#include "sync/pool.hpp"

namespace memlane {

namespace {

// A thread more pays when each has at least so much to do: to hand one a range and to hear that it is done costs 1 to 2 us
// while it is awake.
constexpr double worth_a_thread_ns = 3'000;
// Threads that make steps slower than one alone would (the cores have other work) are left alone for so many steps, and
// twice as many each time that they do it again: beside a busy core a trial can cost more than all the steps in between.
constexpr int steps_of_rest = 1'000, most_rest = 64'000;
// They are judged by so many steps together, or by a few if it is very bad; the first are not counted, because threads have
// to be woken then, or even made. Together, because now and then one step takes ten times as long (a core had gone to sleep):
// by a running mean, 4096 CartPoles were left to one thread, at two thirds of the speed.
constexpr int steps_of_trial = 256, bad_after = 16, not_counted = 8;
constexpr double very_bad = 4;
// Ranges end at multiples of this, so that two threads do not write to one cache line of flags.
constexpr std::int32_t block = 64;
// Of a new measurement in the running mean.
constexpr double weight_of_new = 0.125;

double mean(double before, double now) { return before == 0 ? now : before + weight_of_new * (now - before); }

int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

} // namespace

std::size_t item_bytes(std::int32_t dtype) {
    switch (dtype) {
    case MEMLANE_BOOL:
    case MEMLANE_INT8:
    case MEMLANE_UINT8:
        return 1;
    case MEMLANE_INT16:
    case MEMLANE_UINT16:
        return 2;
    case MEMLANE_FLOAT32:
    case MEMLANE_INT32:
    case MEMLANE_UINT32:
        return 4;
    case MEMLANE_FLOAT64:
    case MEMLANE_INT64:
    case MEMLANE_UINT64:
        return 8;
    }
    return 0;
}

std::size_t row_bytes(const memlane_field &field) {
    std::size_t bytes = item_bytes(field.dtype);
    for (std::int32_t dim = 0; dim < field.num_dims; ++dim)
        bytes *= static_cast<std::size_t>(field.shape[dim]);
    return bytes;
}

bool are_choices(const memlane_field &field, const std::int64_t *numbers, std::size_t rows) {
    const std::size_t each = row_bytes(field) / sizeof *numbers;
    bool good = true; // without branches: a thousand take 0.2 us
    if (field.lows == nullptr && field.highs == nullptr) {
        const auto low = static_cast<std::int64_t>(field.low), high = static_cast<std::int64_t>(field.high);
        for (std::size_t i = 0; i < rows * each; ++i)
            good &= (numbers[i] >= low) & (numbers[i] <= high);
        return good;
    }
    for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t i = 0; i < each; ++i) {
            const auto number = static_cast<double>(numbers[row * each + i]);
            good &= number >= (field.lows ? field.lows[i] : field.low);
            good &= number <= (field.highs ? field.highs[i] : field.high);
        }
    return good;
}

Host::Host(const memlane_spec &spec, std::int32_t num_envs, Autoreset mode, std::int32_t max_episode_steps,
           HostBuffers buffers, std::vector<double> settings)
    : spec_(spec), num_envs_(num_envs), num_agents_(std::max(spec.num_agents, 1)),
      limit_(max_episode_steps > 0 ? max_episode_steps : std::numeric_limits<std::int32_t>::max()), mode_(mode), cores_(cores()),
      buffers_(std::move(buffers)), settings_(std::move(settings)), next_rest_(steps_of_rest) {
    for (std::int32_t i = 0; i < spec.num_observations; ++i)
        observation_bytes_.push_back(row_bytes(spec.observations[i]));
    for (std::int32_t i = 0; i < spec.num_infos; ++i)
        info_bytes_.push_back(row_bytes(spec.infos[i]));
    envs_ = {num_envs_,
             num_agents_,
             buffers_.state,
             buffers_.random,
             buffers_.actions.data(),
             buffers_.observations.data(),
             buffers_.rewards,
             buffers_.terminated,
             buffers_.truncated,
             buffers_.infos.data(),
             buffers_.alive,
             settings_.data(),
             buffers_.steps};
}

const char *Host::init() { return spec_.init == nullptr ? nullptr : spec_.init(&envs_, 0, num_envs_); }

void Host::close() {
    if (spec_.close != nullptr)
        spec_.close(&envs_, 0, num_envs_);
}

void Host::reset(const std::uint8_t *which) {
    const std::size_t agents = static_cast<std::size_t>(num_agents_);
    for (std::int32_t begin = 0; begin < num_envs_;) {
        std::int32_t end = begin;
        while (end < num_envs_ && (which == nullptr || which[end]))
            ++end;
        if (begin < end) {
            const std::size_t first = static_cast<std::size_t>(begin), many = static_cast<std::size_t>(end - begin);
            std::fill_n(buffers_.rewards + first * agents, many * agents, 0.0);
            std::memset(buffers_.terminated + first * agents, 0, many * agents);
            std::memset(buffers_.truncated + first * agents, 0, many * agents);
            std::memset(buffers_.ended + first, 0, many);
            begin_episodes(begin, end);
        }
        begin = end + 1;
    }
}

void Host::begin_episodes(std::int32_t begin, std::int32_t end) {
    const std::size_t first = static_cast<std::size_t>(begin), many = static_cast<std::size_t>(end - begin);
    std::fill_n(buffers_.steps + first, many, 0);
    std::memset(buffers_.alive + first * static_cast<std::size_t>(num_agents_), 1, many * static_cast<std::size_t>(num_agents_));
    spec_.reset(&envs_, begin, end);
    if (num_agents_ > 1)
        for (std::int32_t row = begin * num_agents_; row < end * num_agents_; ++row)
            if (!buffers_.alive[row])
                show_nothing(row);
}

// Who is not in the game sees zeros.
void Host::show_nothing(std::int32_t row) {
    for (std::size_t field = 0; field < observation_bytes_.size(); ++field)
        std::memset(static_cast<std::byte *>(buffers_.observations[field]) +
                        static_cast<std::size_t>(row) * observation_bytes_[field],
                    0, observation_bytes_[field]);
}

int Host::threads_that_pay() const {
    if (rest_ > 0)
        return 1;
    const int most = static_cast<int>(std::min<double>(step_ns() / worth_a_thread_ns, num_envs_ / block));
    return std::clamp(most, 1, cores_);
}

std::int32_t Host::step(int threads, const void *actions) {
    void *const own = buffers_.actions[0];
    if (actions != nullptr)
        buffers_.actions[0] = const_cast<void *>(actions); // environments get it as const
    const std::int32_t ended =
        threads <= 0 ? step_measured() : threads == 1 ? step_alone() : step_shared(threads);
    buffers_.actions[0] = own;
    return ended;
}

std::int32_t Host::step_measured() {
    const int threads = threads_that_pay();
    if (threads == 1) {
        rest_ = std::max(rest_ - 1, 0);
        return step_alone();
    }
    const std::int64_t begin_ns = now_ns();
    const std::int32_t ended = step_shared(threads);
    if (++shared_steps_ <= not_counted)
        return ended;
    shared_ns_ += now_ns() - begin_ns;
    const int counted = shared_steps_ - not_counted;
    const double slowness = static_cast<double>(shared_ns_) / (counted * step_ns());
    if (counted < (slowness > very_bad ? bad_after : steps_of_trial))
        return ended;
    if (slowness > 1) {
        rest_ = next_rest_;
        next_rest_ = std::min(2 * next_rest_, most_rest);
        shared_steps_ = 0;
    } else {
        next_rest_ = std::max(next_rest_ / 2, steps_of_rest);
        shared_steps_ = not_counted; // they are awake
    }
    shared_ns_ = 0;
    return ended;
}

std::int32_t Host::step_alone() {
    const std::int64_t begin_ns = now_ns();
    const std::int32_t ended = step_range(0, num_envs_);
    env_ns_ = mean(env_ns_, static_cast<double>(now_ns() - begin_ns) / num_envs_);
    return ended;
}

std::int32_t Host::step_shared(int threads) {
    struct Shared {
        Host &host;
        std::atomic<std::int32_t> ended{0};
        std::int64_t ns = 0; // of the first range, which is the caller's
        std::int32_t envs = 0;
    } shared{*this};
    const std::size_t blocks = static_cast<std::size_t>((num_envs_ + block - 1) / block);
    run_in_parts(blocks, threads, [&shared](std::size_t first, std::size_t last) {
        const std::int32_t begin = static_cast<std::int32_t>(first) * block;
        const std::int32_t end = std::min(static_cast<std::int32_t>(last) * block, shared.host.num_envs_);
        const std::int64_t begun = begin == 0 ? now_ns() : 0;
        // relaxed: run_in_parts orders all of it before its return (PAIR publish/see)
        shared.ended.fetch_add(shared.host.step_range(begin, end), std::memory_order_relaxed);
        if (begin == 0) {
            shared.ns = now_ns() - begun;
            shared.envs = end;
        }
    });
    env_ns_ = mean(env_ns_, static_cast<double>(shared.ns) / shared.envs);
    return shared.ended.load(std::memory_order_relaxed);
}

std::int32_t Host::step_range(std::int32_t begin, std::int32_t end) {
    const std::size_t first = static_cast<std::size_t>(begin), many = static_cast<std::size_t>(end - begin);
    const std::size_t agents = static_cast<std::size_t>(num_agents_);
    std::fill_n(buffers_.rewards + first * agents, many * agents, 0.0);
    std::memset(buffers_.terminated + first * agents, 0, many * agents);
    std::memset(buffers_.truncated + first * agents, 0, many * agents);
    if (mode_ == Autoreset::next_step && std::memchr(buffers_.ended + first, 1, many) != nullptr)
        step_running(begin, end);
    else
        spec_.step(&envs_, begin, end);
    return end_episodes(begin, end);
}

// Of those in the range that have not ended; the others are reset.
void Host::step_running(std::int32_t begin, std::int32_t end) {
    const std::uint8_t *ended = buffers_.ended;
    if (spec_.steps_past_end)
        spec_.step(&envs_, begin, end);
    std::int32_t run = begin;
    for (;;) {
        const void *found = std::memchr(ended + run, 1, static_cast<std::size_t>(end - run));
        const std::int32_t next =
            found == nullptr ? end : static_cast<std::int32_t>(static_cast<const std::uint8_t *>(found) - ended);
        if (!spec_.steps_past_end && run < next)
            spec_.step(&envs_, run, next);
        if (next == end)
            return;
        for (std::int32_t row = next * num_agents_; row < (next + 1) * num_agents_; ++row) {
            buffers_.rewards[row] = 0;
            buffers_.terminated[row] = buffers_.truncated[row] = 0;
        }
        begin_episodes(next, next + 1);
        buffers_.steps[next] = -1; // the count that follows makes it 0
        run = next + 1;
        if (run == end)
            return;
    }
}

std::int32_t Host::end_episodes(std::int32_t begin, std::int32_t end) {
    std::int32_t count = 0;
    if (num_agents_ == 1) {
        std::int32_t *steps = buffers_.steps;
        std::uint8_t *truncated = buffers_.truncated, *ended = buffers_.ended;
        std::uint8_t *terminated = buffers_.terminated;
        for (std::int32_t i = begin; i < end; ++i) {
            steps[i] += 1;
            terminated[i] = terminated[i] != 0; // Python shows them as bool, which knows only 0 and 1
            truncated[i] = (truncated[i] != 0) | (steps[i] >= limit_);
            ended[i] = terminated[i] | truncated[i];
            count += ended[i];
        }
    } else {
        for (std::int32_t i = begin; i < end; ++i) {
            buffers_.steps[i] += 1;
            buffers_.ended[i] = end_game(i);
            count += buffers_.ended[i];
        }
    }
    if (mode_ == Autoreset::same_step && count > 0)
        for (std::int32_t i = begin; i < end; ++i)
            if (buffers_.ended[i]) {
                keep_last(i);
                begin_episodes(i, i + 1);
            }
    return count;
}

// Agents leave a game when they end; who has left sees and gets nothing. Over when nobody is left.
bool Host::end_game(std::int32_t index) {
    const std::int32_t first = index * num_agents_, last = first + num_agents_;
    bool over = true;
    for (std::int32_t row = first; row < last; ++row) {
        if (!buffers_.alive[row]) {
            buffers_.rewards[row] = 0;
            buffers_.terminated[row] = buffers_.truncated[row] = 0;
            show_nothing(row);
            continue;
        }
        buffers_.terminated[row] = buffers_.terminated[row] != 0;
        buffers_.truncated[row] =
            buffers_.truncated[row] != 0 || (buffers_.steps[index] >= limit_ && !buffers_.terminated[row]);
        buffers_.alive[row] = !(buffers_.terminated[row] | buffers_.truncated[row]);
        over = over && !buffers_.alive[row];
    }
    return over;
}

void Host::keep_last(std::int32_t index) {
    const auto keep = [&](const std::vector<void *> &from, const std::vector<void *> &to,
                          const std::vector<std::size_t> &bytes) {
        for (std::size_t field = 0; field < bytes.size(); ++field) {
            const std::size_t game = bytes[field] * static_cast<std::size_t>(num_agents_);
            const std::size_t at = game * static_cast<std::size_t>(index);
            std::memcpy(static_cast<std::byte *>(to[field]) + at, static_cast<const std::byte *>(from[field]) + at, game);
        }
    };
    keep(buffers_.observations, buffers_.final_observations, observation_bytes_);
    keep(buffers_.infos, buffers_.final_infos, info_bytes_);
}

} // namespace memlane
