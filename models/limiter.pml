// The limiter of a replay (cpp/src/lanes/replay.cpp: admit_inserts, admit_samples, wait_admitted): it makes the side wait
// that is ahead.
//
// Promises: writers and samplers never wait for each other at the same time if error_buffer is at least what
// required_error_buffer demands; the number of samples that are due stays within error_buffer of its value at min_size;
// no batch is drawn before min_size rows are stored; a process that dies after its admission does not block the others.
//
// Why refunds need the slice: they change a count without a signal. A process of the same side that this would admit finds
// out when its slice ends.
//
// All comparisons are doubled, because the smallest error_buffer is half of an integer.
//
// small: calm    WRITERS=2 SAMPLERS=1 INSERT=1 SAMPLE=2 RATIO=1 MIN_SIZE=2 ADDS=3 BATCHES=2 KILLS=0
// small: ratio   WRITERS=1 SAMPLERS=2 INSERT=1 SAMPLE=3 RATIO=2 MIN_SIZE=1 ADDS=3 BATCHES=1 KILLS=0 REFUNDS=1
// small: deaths  WRITERS=2 SAMPLERS=1 INSERT=2 SAMPLE=1 RATIO=1 MIN_SIZE=3 ADDS=2 OTHER_ADDS=1 BATCHES=1 KILLS=1
// large: calm    WRITERS=2 SAMPLERS=2 INSERT=2 SAMPLE=3 RATIO=2 MIN_SIZE=3 ADDS=2 BATCHES=2 KILLS=0 REFUNDS=1
// large: deaths  WRITERS=2 SAMPLERS=1 INSERT=2 SAMPLE=1 RATIO=1 MIN_SIZE=3 ADDS=3 BATCHES=2 KILLS=1
//
// mutant: ATTEMPT_BEFORE_SIGNAL     calm    a waiter loads the signal after its attempt
// mutant: ADMIT_WITHOUT_EXCHANGE    calm    a process loads the count and stores the next one
// mutant: BUFFER_TOO_SMALL          calm    error_buffer is one sample smaller than required
// mutant: NO_SIGNAL_AFTER_A_SAMPLE  calm    a sampler does not signal `sampled`
// mutant: SAMPLES_BEFORE_MIN_SIZE   calm    samplers look at the admitted rows instead of the stored ones
// mutant: MIN_SIZE_BY_ADMISSION     deaths  writers look at the admitted rows: those of a dead writer are never stored

#ifndef OTHER_ADDS
#define OTHER_ADDS ADDS // of the first of two writers
#endif
#ifndef REFUNDS
#define REFUNDS 0
#endif
#define PROCESSES (WRITERS + SAMPLERS)
#include "include/deaths.pml"

#ifdef MUTANT_BUFFER_TOO_SMALL
#define TWICE_THE_BUFFER (INSERT * RATIO + SAMPLE - 2)
#else
#define TWICE_THE_BUFFER (INSERT * RATIO + SAMPLE)
#endif
#define TWICE_DUE(inserts, samples) (2 * ((inserts) * RATIO - (samples)))
#define MOST_DUE (2 * MIN_SIZE * RATIO + TWICE_THE_BUFFER)
#define LEAST_DUE (2 * MIN_SIZE * RATIO - TWICE_THE_BUFFER)

byte inserts, samples; // admitted
byte added, sampled;   // signals
bool asleep[PROCESSES + 1];

// For assertions: what was really admitted.
byte real_inserts, real_samples;
byte refunds; // samples that were admitted and given back

inline wake(first, last) {
    d_step {
        k = first;
        do
        :: k <= last -> asleep[k] = false; k++
        :: else -> break
        od;
        k = 0
    }
}

inline admit_inserts() {
    d_step { known = inserts; admitted = false; refused = false };
    do
    :: atomic { !admitted && !refused -> other = samples };
       atomic {
#ifdef MUTANT_MIN_SIZE_BY_ADMISSION
           stored = inserts;
#else
           stored = added;
#endif
           refused = (stored >= MIN_SIZE && TWICE_DUE(known + INSERT, other) > MOST_DUE)
       };
       if
       :: refused
       :: d_step { !refused ->
#ifndef MUTANT_ADMIT_WITHOUT_EXCHANGE
              if
              :: inserts == known ->
#endif
                 inserts = known + INSERT;
                 real_inserts = real_inserts + INSERT;
                 admitted = true;
                 assert(stored < MIN_SIZE || TWICE_DUE(real_inserts, real_samples) <= MOST_DUE + 2 * refunds)
#ifndef MUTANT_ADMIT_WITHOUT_EXCHANGE
              :: else -> known = inserts
              fi
#endif
          }
       fi
    :: else -> break
    od;
    atomic { known = 0; other = 0; stored = 0; refused = false }
}

inline admit_samples() {
    d_step { known = samples; admitted = false; refused = false };
    do
#ifdef MUTANT_SAMPLES_BEFORE_MIN_SIZE
    :: atomic { !admitted && !refused -> stored = inserts };
#else
    :: atomic { !admitted && !refused -> stored = added };
#endif
       atomic {
           other = inserts;
           refused = (stored < MIN_SIZE || TWICE_DUE(other, known + SAMPLE) < LEAST_DUE)
       };
       if
       :: refused
       :: d_step { !refused ->
#ifndef MUTANT_ADMIT_WITHOUT_EXCHANGE
              if
              :: samples == known ->
#endif
                 samples = known + SAMPLE;
                 real_samples = real_samples + SAMPLE;
                 admitted = true;
                 assert(added >= MIN_SIZE);
                 assert(TWICE_DUE(real_inserts, real_samples) >= LEAST_DUE)
#ifndef MUTANT_ADMIT_WITHOUT_EXCHANGE
              :: else -> known = samples
              fi
#endif
          }
       fi
    :: else -> break
    od;
    atomic { known = 0; other = 0; stored = 0; refused = false }
}

// `nothing_left`: all processes of the other side have ended, so no process would ever wake this one.
#ifdef MUTANT_ATTEMPT_BEFORE_SIGNAL
#define SEE_AND_ATTEMPT(signal, attempt) attempt; seen = signal
#else
#define SEE_AND_ATTEMPT(signal, attempt) seen = signal; attempt
#endif
#define WAIT_ADMITTED(signal, attempt, nothing_left) \
    do \
    :: !admitted && !quit -> \
       SEE_AND_ATTEMPT(signal, attempt); \
       if \
       :: admitted \
       :: else -> \
          d_step { asleep[me] = (signal == seen); seen = 0 }; \
          if \
          :: !asleep[me] \
          :: d_step { asleep[me] && slices < excuses -> asleep[me] = false; slices++ } \
          :: d_step { asleep[me] && nothing_left -> asleep[me] = false; quit = true } \
          fi \
       fi \
    :: else -> break \
    od; \
    atomic { seen = 0; admitted = false }

#define LOCALS \
    byte turn, known, other, stored, seen, slices, k; \
    bool admitted, refused, quit

#if WRITERS == 1
#define WRITERS_ARE_GONE ended[1]
#else
#define WRITERS_ARE_GONE (ended[1] && ended[2])
#endif
#if SAMPLERS == 1
#define SAMPLERS_ARE_GONE ended[WRITERS + 1]
#else
#define SAMPLERS_ARE_GONE (ended[WRITERS + 1] && ended[WRITERS + 2])
#endif

proctype Writer(byte me) {
    LOCALS;
    {
        do
        :: turn < (me == WRITERS -> ADDS : OTHER_ADDS) && !quit ->
           WAIT_ADMITTED(sampled, admit_inserts(), SAMPLERS_ARE_GONE);
           if
           :: quit
           :: else -> // the rows are written here
              added = added + INSERT;
              wake(WRITERS + 1, PROCESSES)
           fi;
           turn++
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

proctype Sampler(byte me) {
    LOCALS;
    {
        do
        :: turn < BATCHES && !quit ->
           WAIT_ADMITTED(added, admit_samples(), WRITERS_ARE_GONE);
           if
           :: quit
#if REFUNDS > 0
           :: d_step { !quit && refunds < REFUNDS * SAMPLE -> // no row could be drawn
                  samples = samples - SAMPLE; real_samples = real_samples - SAMPLE; refunds = refunds + SAMPLE; excuses++
              }
#endif
           :: !quit -> // the rows are copied here
#ifndef MUTANT_NO_SIGNAL_AFTER_A_SAMPLE
              sampled = sampled + SAMPLE;
              wake(1, WRITERS)
#endif
           fi;
           turn++
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
        :: p > WRITERS && p <= PROCESSES -> run Sampler(p); p++
        :: else -> break
        od
    }
}
