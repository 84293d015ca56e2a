// A signal (cpp/src/sync/signal.hpp): signallers advance the value, waiters wait for it, any of them may die.
//
// Promises: a wait ends when the value is reached, without the help of the slice unless a process died; the death of a
// watched process ends the wait, and a value that it stored before its death is not missed.
//
// small: calm     WAITERS=2 SIGNALLERS=2 ADDS=1 KILLS=0
// small: deaths   WAITERS=2 SIGNALLERS=1 ADDS=1 KILLS=1
// large: calm     WAITERS=2 SIGNALLERS=2 ADDS=2 KILLS=0
// large: deaths   WAITERS=2 SIGNALLERS=2 ADDS=2 KILLS=2
//
// mutant: WAKE_BEFORE_CHANGE         calm    the sleepers are woken, then the value changes
// mutant: GATE_LOADED_BEFORE_CHANGE  calm    the waker's load of the gate moves before its store of the value
// mutant: GATE_NOT_COUNTED           calm    a wake-up clears bit 0 instead of counting: the gate may look unchanged
// mutant: WAKE_ONE                   calm    one sleeper is woken, although bit 0 is cleared for all
// mutant: NO_SECOND_LOAD             calm    a waiter sleeps without loading the value after it set the gate
// mutant: VALUE_LOADED_BEFORE_GATE   calm    the waiter's second load moves before its store of the gate
// mutant: PEER_ASKED_AFTER_VALUE     deaths  a value stored right before the death of the watched process is missed

#define PROCESSES (WAITERS + SIGNALLERS)

#define ASK_PEERS peer_dead = dead[1] || (SIGNALLERS == 2 && dead[2]); stored = STORED_BY_THE_DEAD
#define NOTE_CHANGE stored_by[me]++
#define STORED_BY_THE_DEAD ((dead[1] -> stored_by[1] : 0) + (SIGNALLERS == 2 && dead[2] -> stored_by[2] : 0))

#include "include/deaths.pml"
#include "include/signal.pml"

SignalCell cell;
byte stored_by[3]; // how much of the value comes from each signaller

proctype Signaller(byte me) {
    SIGNAL_LOCALS;
    byte adds;
    {
        do
        :: adds < ADDS -> signal_add(cell, 1); adds++
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

// Waits for each value in turn, and watches the signallers.
proctype Waiter(byte me) {
    SIGNAL_LOCALS;
    byte until = 1, stored;
    {
        do
        :: until <= SIGNALLERS * ADDS ->
           signal_wait(cell, until);
           if
           :: result == REACHED -> assert(value >= until); until++
           :: result == PEER_DIED -> assert(value >= stored); break
           :: result == PAUSED // as the callers do: check other conditions, and wait again
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
        :: p <= SIGNALLERS -> run Signaller(p); p++
        :: p > SIGNALLERS && p <= PROCESSES -> run Waiter(p); p++
        :: else -> break
        od
    }
}
