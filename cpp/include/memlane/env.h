/* The C interface of memlane's environments: fill in one `memlane_spec`, export it as `memlane_env`, build, load.
 *
 *     memlane build my_env.c                      ->  my_env.so
 *     memlane.native.load("my_env.so", num_envs=1024)
 *
 * The host (memlane) owns every buffer. It calls your functions with a range of environments, begin <= i < end, and your
 * functions write observations and rewards directly into the arrays that Python returns. Calls for different ranges may run
 * at the same time on several threads: access only the environments of your range, keep nothing in global variables, draw
 * random numbers only from `random[i]`. Then results depend on the seed and the actions alone.
 *
 * The host counts steps, resets environments whose episode has ended and saves their final observation; your functions do
 * not. A complete example in a hundred lines: cpp/envs/cart_pole.c.
 */
#ifndef MEMLANE_ENV_H
#define MEMLANE_ENV_H

#include <stdint.h>

#define MEMLANE_ENV_ABI 1 /* changes when a struct below changes its layout or meaning */
#define MEMLANE_MAX_DIMS 4

/* ------------------------------------------------------------------------------------------------ declarations */

enum memlane_dtype {
    MEMLANE_FLOAT32 = 1,
    MEMLANE_FLOAT64,
    MEMLANE_BOOL,
    MEMLANE_INT8,
    MEMLANE_UINT8,
    MEMLANE_INT16,
    MEMLANE_UINT16,
    MEMLANE_INT32,
    MEMLANE_UINT32,
    MEMLANE_INT64,
    MEMLANE_UINT64
};

/* BOX: numbers between bounds. DISCRETE: one of the integers low, low + 1, ... high; the dtype must be MEMLANE_INT64. */
enum memlane_kind { MEMLANE_BOX = 0, MEMLANE_DISCRETE = 1 };

/* One array of the observation, the action or the infos. A single field without a name is the whole observation or action;
 * several fields need names and become a dict in Python. */
typedef struct memlane_field {
    const char *name;
    int32_t dtype; /* enum memlane_dtype */
    int32_t kind;  /* enum memlane_kind */
    int32_t num_dims;
    int32_t shape[MEMLANE_MAX_DIMS];
    double low, high;    /* bounds of all elements; -INFINITY and INFINITY for no bound */
    const double *lows;  /* if not NULL: one bound per element instead */
    const double *highs;
} memlane_field;

/* A number that users may set when they create environments: memlane.native.load(..., gravity=3.7) */
typedef struct memlane_setting {
    const char *name; /* not that of an argument of make, load or check_env, such as num_envs or seed */
    double value; /* the default */
    double low, high;
} memlane_setting;

/* -------------------------------------------------------------------------------- arguments of your functions */

/* Arrays of all environments; a call may access the rows begin to end - 1. With several agents, environment i has the rows
 * i * num_agents to i * num_agents + num_agents - 1 of all arrays but `state`, `random` and `steps`. */
typedef struct memlane_envs {
    int32_t num_envs;
    int32_t num_agents;
    void *state;                /* num_envs * state_bytes, in a layout of your choice: an array of structs, or one array
                                   per variable */
    uint64_t *random;           /* RNG state of each environment: see memlane_random */
    const void *const *actions; /* one array per action field */
    void *const *observations;  /* one array per observation field */
    double *rewards;            /* 0 before every step; write only other values */
    uint8_t *terminated;        /* 0 before every step; write 1 when the episode (of this agent) has terminated */
    uint8_t *truncated;         /* 0 before every step; write 1 to truncate; the host does so at max_episode_steps */
    void *const *infos;         /* one array per info field */
    uint8_t *alive;             /* agents in the game: all 1 before reset, which may clear some; read-only in step */
    const double *settings;     /* one value per setting */
    const int32_t *steps;       /* number of steps in the current episode, before this one */
} memlane_envs;

typedef void (*memlane_function)(const memlane_envs *envs, int32_t begin, int32_t end);

typedef struct memlane_spec {
    uint32_t abi;        /* MEMLANE_ENV_ABI */
    uint32_t spec_bytes; /* sizeof(memlane_spec) */
    const char *name;
    const memlane_field *observations; /* fields of one agent */
    const memlane_field *actions;
    const memlane_field *infos;
    const memlane_setting *settings;
    int32_t num_observations, num_actions, num_infos, num_settings;
    int32_t num_agents;        /* 0 or 1: an ordinary environment */
    int32_t max_episode_steps; /* 0: no limit */
    uint64_t state_bytes;      /* bytes of state per environment; zeros before `init` */
    double reward_low, reward_high; /* bounds of every reward */
    int32_t render_width, render_height; /* pixels; 0: no render function */
    int32_t steps_past_end;    /* 1: `step` may also be called for an environment whose episode has ended. It must draw no
                                  random number then, and its results are discarded. The host need not split its ranges
                                  in that case: nearly twice as fast for CartPole. */

    /* Called once, before all others. Returns an error message (about the settings, for example) or NULL. May be NULL. */
    const char *(*init)(const memlane_envs *envs, int32_t begin, int32_t end);
    /* Start new episodes: write the whole state, all observations and all infos. */
    memlane_function reset;
    /* One step: read the actions; write state, observations, infos, rewards, terminated and truncated. */
    memlane_function step;
    /* Called once at the end, to release what `init` allocated. May be NULL. */
    memlane_function close;
    /* Draw one environment: rows of pixels of red, green, blue. May be NULL. */
    void (*render)(const memlane_envs *envs, int32_t index, uint8_t *rgb);
} memlane_spec;

#ifdef __cplusplus
#define MEMLANE_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define MEMLANE_EXPORT __attribute__((visibility("default")))
#endif

/* The symbol that the host loads: MEMLANE_EXPORT const memlane_spec memlane_env = {...}; */
#ifdef __cplusplus
MEMLANE_EXPORT const memlane_spec memlane_env;
#else
extern MEMLANE_EXPORT const memlane_spec memlane_env;
#endif

/* The number of elements in an array of fields or settings. */
#define MEMLANE_COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

/* -------------------------------------------------------------------------------------------------- random numbers */

/* 64 random bits; pass &envs->random[i] (SplitMix64: Steele, Lea and Flood, 2014). */
static inline uint64_t memlane_random(uint64_t *random) {
    uint64_t z = (*random += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* A number of the interval [low, high), uniformly distributed. */
static inline double memlane_uniform(uint64_t *random, double low, double high) {
    return low + (high - low) * ((double)(memlane_random(random) >> 11) * 0x1p-53);
}

/* An integer from 0 to count - 1, uniformly distributed. */
static inline int32_t memlane_choice(uint64_t *random, int32_t count) {
    return (int32_t)(((memlane_random(random) >> 32) * (uint64_t)count) >> 32);
}

/* -------------------------------------------------------------------------------------------------------- speed */

/* In front of a function: compile a second version for processors with AVX2, which is selected when the program starts.
 * (Not under sanitizers: they are not initialised yet when the selection runs.) */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&                    \
    !defined(__SANITIZE_THREAD__)
#define MEMLANE_SIMD_FUNCTION __attribute__((target_clones("avx2", "default")))
#else
#define MEMLANE_SIMD_FUNCTION
#endif

/* In front of a loop over environments: its iterations are independent, so that the compiler may vectorise it. */
#if defined(__clang__)
#define MEMLANE_SIMD_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define MEMLANE_SIMD_LOOP _Pragma("GCC ivdep")
#endif

#endif
