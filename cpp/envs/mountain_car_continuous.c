/* MountainCarContinuous-v0: the car of mountain_car.c with a continuous force, which has a cost. Gymnasium's equations, in
 * the same order and precision: the state is float32, so that every sum is rounded to it. */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"
#include "memlane/sincos.h"

#define LEFTMOST -1.2f
#define RIGHTMOST 0.6f
#define MAX_SPEED 0.07f
#define GOAL 0.45f
#define POWER 0.0015
#define GRAVITY 0.0025

/* The state: an array of positions, then one of speeds, so that the compiler can vectorise the loop over environments. */
static float *state_array(const memlane_envs *envs, int index) {
    return (float *)envs->state + (int64_t)index * envs->num_envs;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    float *xs = state_array(envs, 0), *speeds = state_array(envs, 1), *observations = envs->observations[0];
    for (int32_t i = begin; i < end; ++i) {
        xs[i] = (float)memlane_uniform(&envs->random[i], -0.6, -0.4);
        speeds[i] = 0;
        observations[2 * i + 0] = xs[i], observations[2 * i + 1] = 0;
    }
}

MEMLANE_SIMD_FUNCTION static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    float *restrict xs = state_array(envs, 0), *restrict speeds = state_array(envs, 1);
    const float *restrict actions = envs->actions[0];
    float *restrict observations = envs->observations[0];
    double *restrict rewards = envs->rewards;
    uint8_t *restrict terminated = envs->terminated;
    const float goal_speed = (float)envs->settings[0];

    MEMLANE_SIMD_LOOP
    for (int32_t i = begin; i < end; ++i) {
        const double action = (double)actions[i], force = action < -1 ? -1 : action > 1 ? 1 : action;
        double sine, cosine;
        memlane_sincos((double)(3 * xs[i]), &sine, &cosine);
        /* In Gymnasium a clamped force is a Python float, any other a float32: they are rounded at different places. */
        const float push = force != action ? (float)(force * POWER - GRAVITY * cosine)
                                           : (float)force * (float)POWER - (float)(GRAVITY * cosine);
        float speed = speeds[i] + push;
        speed = speed < -MAX_SPEED ? -MAX_SPEED : speed > MAX_SPEED ? MAX_SPEED : speed;
        const float x = xs[i] + speed;
        /* Before the position is clamped, which does not change the result: so the compiler needs no branch. */
        const int reached = (x >= GOAL) & (speed >= goal_speed);

        xs[i] = x < LEFTMOST ? LEFTMOST : x > RIGHTMOST ? RIGHTMOST : x;
        speeds[i] = x <= LEFTMOST ? 0 : speed; /* a wall: the car can only hit it from the right */
        observations[2 * i + 0] = xs[i], observations[2 * i + 1] = speeds[i];
        terminated[i] = (uint8_t)reached;
        rewards[i] = (reached ? 100.0 : 0.0) - action * action * 0.1; /* the cost is that of the action before clamping */
    }
}

static double height(double x) { return 400 - (sin(3 * x) * 0.45 + 0.55) * 600 / 1.8; }

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 600, 400};
    const double scale = 600 / 1.8, position = (double)state_array(envs, 0)[i], tilt = cos(3 * position);
    memlane_fill(canvas, 255, 255, 255);
    for (int x = 0; x < 600; x += 6)
        memlane_line(canvas, x, height(x / scale - 1.2), x + 6, height((x + 6) / scale - 1.2), 1, 0, 0, 0);
    const double flag = (0.45 + 1.2) * scale, foot = height(0.45);
    memlane_line(canvas, flag, foot, flag, foot - 50, 1, 0, 0, 0);
    memlane_rectangle(canvas, flag, foot - 50, flag + 20, foot - 40, 204, 204, 0);
    /* The car is drawn 10 pixels above the ground; (c, s) is its direction. */
    const double x = (position + 1.2) * scale, y = height(position) - 10, c = cos(tilt), s = sin(tilt);
    memlane_line(canvas, x - 12 * c - 8 * s, y + 12 * s - 8 * c, x + 12 * c - 8 * s, y - 12 * s - 8 * c, 16, 0, 0, 0);
    memlane_disc(canvas, x - 10 * c, y + 10 * s, 8, 128, 128, 128);
    memlane_disc(canvas, x + 10 * c, y - 10 * s, 8, 128, 128, 128);
}

static const double bounds[2][2] = {{LEFTMOST, -MAX_SPEED}, {RIGHTMOST, MAX_SPEED}};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {2}, .lows = bounds[0], .highs = bounds[1]},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {1}, .low = -1, .high = 1}};
static const memlane_setting settings[] = {{.name = "goal_velocity", .value = 0, .low = -INFINITY, .high = INFINITY}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "MountainCarContinuous-v0",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .settings = settings,
    .num_settings = MEMLANE_COUNT(settings),
    .max_episode_steps = 999,
    .state_bytes = 2 * sizeof(float),
    .reward_low = -0.1,
    .reward_high = 100,
    .render_width = 600,
    .render_height = 400,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
