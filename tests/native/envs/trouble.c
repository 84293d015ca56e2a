/* Counts its steps. Action 1 takes as long as the setting `seconds` says, action 2 crashes the process. */
#define _POSIX_C_SOURCE 199309L
#include <time.h>

#include "memlane/env.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i)
        ((int64_t *)envs->observations[0])[i] = 0;
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        const int64_t action = ((const int64_t *)envs->actions[0])[i];
        if (action == 1)
            for (const double until = now() + envs->settings[0]; now() < until;)
                ;
        if (action == 2)
            *(volatile int *)0 = 0;
        ((int64_t *)envs->observations[0])[i] += 1;
        envs->rewards[i] = (double)action;
        ((int64_t *)envs->infos[0])[i] = 10 * i + action;
        envs->terminated[i] = action == 3;
    }
}

static const memlane_field observations[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 1e6}};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 3}};
static const memlane_field infos[] = {{.name = "number", .dtype = MEMLANE_INT64}};
static const memlane_setting settings[] = {{.name = "seconds", .value = 0.3, .low = 0, .high = 60}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Trouble",
    .observations = observations,
    .actions = actions,
    .infos = infos,
    .settings = settings,
    .num_observations = 1,
    .num_actions = 1,
    .num_infos = 1,
    .num_settings = 1,
    .reward_low = 0,
    .reward_high = 3,
    .reset = reset,
    .step = step,
};
