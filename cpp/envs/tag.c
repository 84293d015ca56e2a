/* Tag-v0: four agents in a square; one is "it" and chases the others, which are out when it touches them. An example for
 * authors: an environment with several agents, some of which leave the game before its end. */
#include "memlane/draw.h"
#include "memlane/env.h"

#define AGENTS 4
#define EDGE 1.0f /* the square reaches from -EDGE to EDGE */
#define RUN 0.05f
#define CHASE 0.06f
#define REACH 0.12f
#define HEAD_START 0.5f
#define REWARD_FOR_RUNNING 0.01
#define OBSERVATION_SIZE (3 + 4 * (AGENTS - 1))

struct game {
    float x[AGENTS], y[AGENTS];
    int32_t it;
};

static const float moves[5][2] = {{0, 0}, {1, 0}, {0, -1}, {-1, 0}, {0, 1}}; /* stay, right, up, left, down */

static float clamp(float x) { return x < -EDGE ? -EDGE : x > EDGE ? EDGE : x; }

/* Writes the observation of agent `me`: its position, whether it is "it", and for each other agent, from the next one on,
 * the relative position, whether it is "it" and whether it is in the game; zeros for agents that have left. `playing` has a
 * flag for each agent. */
static void observe(const struct game *game, int me, const uint8_t *playing, float *observation) {
    observation[0] = game->x[me], observation[1] = game->y[me];
    observation[2] = me == game->it;
    for (int k = 1; k < AGENTS; ++k) {
        const int other = (me + k) % AGENTS;
        float *seen = observation + 3 + 4 * (k - 1);
        seen[0] = playing[other] ? game->x[other] - game->x[me] : 0;
        seen[1] = playing[other] ? game->y[other] - game->y[me] : 0;
        seen[2] = playing[other] && other == game->it;
        seen[3] = playing[other];
    }
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        struct game *game = (struct game *)envs->state + i;
        uint64_t *random = &envs->random[i];
        game->it = memlane_choice(random, AGENTS);
        for (int a = 0; a < AGENTS; ++a) {
            float x = 0, y = 0; /* "it" begins in the centre, the others at some distance */
            while (a != game->it && x * x + y * y < HEAD_START * HEAD_START) {
                x = (float)memlane_uniform(random, -EDGE, EDGE);
                y = (float)memlane_uniform(random, -EDGE, EDGE);
            }
            game->x[a] = x, game->y[a] = y;
        }
        static const uint8_t all_playing[AGENTS] = {1, 1, 1, 1};
        for (int a = 0; a < AGENTS; ++a)
            observe(game, a, all_playing, (float *)envs->observations[0] + ((int64_t)i * AGENTS + a) * OBSERVATION_SIZE);
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        /* The rows of this game: one per agent. */
        const int64_t first = (int64_t)i * AGENTS;
        const int64_t *actions = (const int64_t *)envs->actions[0] + first;
        const uint8_t *alive = envs->alive + first;
        uint8_t *terminated = envs->terminated + first;
        double *rewards = envs->rewards + first;
        struct game *game = (struct game *)envs->state + i;

        for (int a = 0; a < AGENTS; ++a)
            if (alive[a]) { /* actions of agents that have left are ignored */
                const float speed = a == game->it ? CHASE : RUN;
                game->x[a] = clamp(game->x[a] + speed * moves[actions[a]][0]);
                game->y[a] = clamp(game->y[a] + speed * moves[actions[a]][1]);
            }

        /* An agent that is touched is out. The host clears `alive` after the step; `playing` has the new values now. */
        uint8_t playing[AGENTS];
        int runners = 0;
        for (int a = 0; a < AGENTS; ++a) {
            playing[a] = alive[a];
            if (!alive[a] || a == game->it)
                continue;
            const float dx = game->x[a] - game->x[game->it], dy = game->y[a] - game->y[game->it];
            if (dx * dx + dy * dy < REACH * REACH) {
                rewards[a] = -1, rewards[game->it] += 1;
                terminated[a] = 1, playing[a] = 0;
            } else {
                rewards[a] = REWARD_FOR_RUNNING;
                ++runners;
            }
        }
        if (runners == 0)
            terminated[game->it] = 1; /* the game is over */
        for (int a = 0; a < AGENTS; ++a)
            if (alive[a])
                observe(game, a, playing, (float *)envs->observations[0] + (first + a) * OBSERVATION_SIZE);
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 400, 400};
    const struct game *game = (const struct game *)envs->state + i;
    const double scale = 400 / (2 * (EDGE + REACH)); /* with a margin for agents at the edge */
    memlane_fill(canvas, 120, 120, 120);
    memlane_rectangle(canvas, 200 - EDGE * scale, 200 - EDGE * scale, 200 + EDGE * scale, 200 + EDGE * scale, 245, 245, 235);
    for (int a = 0; a < AGENTS; ++a) {
        const double x = 200 + game->x[a] * scale, y = 200 + game->y[a] * scale;
        if (envs->alive[(int64_t)i * AGENTS + a] && a == game->it)
            memlane_disc(canvas, x, y, REACH / 2 * scale, 210, 50, 50);
        else if (envs->alive[(int64_t)i * AGENTS + a])
            memlane_disc(canvas, x, y, REACH / 2 * scale, 50, 90, 200);
    }
}

#define OTHER(sign) sign * 2 * EDGE, sign * 2 * EDGE, sign > 0, sign > 0
static const double bounds[2][OBSERVATION_SIZE] = {{-EDGE, -EDGE, 0, OTHER(-1), OTHER(-1), OTHER(-1)},
                                                   {EDGE, EDGE, 1, OTHER(1), OTHER(1), OTHER(1)}};
static const memlane_field observations[] = {
    {.dtype = MEMLANE_FLOAT32, .num_dims = 1, .shape = {OBSERVATION_SIZE}, .lows = bounds[0], .highs = bounds[1]},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 4}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Tag-v0",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .num_agents = AGENTS,
    .max_episode_steps = 200,
    .state_bytes = sizeof(struct game),
    .reward_low = -1,
    .reward_high = AGENTS - 1,
    .render_width = 400,
    .render_height = 400,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
