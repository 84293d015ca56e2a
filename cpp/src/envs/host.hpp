// Host: runs the environments of a C library (memlane/env.h) over arrays that somebody else owns.
//
// It is the host that counts steps, cuts episodes off at their limit, keeps last observations, resets what has ended and
// looks after agents that have left a game, so that no author of an environment has to.
//
// Who may call: one thread at a time; the host shares out ranges to others by itself (pool.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memlane/env.h"

namespace memlane {

enum class Autoreset : int {
    next_step = 0, // an environment that has ended is reset in the place of its next step
    same_step = 1, // at once; its last observation is kept apart
    disabled = 2,  // by the caller
};

// Where everything lies. `rows` is num_envs * num_agents.
struct HostBuffers {
    std::byte *state;                             // num_envs * state_bytes
    std::uint64_t *random;                        // num_envs
    std::int32_t *steps;                          // num_envs: of the running episode
    std::uint8_t *ended;                          // num_envs: whether the last step ended it
    double *rewards;                              // rows
    std::uint8_t *terminated, *truncated, *alive; // rows
    // One array of rows for each field of the spec.
    std::vector<void *> actions, observations, final_observations, infos, final_infos;
};

class Host {
  public:
    // `spec` and the buffers must outlive the host.
    Host(const memlane_spec &spec, std::int32_t num_envs, Autoreset mode, std::int32_t max_episode_steps,
         HostBuffers buffers, std::vector<double> settings);
    Host(const Host &) = delete;
    Host &operator=(const Host &) = delete;

    // What is wrong, in the environment's words; nullptr if nothing. To be called first, once.
    const char *init();
    // Begins new episodes where `which` is not 0, or everywhere.
    void reset(const std::uint8_t *which);
    // One step of all; how many ended. 0 threads: as many as pay. `actions`: where those of the first field lie this time,
    // if not in the buffers.
    std::int32_t step(int threads, const void *actions = nullptr);
    // One step of a few, on this thread.
    std::int32_t step_range(std::int32_t begin, std::int32_t end);
    void render(std::int32_t index, std::uint8_t *rgb) const { spec_.render(&envs_, index, rgb); }
    void close();

    // How long a step of all would take on one thread, as far as is known; 0 before the first.
    double step_ns() const { return env_ns_ * num_envs_; }
    int threads_that_pay() const;
    const memlane_spec &spec() const { return spec_; }
    Autoreset mode() const { return mode_; }
    std::int32_t num_envs() const { return num_envs_; }
    const HostBuffers &buffers() const { return buffers_; }

  private:
    void begin_episodes(std::int32_t begin, std::int32_t end);
    void step_running(std::int32_t begin, std::int32_t end);
    std::int32_t end_episodes(std::int32_t begin, std::int32_t end);
    bool end_game(std::int32_t index);
    void show_nothing(std::int32_t row);
    void keep_last(std::int32_t index);
    std::int32_t step_measured();
    std::int32_t step_alone();
    std::int32_t step_shared(int threads);

    const memlane_spec &spec_;
    const std::int32_t num_envs_, num_agents_, limit_;
    const Autoreset mode_;
    const int cores_;
    HostBuffers buffers_;
    std::vector<double> settings_;
    std::vector<std::size_t> observation_bytes_, info_bytes_; // of one row
    memlane_envs envs_;
    double env_ns_ = 0;    // a step of one of them, on one thread
    std::int64_t shared_ns_ = 0; // the counted steps on several threads, since they were last judged
    int shared_steps_ = 0;       // and their number, with those that are not counted
    int rest_ = 0;               // so many steps to come are for one thread
    int next_rest_;
};

std::size_t item_bytes(std::int32_t dtype); // 0: there is no such type
std::size_t row_bytes(const memlane_field &field);
// Whether rows of a discrete field are all choices that there are.
bool are_choices(const memlane_field &field, const std::int64_t *numbers, std::size_t rows);

} // namespace memlane
