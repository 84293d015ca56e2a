/* Three agents per game: agent `a` leaves after a random number of steps, the second by truncation; the game is over when all
 * have left. */
#include "memlane/env.h"

typedef struct {
    int32_t leaves[3];
} plan;

static void show(const memlane_envs *envs, int32_t i, int32_t steps) {
    for (int32_t a = 0; a < 3; ++a) {
        const int64_t row = 3 * (int64_t)i + a;
        float *seen = (float *)envs->observations[0] + 2 * row;
        seen[0] = (float)steps, seen[1] = (float)a + 1;
        ((int64_t *)envs->infos[0])[row] = 100 * a + steps;
    }
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        for (int32_t a = 0; a < 3; ++a)
            ((plan *)envs->state)[i].leaves[a] = 2 + memlane_choice(&envs->random[i], 6);
        show(envs, i, 0);
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        const int32_t steps = envs->steps[i] + 1;
        for (int32_t a = 0; a < 3; ++a) {
            const int32_t row = 3 * i + a;
            envs->rewards[row] = (double)(((const int64_t *)envs->actions[0])[row] + 1);
            if (steps >= ((plan *)envs->state)[i].leaves[a])
                (a == 1 ? envs->truncated : envs->terminated)[row] = 1;
        }
        show(envs, i, steps);
    }
}

static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .low = 0, .high = 1000}};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 9}};
static const memlane_field infos[] = {{.name = "seat", .dtype = MEMLANE_INT64, .low = 0, .high = 1000}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Team",
    .observations = observations,
    .actions = actions,
    .infos = infos,
    .num_observations = 1,
    .num_actions = 1,
    .num_infos = 1,
    .num_agents = 3,
    .state_bytes = sizeof(plan),
    .reward_low = 0,
    .reward_high = 10,
    .reset = reset,
    .step = step,
};
