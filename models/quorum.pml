// A quorum (cpp/src/sync/quorum.hpp): processes arrive, one process waits, and only the arrival that completes the wanted
// count wakes it.
//
// Promise: the wait for the count of a round ends when the last process has arrived, without the help of the slice unless
// a process died; the death of a process that has not arrived ends it too.
//
// small: calm    ARRIVERS=2 ROUNDS=2 KILLS=0
// small: deaths  ARRIVERS=2 ROUNDS=1 KILLS=1
// large: calm    ARRIVERS=3 ROUNDS=2 KILLS=0
// large: deaths  ARRIVERS=2 ROUNDS=2 KILLS=2
//
// mutant: WANTED_LOADED_FIRST  calm  an arriving process loads the wanted count before it adds
// mutant: WANTED_STORED_LATE   calm  the waiter stores the wanted count after it loaded the arrivals
// mutant: WAKE_WHEN_EQUAL      calm  the waiter is woken when the count is equal, which an arrival of two jumps over
// mutant: WAKE_BEFORE_ARRIVAL  calm  the waiter is woken, then the count changes

#define PROCESSES (ARRIVERS + 1)
#define WAITER PROCESSES
#define ASK_PEERS peer_dead = dead[1] || dead[2] || (ARRIVERS > 2 && dead[ARRIVERS]) || (ARRIVERS > 3 && dead[3])

#include "include/deaths.pml"
#include "include/signal.pml"

// The last process stands for a worker with two environments: it arrives with 2.
#define WEIGHT(p) (p == ARRIVERS -> 2 : 1)
#define ALL (ARRIVERS + 1)

SignalCell arrived;
byte wanted;

// Between its addition and its load of `wanted` a process may be overtaken; `before` is what the addition returned.
inline quorum_arrive(count) {
#ifdef MUTANT_WANTED_LOADED_FIRST
    want = wanted;
#endif
#ifdef MUTANT_WAKE_BEFORE_ARRIVAL
    want = wanted;
    before = arrived.value;
    if
    :: before < want && before + count >= want -> wake_sleepers(arrived)
    :: else
    fi;
    arrived.value = arrived.value + count;
#else
    d_step { before = arrived.value; arrived.value = arrived.value + count };
#ifndef MUTANT_WANTED_LOADED_FIRST
    want = wanted;
#endif
    if
#ifdef MUTANT_WAKE_WHEN_EQUAL
    :: before + count == want -> wake_sleepers(arrived)
#else
    :: before < want && before + count >= want -> wake_sleepers(arrived)
#endif
    :: else
    fi;
#endif
    d_step { want = 0; before = 0 }
}

proctype Arriver(byte me) {
    SIGNAL_LOCALS;
    byte round, want, before;
    {
        do
        :: round < ROUNDS -> quorum_arrive(WEIGHT(me)); round++
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

// Waits until one of the processes is missing (no arrival of the last process is complete without its second half), then
// for all of them.
proctype Waiter(byte me) {
    SIGNAL_LOCALS;
    byte round = 1, until = ALL - 1;
    {
        do
        :: round <= ROUNDS ->
#ifndef MUTANT_WANTED_STORED_LATE
           wanted = until;
#endif
           signal_wait(arrived, until);
           if
           :: result == REACHED ->
              d_step {
                  assert(value >= until);
                  if
                  :: until == round * ALL -> round++; until = round * ALL - 1
                  :: else -> until = round * ALL
                  fi
              }
           :: result == PEER_DIED -> break
           :: result == PAUSED
           fi
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

init {
    byte p;
    atomic {
        p = 1;
        do
        :: p <= ARRIVERS -> run Arriver(p); p++
        :: else -> break
        od;
        run Waiter(WAITER)
    }
}
