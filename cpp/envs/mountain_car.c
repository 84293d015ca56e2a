/* MountainCar-v0: a car in a valley, too weak to drive straight up, must gain speed by swinging to reach the flag on the
 * right hill. Gymnasium's equations (Moore, 1990), in the same order and precision. */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"
#include "memlane/sincos.h"

#define LEFTMOST -1.2
#define RIGHTMOST 0.6
#define MAX_SPEED 0.07
#define GOAL 0.5
#define FORCE 0.001
#define GRAVITY 0.0025

/* The state: an array of positions, then one of speeds, so that the compiler can vectorise the loop over environments. */
static double *state_array(const memlane_envs *envs, int index) {
    return (double *)envs->state + (int64_t)index * envs->num_envs;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *xs = state_array(envs, 0), *speeds = state_array(envs, 1);
    float *observations = envs->observations[0];
    for (int32_t i = begin; i < end; ++i) {
        xs[i] = memlane_uniform(&envs->random[i], -0.6, -0.4);
        speeds[i] = 0;
        observations[2 * i + 0] = (float)xs[i], observations[2 * i + 1] = 0;
    }
}

MEMLANE_SIMD_FUNCTION static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *restrict xs = state_array(envs, 0), *restrict speeds = state_array(envs, 1);
    const int64_t *restrict actions = envs->actions[0];
    float *restrict observations = envs->observations[0];
    double *restrict rewards = envs->rewards;
    uint8_t *restrict terminated = envs->terminated;
    const double goal_speed = envs->settings[0];

    MEMLANE_SIMD_LOOP
    for (int32_t i = begin; i < end; ++i) {
        double sine, cosine;
        memlane_sincos(3 * xs[i], &sine, &cosine);
        /* Not (double)(actions[i] - 1): before AVX-512 there is no vector instruction that converts 64-bit integers. */
        const double direction = actions[i] == 0 ? -1.0 : actions[i] == 1 ? 0.0 : 1.0;
        double speed = speeds[i] + (direction * FORCE + cosine * -GRAVITY);
        speed = speed < -MAX_SPEED ? -MAX_SPEED : speed > MAX_SPEED ? MAX_SPEED : speed;
        const double x = xs[i] + speed;
        /* Before the position is clamped, which does not change the result: so the compiler needs no branch. */
        const int reached = (x >= GOAL) & (speed >= goal_speed);

        xs[i] = x < LEFTMOST ? LEFTMOST : x > RIGHTMOST ? RIGHTMOST : x;
        speeds[i] = x <= LEFTMOST ? 0 : speed; /* a wall: the car can only hit it from the right */
        observations[2 * i + 0] = (float)xs[i], observations[2 * i + 1] = (float)speeds[i];
        terminated[i] = (uint8_t)reached;
        rewards[i] = -1;
    }
}

static double height(double x) { return 400 - (sin(3 * x) * 0.45 + 0.55) * 600 / (RIGHTMOST - LEFTMOST); }

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 600, 400};
    const double scale = 600 / (RIGHTMOST - LEFTMOST), position = state_array(envs, 0)[i], tilt = cos(3 * position);
    memlane_fill(canvas, 255, 255, 255);
    for (int x = 0; x < 600; x += 6)
        memlane_line(canvas, x, height(LEFTMOST + x / scale), x + 6, height(LEFTMOST + (x + 6) / scale), 1, 0, 0, 0);
    const double flag = (GOAL - LEFTMOST) * scale, foot = height(GOAL);
    memlane_line(canvas, flag, foot, flag, foot - 50, 1, 0, 0, 0);
    memlane_rectangle(canvas, flag, foot - 50, flag + 20, foot - 40, 204, 204, 0);
    /* The car is drawn 10 pixels above the ground; (c, s) is its direction. */
    const double x = (position - LEFTMOST) * scale, y = height(position) - 10, c = cos(tilt), s = sin(tilt);
    memlane_line(canvas, x - 12 * c - 8 * s, y + 12 * s - 8 * c, x + 12 * c - 8 * s, y - 12 * s - 8 * c, 16, 0, 0, 0);
    memlane_disc(canvas, x - 10 * c, y + 10 * s, 8, 128, 128, 128);
    memlane_disc(canvas, x + 10 * c, y - 10 * s, 8, 128, 128, 128);
}

static const double bounds[2][2] = {{LEFTMOST, -MAX_SPEED}, {RIGHTMOST, MAX_SPEED}};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .lows = bounds[0], .highs = bounds[1]},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 2}};
static const memlane_setting settings[] = {{.name = "goal_velocity", .value = 0, .low = -INFINITY, .high = INFINITY}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "MountainCar-v0",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .settings = settings,
    .num_settings = MEMLANE_COUNT(settings),
    .max_episode_steps = 200,
    .state_bytes = 2 * sizeof(double),
    .reward_low = -1,
    .reward_high = -1,
    .render_width = 600,
    .render_height = 400,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
