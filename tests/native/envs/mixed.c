/* Everything that an environment may declare: several observations, actions and infos, settings, an error of `init`, a
 * visible effect of `close`, an image. */
#include <string.h>

#include "memlane/env.h"

typedef struct {
    double x, y;
    int64_t count;
} place;

static place *place_of(const memlane_envs *envs, int32_t i) { return (place *)envs->state + i; }

static void show(const memlane_envs *envs, int32_t i) {
    const place *here = place_of(envs, i);
    float *position = (float *)envs->observations[0] + 2 * (int64_t)i;
    position[0] = (float)here->x, position[1] = (float)here->y;
    ((int64_t *)envs->observations[1])[i] = here->count % 50;
    uint8_t *patch = (uint8_t *)envs->observations[2] + 6 * (int64_t)i;
    for (int k = 0; k < 6; ++k)
        patch[k] = (uint8_t)(here->count * 7 + k);
    ((double *)envs->infos[0])[i] = here->x * here->x + here->y * here->y;
    float *corner = (float *)envs->infos[1] + 2 * (int64_t)i;
    corner[0] = position[0] - 1, corner[1] = position[1] + 1;
}

static const char *init(const memlane_envs *envs, int32_t begin, int32_t end) {
    (void)begin, (void)end;
    return envs->settings[0] == 13 ? "a gravity of 13 brings bad luck" : 0;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        place *here = place_of(envs, i);
        here->x = memlane_uniform(&envs->random[i], -1, 1);
        here->y = memlane_uniform(&envs->random[i], -1, 1);
        here->count = memlane_choice(&envs->random[i], 50);
        show(envs, i);
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        place *here = place_of(envs, i);
        const float *push = (const float *)envs->actions[0] + 2 * (int64_t)i;
        const int64_t *levers = (const int64_t *)envs->actions[1] + 2 * (int64_t)i;
        const int64_t gear = ((const int64_t *)envs->actions[2])[i];
        here->x += 0.01 * push[0] * (double)gear;
        here->y += 0.01 * push[1] - 0.001 * envs->settings[0];
        here->count += levers[0] - levers[1];
        if (here->count < 0)
            here->count += 50;
        envs->rewards[i] = push[0] + (double)levers[0] * 10 + (double)levers[1] * 100 + (double)gear * 1000;
        envs->terminated[i] = memlane_uniform(&envs->random[i], 0, 1) < envs->settings[1] ? 3 : 0; /* any value but 0 is true */
        show(envs, i);
    }
}

static void close(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i)
        place_of(envs, i)->count += 1000; /* a second call would be visible */
}

static void render(const memlane_envs *envs, int32_t index, uint8_t *rgb) {
    memset(rgb, (int)place_of(envs, index)->count, 4 * 3 * 3);
    rgb[0] = (uint8_t)index;
}

static const double least[] = {0, -1}, most[] = {2, 1};
static const memlane_field observations[] = {
    {.name = "position", .dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .low = -1e9, .high = 1e9},
    {.name = "count", .dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 49},
    {.name = "a patch", .dtype = MEMLANE_UINT8, .num_dims = 2, .shape = {2, 3}, .low = 0, .high = 255},
};
static const memlane_field actions[] = {
    {.name = "push", .dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .low = -1, .high = 1},
    {.name = "levers", .dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .num_dims = 1, .shape = {2}, .lows = least, .highs = most},
    {.name = "gear", .dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 1, .high = 5},
};
static const memlane_field infos[] = {
    {.name = "energy", .dtype = MEMLANE_FLOAT64},
    {.name = "corner", .dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}},
};
static const memlane_setting settings[] = {
    {.name = "gravity", .value = 9.8, .low = 0, .high = 20},
    {.name = "luck", .value = 0.05, .low = 0, .high = 1},
};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Mixed",
    .observations = observations,
    .actions = actions,
    .infos = infos,
    .settings = settings,
    .num_observations = MEMLANE_COUNT(observations),
    .num_actions = MEMLANE_COUNT(actions),
    .num_infos = MEMLANE_COUNT(infos),
    .num_settings = MEMLANE_COUNT(settings),
    .max_episode_steps = 15,
    .state_bytes = sizeof(place),
    .reward_low = -200,
    .reward_high = 6000,
    .render_width = 4,
    .render_height = 3,
    .init = init,
    .reset = reset,
    .step = step,
    .close = close,
    .render = render,
};
