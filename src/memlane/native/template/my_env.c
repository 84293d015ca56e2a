/* my_env: catch falling fruit with a basket that moves left and right.
 *
 * Catching a fruit gives a reward of 1, and the next one falls. A fruit that hits the ground ends the episode. This is
 * a template: change the rules, then run `memlane build my_env.c`. The interface is documented in the header
 * memlane/env.h, and in docs/native-envs.md of memlane's repository.
 */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"

#define BASKET_SPEED 0.08 /* per step; x reaches from -1 to 1 */
#define HALF_BASKET 0.15
#define IMAGE_SIZE 300 /* pixels */

enum { FALL, WIND }; /* indices of the settings in the table below */

/* The state of one environment. The host allocates the states of all environments: do not use global variables. */
typedef struct game {
    double basket;           /* x of its centre */
    double fruit_x, fruit_y; /* y is 1 at the top and 0 at the ground */
    double drift;            /* change of fruit_x per step, caused by the wind */
} game;

static void drop_fruit(game *g, const memlane_envs *envs, int32_t i) {
    const double wind = envs->settings[WIND];
    g->fruit_x = memlane_uniform(&envs->random[i], -1, 1); /* the only source of random numbers */
    g->fruit_y = 1;
    g->drift = memlane_uniform(&envs->random[i], -wind, wind);
}

static void observe(const game *g, const memlane_envs *envs, int32_t i) {
    float *observation = (float *)envs->observations[0] + 4 * (int64_t)i; /* row i of the array in Python */
    observation[0] = (float)g->basket;
    observation[1] = (float)g->fruit_x;
    observation[2] = (float)g->fruit_y;
    observation[3] = (float)g->drift;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        game *g = (game *)envs->state + i;
        g->basket = memlane_uniform(&envs->random[i], -1, 1);
        drop_fruit(g, envs, i);
        observe(g, envs, i);
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    const int64_t *actions = envs->actions[0];
    for (int32_t i = begin; i < end; ++i) {
        game *g = (game *)envs->state + i;
        g->basket += (double)(actions[i] - 1) * BASKET_SPEED; /* 0 is left, 1 is stay, 2 is right */
        g->basket = fmin(fmax(g->basket, -1), 1);
        g->fruit_x += g->drift;
        if (fabs(g->fruit_x) > 1) { /* it bounces off the wall */
            g->fruit_x = copysign(2, g->fruit_x) - g->fruit_x;
            g->drift = -g->drift;
        }
        g->fruit_y -= envs->settings[FALL];
        if (g->fruit_y <= 0) {
            g->fruit_y = 0;
            if (fabs(g->fruit_x - g->basket) <= HALF_BASKET) {
                envs->rewards[i] = 1; /* rewards, terminated and truncated are 0 before each step */
                drop_fruit(g, envs, i);
            } else {
                envs->terminated[i] = 1; /* the host resets the environment */
            }
        }
        observe(g, envs, i);
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    const game *g = (const game *)envs->state + i;
    const memlane_canvas canvas = {rgb, IMAGE_SIZE, IMAGE_SIZE};
    const double half = IMAGE_SIZE / 2.0;
    const double left = half + (g->basket - HALF_BASKET) * half, right = half + (g->basket + HALF_BASKET) * half;
    memlane_fill(canvas, 235, 245, 255);
    memlane_rectangle(canvas, left, IMAGE_SIZE - 12, right, IMAGE_SIZE, 140, 90, 40);
    memlane_disc(canvas, half + g->fruit_x * half, (1 - g->fruit_y) * IMAGE_SIZE, 8, 200, 30, 40);
}

/* ---------------------------------------------------------------------------------------------------- declarations */

static const double lows[] = {-1, -1, 0, -0.05}, highs[] = {1, 1, 1, 0.05};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {4}, .lows = lows, .highs = highs},
};
static const memlane_field actions[] = {
    {.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 2},
};
static const memlane_setting settings[] = {
    [FALL] = {.name = "fall", .value = 0.04, .low = 0.01, .high = 0.2},
    [WIND] = {.name = "wind", .value = 0.02, .low = 0, .high = 0.05},
};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "my_env",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .settings = settings,
    .num_settings = MEMLANE_COUNT(settings),
    .max_episode_steps = 500,
    .state_bytes = sizeof(game),
    .reward_low = 0,
    .reward_high = 1,
    .render_width = IMAGE_SIZE,
    .render_height = IMAGE_SIZE,
    .reset = reset,
    .step = step,
    .render = render,
};
