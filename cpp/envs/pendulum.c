/* Pendulum-v1: swing a pendulum up and keep it upright with a torque that is too weak to lift it directly. Gymnasium's
 * equations, in the same order and precision. */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"
#include "memlane/sincos.h"

#define PI 3.141592653589793
#define MAX_SPEED 8.0
#define MAX_TORQUE 2.0f
#define SECONDS 0.05

/* The state: an array of angles (0 is upright), then one of speeds, so that the compiler can vectorise the loop over
 * environments. */
static double *state_array(const memlane_envs *envs, int index) {
    return (double *)envs->state + (int64_t)index * envs->num_envs;
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *angles = state_array(envs, 0), *speeds = state_array(envs, 1);
    float *observations = envs->observations[0];
    for (int32_t i = begin; i < end; ++i) {
        angles[i] = memlane_uniform(&envs->random[i], -PI, PI);
        speeds[i] = memlane_uniform(&envs->random[i], -1, 1);
        double sine, cosine;
        memlane_sincos(angles[i], &sine, &cosine);
        observations[3 * i + 0] = (float)cosine, observations[3 * i + 1] = (float)sine;
        observations[3 * i + 2] = (float)speeds[i];
    }
}

MEMLANE_SIMD_FUNCTION static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *restrict angles = state_array(envs, 0), *restrict speeds = state_array(envs, 1);
    const float *restrict actions = envs->actions[0];
    float *restrict observations = envs->observations[0];
    double *restrict rewards = envs->rewards;
    const double gravity = envs->settings[0];

    MEMLANE_SIMD_LOOP
    for (int32_t i = begin; i < end; ++i) {
        const float action = actions[i];
        const float torque = action < -MAX_TORQUE ? -MAX_TORQUE : action > MAX_TORQUE ? MAX_TORQUE : action;
        /* The cost is that of the state before the step. The stored angle is not wrapped, so it is wrapped here to between
         * -pi and pi. The torque term is computed in float: in numpy, float32 times a Python number is float32. */
        const double wrapped = angles[i] - 2 * PI * floor((angles[i] + PI) / (2 * PI));
        rewards[i] = -(wrapped * wrapped + 0.1 * (speeds[i] * speeds[i]) + (double)(0.001f * (torque * torque)));

        double sine, cosine;
        memlane_sincos(angles[i], &sine, &cosine);
        double speed = speeds[i] + (3 * gravity / 2 * sine + (double)(3.0f * torque)) * SECONDS;
        speed = speed < -MAX_SPEED ? -MAX_SPEED : speed > MAX_SPEED ? MAX_SPEED : speed;
        const double angle = angles[i] + speed * SECONDS;
        angles[i] = angle, speeds[i] = speed;

        memlane_sincos(angle, &sine, &cosine);
        observations[3 * i + 0] = (float)cosine, observations[3 * i + 1] = (float)sine;
        observations[3 * i + 2] = (float)speed;
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 500, 500};
    const double length = 500 / 4.4, angle = state_array(envs, 0)[i];
    memlane_fill(canvas, 255, 255, 255);
    memlane_line(canvas, 250, 250, 250 - length * sin(angle), 250 - length * cos(angle), 0.2 * length, 204, 77, 77);
    memlane_disc(canvas, 250, 250, 0.05 * length, 0, 0, 0);
}

static const double bounds[2][3] = {{-1, -1, -MAX_SPEED}, {1, 1, MAX_SPEED}};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {3}, .lows = bounds[0], .highs = bounds[1]},
};
static const memlane_field actions[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {1}, .low = -MAX_TORQUE, .high = MAX_TORQUE},
};
static const memlane_setting settings[] = {{.name = "g", .value = 10, .low = -1000, .high = 1000}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Pendulum-v1",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .settings = settings,
    .num_settings = MEMLANE_COUNT(settings),
    .max_episode_steps = 200,
    .state_bytes = 2 * sizeof(double),
    .reward_low = -(PI * PI + 0.1 * MAX_SPEED * MAX_SPEED + 0.001 * 4),
    .reward_high = 0,
    .render_width = 500,
    .render_height = 500,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
