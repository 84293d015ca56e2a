/* Its observation is the last action and the number of steps; it terminates after nine steps. The compiler flags declare
 * the action: -DTYPE=float -DACTION='...'. */
#include "memlane/env.h"

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        double *seen = (double *)envs->observations[0] + 3 * (int64_t)i;
        seen[0] = seen[1] = seen[2] = 0;
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        const TYPE *action = (const TYPE *)envs->actions[0] + 2 * (int64_t)i;
        double *seen = (double *)envs->observations[0] + 3 * (int64_t)i;
        seen[0] = (double)action[0], seen[1] = (double)action[1], seen[2] += 1;
        envs->rewards[i] = seen[0];
        envs->terminated[i] = seen[2] >= 9;
    }
}

static const double least[] = {-1, 2}, most[] = {1, 5};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT64, .num_dims = 1, .shape = {3}, .low = -1e9, .high = 1e9}};
static const memlane_field actions[] = {{ACTION, .num_dims = 1, .shape = {2}, .lows = least, .highs = most}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Echo",
    .observations = observations,
    .actions = actions,
    .num_observations = 1,
    .num_actions = 1,
    .reward_low = -1e9,
    .reward_high = 1e9,
    .reset = reset,
    .step = step,
};
