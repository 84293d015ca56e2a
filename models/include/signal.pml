// The lines of cpp/src/sync/signal.cpp, one shared access per statement. signal.pml and quorum.pml check them; the other
// models use what these two show: a change of the value ends every wait for it.
//
// A proctype that uses them has the parameter `me` and the local variables of SIGNAL_LOCALS. Before this file a model may
// define ASK_PEERS, the check of the watched processes, and NOTE_CHANGE, which notes a change in variables that only
// assertions use. POSIX signals are not modelled: they end a sleep early, as a wake-up does.

#ifndef ASK_PEERS
#define ASK_PEERS peer_dead = false
#endif
#ifndef NOTE_CHANGE
#define NOTE_CHANGE skip
#endif

typedef SignalCell {
    byte value;
    byte gate;                  // bit 0: a waiter may be asleep; above: the number of wake-ups
    bool asleep[PROCESSES + 1]; // in the kernel: who sleeps on the gate
}

#define SIGNAL_LOCALS \
    byte value, gate, k, slices; \
    bool peer_dead; \
    mtype result

mtype = { REACHED, PEER_DIED, PAUSED };

// The kernel compares the word and enqueues the sleeper in one step.
inline futex_wait(cell, expected) {
    d_step { cell.asleep[me] = (cell.gate == expected) };
    if
    :: !cell.asleep[me]
    :: d_step { cell.asleep[me] && slices < excuses -> cell.asleep[me] = false; slices++ } // the slice ended
    fi
}

inline futex_wake_all(cell) {
    d_step {
        k = 1;
        do
        :: k <= PROCESSES ->
#ifdef MUTANT_WAKE_ONE
           if
           :: cell.asleep[k] -> cell.asleep[k] = false; break
           :: else
           fi;
#else
           cell.asleep[k] = false;
#endif
           k++
        :: else -> break
        od;
        k = 0
    }
}

// Loads the gate, and wakes if bit 0 is set and no other waker was first.
inline wake_sleepers(cell) {
#ifndef MUTANT_GATE_LOADED_BEFORE_CHANGE
    gate = cell.gate;
#endif
    if
    :: d_step {
           (gate & 1) && cell.gate == gate ->
#ifdef MUTANT_GATE_NOT_COUNTED
           cell.gate = gate - 1
#else
           cell.gate = gate + 1
#endif
       };
       futex_wake_all(cell)
    :: else
    fi;
    gate = 0
}

inline signal_add(cell, amount) {
#ifdef MUTANT_WAKE_BEFORE_CHANGE
    wake_sleepers(cell);
    d_step { cell.value = cell.value + amount; NOTE_CHANGE }
#else
#ifdef MUTANT_GATE_LOADED_BEFORE_CHANGE
    gate = cell.gate;
#endif
    d_step { cell.value = cell.value + amount; NOTE_CHANGE };
    wake_sleepers(cell)
#endif
}

// One slice of a wait. Spinning is left out: it loads the value again and again, as the first line does once.
inline signal_wait(cell, until) {
    value = cell.value;
    if
    :: value >= until -> result = REACHED
    :: atomic { value < until ->
#ifndef MUTANT_PEER_ASKED_AFTER_VALUE
           ASK_PEERS
#endif
       };
#ifdef MUTANT_VALUE_LOADED_BEFORE_GATE
       value = cell.value;
#endif
       atomic { gate = cell.gate | 1; cell.gate = gate };
#if !defined(MUTANT_NO_SECOND_LOAD) && !defined(MUTANT_VALUE_LOADED_BEFORE_GATE)
       value = cell.value;
#endif
#ifdef MUTANT_PEER_ASKED_AFTER_VALUE
       atomic { ASK_PEERS };
#endif
#ifdef MUTANT_WANTED_STORED_LATE
       wanted = until;
#endif
       if
       :: value >= until -> result = REACHED
       :: value < until && peer_dead -> result = PEER_DIED
       :: else ->
          futex_wait(cell, gate);
          atomic { value = cell.value; result = (value >= until -> REACHED : PAUSED) }
       fi;
       atomic { gate = 0; peer_dead = false }
    fi
}
