// Host: runs the environments of a C library (memlane/env.h) on arrays that the caller owns.
//
// The host counts steps, truncates episodes at their limit, saves final observations, resets environments whose episode
// has ended, and handles agents that have left a game, so that authors of environments do not have to.
//
// Who may call: one thread at a time; the host distributes ranges to other threads by itself (pool.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memlane/env.h"

namespace memlane {

enum class Autoreset : int {
    next_step = 0, // an environment whose episode has ended is reset instead of its next step
    same_step = 1, // it is reset in the same step; its final observation is saved in a separate array
    disabled = 2,  // the caller resets it
};

// The arrays of the caller. `rows` is num_envs * num_agents.
struct HostBuffers {
    std::byte *state;                             // num_envs * state_bytes
    std::uint64_t *random;                        // num_envs
    std::int32_t *steps;                          // num_envs: steps of the current episode
    std::uint8_t *ended;                          // num_envs: whether the last step ended the episode
    double *rewards;                              // rows
    std::uint8_t *terminated, *truncated, *alive; // rows
    // One array of rows per field of the spec.
    std::vector<void *> actions, observations, final_observations, infos, final_infos;
};

class Host {
  public:
    // `spec` and the buffers must outlive the host.
    Host(const memlane_spec &spec, std::int32_t num_envs, Autoreset mode, std::int32_t max_episode_steps,
         HostBuffers buffers, std::vector<double> settings);
    Host(const Host &) = delete;
    Host &operator=(const Host &) = delete;

    // Calls the environment's init: its error message, or nullptr. Must be called once, before all other functions.
    const char *init();
    // Starts new episodes where `mask` is not 0, or everywhere if it is nullptr.
    void reset(const std::uint8_t *mask);
    // Steps all environments; returns how many episodes ended. `threads` 0: chosen from the measured duration of a step.
    // `actions`: the array of the first action field for this step, instead of the one in the buffers.
    std::int32_t step(int threads, const void *actions = nullptr);
    // Steps the environments begin to end - 1 on this thread; returns how many episodes ended.
    std::int32_t step_range(std::int32_t begin, std::int32_t end);
    void render(std::int32_t index, std::uint8_t *rgb) const { spec_.render(&envs_, index, rgb); }
    void close();

    // Measured duration of a step of all environments on one thread; 0 before the first step.
    double step_ns() const { return env_ns_ * num_envs_; }
    // The number of threads that step(0) uses now.
    int auto_threads() const;
    const memlane_spec &spec() const { return spec_; }
    Autoreset mode() const { return mode_; }
    std::int32_t num_envs() const { return num_envs_; }
    const HostBuffers &buffers() const { return buffers_; }

  private:
    void begin_episodes(std::int32_t begin, std::int32_t end);
    void step_or_reset(std::int32_t begin, std::int32_t end);
    std::int32_t end_episodes(std::int32_t begin, std::int32_t end);
    bool end_agents(std::int32_t env);
    void clear_observations(std::int32_t row);
    void save_final(std::int32_t env);
    std::int32_t step_auto();
    std::int32_t step_single_threaded();
    std::int32_t step_multi_threaded(int threads);
    std::int32_t step_blocks(std::size_t first, std::size_t last);

    const memlane_spec &spec_;
    const std::int32_t num_envs_, num_agents_, limit_;
    const Autoreset mode_;
    const int cores_;
    HostBuffers buffers_;
    std::vector<double> settings_;
    std::vector<std::size_t> observation_bytes_, info_bytes_; // bytes of one row of each field
    memlane_envs envs_;
    // From here on the calling thread writes in each step. The other threads read what is above: on other cache lines.
    alignas(64) double env_ns_ = 0; // running mean of the duration of one environment's step on one thread
    double last_range_ns_ = 0;      // the same in the last range of the last step that used several threads
    // The current trial of several threads:
    std::int64_t trial_ns_ = 0; // duration of its measured steps
    int trial_steps_ = 0;       // number of its steps, with the warm-up steps
    int backoff_ = 0;           // number of steps left that use one thread, after a failed trial
    int next_backoff_;
};

// An exponential running mean; 0: no value yet.
inline double update_mean(double mean, double value) { return mean == 0 ? value : mean + 0.125 * (value - mean); }

std::size_t item_bytes(std::int32_t dtype); // 0: unknown dtype
std::size_t row_bytes(const memlane_field &field);
// Whether all values in rows of a discrete field are within its bounds.
bool within_bounds(const memlane_field &field, const std::int64_t *values, std::size_t rows);

} // namespace memlane
