/* An environment for memlane, in plain C: fill in one `memlane_spec`, export it as `memlane_env`, build, load.
 *
 *     memlane build my_env.c                      ->  my_env.so
 *     memlane.native.load("my_env.so", num_envs=1024)
 *
 * The host (memlane) owns every buffer. It calls your functions with a range of environments, begin <= i < end, and you
 * write what they see straight into the arrays that Python shows. Calls for different ranges may run at the same time on
 * several threads: touch nothing but your range, keep nothing in global variables, draw random numbers only from
 * `random[i]`. Then results depend on the seed and on nothing else.
 *
 * You do not reset an environment because its episode has ended, nor count its steps: that is the host's work, as is
 * keeping the last observation. A complete example of a hundred lines: native/envs/cart_pole.c.
 */
#ifndef MEMLANE_ENV_H
#define MEMLANE_ENV_H

#include <stdint.h>

#define MEMLANE_ENV_ABI 1 /* changes when anything below changes its meaning or its place */
#define MEMLANE_MAX_DIMS 4

/* ------------------------------------------------------------------------------------------- what you declare */

enum memlane_dtype {
    MEMLANE_FLOAT32 = 1, MEMLANE_FLOAT64, MEMLANE_BOOL, MEMLANE_INT8, MEMLANE_UINT8, MEMLANE_INT16, MEMLANE_UINT16,
    MEMLANE_INT32, MEMLANE_UINT32, MEMLANE_INT64, MEMLANE_UINT64
};

/* BOX: numbers between bounds. DISCRETE: whole numbers low, low + 1, ... high, each a choice of its own; of type int64. */
enum memlane_kind { MEMLANE_BOX = 0, MEMLANE_DISCRETE = 1 };

/* One array of an observation, an action or an info. A single field without a name is the whole observation or action;
 * several fields have names and become a dict. */
typedef struct memlane_field {
    const char *name;
    int32_t dtype; /* enum memlane_dtype */
    int32_t kind;  /* enum memlane_kind */
    int32_t num_dims;
    int32_t shape[MEMLANE_MAX_DIMS];
    double low, high;    /* of every number; INFINITY for none */
    const double *lows;  /* or one for each number, when not NULL */
    const double *highs;
} memlane_field;

/* A number that users may set when they make the environments: memlane.native.make(..., gravity=3.7) */
typedef struct memlane_setting {
    const char *name;
    double value; /* unless they say otherwise */
    double low, high;
} memlane_setting;

/* -------------------------------------------------------------------------------------------- what you are given */

/* Arrays over all environments; yours are rows begin to end - 1. With several agents, environment i has the rows
 * i * num_agents to i * num_agents + num_agents - 1 of everything but `state`, `random` and `steps`. */
typedef struct memlane_envs {
    int32_t num_envs;
    int32_t num_agents;
    void *state;                /* num_envs * state_bytes, yours: one struct each, or one array for each number */
    uint64_t *random;           /* one word each: see memlane_random */
    const void *const *actions; /* one array for each action field */
    void *const *observations;  /* one array for each observation field */
    double *rewards;            /* 0 before every step; write only what differs */
    uint8_t *terminated;        /* likewise: 1 when the episode (of this agent) has come to its end */
    uint8_t *truncated;         /* likewise: 1 when it is cut off; the host does that at max_episode_steps */
    void *const *infos;         /* one array for each info field */
    uint8_t *alive;             /* agents in the game: all after a reset, unless you clear some there; then the host's */
    const double *settings;     /* one for each setting */
    const int32_t *steps;       /* how many steps each episode has had before this one */
} memlane_envs;

typedef void (*memlane_function)(const memlane_envs *envs, int32_t begin, int32_t end);

typedef struct memlane_spec {
    uint32_t abi;        /* MEMLANE_ENV_ABI */
    uint32_t spec_bytes; /* sizeof(memlane_spec) */
    const char *name;
    const memlane_field *observations; /* of one agent */
    const memlane_field *actions;
    const memlane_field *infos;
    const memlane_setting *settings;
    int32_t num_observations, num_actions, num_infos, num_settings;
    int32_t num_agents;        /* 0 and 1: an ordinary environment */
    int32_t max_episode_steps; /* 0: no limit */
    uint64_t state_bytes;      /* of one environment; all zeros before `init` */
    double reward_low, reward_high;
    int32_t render_width, render_height; /* 0: it has no picture */
    int32_t steps_past_end;    /* 1: `step` may also be called for an environment whose episode has ended, and draws no
                                  random number then; what it writes is thrown away. The host need not cut its ranges
                                  in that case: nearly twice as fast for CartPole. */

    /* Once, before anything else. A text says what is wrong (with the settings, say); NULL: nothing. May be NULL. */
    const char *(*init)(const memlane_envs *envs, int32_t begin, int32_t end);
    /* New episodes: write state, observations and infos, all of them. */
    memlane_function reset;
    /* One step: read the actions, write state, observations, rewards and ends. */
    memlane_function step;
    /* Once, at the end, for what `init` took from elsewhere. May be NULL. */
    memlane_function close;
    /* One environment as rows of red, green, blue. May be NULL. */
    void (*render)(const memlane_envs *envs, int32_t index, uint8_t *rgb);
} memlane_spec;

#ifdef __cplusplus
#define MEMLANE_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define MEMLANE_EXPORT __attribute__((visibility("default")))
#endif

/* What the host looks for: MEMLANE_EXPORT const memlane_spec memlane_env = {...}; */
#ifdef __cplusplus
MEMLANE_EXPORT const memlane_spec memlane_env;
#else
extern MEMLANE_EXPORT const memlane_spec memlane_env;
#endif

/* How many there are in an array of fields or settings. */
#define MEMLANE_COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

/* -------------------------------------------------------------------------------------------------- random numbers */

/* 64 random bits from an environment's word (SplitMix64: Steele, Lea and Flood, 2014). */
static inline uint64_t memlane_random(uint64_t *word) {
    uint64_t z = (*word += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* From low to high. */
static inline double memlane_uniform(uint64_t *word, double low, double high) {
    return low + (high - low) * ((double)(memlane_random(word) >> 11) * 0x1p-53);
}

/* A whole number from 0 up to count - 1. */
static inline int32_t memlane_choice(uint64_t *word, int32_t count) {
    return (int32_t)(((memlane_random(word) >> 32) * (uint64_t)count) >> 32);
}

/* -------------------------------------------------------------------------------------------------------- speed */

/* In front of `step`: compiled also for processors that work on four numbers at a time, chosen when the program starts.
 * (Not under sanitizers: they are not ready yet when the choice is made.) */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&                    \
    !defined(__SANITIZE_THREAD__)
#define MEMLANE_FAST __attribute__((target_clones("avx2", "default")))
#else
#define MEMLANE_FAST
#endif

/* In front of the loop in `step`: no environment reads what the loop writes for another. */
#if defined(__clang__)
#define MEMLANE_EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define MEMLANE_EACH_ALONE _Pragma("GCC ivdep")
#endif

#endif
