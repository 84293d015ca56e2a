#include "envs/host.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <sched.h>

#include "os/clock.hpp"
#include "sync/pool.hpp"

namespace memlane {

namespace {

// Work per thread from which another thread makes a step faster: to hand a range to a thread that is awake and to wait for
// its completion costs 1 to 2 us.
constexpr double min_ns_per_thread = 3'000;
// After a trial in which several threads were slower than one (the cores have other work), this many steps use one thread,
// and twice as many after each further failure: beside a busy core a trial can cost more than all the steps in between.
constexpr int min_backoff = 1'000, max_backoff = 64'000;
// A trial has this many measured steps, or a few if several threads are much slower. The warm-up steps are not measured:
// threads have to be woken or started then. The steps are judged by their sum, because now and then one step takes ten times
// as long (a core had gone to sleep): judged by a running mean, 4096 CartPoles stayed on one thread, at two thirds of the
// speed.
constexpr int trial_steps = 256, short_trial_steps = 16, warm_up_steps = 8;
constexpr double much_slower = 4;
// Ranges end at multiples of this, so that two threads do not write to one cache line of flags.
constexpr std::int32_t block = 64;

int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Whether all values are between `low` and `low + range`. Bit 63 of `outside` is set by a value below (its distance from
// `low` wraps around) and by one above. Subtractions, because compilers do not vectorise the comparisons with a bool: 1024
// values take 0.10 us, 0.22 us without AVX2, and took 0.48 us.
MEMLANE_SIMD_FUNCTION bool all_between(const std::int64_t *values, std::size_t count, std::uint64_t low,
                                       std::uint64_t range) {
    std::uint64_t outside = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t distance = static_cast<std::uint64_t>(values[i]) - low;
        outside |= distance | (range - distance);
    }
    return outside >> 63 == 0;
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

bool within_bounds(const memlane_field &field, const std::int64_t *values, std::size_t rows) {
    const std::size_t row_size = row_bytes(field) / sizeof *values;
    if (field.lows == nullptr && field.highs == nullptr) {
        const auto low = static_cast<std::uint64_t>(static_cast<std::int64_t>(field.low));
        const auto high = static_cast<std::uint64_t>(static_cast<std::int64_t>(field.high));
        return all_between(values, rows * row_size, low, high - low);
    }
    bool valid = true;
    for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t i = 0; i < row_size; ++i) {
            const auto value = static_cast<double>(values[row * row_size + i]);
            valid &= value >= (field.lows ? field.lows[i] : field.low);
            valid &= value <= (field.highs ? field.highs[i] : field.high);
        }
    return valid;
}

Host::Host(const memlane_spec &spec, std::int32_t num_envs, Autoreset mode, std::int32_t max_episode_steps,
           HostBuffers buffers, std::vector<double> settings)
    : spec_(spec), num_envs_(num_envs), num_agents_(std::max(spec.num_agents, 1)),
      limit_(max_episode_steps > 0 ? max_episode_steps : std::numeric_limits<std::int32_t>::max()), mode_(mode),
      cores_(cores()), buffers_(std::move(buffers)), settings_(std::move(settings)), next_backoff_(min_backoff) {
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

void Host::reset(const std::uint8_t *mask) {
    const std::size_t agents = static_cast<std::size_t>(num_agents_);
    for (std::int32_t begin = 0; begin < num_envs_;) {
        std::int32_t end = begin;
        while (end < num_envs_ && (mask == nullptr || mask[end]))
            ++end;
        if (begin < end) {
            const std::size_t first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
            std::fill_n(buffers_.rewards + first * agents, count * agents, 0.0);
            std::memset(buffers_.terminated + first * agents, 0, count * agents);
            std::memset(buffers_.truncated + first * agents, 0, count * agents);
            std::memset(buffers_.ended + first, 0, count);
            begin_episodes(begin, end);
        }
        begin = end + 1;
    }
}

void Host::begin_episodes(std::int32_t begin, std::int32_t end) {
    const std::size_t first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
    std::fill_n(buffers_.steps + first, count, 0);
    const std::size_t agents = static_cast<std::size_t>(num_agents_);
    std::memset(buffers_.alive + first * agents, 1, count * agents);
    spec_.reset(&envs_, begin, end);
    if (num_agents_ > 1)
        for (std::int32_t row = begin * num_agents_; row < end * num_agents_; ++row)
            if (!buffers_.alive[row])
                clear_observations(row);
}

// The observation of an agent that is not in the game is zeros.
void Host::clear_observations(std::int32_t row) {
    for (std::size_t field = 0; field < observation_bytes_.size(); ++field)
        std::memset(static_cast<std::byte *>(buffers_.observations[field]) +
                        static_cast<std::size_t>(row) * observation_bytes_[field],
                    0, observation_bytes_[field]);
}

int Host::auto_threads() const {
    if (backoff_ > 0)
        return 1;
    const int useful = static_cast<int>(std::min<double>(step_ns() / min_ns_per_thread, num_envs_ / block));
    return std::clamp(useful, 1, cores_);
}

std::int32_t Host::step(int threads, const void *actions) {
    void *const own = buffers_.actions[0];
    if (actions != nullptr)
        buffers_.actions[0] = const_cast<void *>(actions); // memlane_envs has it as const
    const std::int32_t ended = threads <= 0   ? step_auto()
                               : threads == 1 ? step_single_threaded()
                                              : step_multi_threaded(threads);
    buffers_.actions[0] = own;
    return ended;
}

std::int32_t Host::step_auto() {
    const int threads = auto_threads();
    if (threads == 1) {
        backoff_ = std::max(backoff_ - 1, 0);
        return step_single_threaded();
    }
    const std::int64_t begin_ns = now_ns();
    const std::int32_t ended = step_multi_threaded(threads);
    if (++trial_steps_ <= warm_up_steps)
        return ended;
    trial_ns_ += now_ns() - begin_ns;
    const int measured = trial_steps_ - warm_up_steps;
    const double slowdown = static_cast<double>(trial_ns_) / (measured * step_ns());
    if (measured < (slowdown > much_slower ? short_trial_steps : trial_steps))
        return ended;
    if (slowdown > 1) {
        backoff_ = next_backoff_;
        next_backoff_ = std::min(2 * next_backoff_, max_backoff);
        trial_steps_ = 0;
    } else {
        next_backoff_ = std::max(next_backoff_ / 2, min_backoff);
        trial_steps_ = warm_up_steps; // the threads are awake
    }
    trial_ns_ = 0;
    return ended;
}

std::int32_t Host::step_single_threaded() {
    const std::int64_t begin_ns = now_ns();
    const std::int32_t ended = step_range(0, num_envs_);
    env_ns_ = update_mean(env_ns_, static_cast<double>(now_ns() - begin_ns) / num_envs_);
    return ended;
}

std::int32_t Host::step_multi_threaded(int threads) {
    const std::size_t blocks = static_cast<std::size_t>((num_envs_ + block - 1) / block);
    // What the other threads read is the same in each step, so that it stays in their caches (run_in_parts).
    const std::uint32_t ended = run_in_parts(
        blocks, threads,
        [](void *host, std::size_t first, std::size_t last) {
            return static_cast<std::uint32_t>(static_cast<Host *>(host)->step_blocks(first, last));
        },
        this);
    env_ns_ = update_mean(env_ns_, last_range_ns_);
    return static_cast<std::int32_t>(ended);
}

std::int32_t Host::step_blocks(std::size_t first, std::size_t last) {
    const std::int32_t begin = static_cast<std::int32_t>(first) * block;
    const std::int32_t end = std::min(static_cast<std::int32_t>(last) * block, num_envs_);
    if (end < num_envs_)
        return step_range(begin, end);
    const std::int64_t begin_ns = now_ns(); // the last range: the calling thread runs it
    const std::int32_t ended = step_range(begin, end);
    last_range_ns_ = static_cast<double>(now_ns() - begin_ns) / (end - begin);
    return ended;
}

std::int32_t Host::step_range(std::int32_t begin, std::int32_t end) {
    const std::size_t first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
    const std::size_t agents = static_cast<std::size_t>(num_agents_);
    std::fill_n(buffers_.rewards + first * agents, count * agents, 0.0);
    std::memset(buffers_.terminated + first * agents, 0, count * agents);
    std::memset(buffers_.truncated + first * agents, 0, count * agents);
    if (mode_ == Autoreset::next_step && std::memchr(buffers_.ended + first, 1, count) != nullptr)
        step_or_reset(begin, end);
    else
        spec_.step(&envs_, begin, end);
    return end_episodes(begin, end);
}

// Steps the environments in the range whose episode has not ended, and resets the others.
void Host::step_or_reset(std::int32_t begin, std::int32_t end) {
    const std::uint8_t *ended = buffers_.ended;
    if (spec_.steps_past_end)
        spec_.step(&envs_, begin, end);
    std::int32_t run = begin;
    for (;;) {
        const void *first_ended = std::memchr(ended + run, 1, static_cast<std::size_t>(end - run));
        const std::int32_t next =
            first_ended == nullptr ? end : static_cast<std::int32_t>(static_cast<const std::uint8_t *>(first_ended) - ended);
        if (!spec_.steps_past_end && run < next)
            spec_.step(&envs_, run, next);
        if (next == end)
            return;
        for (std::int32_t row = next * num_agents_; row < (next + 1) * num_agents_; ++row) {
            buffers_.rewards[row] = 0;
            buffers_.terminated[row] = buffers_.truncated[row] = 0;
        }
        begin_episodes(next, next + 1);
        buffers_.steps[next] = -1; // end_episodes increments it to 0
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
            terminated[i] = terminated[i] != 0; // Python shows them as bool, which must be 0 or 1
            truncated[i] = (truncated[i] != 0) | (steps[i] >= limit_);
            ended[i] = terminated[i] | truncated[i];
            count += ended[i];
        }
    } else {
        for (std::int32_t i = begin; i < end; ++i) {
            buffers_.steps[i] += 1;
            buffers_.ended[i] = end_agents(i);
            count += buffers_.ended[i];
        }
    }
    if (mode_ == Autoreset::same_step && count > 0)
        for (std::int32_t i = begin; i < end; ++i)
            if (buffers_.ended[i]) {
                save_final(i);
                begin_episodes(i, i + 1);
            }
    return count;
}

// Removes agents whose episode has ended; an agent that has left has zeros as observation and reward. Returns whether no
// agent is left.
bool Host::end_agents(std::int32_t env) {
    const std::int32_t first = env * num_agents_, last = first + num_agents_;
    bool over = true;
    for (std::int32_t row = first; row < last; ++row) {
        if (!buffers_.alive[row]) {
            buffers_.rewards[row] = 0;
            buffers_.terminated[row] = buffers_.truncated[row] = 0;
            clear_observations(row);
            continue;
        }
        buffers_.terminated[row] = buffers_.terminated[row] != 0;
        buffers_.truncated[row] =
            buffers_.truncated[row] != 0 || (buffers_.steps[env] >= limit_ && !buffers_.terminated[row]);
        buffers_.alive[row] = !(buffers_.terminated[row] | buffers_.truncated[row]);
        over = over && !buffers_.alive[row];
    }
    return over;
}

void Host::save_final(std::int32_t env) {
    const auto copy = [&](const std::vector<void *> &from, const std::vector<void *> &to,
                          const std::vector<std::size_t> &row_bytes) {
        for (std::size_t field = 0; field < row_bytes.size(); ++field) {
            const std::size_t bytes = row_bytes[field] * static_cast<std::size_t>(num_agents_);
            const std::size_t offset = bytes * static_cast<std::size_t>(env);
            std::memcpy(static_cast<std::byte *>(to[field]) + offset, static_cast<const std::byte *>(from[field]) + offset,
                        bytes);
        }
    };
    copy(buffers_.observations, buffers_.final_observations, observation_bytes_);
    copy(buffers_.infos, buffers_.final_infos, info_bytes_);
}

} // namespace memlane
