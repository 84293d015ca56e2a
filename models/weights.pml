// Weights (cpp/src/lanes/weights.hpp): writers claim a buffer, fill it, publish it as the latest version and mark it;
// readers copy the latest one and check that it was not overwritten meanwhile; any of them may die at any line.
//
// Promises: a copy that a reader accepts is whole and of the version that it returns; versions do not go back; the latest
// buffer is never overwritten; a writer finds a buffer if there is one more than writers, also after deaths; a reader that
// no writer disturbs succeeds.
//
// Writer 1 publishes VERSIONS times, the other one once; with IN_TURN it starts when writer 1 has ended or is dead.
// `rotate_until` is a hint that chooses between the newest and the oldest buffer: here every claim chooses freely.
//
// small: one     WRITERS=1 READERS=1 BUFFERS=2 VERSIONS=4 READS=2 KILLS=0
// small: two     WRITERS=2 READERS=1 BUFFERS=3 VERSIONS=2 READS=1 KILLS=0
// small: turns   WRITERS=2 READERS=0 BUFFERS=3 VERSIONS=4 READS=0 KILLS=0
// small: deaths  WRITERS=2 READERS=1 BUFFERS=2 VERSIONS=2 READS=2 KILLS=1 IN_TURN=1
// small: last    WRITERS=1 READERS=1 BUFFERS=2 VERSIONS=3 READS=3 KILLS=1
// large: two     WRITERS=2 READERS=2 BUFFERS=3 VERSIONS=3 READS=1 KILLS=0
// large: deaths  WRITERS=2 READERS=1 BUFFERS=3 VERSIONS=2 READS=1 KILLS=1
//
// mutant: NO_SECOND_LOAD          one     a reader accepts its copy without loading the state again
// mutant: CLAIM_THE_LATEST        one     a writer claims the latest buffer
// mutant: PUBLISH_BEFORE_COPY     one     the version is published before the content is complete
// mutant: LATEST_LOADED_EARLIER   two     whether a buffer is the latest is looked at before its state, not after
// mutant: MARK_BEFORE_PUBLISH     two     the mark is stored before the version is published
// mutant: CLAIM_WITHOUT_EXCHANGE  two     a writer loads the state and stores its claim
// mutant: PUBLISH_WITHOUT_EXCHANGE two    a writer loads the latest version and stores the next one
// mutant: CLAIMED_IN_TURN         turns     a writer gives up when it has seen every buffer claimed, at different times
// mutant: CLAIM_FROM_THE_LIVING   two     a writer claims a buffer that a live writer fills
// mutant: NO_CLAIM_FROM_THE_DEAD  deaths  the buffer of a dead writer is never claimed again
// mutant: ONLY_THE_MARK           last    a reader accepts only marked buffers: not that of a writer that died before it

#define PROCESSES (WRITERS + READERS)
#include "include/deaths.pml"

#define LATEST(version, buffer) ((version) << 2 | (buffer))
#define VERSION(word) ((word) >> 2)
#define BUFFER(word) ((word) & 3)
#define NONE 255

byte latest;
short state[BUFFERS]; // 0: never used; above 0: claimed by this process; below 0: the mark, minus the version
byte first_half[BUFFERS], second_half[BUFFERS];

byte content[WRITERS + VERSIONS]; // for assertions: what was published as each version

// A claimed, marked or unused buffer that is not the latest can be claimed. The load of `latest` comes last: a buffer
// that was published in between would be overwritten while it is the latest.
inline look_at_buffer() {
#ifdef MUTANT_LATEST_LOADED_EARLIER
    word = latest;
#endif
    d_step { states[index] = state[index]; claimable = true };
#ifndef MUTANT_CLAIM_FROM_THE_LIVING
    if
#ifdef MUTANT_NO_CLAIM_FROM_THE_DEAD
    :: states[index] > 0 -> claimable = false
#else
    :: states[index] > 0 && !dead[states[index]] -> claimable = false
#endif
    :: else
    fi;
#endif
#ifndef MUTANT_LATEST_LOADED_EARLIER
    word = latest;
#endif
    d_step {
#ifndef MUTANT_CLAIM_THE_LATEST
        claimable = claimable && (word == 0 || BUFFER(word) != index);
#endif
        // The mark grows with the version; 0: never used, or the writer is dead.
        age = (states[index] < 0 -> -states[index] : 0);
        if
        :: claimable && (chosen == NONE || (rotate -> age < chosen_age : age > chosen_age)) ->
           chosen = index; chosen_age = age
        :: else
        fi;
        word = 0; age = 0; claimable = false
    }
}

inline claim() {
    do
    :: began = latest;
       if
       :: rotate = false
       :: rotate = true
       fi;
       d_step { index = 0; chosen = NONE; chosen_age = 0 };
       do
       :: index < BUFFERS -> look_at_buffer(); index++
       :: else -> break
       od;
       if
       :: chosen != NONE ->
          d_step {
#ifdef MUTANT_CLAIM_WITHOUT_EXCHANGE
              moved = false;
#else
              moved = (state[chosen] != states[chosen]);
#endif
              if
              :: !moved -> state[chosen] = me
              :: else
              fi
          }
       :: else -> // only if no word changed meanwhile were all buffers claimed at the same time
#ifdef MUTANT_CLAIMED_IN_TURN
          moved = false;
#else
          moved = (latest != began);
          index = 0;
          do
          :: index < BUFFERS -> d_step { moved = moved || (state[index] != states[index]); index++ }
          :: else -> break
          od;
#endif
          assert(moved) // there is one buffer more than writers, so not all are claimed
       fi;
       if
       :: !moved -> break
       :: else
       fi
    od;
    atomic {
        index = 0;
        do
        :: index < BUFFERS -> states[index] = 0; index++
        :: else -> break
        od;
        index = 0; began = 0; rotate = false; moved = false; chosen_age = 0
    }
}

inline publish() {
    do
    :: word = latest;
       d_step {
#ifdef MUTANT_PUBLISH_WITHOUT_EXCHANGE
           moved = false;
#else
           moved = (latest != word);
#endif
           if
           :: !moved ->
              latest = LATEST(VERSION(word) + 1, chosen);
              content[VERSION(word) + 1] = value
           :: else
           fi
       };
       if
       :: !moved -> break
       :: else
       fi
    od;
    moved = false
}

#define store_half(half) d_step { assert(latest == 0 || BUFFER(latest) != chosen); half[chosen] = value }

proctype Writer(byte me) {
    byte published, index, chosen = NONE, chosen_age, age, word, began, value;
    short states[BUFFERS];
    bool rotate, claimable, moved;
    {
#ifdef IN_TURN
        me == 1 || ended[1]; // the second writer replaces the first: two buffers are enough
#endif
        do
        :: published < (me == 1 -> VERSIONS : 1) ->
           claim();
           d_step { published++; value = me << 4 | published };
           store_half(first_half);
#ifdef MUTANT_PUBLISH_BEFORE_COPY
           publish();
           second_half[chosen] = value;
           state[chosen] = -(VERSION(word) + 1);
#else
           store_half(second_half);
#ifdef MUTANT_MARK_BEFORE_PUBLISH
           word = latest;
           state[chosen] = -(VERSION(word) + 1);
           publish();
#else
           publish();
           state[chosen] = -(VERSION(word) + 1);
#endif
#endif
           d_step { chosen = NONE; word = 0; value = 0 }
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

#if WRITERS == 1
#define WRITERS_ARE_GONE ended[1]
#else
#define WRITERS_ARE_GONE (ended[1] && ended[2])
#endif

proctype Reader(byte me) {
    byte reads, word, first, second, newest;
    bool accepted, undisturbed;
    {
        do
        :: reads < READS ->
           d_step { undisturbed = WRITERS_ARE_GONE; word = latest };
           if
           :: word == 0
           :: else ->
              first = first_half[BUFFER(word)];
              second = second_half[BUFFER(word)];
#ifdef MUTANT_NO_SECOND_LOAD
              accepted = true;
#else
              accepted = (state[BUFFER(word)] == -VERSION(word));
#ifndef MUTANT_ONLY_THE_MARK
              if
              :: !accepted -> accepted = (latest == word)
              :: else
              fi;
#endif
#endif
              d_step {
                  assert(accepted || !undisturbed);
                  if
                  :: accepted ->
                     assert(first == second && first == content[VERSION(word)]);
                     assert(VERSION(word) >= newest);
                     newest = VERSION(word)
                  :: else
                  fi
              }
           fi;
           d_step { reads++; word = 0; first = 0; second = 0; accepted = false; undisturbed = false }
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
        :: p <= WRITERS -> run Writer(p); p++
        :: p > WRITERS && p <= PROCESSES -> run Reader(p); p++
        :: else -> break
        od
    }
}
