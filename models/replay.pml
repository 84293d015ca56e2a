// Rows and links of a replay (cpp/src/lanes/replay.hpp, sampler.hpp): writers reserve sequence numbers, claim slots, write
// and publish rows and link each to its predecessor; a sampler copies a row and those that follow it, and verifies that
// none was overwritten meanwhile; writers may die at any line, and a new writer continues the stream of a dead one.
//
// Promises: a batch row that the sampler accepts is whole, and its steps and its next observation follow each other in one
// episode; a newer row is not overwritten by an older one; the slot of a dead writer is used again in the next round; the
// bit `stored` is right for every slot that is not being written.
//
// Not modelled: the sum tree of priorities, stacked frames (the links backwards), saving.
//
// small: links   WRITERS=2 CAPACITY=2 ROWS=3 OTHER_ROWS=1 STEPS=1 DRAWS=1 KILLS=0
// small: steps   WRITERS=1 CAPACITY=3 ROWS=4 STEPS=2 DRAWS=1 KILLS=0 ENDS=1
// small: tails   WRITERS=1 CAPACITY=3 ROWS=3 STEPS=2 DRAWS=1 KILLS=0 ENDS=2
// small: alone   WRITERS=1 CAPACITY=2 ROWS=2 STEPS=1 DRAWS=1 KILLS=1
// small: deaths  WRITERS=1 CAPACITY=2 ROWS=2 STEPS=1 DRAWS=1 KILLS=1 HEIR=3
// large: links   WRITERS=2 CAPACITY=3 ROWS=3 STEPS=2 DRAWS=1 KILLS=0 ENDS=1
// large: deaths  WRITERS=2 CAPACITY=3 ROWS=2 STEPS=2 DRAWS=1 KILLS=1 HEIR=3 ENDS=2
//
// mutant: NO_VERIFY               links   the sampler accepts its copy without loading the states again
// mutant: ONLY_THE_FIRST_VERIFIED links   only the state of the drawn row is loaded again, not of those that follow it
// mutant: NEXT_WITHOUT_NUMBER     links   `next` starts as 0 for every row: a late link fits the row that came later
// mutant: LINK_WITHOUT_EXCHANGE   links   a link is stored without looking at the row that it lands in
// mutant: PUBLISH_BEFORE_WRITE    links   a row is published before its content is complete
// mutant: CLAIM_FROM_THE_LIVING   links   a slot that a live writer holds is claimed
// mutant: CLAIM_WITHOUT_EXCHANGE  links   a writer loads the state and stores its claim
// mutant: NEWER_NOT_CHECKED       links   a writer that was overtaken by a round overwrites the newer row
// mutant: STORED_AFTER_PUBLISH    alone   the bit `stored` is set after the row is published
// mutant: NO_CLAIM_FROM_THE_DEAD  deaths  the slot of a dead writer is never claimed again
// mutant: NEW_WRITER_NOT_CUT      deaths  a new writer links its first row to the last one of the dead writer

#ifndef OTHER_ROWS
#define OTHER_ROWS ROWS // of the second writer
#endif
#ifndef ENDS
#define ENDS 0 // 1: rows may end an episode without a final observation; 2: also with one
#endif
#ifndef HEIR
#define HEIR 0 // rows that the heir adds to the stream of writer 1 after its death
#endif
#if HEIR > 0
#define PROCESSES (WRITERS + 1)
#else
#define PROCESSES WRITERS
#endif
#include "include/deaths.pml"

#define EMPTY 0
#define WRITING 1
#define COMPLETE 2
#define TAIL 3
#define WORD(tag, detail) ((detail) << 2 | (tag))
#define TAG(word) ((word) & 3)
#define DETAIL(word) ((word) >> 2)
#define SLOT(sequence) ((sequence) % CAPACITY)
#define MAX_SEQUENCE 24

byte last; // reserved.last
byte state[CAPACITY], previous[CAPACITY];
short next[CAPACITY];
bool stored[CAPACITY];
// The payload: the observation in two halves, and whether the episode ended. An observation is the number of its episode
// and its index there, so the observation after it is the next number.
byte first_half[CAPACITY], second_half[CAPACITY];
bool ends[CAPACITY];
byte newest[WRITERS + 1]; // of each stream

byte observation_of[MAX_SEQUENCE + 1]; // for assertions: what was published as each row
byte episodes;

// Claims a slot for the next sequence number: `sequence`, or 0 if other writers hold every slot.
inline claim() {
    d_step { tries = 0; sequence = 0 };
    do
    :: sequence == 0 && tries <= CAPACITY ->
       if
       :: from != to -> d_step { candidate = from; from++ }
       :: else -> d_step { last++; candidate = last }
       fi;
       if
#ifndef MUTANT_NEWER_NOT_CHECKED
       :: d_step { last >= candidate + CAPACITY -> skip } // overtaken by a round; not a try
#endif
       :: else ->
          tries++;
          word = state[SLOT(candidate)];
          if
#ifndef MUTANT_NEWER_NOT_CHECKED
          :: TAG(word) != WRITING && DETAIL(word) > candidate // a newer row, since the check above
#endif
#ifdef MUTANT_CLAIM_FROM_THE_LIVING
#elif defined(MUTANT_NO_CLAIM_FROM_THE_DEAD)
          :: TAG(word) == WRITING
#else
          :: TAG(word) == WRITING && !dead[DETAIL(word)] // held by a live writer
#endif
          :: else ->
             d_step {
#ifndef MUTANT_CLAIM_WITHOUT_EXCHANGE
                 if
                 :: state[SLOT(candidate)] == word ->
#endif
                    assert(TAG(word) == WRITING || DETAIL(word) < candidate);
                    state[SLOT(candidate)] = WORD(WRITING, me);
                    sequence = candidate
#ifndef MUTANT_CLAIM_WITHOUT_EXCHANGE
                 :: else
                 fi
#endif
             }
          fi;
          word = 0
       fi;
       candidate = 0
    :: else -> break
    od;
    tries = 0
}

// The bit of a slot that this process holds.
inline mark_stored(slot, value) {
    stored[slot] = value
}

inline write_observation(slot, observation) {
    first_half[slot] = observation;
    second_half[slot] = observation
}

inline publish(slot, tag, number, observation) {
    d_step {
        observation_of[number] = observation;
        state[slot] = WORD(tag, number)
    }
}

inline write_tail() {
    write_observation(SLOT(tail), observation + 1);
    previous[SLOT(tail)] = row;
    next[SLOT(tail)] = -tail;
    mark_stored(SLOT(tail), false);
    publish(SLOT(tail), TAIL, tail, observation + 1)
}

// Replay::add of one row of the stream. `end`: 0 the episode goes on, 1 it ends, 2 it ends with a final observation.
inline add(stream) {
    d_step { last = last + 1 + (end == 2); to = last + 1; from = to - 1 - (end == 2) };
    claim();
    d_step { row = sequence; sequence = 0 };
    if
    :: row == 0 -> refused = true
    :: else ->
       link = (end == 0 -> -row : row);
       if
       :: end == 2 ->
          claim();
          d_step { tail = sequence; sequence = 0 };
          if
          :: tail == 0 ->
             mark_stored(SLOT(row), false);
             state[SLOT(row)] = EMPTY; // give the row's slot back
             refused = true
          :: else ->
             write_tail();
             link = tail
          fi
       :: else
       fi;
       if
       :: refused
       :: else ->
#ifdef MUTANT_PUBLISH_BEFORE_WRITE
          first_half[SLOT(row)] = observation;
#else
          write_observation(SLOT(row), observation);
#endif
          ends[SLOT(row)] = (end > 0);
          before = newest[stream];
          previous[SLOT(row)] = before;
#ifdef MUTANT_NEXT_WITHOUT_NUMBER
          next[SLOT(row)] = (link < 0 -> 0 : link);
#else
          next[SLOT(row)] = link;
#endif
          newest[stream] = 0; // cut until the row is linked
#ifndef MUTANT_STORED_AFTER_PUBLISH
          mark_stored(SLOT(row), true);
#endif
          publish(SLOT(row), COMPLETE, row, observation);
#ifdef MUTANT_PUBLISH_BEFORE_WRITE
          second_half[SLOT(row)] = observation;
#endif
#ifdef MUTANT_STORED_AFTER_PUBLISH
          mark_stored(SLOT(row), true);
#endif
          if
#if defined(MUTANT_LINK_WITHOUT_EXCHANGE)
          :: d_step { before > 0 -> next[SLOT(before)] = row }
#elif defined(MUTANT_NEXT_WITHOUT_NUMBER)
          :: d_step { before > 0 && next[SLOT(before)] == 0 -> next[SLOT(before)] = row }
#else
          :: d_step { before > 0 && next[SLOT(before)] == -before -> next[SLOT(before)] = row }
#endif
          :: else
          fi;
          newest[stream] = (end > 0 -> 0 : row)
       fi
    fi;
    d_step { row = 0; tail = 0; before = 0; link = 0; from = 0; to = 0 }
}

// The next observation: of this episode, or of a new one after an end.
inline advance() {
    d_step {
        if
        :: observation == 0 || end > 0 -> episodes++; observation = episodes << 3
        :: else -> observation++
        fi;
        end = 0
    }
}

inline choose_end() {
    if
    :: end = 0
#if ENDS > 0
    :: end = 1
#endif
#if ENDS > 1
    :: end = 2
#endif
    fi
}

#define WRITER_LOCALS \
    byte adds, observation, end, from, to, candidate, tries, word, sequence, row, tail, before; \
    short link; \
    bool refused

proctype Writer(byte me) {
    WRITER_LOCALS;
    {
        do
        :: adds < (me == 1 -> ROWS : OTHER_ROWS) && !refused ->
           advance();
           choose_end();
           add(me);
           adds++
        :: else -> break
        od;
        assert(!refused || (WRITERS > 1 && ENDS == 2)) // a writer that wants a tail may hold a second slot
    } UNTIL_KILLED;
    ended[me] = true
}

#if HEIR > 0
// Continues the stream of writer 1 with a new environment. After a full round no slot is held by the dead.
proctype Heir(byte me) {
    WRITER_LOCALS;
    {
        ended[1];
        if
        :: dead[1] ->
#ifndef MUTANT_NEW_WRITER_NOT_CUT
           newest[1] = 0; // ReplayWriter cuts its streams, unless it resumes the same environment
#endif
           do
           :: adds < HEIR && !refused ->
              advance();
              add(1);
              adds++
           :: else -> break
           od;
           atomic {
               tries = 0;
               do
               :: tries < CAPACITY ->
                  assert(TAG(state[tries]) != WRITING || DETAIL(state[tries]) != 1 || WRITERS > 1);
                  tries++
               :: else -> break
               od
           }
        :: else
        fi
    } UNTIL_KILLED;
    ended[me] = true
}
#endif

// Adds a row to the chain, whose states are loaded again after the copy.
inline add_to_chain(number, tails) {
    word = state[SLOT(number)];
    d_step {
        if
        :: word == WORD(COMPLETE, number) || (tails && word == WORD(TAIL, number)) ->
           chain[links] = word; links++
        :: else -> failed = true
        fi;
        word = 0
    }
}

// Sampler::copy_row with walk_steps. Draws any slot; a row that cannot be used is not drawn again here.
proctype Sampler() {
    byte draws, drawn, at, following, word, first, second, next_first, next_second, horizon, links, checked;
    byte chain[STEPS + 2];
    short to;
    bool failed, end, final;
    do
    :: draws < DRAWS ->
       drawn = 0;
       if // any slot
       :: word = state[0]
       :: word = state[1]
#if CAPACITY > 2
       :: word = state[2]
#endif
       fi;
       if
       :: TAG(word) == COMPLETE -> d_step { drawn = DETAIL(word); word = 0 }; add_to_chain(drawn, false)
       :: else -> failed = true; word = 0
       fi;
       if
       :: failed
       :: else ->
          first = first_half[SLOT(drawn)];
          second = second_half[SLOT(drawn)];
          at = drawn;
          do
          :: !failed && !final ->
             to = next[SLOT(at)];
             if
             :: to <= 0 -> // no successor yet: the steps end before this row
                following = at;
                if
                :: horizon == 0 -> failed = true
                :: else -> break
                fi
             :: else ->
                end = ends[SLOT(at)];
                horizon++;
                following = to;
                if
                :: to != at -> add_to_chain(following, (end || horizon == STEPS))
                :: else -> final = true // the episode ended here, without a final observation
                fi;
                if
                :: failed || end || horizon == STEPS -> break
                :: else ->
                   if
                   :: final -> failed = true // only the end of an episode links to itself
                   :: else -> at = following
                   fi
                fi
             fi
          :: else -> break
          od;
          if
          :: failed
          :: else ->
             next_first = first_half[SLOT(following)];
             next_second = second_half[SLOT(following)];
#ifndef MUTANT_NO_VERIFY
             checked = 0;
             do
#ifdef MUTANT_ONLY_THE_FIRST_VERIFIED
             :: checked < 1 ->
#else
             :: checked < links ->
#endif
                d_step {
                    failed = failed || state[SLOT(DETAIL(chain[checked]))] != chain[checked];
                    checked++
                }
             :: else -> break
             od;
#endif
             atomic {
                 if
                 :: !failed ->
                    assert(first == second && first == observation_of[drawn]);
                    assert(next_first == next_second);
                    // The steps follow each other, and so does the next observation. After an end without a final
                    // observation it is that of the last step, and its value is not used.
                    assert(next_first == first + horizon - final);
                    assert(!final || end)
                 :: else
                 fi
             }
          fi
       fi;
       d_step {
           draws++; drawn = 0; at = 0; following = 0; first = 0; second = 0; next_first = 0; next_second = 0;
           horizon = 0; links = 0; checked = 0; to = 0; failed = false; end = false; final = false;
           chain[0] = 0; chain[1] = 0; chain[STEPS] = 0
       }
    :: else -> break
    od
}

#if WRITERS == 1
#define WRITERS_ARE_GONE ended[1]
#else
#define WRITERS_ARE_GONE (ended[1] && ended[2])
#endif

proctype Judge() {
    byte slot;
    atomic {
        WRITERS_ARE_GONE && (HEIR == 0 || ended[PROCESSES]) ->
        do
        :: slot < CAPACITY ->
           if
           :: TAG(state[slot]) == WRITING -> assert(dead[DETAIL(state[slot])])
           :: else -> assert(stored[slot] == (TAG(state[slot]) == COMPLETE))
           fi;
           slot++
        :: else -> break
        od
    }
}

init {
    byte p;
    atomic {
        p = 1;
        do
        :: p <= WRITERS -> run Writer(p); p++
        :: else -> break
        od;
#if HEIR > 0
        run Heir(PROCESSES);
#endif
        run Sampler();
        run Judge()
    }
}
