/* Bricks-v0: a ball, a paddle and a wall of bricks; observations are pixels. A brick is worth 1; the episode ends when the
 * ball gets past the paddle or no brick is left.
 *
 * One frame shows the whole state. Objects move by whole pixels, and the ball has a dimmer trail at the position it would
 * have come from at its current speed, so the speed is visible, also right after a bounce. An example for authors: an
 * observation of bytes that is redrawn in every step (0.5 us; to keep and update a frame would take 7 KB of state per
 * environment). */
#include <string.h>

#include "memlane/env.h"

#define SIZE 84
#define WALL 2 /* thickness left and right; at least the speed of the ball, so that its trail stays in the image */
#define TOP 4  /* thickness of the wall above, for the same reason */
#define COLUMNS 10
#define ROWS 6
#define BRICK_WIDTH 8
#define BRICK_HEIGHT 4 /* more than the ball moves in a step */
#define BRICKS_TOP 14
#define BALL 2
#define FALL 3 /* vertical speed of the ball, in pixels per step */
#define PADDLE_WIDTH 16
#define PADDLE_TOP 80
#define PADDLE_SPEED 3
#define ZOOM 5 /* of the rendered image */

struct game {
    uint64_t bricks; /* bit row * COLUMNS + column is 1 while the brick exists */
    int32_t paddle;  /* its left end */
    int32_t x, y;    /* the ball's upper left corner */
    int32_t dx, dy;
};

static const int32_t speeds[4] = {-2, -1, 1, 2};
static const uint8_t row_shade[ROWS] = {220, 200, 180, 160, 140, 120};

/* The bit of the brick at a pixel; 0 if there is none. */
static uint64_t brick_at(const struct game *game, int32_t x, int32_t y) {
    if (x < WALL || x >= SIZE - WALL || y < BRICKS_TOP || y >= BRICKS_TOP + ROWS * BRICK_HEIGHT)
        return 0;
    const int32_t row = (y - BRICKS_TOP) / BRICK_HEIGHT, column = (x - WALL) / BRICK_WIDTH;
    return game->bricks & UINT64_C(1) << (row * COLUMNS + column);
}

/* Fill a rectangle, clipped at the edges of the image. */
static void fill(uint8_t *frame, int32_t left, int32_t top, int32_t width, int32_t height, uint8_t shade) {
    for (int32_t y = top < 0 ? 0 : top; y < top + height && y < SIZE; ++y)
        for (int32_t x = left < 0 ? 0 : left; x < left + width && x < SIZE; ++x)
            frame[y * SIZE + x] = shade;
}

static void draw(const struct game *game, uint8_t *frame) {
    memset(frame, 80, TOP * SIZE);
    memset(frame + TOP * SIZE, 0, (SIZE - TOP) * SIZE);
    for (int y = TOP; y < SIZE; ++y) {
        memset(frame + y * SIZE, 80, WALL);
        memset(frame + y * SIZE + SIZE - WALL, 80, WALL);
    }
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column)
            if (game->bricks >> (row * COLUMNS + column) & 1) {
                uint8_t *brick = frame + (BRICKS_TOP + row * BRICK_HEIGHT) * SIZE + WALL + column * BRICK_WIDTH;
                for (int y = 0; y < BRICK_HEIGHT - 1; ++y) /* a gap below it and beside it */
                    memset(brick + y * SIZE, row_shade[row], BRICK_WIDTH - 1);
            }
    fill(frame, game->paddle, PADDLE_TOP, PADDLE_WIDTH, 2, 255);
    fill(frame, game->x - game->dx, game->y - game->dy, BALL, BALL, 100);
    fill(frame, game->x, game->y, BALL, BALL, 255);
}

static void reset(const memlane_envs *envs, int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
        struct game *game = (struct game *)envs->state + i;
        uint64_t *random = &envs->random[i];
        game->bricks = (UINT64_C(1) << (ROWS * COLUMNS)) - 1;
        game->paddle = (SIZE - PADDLE_WIDTH) / 2;
        game->x = WALL + memlane_choice(random, SIZE - 2 * WALL - BALL + 1);
        game->y = BRICKS_TOP + ROWS * BRICK_HEIGHT + FALL;
        game->dx = speeds[memlane_choice(random, 4)], game->dy = FALL;
        draw(game, (uint8_t *)envs->observations[0] + (int64_t)i * SIZE * SIZE);
    }
}

/* Moves the ball; returns the number of bricks it hit. It bounces off walls and bricks: first horizontally, then
 * vertically, so it may hit two bricks. Collisions are those of its leading corner. */
static int move_ball(struct game *game) {
    int hits = 0;
    int32_t x = game->x + game->dx, y = game->y + game->dy;
    const int32_t ahead_x = game->dx > 0 ? BALL - 1 : 0, ahead_y = game->dy > 0 ? BALL - 1 : 0;
    uint64_t brick = brick_at(game, x + ahead_x, game->y + ahead_y);
    if (brick || x < WALL || x > SIZE - WALL - BALL)
        x = game->x, game->dx = -game->dx;
    game->bricks &= ~brick, hits += brick != 0;

    brick = brick_at(game, x + ahead_x, y + ahead_y);
    if (brick || y < TOP)
        y = game->y, game->dy = -game->dy;
    game->bricks &= ~brick, hits += brick != 0;
    game->x = x, game->y = y;
    return hits;
}

static void step(const memlane_envs *envs, int32_t begin, int32_t end) {
    const int64_t *actions = envs->actions[0];
    for (int32_t i = begin; i < end; ++i) {
        struct game *game = (struct game *)envs->state + i;
        const int32_t leftmost = WALL, rightmost = SIZE - WALL - PADDLE_WIDTH;
        const int32_t paddle = game->paddle + (actions[i] == 1 ? -PADDLE_SPEED : actions[i] == 2 ? PADDLE_SPEED : 0);
        game->paddle = paddle < leftmost ? leftmost : paddle > rightmost ? rightmost : paddle;

        envs->rewards[i] = move_ball(game);
        int missed = 0;
        if (game->y + BALL > PADDLE_TOP) {
            const int32_t offset = game->x + BALL / 2 - game->paddle;
            missed = offset < 0 || offset > PADDLE_WIDTH;
            game->y = PADDLE_TOP - (missed ? 0 : BALL);
            if (!missed) /* each quarter of the paddle gives another direction, so the player can aim */
                game->dy = -FALL, game->dx = speeds[offset * 4 / (PADDLE_WIDTH + 1)];
        }
        envs->terminated[i] = (uint8_t)(missed || game->bricks == 0);
        draw(game, (uint8_t *)envs->observations[0] + (int64_t)i * SIZE * SIZE);
    }
}

/* The observation, ZOOM times as large. Drawn from the state: the observation array may have other content by now. */
static void render(const memlane_envs *envs, int32_t i, uint8_t *rgb) {
    uint8_t frame[SIZE * SIZE];
    draw((const struct game *)envs->state + i, frame);
    for (int y = 0; y < ZOOM * SIZE; ++y)
        for (int x = 0; x < ZOOM * SIZE; ++x)
            memset(rgb + 3 * (y * ZOOM * SIZE + x), frame[y / ZOOM * SIZE + x / ZOOM], 3);
}

static const memlane_field observations[] = {
    {.dtype = MEMLANE_UINT8, .num_dims = 2, .shape = {SIZE, SIZE}, .low = 0, .high = 255},
};
/* 0 is stay, 1 is left, 2 is right. */
static const memlane_field actions[] = {{.dtype = MEMLANE_INT64, .kind = MEMLANE_DISCRETE, .low = 0, .high = 2}};

MEMLANE_EXPORT const memlane_spec memlane_env = {
    .abi = MEMLANE_ENV_ABI,
    .spec_bytes = sizeof(memlane_spec),
    .name = "Bricks-v0",
    .observations = observations,
    .num_observations = MEMLANE_COUNT(observations),
    .actions = actions,
    .num_actions = MEMLANE_COUNT(actions),
    .max_episode_steps = 2000,
    .state_bytes = sizeof(struct game),
    .reward_low = 0,
    .reward_high = 2,
    .render_width = ZOOM * SIZE,
    .render_height = ZOOM * SIZE,
    .steps_past_end = 1,
    .reset = reset,
    .step = step,
    .render = render,
};
