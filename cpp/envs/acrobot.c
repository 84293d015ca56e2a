/* Acrobot-v1: two links hang from a joint; a torque at the joint between them is to swing the free end up above a line.
 * Gymnasium's equations (those of Sutton and Barto's book) and its way to integrate them (Runge and Kutta's, of order four),
 * in the same order and precision. */
#include <math.h>

#include "memlane/draw.h"
#include "memlane/env.h"
#include "memlane/sincos.h"

#define PI 3.141592653589793
#define GRAVITY 9.8
#define SECONDS 0.2
#define MAX_SPEED_1 (4 * PI)
#define MAX_SPEED_2 (9 * PI)

/* Two angles and their speeds: those of the first link from hanging down, and of the second from the first. Also how fast
 * each of them changes. */
typedef struct links {
    double angle1, angle2, speed1, speed2;
} links;

/* The state: four arrays one after the other, so that the compiler can work on several environments at once. */
static double *state_of(const memlane_envs *envs, int number) {
    return (double *)envs->state + (int64_t)number * envs->num_envs;
}

/* Both links have a length, mass and moment of inertia of 1, and their centre of mass in the middle. */
static inline links change(links now, double torque) {
    double sine1, cosine1, sine2, cosine2;
    memlane_sincos(now.angle1, &sine1, &cosine1);
    memlane_sincos(now.angle2, &sine2, &cosine2);
    const double d1 = 0.25 + (1.25 + cosine2) + 1 + 1, d2 = 0.25 + 0.5 * cosine2 + 1;
    /* Gymnasium has cos(angle - pi / 2) for these two sines. The first is of angle1 + angle2. */
    const double phi2 = 0.5 * GRAVITY * (sine1 * cosine2 + cosine1 * sine2);
    const double phi1 = -0.5 * (now.speed2 * now.speed2) * sine2 - now.speed2 * now.speed1 * sine2 +
                        1.5 * GRAVITY * sine1 + phi2;
    const double turn2 = (torque + d2 / d1 * phi1 - 0.5 * (now.speed1 * now.speed1) * sine2 - phi2) / (1.25 - d2 * d2 / d1);
    const double turn1 = -(d2 * turn2 + phi1) / d1;
    return (links){now.speed1, now.speed2, turn1, turn2};
}

static inline links after(links now, double seconds, links by) {
    return (links){now.angle1 + seconds * by.angle1, now.angle2 + seconds * by.angle2, now.speed1 + seconds * by.speed1,
                   now.speed2 + seconds * by.speed2};
}

/* To between -pi and pi. */
static inline double wound_back(double angle) {
    const double turns = angle > PI ? ceil((angle - PI) / (2 * PI)) : angle < -PI ? floor((angle + PI) / (2 * PI)) : 0;
    return angle - 2 * PI * turns;
}

static inline double limited(double speed, double most) { return speed < -most ? -most : speed > most ? most : speed; }

/* Writes the observation; whether the free end is above the line. */
static inline int observe(float *observation, links now) {
    double sine1, cosine1, sine2, cosine2;
    memlane_sincos(now.angle1, &sine1, &cosine1);
    memlane_sincos(now.angle2, &sine2, &cosine2);
    observation[0] = (float)cosine1, observation[1] = (float)sine1;
    observation[2] = (float)cosine2, observation[3] = (float)sine2;
    observation[4] = (float)now.speed1, observation[5] = (float)now.speed2;
    return -cosine1 - (cosine1 * cosine2 - sine1 * sine2) > 1.0; /* the second is the cosine of angle1 + angle2 */
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        for (int number = 0; number < 4; ++number) /* Gymnasium, too, begins with numbers that fit a float */
            state_of(envs, number)[i] = (double)(float)memlane_uniform(&envs->random[i], -0.1, 0.1);
        observe((float *)envs->observations[0] + 6 * (int64_t)i,
                (links){state_of(envs, 0)[i], state_of(envs, 1)[i], state_of(envs, 2)[i], state_of(envs, 3)[i]});
    }
}

MEMLANE_FAST static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    double *restrict angles1 = state_of(envs, 0), *restrict angles2 = state_of(envs, 1);
    double *restrict speeds1 = state_of(envs, 2), *restrict speeds2 = state_of(envs, 3);
    const int64_t *restrict actions = envs->actions[0];
    float *restrict observations = envs->observations[0];
    double *restrict rewards = envs->rewards;
    uint8_t *restrict terminated = envs->terminated;

    MEMLANE_EACH_ALONE
    for (int32_t i = begin; i < end; ++i) {
        const double torque = actions[i] == 0 ? -1.0 : actions[i] == 1 ? 0.0 : 1.0;
        const links now = {angles1[i], angles2[i], speeds1[i], speeds2[i]};
        const links k1 = change(now, torque);
        const links k2 = change(after(now, SECONDS / 2, k1), torque);
        const links k3 = change(after(now, SECONDS / 2, k2), torque);
        const links k4 = change(after(now, SECONDS, k3), torque);
        const links sum = {k1.angle1 + 2 * k2.angle1 + 2 * k3.angle1 + k4.angle1,
                           k1.angle2 + 2 * k2.angle2 + 2 * k3.angle2 + k4.angle2,
                           k1.speed1 + 2 * k2.speed1 + 2 * k3.speed1 + k4.speed1,
                           k1.speed2 + 2 * k2.speed2 + 2 * k3.speed2 + k4.speed2};
        links next = after(now, SECONDS / 6, sum);
        next.angle1 = wound_back(next.angle1), next.angle2 = wound_back(next.angle2);
        next.speed1 = limited(next.speed1, MAX_SPEED_1), next.speed2 = limited(next.speed2, MAX_SPEED_2);

        angles1[i] = next.angle1, angles2[i] = next.angle2, speeds1[i] = next.speed1, speeds2[i] = next.speed2;
        const int above = observe(observations + 6 * i, next);
        terminated[i] = (uint8_t)above;
        rewards[i] = above ? 0.0 : -1.0;
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 500, 500};
    const double scale = 500 / 4.4, first = state_of(envs, 0)[i], second = first + state_of(envs, 1)[i];
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
