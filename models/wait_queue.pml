// A wait queue (cpp/src/sync/wait_queue.hpp): processes wait in places, with tickets, for one of several equal things; who
// makes a thing available calls as many waiters as things are available. The functions that use it are those of Ring
// (get_as_newcomer, get_in_turn, wait_in_turn, offer), for the side of the writers; with READERS, for the other side.
//
// Promises: every waiter is served, unless it gives up or dies, and no thing stays unused beside a waiter that sleeps for
// ever: without the help of the slice unless a process died or was slow, or lost its place although it was not slow (see below).
// Waiters are served in the order of their tickets if no newcomer overtakes; newcomers overtake at most MAX_OVERTAKES times
// in a row.
//
// A signal is a flag for each process that watches it, set by every change: signal.pml shows that no sleeper misses one.
// `waiting` and `called` are one word each.
//
// The slice: see include/deaths.pml. It is modelled only where it can help: while a thing is available, or held by a dead
// process. A slice that ends makes the calls of the dead and of the slow old: they count as stuck. A slow process is one that
// goes on although its calls grow old; it may be slow at any of its statements. A death and a slow process give each sleeper
// SLICES_OF_A_DEATH slices. One is not enough for a waiter that dies with its thing: after the first, the thing is reclaimed
// and the dead waiter is called, and only after the second it counts as stuck. With three processes it takes one more: the
// third may be in the middle of a call for longer than a slice, and here it stores a new time then (in the code, an old one).
//
// Left over: a call may come after its waiter has left, and the place keeps its bit in `called`. The next process that takes
// it, perhaps much later, counts as stuck until it looks, and if another process looks first, it loses its place although it
// was not slow. It finds out when its slice ends. With LEFTOVERS the model has such old calls, and one more slice for each.
//
// With COARSE each of the scans is one step: for bounds with three processes. Without it, each access is one.
//
// small: two      PROCESSES=2 THINGS=1 ROUNDS=2
// small: overtake PROCESSES=2 THINGS=1 ROUNDS=3 MAX_OVERTAKES=1 COARSE=1
// small: three    PROCESSES=3 THINGS=1 ROUNDS=1 COARSE=1
// small: supply   PROCESSES=3 THINGS=0 SUPPLY=2 ROUNDS=1 COARSE=1
// small: giveup   PROCESSES=2 THINGS=1 ROUNDS=2 GIVE_UPS=1 COARSE=1
// small: readers  PROCESSES=2 THINGS=1 ROUNDS=2 READERS=1
// small: deaths   PROCESSES=2 THINGS=1 ROUNDS=2 ONCE=1 KILLS=1
// small: slow     PROCESSES=2 THINGS=1 ROUNDS=2 ONCE=1 STOPS=1 COARSE=1
// small: leftover PROCESSES=2 THINGS=1 ROUNDS=2 LEFTOVERS=1 COARSE=1
// small: full     PROCESSES=3 THINGS=1 ROUNDS=1 PLACES=1 FULL=1 COARSE=1
// large: three    PROCESSES=3 THINGS=1 ROUNDS=2 MAX_OVERTAKES=1
// large: deaths   PROCESSES=3 THINGS=1 ROUNDS=1 KILLS=1 SLICES_OF_A_DEATH=3 COARSE=1
// large: slow     PROCESSES=2 THINGS=1 ROUNDS=2 STOPS=2
//
// mutant: ATTEMPT_BEFORE_SIGNAL two      a waiter loads its signal after its attempt
// mutant: LOOK_AFTER_ATTEMPT    two      a waiter clears its bit in `called` after its attempt
// mutant: EMPTY_BEFORE_THING    two      who makes a thing available loads `waiting` before
// mutant: CALL_WITHOUT_WAKE     two      a call sets the bit only
// mutant: WAKE_BEFORE_CALLED    two      a call changes the signal, then sets the bit
// mutant: NO_CALL_AFTER_SERVED  supply   a waiter that was served calls no other
// mutant: NO_CALL_AFTER_LEAVE   giveup   a waiter that gives up calls no other
// mutant: NO_CALL_OF_THE_FIRST  three    a waiter that is called too early does not pass it on
// mutant: TAKE_OUT_OF_TURN      three    a waiter takes a thing without asking for its rank
// mutant: NO_COUNT_OF_OVERTAKES overtake newcomers do not count what they take
// mutant: NO_REMOVE_OF_STUCK    deaths   a waiter that does not look keeps its place

#ifndef STOPS
#define STOPS 0
#endif
#ifdef ONCE // only the first process comes again
#define ROUNDS_OF(p) (p == 1 -> ROUNDS : 1)
#else
#define ROUNDS_OF(p) ROUNDS
#endif
#ifndef LEFTOVERS
#define LEFTOVERS 0
#endif
#ifndef SUPPLY
#define SUPPLY 0 // with it, the first process makes so many things available, and the others keep theirs
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 0
#endif
#ifndef PLACES
#if LEFTOVERS > 0 || STOPS > 0 || KILLS > 0
#define PLACES (PROCESSES + 1) // a place that is being removed is still taken
#else
#define PLACES PROCESSES
#endif
#endif
#ifndef MAX_OVERTAKES
#define MAX_OVERTAKES 0
#endif
#ifndef SLICES_OF_A_DEATH
#define SLICES_OF_A_DEATH 2
#endif
#include "include/deaths.pml"

#ifdef COARSE
#define SCAN atomic
#else
#define SCAN
#endif
#define NONE 255
#define BIT(index) (1 << (index))
#define LOWEST(set) (((set) & 1) -> 0 : (((set) & 2) -> 1 : (((set) & 4) -> 2 : 3)))
#define REMOVED 1 // the ticket -1: a place without a ticket that is being removed

byte waiting, called;  // one bit per place
byte ticket[PLACES];   // 0: none
byte last = REMOVED;   // the last ticket
byte overtaken;
bool old[PLACES];      // called_ns: whether it is older than a slice
byte watched[PROCESSES + 1] = NONE; // the signal that a process has loaded last: of a place, or PLACES for `freed`
bool changed[PROCESSES + 1];        // whether the signal has changed since
byte things = THINGS;
bool holding[PROCESSES + 1];

bool slow[PROCESSES + 1];
byte stops, give_ups, leftovers;
byte owner[PLACES]; // the last process that took the place

// What only assertions use.
byte queued;                 // the processes that have a ticket and nothing yet
byte earlier[PROCESSES + 1]; // those that must be served before this process
byte ticket_of[PROCESSES + 1];
byte in_a_row;               // overtakes since a waiter was served

#define COUNT(set) (((set) >> 1 & 1) + ((set) >> 2 & 1) + ((set) >> 3 & 1) + ((set) >> 4 & 1))

// Inside a d_step: this process is no longer in the queue.
inline note_gone() {
    queued = queued & ~BIT(me);
    earlier[me] = 0;
    k = 1;
    do
    :: k <= PROCESSES -> earlier[k] = earlier[k] & ~BIT(me); k++
    :: else -> break
    od;
    k = 0
}

// ------------------------------------------------------------------------------------------------------------- signals

inline signal_change(signal) {
    d_step {
        k = 1;
        do
        :: k <= PROCESSES -> changed[k] = changed[k] || watched[k] == signal; k++
        :: else -> break
        od;
        k = 0
    }
}

inline see_signal(signal) {
    d_step { watched[me] = signal; changed[me] = false }
}

// A slice that ends: the calls that nobody answers are old now.
inline end_slice() {
    slices++;
    k = 0;
    do
    :: k < PLACES ->
       old[k] = old[k] || ((called & BIT(k)) && (dead[owner[k]] || slow[owner[k]]));
       k++
    :: else -> break
    od;
    k = 0
}

#define IS_LOST(p) (dead[p] && holding[p])
#if PROCESSES == 2
#define HELD_BY_THE_DEAD (IS_LOST(1) || IS_LOST(2))
#else
#define HELD_BY_THE_DEAD (IS_LOST(1) || IS_LOST(2) || IS_LOST(3))
#endif

inline signal_wait() {
    if
    :: changed[me]
    :: d_step { !changed[me] && slices < excuses && (things > 0 || HELD_BY_THE_DEAD) -> end_slice() }
#if GIVE_UPS > 0
    :: d_step { !changed[me] && give_ups < GIVE_UPS -> give_ups++; quit = true } // its deadline has passed
#endif
    fi;
    atomic { watched[me] = NONE; changed[me] = false; woken = true }
}

// --------------------------------------------------------------------------------------------------------- the queue

inline call_place(index) {
    if
    :: called & BIT(index)
    :: else ->
#ifdef MUTANT_WAKE_BEFORE_CALLED
       signal_change(index);
#endif
       old[index] = false;
       if
       :: d_step { (called & BIT(index)) == 0 -> called = called | BIT(index) };
#if !defined(MUTANT_CALL_WITHOUT_WAKE) && !defined(MUTANT_WAKE_BEFORE_CALLED)
          signal_change(index)
#endif
       :: else // another process was faster
       fi
    fi
}

// Calls as many waiters as `available` says.
inline call() {
    do
    :: calls < available ->
       SCAN {
       atomic { left = available; set = waiting }; // has_called
       set = set & called;
       do
       :: d_step { set != 0 && left > 0 ->
              i = LOWEST(set); set = set & ~BIT(i);
              left = left - (ticket[i] != 0); i = 0
          }
       :: atomic { else -> set = 0; break }
       od;
       if
       :: atomic { left == 0 -> first = NONE; break }
       :: atomic { else -> left = 0; first = NONE; first_ticket = 255; set = waiting }
       fi;
       set = set & ~called;
       do
       :: d_step { set != 0 ->
              i = LOWEST(set); set = set & ~BIT(i);
              if
              :: ticket[i] != 0 && ticket[i] < first_ticket -> first = i; first_ticket = ticket[i]
              :: else
              fi;
              i = 0
          }
       :: atomic { else -> first_ticket = 0; break }
       od
       };
       if
       :: atomic { first == NONE -> break }
       :: else -> call_place(first)
       fi;
       atomic { calls++; first = 0 }
    :: atomic { else -> break }
    od;
    atomic { calls = 0; available = 0; first = 0 }
}

inline call_waiters() {
    available = things;
    call()
}

inline call_waiters_if_any() {
    if
    :: waiting != 0 -> call_waiters()
    :: else
    fi
}

// Result: place.
inline join() {
    set = 0;
    do
    :: atomic { set != BIT(PLACES) - 1 -> // the first place that is free in the last word that it loaded
           i = LOWEST(~set); set = waiting; waiting = waiting | BIT(i);
           if
           :: set & BIT(i)
           :: else ->
              place = i; owner[place] = me; set = BIT(PLACES) - 1;
              if
              :: (called & BIT(place)) && leftovers < LEFTOVERS -> leftovers++; old[place] = true
              :: true
              fi
           fi;
           i = 0
       }
    :: atomic { else -> set = 0; break }
    od;
    SCAN {
    if
    :: place != NONE ->
       d_step { last++; my_ticket = last };
       d_step {
           ticket[place] = my_ticket;
           k = 1;
           do
           :: k <= PROCESSES ->
              if
              :: (queued & BIT(k)) && ticket_of[k] < my_ticket -> earlier[me] = earlier[me] | BIT(k)
              :: else
              fi;
              k++
           :: else -> break
           od;
           k = 0;
           ticket_of[me] = my_ticket;
           queued = queued | BIT(me)
       }
    :: else
    fi
    }
}

// Result: rank. The caller's own place is left out; NONE: it has none.
inline find_rank(own) {
    SCAN {
    atomic { rank = 0; all = waiting };
    do
    :: d_step { all != 0 ->
           at = LOWEST(all); all = all & ~BIT(at);
           if
           :: at == own -> at = NONE
           :: else -> seen_ticket = ticket[at]
           fi
       };
       if
       :: atomic { at == NONE -> at = 0 }
       :: atomic { at != NONE && (called & BIT(at)) && old[at] -> // stuck
#ifdef MUTANT_NO_REMOVE_OF_STUCK
              rank++
          }
#else
              removed = true
          };
          old[at] = false;
          if
          :: atomic { ticket[at] == seen_ticket -> ticket[at] = (seen_ticket == 0 -> REMOVED : 0) };
             called = called & ~BIT(at);
             d_step {
                 waiting = waiting & ~BIT(at);
                 excuses = excuses + !dead[owner[at]] // its process finds out when its slice ends
             }
          :: else
          fi
#endif
       :: atomic { else ->
              if
              :: seen_ticket != 0 -> rank = rank + (seen_ticket < my_ticket)
              :: else
              fi
          };
          if
          :: seen_ticket == 0 -> call_place(at)
          :: else
          fi
       fi;
       atomic { at = 0; seen_ticket = 0 }
    :: atomic { else -> break }
    od;
    };
    if
    :: removed -> atomic { removed = false; available = PLACES }; call()
    :: else
    fi
}

inline leave() {
    SCAN {
    old[place] = false;
    if
    :: d_step { ticket[place] == my_ticket -> ticket[place] = 0; note_gone() };
       called = called & ~BIT(place);
       waiting = waiting & ~BIT(place)
    :: d_step { else -> note_gone() }
    fi;
    atomic { place = NONE; my_ticket = 0 }
    }
}

// Result: held.
inline holds() {
    SCAN {
        held = place != NONE && (waiting & BIT(place));
        held = held && ticket[place] == my_ticket
    }
}

// ----------------------------------------------------------------------------------------------- who uses the queue

inline offer() {
    signal_change(PLACES); // `freed`
#ifdef MUTANT_EMPTY_BEFORE_THING
    if
    :: some -> call_waiters()
    :: else
    fi;
    some = false
#else
    call_waiters_if_any()
#endif
}

// Takes a thing, if there is one.
inline get() {
    got = things > 0;
    things = things - got;
    holding[me] = got
}

// Who is overtaken may see another waiter served first.
inline note_overtake(overtakes) {
    k = 1;
    do
    :: k <= PROCESSES -> earlier[k] = (overtakes -> 0 : earlier[k]); k++
    :: else -> break
    od;
    k = 0
}

inline get_served() {
    d_step {
        get();
        if
        :: got ->
#ifndef READERS
           assert(excuses > 0 || COUNT(earlier[me]) <= things);
#endif
           note_gone()
        :: else
        fi
    }
}

inline get_as_newcomer() {
    if
    :: waiting == 0 ->
       d_step {
           get();
           note_overtake(got && queued != 0)
       }
    :: else ->
       if
       :: overtaken < MAX_OVERTAKES ->
          d_step {
              get();
              note_overtake(got && queued != 0);
              in_a_row = in_a_row + (got && queued != 0);
              // Several newcomers may look at `overtaken` before one of them counts.
              assert(in_a_row <= MAX_OVERTAKES + PROCESSES - 2)
          };
          if
#ifndef MUTANT_NO_COUNT_OF_OVERTAKES
          :: got -> overtaken++
#endif
          :: else
          fi
       :: else
       fi
    fi
}

inline get_in_turn() {
#ifndef MUTANT_LOOK_AFTER_ATTEMPT
    called = called & ~BIT(place);
#endif
    holds();
    if
    :: atomic { held -> held = false };
       find_rank(place);
#if defined(READERS) || defined(MUTANT_TAKE_OUT_OF_TURN)
       get_served();
#else
       available = things;
       if
#ifdef MUTANT_NO_CALL_OF_THE_FIRST
       :: available <= rank -> available = 0
#else
       :: available <= rank -> call()
#endif
       :: atomic { else -> available = 0; get_served() }
       fi;
#endif
       rank = 0;
#ifdef MUTANT_LOOK_AFTER_ATTEMPT
       called = called & ~BIT(place);
#endif
       if
       :: got ->
          d_step { overtaken = 0; in_a_row = 0 };
          leave();
#ifndef MUTANT_NO_CALL_AFTER_SERVED
          call_waiters_if_any()
#endif
       :: else
       fi
    :: else
    fi
}

// Things that dead processes hold are available again. Result: reaped.
inline reap() {
    j = 1;
    do
    :: atomic { j <= PROCESSES && (!dead[j] || !holding[j]) -> j++ }
    :: d_step { j <= PROCESSES && dead[j] && holding[j] -> holding[j] = false; things++; reaped = true };
       offer()
    :: atomic { else -> j = 0; break }
    od
}

inline release() {
#ifdef MUTANT_EMPTY_BEFORE_THING
    some = waiting != 0;
#endif
    d_step { things++; holding[me] = false };
    offer()
}


proctype Process(byte me) {
    byte place = NONE, my_ticket, rank, available, round;
    byte slices, set, all, at, seen_ticket, i, j, k, left, calls, first, first_ticket;
    bool got, quit, held, removed, reaped, woken, some;
    {
        do
#if SUPPLY > 0
        :: me == 1 && round < SUPPLY -> release(); round++
        :: me != 1 && round < ROUNDS_OF(me) && !quit ->
#else
        :: round < ROUNDS_OF(me) && !quit ->
#endif
           // Each time round: one slice of wait_in_turn.
           do
           :: !got && !quit ->
              holds();
              if
              :: atomic { held -> held = false }
              :: atomic { else -> place = NONE };
                 get_as_newcomer();
                 if
                 :: !got -> join()
                 :: else
                 fi
              fi;
              if
              :: got
#ifdef FULL
              :: !got && place == NONE -> // sleeps on `freed`
                 see_signal(PLACES);
                 do
                 :: get_as_newcomer();
                    if
                    :: !got -> find_rank(NONE); call_waiters()
                    :: else
                    fi;
                    if
                    :: atomic { got || woken -> break }
                    :: else -> signal_wait()
                    fi
                 od
#endif
              :: !got && place != NONE ->
#ifndef MUTANT_ATTEMPT_BEFORE_SIGNAL
                 see_signal(place);
#endif
                 do
                 :: get_in_turn();
#if KILLS > 0
                    if
                    :: !got && !woken && !reaped -> reap()
                    :: else -> reaped = false
                    fi;
#endif
#ifdef MUTANT_ATTEMPT_BEFORE_SIGNAL
                    if
                    :: !got && !woken -> see_signal(place)
                    :: else
                    fi;
#endif
                    if
                    :: atomic { got || woken -> break }
                    :: reaped // attempts once more
                    :: else -> signal_wait()
                    fi
                 od
              fi;
              atomic { woken = false; reaped = false }
           :: atomic { else -> break }
           od;
           if
           :: place != NONE -> // it gives up
              leave();
#ifndef MUTANT_NO_CALL_AFTER_LEAVE
              call_waiters_if_any()
#endif
           :: else
           fi;
           if
#if SUPPLY > 0
           :: got -> atomic { got = false; round++ } // nobody needs it back
#else
           :: got -> release(); atomic { got = false; round++ }
#endif
           :: else
           fi
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

#if STOPS > 0
#define STOP(p) :: d_step { stops < STOPS && !slow[p] && !ended[p] -> \
    slow[p] = true; stops++; excuses = excuses + SLICES_OF_A_DEATH }
active proctype Stopper() {
    do
    STOP(1)
    STOP(2)
#if PROCESSES > 2
    STOP(3)
#endif
    :: break
    od
}
#endif

init {
    byte p;
    atomic {
        p = 1;
        do
        :: p <= PROCESSES -> run Process(p); p++
        :: else -> break
        od
    }
}
