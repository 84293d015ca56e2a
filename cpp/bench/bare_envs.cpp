// The speed of environments in C without Python and without a host: the limit that benchmarks/native_envs.py prints beside
// memlane's own figures. Each thread steps its share of the environments in its own loop and resets those that have ended;
// threads do not wait for each other.
//
//     bare_envs NAME NUM_ENVS THREADS SECONDS BLOCKS     prints nanoseconds per step of one environment, one line per block

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "envs/host.hpp"

#define ENV(file) extern "C" const memlane_spec memlane_env_##file;
#include "built_in_envs.inc"
#undef ENV

namespace {

using Clock = std::chrono::steady_clock;

const memlane_spec *find(const std::string &name) {
#define ENV(file)                                                                                                           \
    if (name == memlane_env_##file.name)                                                                                    \
        return &memlane_env_##file;
#include "built_in_envs.inc"
#undef ENV
    return nullptr;
}

struct Arrays {
    std::vector<void *> of(const memlane_field *fields, int count, std::size_t rows) {
        std::vector<void *> arrays;
        for (int i = 0; i < count; ++i)
            arrays.push_back(zeros(rows * memlane::row_bytes(fields[i])));
        return arrays;
    }
    void *zeros(std::size_t bytes) {
        void *memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
        std::memset(memory, 0, bytes);
        return memory;
    }
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 6) {
        std::fprintf(stderr, "usage: bare_envs NAME NUM_ENVS THREADS SECONDS BLOCKS\n");
        return 2;
    }
    const memlane_spec *spec = find(argv[1]);
    if (spec == nullptr) {
        std::fprintf(stderr, "unknown environment %s\n", argv[1]);
        return 2;
    }
    const int num_envs = std::atoi(argv[2]), threads = std::atoi(argv[3]), blocks = std::atoi(argv[5]);
    const std::chrono::duration<double> seconds(std::atof(argv[4]));
    Arrays arrays;
    const std::size_t rows = static_cast<std::size_t>(num_envs);
    auto actions = arrays.of(spec->actions, spec->num_actions, rows);
    auto observations = arrays.of(spec->observations, spec->num_observations, rows);
    auto infos = arrays.of(spec->infos, spec->num_infos, rows);
    std::vector<double> settings;
    for (int i = 0; i < spec->num_settings; ++i)
        settings.push_back(spec->settings[i].value);
    std::vector<std::int32_t> steps(rows);
    memlane_envs envs{num_envs,
                      1,
                      arrays.zeros(rows * spec->state_bytes),
                      static_cast<std::uint64_t *>(arrays.zeros(rows * 8)),
                      actions.data(),
                      observations.data(),
                      static_cast<double *>(arrays.zeros(rows * 8)),
                      static_cast<std::uint8_t *>(arrays.zeros(rows)),
                      static_cast<std::uint8_t *>(arrays.zeros(rows)),
                      infos.data(),
                      static_cast<std::uint8_t *>(arrays.zeros(rows)),
                      settings.data(),
                      steps.data()};
    for (std::size_t i = 0; i < rows; ++i)
        envs.random[i] = i * 7919;
    // Random actions, so that episodes end as often as they do with memlane.
    if (spec->actions[0].kind == MEMLANE_DISCRETE)
        for (std::size_t i = 0; i < rows; ++i)
            static_cast<std::int64_t *>(actions[0])[i] = static_cast<std::int64_t>(memlane_random(&envs.random[i]) % 2);
    spec->reset(&envs, 0, num_envs);

    for (int block = 0; block < blocks; ++block) {
        std::atomic<long> done{0};
        const auto begin = Clock::now();
        const auto loop = [&](int first, int last) {
            long steps_done = 0;
            while (Clock::now() - begin < seconds) {
                for (int repeat = 0; repeat < 64; ++repeat) {
                    if (spec->actions[0].kind == MEMLANE_DISCRETE) // vary the actions at almost no cost
                        for (int i = first; i < last; ++i)
                            static_cast<std::int64_t *>(actions[0])[i] ^= (i + repeat) % 3 == 0;
                    spec->step(&envs, first, last);
                    for (int i = first; i < last; ++i) {
                        steps[static_cast<std::size_t>(i)] += 1;
                        if (envs.terminated[i] || steps[static_cast<std::size_t>(i)] == spec->max_episode_steps) {
                            spec->reset(&envs, i, i + 1);
                            steps[static_cast<std::size_t>(i)] = 0;
                            envs.terminated[i] = 0;
                        }
                    }
                }
                steps_done += 64;
            }
            done += steps_done * (last - first);
        };
        std::vector<std::thread> helpers;
        for (int thread = 1; thread < threads; ++thread)
            helpers.emplace_back(loop, num_envs * thread / threads, num_envs * (thread + 1) / threads);
        loop(0, num_envs / threads);
        for (auto &helper : helpers)
            helper.join();
        const std::chrono::duration<double, std::nano> elapsed = Clock::now() - begin;
        std::printf("%.4f\n", elapsed.count() / static_cast<double>(done.load()));
    }
    return 0;
}
