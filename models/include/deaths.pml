// Deaths and slices, for every model. Before this file a model defines PROCESSES, the number of processes that can die;
// they are numbered from 1.
//
// A process that can die is written as `{ ... } UNTIL_KILLED`: before each of its statements, which are one shared access
// and what follows from it in local variables, the killer may have ended it. The others ask `dead[p]` where the code asks
// process_alive or a pidfd. A model may define MAY_DIE(p), to leave some of them alive.
//
// The slice. Every wait of the code ends after 0.1 s (slice_ns) and tries again. A model in which a sleeper could always
// do that would never show a lost wake-up. So a sleeper may end its sleep without a wake-up only when an event happened
// that the code itself leaves to the slice, and only once for each: these events are counted in `excuses`, and each
// process counts the ones that it used in its variable `slices`. A death is such an event; a model in which one slice is not
// enough to repair what a death leaves defines SLICES_OF_A_DEATH. In runs without an event, a lost wake-up is a sleeper that
// sleeps for ever: an invalid end state.

#ifndef KILLS
#define KILLS 0
#endif
#ifndef MAY_DIE
#define MAY_DIE(p) true
#endif
#ifndef SLICES_OF_A_DEATH
#define SLICES_OF_A_DEATH 1
#endif

bool dead[PROCESSES + 1];
bool ended[PROCESSES + 1]; // returned from its last call, or is dead
byte excuses;

#if KILLS > 0
#define UNTIL_KILLED unless { dead[me] }
byte kills;

#define KILL(p) :: d_step { kills < KILLS && MAY_DIE(p) && !dead[p] && !ended[p] -> \
    dead[p] = true; kills++; excuses = excuses + SLICES_OF_A_DEATH }

active proctype Killer() {
    do
    KILL(1)
#if PROCESSES > 1
    KILL(2)
#endif
#if PROCESSES > 2
    KILL(3)
#endif
#if PROCESSES > 3
    KILL(4)
#endif
#if PROCESSES > 4
    KILL(5)
#endif
#if PROCESSES > 5
#error "deaths.pml kills at most 5 processes"
#endif
    :: break // no further death
    od
}
#else
#define UNTIL_KILLED // without escapes Spin can leave out interleavings that make no difference
#endif
