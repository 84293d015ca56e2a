/* GridWorld-v0: find the way to a target on a grid with walls and lava. An example for authors of what cart_pole.c does not
 * have: an observation with several fields (a dict in Python), an info, and a state that is one struct per environment. */
#include <stdlib.h>

#include "memlane/draw.h"
#include "memlane/env.h"

#define SIDE 8
#define STEP_COST 0.01

/* '#' is a wall, '~' lava. All other cells are connected, so a target can always be reached. */
/* clang-format off: one line per row */
static const char map[SIDE][SIDE + 1] = {
    "........", ".##..#..", ".#...#..", "....~...", "..~.....", "..#..##.", "..#...#.", "........",
};
/* clang-format on */

typedef struct cell {
    int32_t x, y;
} cell;

struct world {
    cell agent, target;
};

static const cell moves[4] = {{1, 0}, {0, -1}, {-1, 0}, {0, 1}}; /* right, up, left, down */

static int same(cell a, cell b) { return a.x == b.x && a.y == b.y; }

static int inside(cell at) { return at.x >= 0 && at.x < SIDE && at.y >= 0 && at.y < SIDE; }

static cell free_cell(uint64_t *random) {
    for (;;) { /* two statements: the order of evaluation in one initialiser list is not defined in C */
        const int32_t x = memlane_choice(random, SIDE);
        const int32_t y = memlane_choice(random, SIDE);
        if (map[y][x] == '.')
            return (cell){x, y};
    }
}

/* Writes one row of each field: observations[0] is the array of the first field, observations[1] that of the second. */
static void observe(const memlane_envs *envs, int32_t i, const struct world *world) {
    ((cell *)envs->observations[0])[i] = world->agent;
    ((cell *)envs->observations[1])[i] = world->target;
    ((int32_t *)envs->infos[0])[i] = abs(world->agent.x - world->target.x) + abs(world->agent.y - world->target.y);
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        struct world *world = (struct world *)envs->state + i;
        world->agent = free_cell(&envs->random[i]);
        do
            world->target = free_cell(&envs->random[i]);
        while (same(world->agent, world->target));
        observe(envs, i, world);
    }
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    const int64_t *actions = envs->actions[0];
    for (int32_t i = begin; i < end; ++i) {
        struct world *world = (struct world *)envs->state + i;
        const cell move = moves[actions[i]], to = {world->agent.x + move.x, world->agent.y + move.y};
        if (inside(to) && map[to.y][to.x] != '#')
            world->agent = to;
        const int found = same(world->agent, world->target), burnt = map[world->agent.y][world->agent.x] == '~';
        envs->rewards[i] = found ? 1 : burnt ? -1 : -STEP_COST;
        envs->terminated[i] = (uint8_t)(found || burnt);
        observe(envs, i, world);
    }
}

static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    memlane_canvas canvas = {rgb, 400, 400};
    const struct world *world = (const struct world *)envs->state + i;
    const double size = 400.0 / SIDE;
    memlane_fill(canvas, 200, 200, 200); /* visible as lines between the cells */
    for (int y = 0; y < SIDE; ++y)
        for (int x = 0; x < SIDE; ++x) {
            const double left = x * size + 1, top = y * size + 1, right = left + size - 2, bottom = top + size - 2;
            if (map[y][x] == '#')
                memlane_rectangle(canvas, left, top, right, bottom, 60, 60, 60);
            else if (map[y][x] == '~')
                memlane_rectangle(canvas, left, top, right, bottom, 230, 90, 20);
            else
                memlane_rectangle(canvas, left, top, right, bottom, 255, 255, 255);
        }
    memlane_rectangle(canvas, (world->target.x + 0.2) * size, (world->target.y + 0.2) * size, (world->target.x + 0.8) * size,
                      (world->target.y + 0.8) * size, 40, 160, 70);
    memlane_disc(canvas, (world->agent.x + 0.5) * size, (world->agent.y + 0.5) * size, 0.3 * size, 50, 90, 200);
}

static const memlane_field observations[] = {
    {.name = "agent", .dtype = MEMLANE_INT32, .num_dims = 1, .shape = {2}, .low = 0, .high = SIDE - 1},
    {.name = "target", .dtype = MEMLANE_INT32, .num_dims = 1, .shape = {2}, .low = 0, .high = SIDE - 1},
};
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 3}};
/* Distance to the target without walls. */
static const memlane_field infos[] = {{.name = "distance", .dtype = MEMLANE_INT32, .low = 0, .high = 2 * (SIDE - 1)}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "GridWorld-v0",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .infos = infos,
    .num_infos = MEMLANE_COUNT(infos),
    .max_episode_steps = 100,
    .state_bytes = sizeof(struct world),
    .reward_low = -1,
    .reward_high = 1,
    .render_width = 400,
    .render_height = 400,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
