/* Acrobot-v1: two links hang from a joint; a torque at the joint between them must swing the free end above a line.
 * Gymnasium's equations (from the book of Sutton and Barto) and integration method (Runge-Kutta of order four), in the same
 * order and precision. */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"
#include "memlane/sincos.h"

#define PI 3.141592653589793
#define GRAVITY 9.8
#define SECONDS 0.2
#define MAX_SPEED_1 (4 * PI)
#define MAX_SPEED_2 (9 * PI)

/* Two angles and their speeds: of the first link relative to hanging down, and of the second relative to the first. Also
 * used for the derivatives of these four. */
typedef struct links {
    double angle1, angle2, speed1, speed2;
} links;

/* The state: four arrays one after the other, so that the compiler can vectorise the loop over environments. */
static double *state_array(const memlane_envs *envs, int index) {
    return (double *)envs->state + (int64_t)index * envs->num_envs;
}

/* Both links have length, mass and moment of inertia 1, and their centre of mass in the middle. */
static inline links derivative(links now, double torque) {
    double sine1, cosine1, sine2, cosine2;
    memlane_sincos(now.angle1, &sine1, &cosine1);
    memlane_sincos(now.angle2, &sine2, &cosine2);
    const double d1 = 0.25 + (1.25 + cosine2) + 1 + 1, d2 = 0.25 + 0.5 * cosine2 + 1;
    /* Gymnasium writes these two sines as cos(angle - pi / 2). The first is the sine of angle1 + angle2. */
    const double phi2 = 0.5 * GRAVITY * (sine1 * cosine2 + cosine1 * sine2);
    const double phi1 =
        -0.5 * (now.speed2 * now.speed2) * sine2 - now.speed2 * now.speed1 * sine2 + 1.5 * GRAVITY * sine1 + phi2;
    const double turn2 = (torque + d2 / d1 * phi1 - 0.5 * (now.speed1 * now.speed1) * sine2 - phi2) / (1.25 - d2 * d2 / d1);
    const double turn1 = -(d2 * turn2 + phi1) / d1;
    return (links){now.speed1, now.speed2, turn1, turn2};
}

static inline links advance(links now, double seconds, links rate) {
    return (links){now.angle1 + seconds * rate.angle1, now.angle2 + seconds * rate.angle2,
                   now.speed1 + seconds * rate.speed1, now.speed2 + seconds * rate.speed2};
}

/* The same angle between -pi and pi. */
static inline double wrap(double angle) {
    const double turns = angle > PI ? ceil((angle - PI) / (2 * PI)) : angle < -PI ? floor((angle + PI) / (2 * PI)) : 0;
    return angle - 2 * PI * turns;
}

static inline double clamp(double speed, double max) { return speed < -max ? -max : speed > max ? max : speed; }

/* Writes the observation; returns whether the free end is above the line. */
static inline int observe(float *observation, links now) {
    double sine1, cosine1, sine2, cosine2;
    memlane_sincos(now.angle1, &sine1, &cosine1);
    memlane_sincos(now.angle2, &sine2, &cosine2);
    observation[0] = (float)cosine1, observation[1] = (float)sine1;
    observation[2] = (float)cosine2, observation[3] = (float)sine2;
    observation[4] = (float)now.speed1, observation[5] = (float)now.speed2;
    return -cosine1 - (cosine1 * cosine2 - sine1 * sine2) > 1.0; /* the term in brackets is the cosine of angle1 + angle2 */
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        for (int index = 0; index < 4; ++index) /* rounded to float, as in Gymnasium */
            state_array(envs, index)[i] = (double)(float)memlane_uniform(&envs->random[i], -0.1, 0.1);
        observe((float *)envs->observations[0] + 6 * (int64_t)i,
                (links){state_array(envs, 0)[i], state_array(envs, 1)[i], state_array(envs, 2)[i], state_array(envs, 3)[i]});
    }
}

MEMLANE_SIMD_FUNCTION static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *restrict angles1 = state_array(envs, 0), *restrict angles2 = state_array(envs, 1);
    double *restrict speeds1 = state_array(envs, 2), *restrict speeds2 = state_array(envs, 3);
    const int64_t *restrict actions = envs->actions[0];
    float *restrict observations = envs->observations[0];
    double *restrict rewards = envs->rewards;
    uint8_t *restrict terminated = envs->terminated;

    MEMLANE_SIMD_LOOP
    for (int32_t i = begin; i < end; ++i) {
        const double torque = actions[i] == 0 ? -1.0 : actions[i] == 1 ? 0.0 : 1.0;
        const links now = {angles1[i], angles2[i], speeds1[i], speeds2[i]};
        const links k1 = derivative(now, torque);
        const links k2 = derivative(advance(now, SECONDS / 2, k1), torque);
        const links k3 = derivative(advance(now, SECONDS / 2, k2), torque);
        const links k4 = derivative(advance(now, SECONDS, k3), torque);
        const links sum = {k1.angle1 + 2 * k2.angle1 + 2 * k3.angle1 + k4.angle1,
                           k1.angle2 + 2 * k2.angle2 + 2 * k3.angle2 + k4.angle2,
                           k1.speed1 + 2 * k2.speed1 + 2 * k3.speed1 + k4.speed1,
                           k1.speed2 + 2 * k2.speed2 + 2 * k3.speed2 + k4.speed2};
        links next = advance(now, SECONDS / 6, sum);
        next.angle1 = wrap(next.angle1), next.angle2 = wrap(next.angle2);
        next.speed1 = clamp(next.speed1, MAX_SPEED_1), next.speed2 = clamp(next.speed2, MAX_SPEED_2);

        angles1[i] = next.angle1, angles2[i] = next.angle2, speeds1[i] = next.speed1, speeds2[i] = next.speed2;
        const int above = observe(observations + 6 * i, next);
        terminated[i] = (uint8_t)above;
        rewards[i] = above ? 0.0 : -1.0;
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 500, 500};
    const double scale = 500 / 4.4, first = state_array(envs, 0)[i], second = first + state_array(envs, 1)[i];
    const double x = 250 + scale * sin(first), y = 250 + scale * cos(first);
    memlane_fill(canvas, 255, 255, 255);
    memlane_line(canvas, 0, 250 - scale, 500, 250 - scale, 1, 0, 0, 0);
    memlane_line(canvas, 250, 250, x, y, 0.2 * scale, 0, 204, 204);
    memlane_line(canvas, x, y, x + scale * sin(second), y + scale * cos(second), 0.2 * scale, 0, 204, 204);
    memlane_disc(canvas, 250, 250, 0.1 * scale, 204, 204, 0);
    memlane_disc(canvas, x, y, 0.1 * scale, 204, 204, 0);
}

static const double bounds[2][6] = {{-1, -1, -1, -1, -MAX_SPEED_1, -MAX_SPEED_2}, {1, 1, 1, 1, MAX_SPEED_1, MAX_SPEED_2}};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {6}, .lows = bounds[0], .highs = bounds[1]},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 2}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Acrobot-v1",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .max_episode_steps = 500,
    .state_bytes = 4 * sizeof(double),
    .reward_low = -1,
    .reward_high = 0,
    .render_width = 500,
    .render_height = 500,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
