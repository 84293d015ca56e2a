// A ring (cpp/src/lanes/ring.hpp): writers claim slots, fill and commit them or abandon them; readers take slots, read and
// release them or give them back; any of them may die at any line.
//
// Promises: every committed item is read exactly once, whole, and in the order of the commits that did not overlap; with
// drop_oldest, items that are not read were dropped or abandoned, and counted; no slot is lost; every wait ends, without
// the help of the slice unless a process died.
//
// Waiting: the queue of each side is the order of its waiters here, and look with rank, leave and call are one step each:
// wait_queue.pml checks them access by access, with places, overtaking and slow processes. It shows that a place of a dead
// process is removed; here the end of a slice does it. The loads of the slots in between are steps of their own. Writers of
// a ring with drop_oldest wait for `freed` instead. A signal is a flag of each process that is set by every change:
// signal.pml shows that no sleeper misses one.
//
// small: block    WRITERS=2 READERS=1 SLOTS=1 ITEMS=1 KILLS=0 ABANDONS=1
// small: order    WRITERS=1 READERS=1 SLOTS=2 ITEMS=3 KILLS=0
// small: readers  WRITERS=1 READERS=2 SLOTS=2 ITEMS=2 KILLS=0 GIVE_BACKS=1
// small: deaths   WRITERS=1 READERS=2 SLOTS=1 ITEMS=1 KILLS=1 ONLY_READERS_DIE=1
// small: writers  WRITERS=2 READERS=1 SLOTS=1 ITEMS=1 KILLS=1 ONLY_WRITERS_DIE=1
// small: drop     WRITERS=2 READERS=1 SLOTS=2 ITEMS=1 KILLS=0 DROP=1 UNREAD_LIMIT=1
// small: dropped  WRITERS=1 READERS=1 SLOTS=3 ITEMS=2 KILLS=1 DROP=1 UNREAD_LIMIT=1
// small: giveback WRITERS=1 READERS=1 SLOTS=1 ITEMS=2 KILLS=0 DROP=1 UNREAD_LIMIT=1 GIVE_BACKS=1
// large: block    WRITERS=2 READERS=1 SLOTS=2 ITEMS=2 KILLS=0 GIVE_BACKS=1 ABANDONS=1
// large: deaths   WRITERS=1 READERS=2 SLOTS=2 ITEMS=2 KILLS=2
// large: drop     WRITERS=2 READERS=1 SLOTS=3 ITEMS=2 KILLS=1 DROP=1 UNREAD_LIMIT=1
//
// mutant: ONE_ROUND               order    the search for the oldest slot ends after one round
// mutant: READY_BEFORE_PAYLOAD    order    a slot is published before its content is complete
// mutant: FREE_BEFORE_READ        order    a slot is released before its content was read
// mutant: ATTEMPT_BEFORE_SIGNAL   block    a waiter loads the signal after its attempt
// mutant: NO_WAKE_OF_WRITERS      block    a release calls no writer
// mutant: NO_WAKE_AFTER_ABANDON   block    a writer that gives up its slot calls no writer
// mutant: NO_WAKE_AFTER_GIVE_BACK readers  a slot that is given back calls no reader
// mutant: OFFER_BEFORE_FREE       block    a release calls a writer before the slot is free
// mutant: TAKE_WITHOUT_EXCHANGE   readers  a reader loads `ready` and stores `reading`
// mutant: NO_OFFER_TO_DROP        giveback with drop_oldest, a slot that is given back is not offered to writers
// mutant: GIVE_BACK_AS_FREE       readers  a slot that is given back unread is freed
// mutant: GIVE_BACK_UNORDERED     readers  a slot that is given back gets a new place in the order
// mutant: NO_REAP                 deaths   the slot of a dead reader is never offered again
// mutant: REAP_AS_FREE            deaths   the slot of a dead reader is freed instead of offered again
// mutant: REAP_THE_LIVING         writers  slots are reclaimed without asking whether their holder is alive
// mutant: NO_REAP_OF_WRITERS      writers  the slot of a dead writer is never reclaimed
// mutant: COUNT_BEFORE_READY      drop     a writer counts the unread slots before it publishes its own
// mutant: CLAIM_WITHOUT_EXCHANGE  drop     a writer loads `free` and stores `writing`
// mutant: TRIM_DIRECTLY_TO_FREE   dropped  a dropped slot is freed before the drop is counted

#ifndef GIVE_BACKS
#define GIVE_BACKS 0
#endif
#ifndef ABANDONS
#define ABANDONS 0
#endif
#ifndef UNREAD_LIMIT
#define UNREAD_LIMIT SLOTS
#endif
#define PROCESSES (WRITERS + READERS)
#if defined(ONLY_READERS_DIE)
#define MAY_DIE(p) (p > WRITERS)
#elif defined(ONLY_WRITERS_DIE)
#define MAY_DIE(p) (p <= WRITERS)
#endif
#include "include/deaths.pml"

// The state word of a slot: writers are the processes 1 to WRITERS, readers come after them.
#define FREE 0
#define WRITING 1
#define READY 2
#define READING 3
#define WORD(tag, detail) ((detail) << 2 | (tag))
#define TAG(word) ((word) & 3)
#define DETAIL(word) ((word) >> 2)
#define NONE 255

byte state[SLOTS];
byte head_sequence[SLOTS];
byte first_half[SLOTS], second_half[SLOTS]; // the payload: the number of an item, stored in two steps
byte written, last_sequence, read, dropped, abandoned, returned;
byte turn[PROCESSES + 1];    // the position in the wait queue of its side, from 1; 0: not in it
bool called[PROCESSES + 1];
bool changed_for[PROCESSES + 1]; // whether the signal that this process waits for has changed since it loaded it

// What only assertions use. Items are numbered from 0; a set of items is one bit each.
byte committed, delivered;
byte earlier[WRITERS * ITEMS]; // the items whose commits ended before this item's began
byte gone;                     // items that were taken or dropped, without those that were returned
byte returned_during[PROCESSES + 1]; // items that were returned since this process began its search
byte give_backs, abandons;

#define ITEM(writer, number) ((writer - 1) * ITEMS + number)
#define BIT(item) (1 << (item))
#define OUTSTANDING (committed & ~delivered)

// An item leaves the ready slots. Every item whose commit ended before this one's began is gone already, unless it was
// returned after this process began its search.
#define NOTE_GONE(slot) \
    assert((earlier[first_half[slot]] & ~gone & ~returned_during[me]) == 0); \
    gone = gone | BIT(first_half[slot])
inline note_returned(slot) {
    gone = gone & ~BIT(first_half[slot]);
    k = 1;
    do
    :: k <= PROCESSES -> returned_during[k] = returned_during[k] | BIT(first_half[slot]); k++
    :: else -> break
    od;
    k = 0
}

#define WAITS(p) (turn[p] > 0)
#if WRITERS == 1
#define A_WRITER_WAITS WAITS(1)
#else
#define A_WRITER_WAITS (WAITS(1) || WAITS(2))
#endif
#if READERS == 1
#define A_READER_WAITS WAITS(WRITERS + 1)
#else
#define A_READER_WAITS (WAITS(WRITERS + 1) || WAITS(WRITERS + 2))
#endif
#define ANYONE_WAITS(tag) ((tag) == FREE -> A_WRITER_WAITS : A_READER_WAITS)

#define FIRST_OF(tag) ((tag) == FREE -> 1 : WRITERS + 1)
#define LAST_OF(tag) ((tag) == FREE -> WRITERS : PROCESSES)

// Result: available, the number of slots in this state.
inline count_available(tag, limit) {
    do
    :: d_step { probe < SLOTS && available < limit ->
           available = available + (TAG(state[probe]) == tag); probe++
       }
    :: atomic { else -> probe = 0; break }
    od
}

// Inside a d_step: as many waiters are called as slots are available, first come, first called. FREE: writers; READY: readers.
inline call_first(tag) {
    k = FIRST_OF(tag);
    do
    :: k <= LAST_OF(tag) -> available = available - (available > 0 && turn[k] > 0 && called[k]); k++
    :: else -> break
    od;
    place = 1;
    do
    :: place <= PROCESSES && available > 0 ->
       k = FIRST_OF(tag);
       do
       :: k <= LAST_OF(tag) ->
          if
          :: turn[k] == place && !called[k] -> called[k] = true; changed_for[k] = true; available--
          :: else
          fi;
          k++
       :: else -> break
       od;
       place++
    :: else -> break
    od;
    k = 0; place = 0; available = 0
}

inline call_waiters(tag) {
    if
    :: ANYONE_WAITS(tag) ->
       count_available(tag, SLOTS);
       atomic { true -> d_step { call_first(tag) } }
    :: else
    fi
}

#ifdef DROP
inline offer_to_writers() { // all that wait for `freed`
    d_step {
        k = 1;
        do
        :: k <= WRITERS -> changed_for[k] = true; k++
        :: else -> break
        od;
        k = 0
    }
}
#else
#define offer_to_writers() call_waiters(FREE)
#endif
#define offer_to_readers() call_waiters(READY)

inline join(tag) {
    d_step {
        turn[me] = 1;
        k = FIRST_OF(tag);
        do
        :: k <= LAST_OF(tag) -> turn[me] = (k != me && turn[k] >= turn[me] -> turn[k] + 1 : turn[me]); k++
        :: else -> break
        od;
        k = 0
    }
}

// Inside a d_step: this place of the queue is free.
inline vacate(p, tag) {
    place = FIRST_OF(tag);
    do
    :: place <= LAST_OF(tag) -> turn[place] = turn[place] - (turn[p] > 0 && turn[place] > turn[p]); place++
    :: else -> break
    od;
    turn[p] = 0; called[p] = false; place = 0
}

// Sleeps unless the signal has changed since it was loaded. `nothing_left`: no process would ever wake it, rightly.
inline sleep(tag, nothing_left) {
    if
    :: d_step { changed_for[me] -> changed_for[me] = false }
    :: d_step { !changed_for[me] && slices < excuses ->
           slices++;
           k = FIRST_OF(tag); // the dead are stuck; who removes them calls all others
           do
           :: k <= LAST_OF(tag) ->
              if
              :: dead[k] -> vacate(k, tag)
              :: else
              fi;
              k++
           :: else -> break
           od;
           k = 0
       }
    :: d_step { !changed_for[me] && (nothing_left) -> vacate(me, tag); quit = true }
    fi
}

// Results: oldest, oldest_word, ready.
inline oldest_ready() {
    d_step { probe = 0; since = 0; oldest = NONE; oldest_word = 0; ready = 0; returned_during[me] = 0 };
    do
#ifdef MUTANT_ONE_ROUND
    :: d_step { probe < SLOTS ->
#else
    :: d_step { probe < SLOTS || (oldest != NONE && since < SLOTS) ->
#endif
           word = state[probe % SLOTS];
           if
           :: TAG(word) == READY ->
              if
              :: probe < SLOTS -> ready++
              :: else
              fi;
              if
              :: oldest == NONE || DETAIL(word) < DETAIL(oldest_word) ->
                 oldest = probe % SLOTS; oldest_word = word; since = 0
              :: else
              fi
           :: else
           fi;
           probe++; since++; word = 0
       }
    :: atomic { else -> probe = 0; since = 0; break }
    od
}

// Exchanges the oldest ready slot's word; `changed` says whether it did.
inline exchange_oldest(new_word) {
    atomic {
        changed = (state[oldest] == oldest_word);
        if
        :: changed -> NOTE_GONE(oldest); state[oldest] = new_word
        :: else
        fi
    }
}

inline claim_free() {
    d_step { slot = NONE; first = last_sequence % SLOTS; probe = 0; word = NONE };
    do
    :: d_step { slot == NONE && probe < SLOTS && word != FREE -> // the last one that it loaded was not free
           word = state[(first + probe) % SLOTS];
           probe = probe + (word != FREE)
       }
    :: d_step { slot == NONE && probe < SLOTS && word == FREE ->
#ifndef MUTANT_CLAIM_WITHOUT_EXCHANGE
           if
           :: state[(first + probe) % SLOTS] == FREE ->
#endif
              slot = (first + probe) % SLOTS; state[slot] = WORD(WRITING, me)
#ifndef MUTANT_CLAIM_WITHOUT_EXCHANGE
           :: else -> probe++; word = NONE
           fi
#endif
       }
    :: else -> break
    od;
    atomic { first = 0; probe = 0; word = 0 }
}

inline try_claim() {
    claim_free();
#ifdef DROP
    if
    :: slot == NONE ->
       if
       :: reap(WRITING); reap(READING); claim_free() // once per slice
       :: skip
       fi
    :: else
    fi;
    do
    :: slot == NONE ->
       oldest_ready();
       if
       :: oldest == NONE -> break
       :: atomic { oldest != NONE ->
              exchange_oldest(WORD(WRITING, me));
              if
              :: changed -> slot = oldest
              :: else
              fi
          };
          if
          :: changed -> dropped++
          :: else
          fi
       fi
    :: else -> break
    od;
    atomic { oldest = NONE; oldest_word = 0; ready = 0; changed = false }
#endif
}

inline try_take() {
    do
    :: oldest_ready();
       if
       :: oldest == NONE -> break
       :: atomic { oldest != NONE ->
#ifdef MUTANT_TAKE_WITHOUT_EXCHANGE
              changed = true; NOTE_GONE(oldest); state[oldest] = WORD(READING, me);
#else
              exchange_oldest(WORD(READING, me));
#endif
              if
              :: changed -> slot = oldest; break
              :: else
              fi
          }
       fi
    od;
    atomic { oldest = NONE; oldest_word = 0; ready = 0; changed = false }
}

// Reclaims the slots of dead processes that are in the state `held`. `reaped` counts them.
inline reap(held) {
    do
    :: atomic { reaping < SLOTS ->
           word = state[reaping];
           if
#ifdef MUTANT_REAP_THE_LIVING
           :: TAG(word) == held -> sequence = head_sequence[reaping]
#else
           :: TAG(word) == held && dead[DETAIL(word)] -> sequence = head_sequence[reaping]
#endif
           :: else -> word = NONE
           fi
       };
       if
       :: d_step { word != NONE && state[reaping] == word ->
              if
              :: held == WRITING -> state[reaping] = FREE
#ifdef MUTANT_REAP_AS_FREE
              :: held == READING -> state[reaping] = FREE
#else
              :: held == READING -> state[reaping] = WORD(READY, sequence); note_returned(reaping)
#endif
              fi;
              reaped++
          };
          if
          :: held == WRITING -> abandoned++; offer_to_writers()
          :: held == READING -> returned++; offer_to_readers()
          fi
       :: else
       fi;
       atomic { reaping++; word = 0; sequence = 0 }
    :: else -> break
    od;
    reaping = 0
}

inline trim() {
    do
    :: trims < SLOTS ->
       oldest_ready();
       if
       :: ready <= UNREAD_LIMIT -> break
       :: else ->
#ifdef MUTANT_TRIM_DIRECTLY_TO_FREE
          exchange_oldest(FREE);
#else
          exchange_oldest(WORD(WRITING, me));
#endif
          if
          :: changed ->
             dropped++;
#ifndef MUTANT_TRIM_DIRECTLY_TO_FREE
             state[oldest] = FREE
#endif
          :: else
          fi
       fi;
       trims++
    :: else -> break
    od;
    atomic { trims = 0; oldest = NONE; oldest_word = 0; ready = 0; changed = false }
}

inline write_payload() {
    first_half[slot] = ITEM(me, item);
    second_half[slot] = ITEM(me, item)
}

inline commit() {
    d_step { last_sequence++; sequence = last_sequence; earlier[ITEM(me, item)] = committed };
    head_sequence[slot] = sequence;
#ifdef MUTANT_COUNT_BEFORE_READY
    trim();
#endif
    d_step { state[slot] = WORD(READY, sequence); committed = committed | BIT(ITEM(me, item)); sequence = 0 };
    written++;
    offer_to_readers();
#ifdef DROP
#ifndef MUTANT_COUNT_BEFORE_READY
    trim();
#endif
    offer_to_writers()
#endif
}

inline abandon() {
    d_step { abandoned++; abandons++ };
    state[slot] = FREE;
#ifndef MUTANT_NO_WAKE_AFTER_ABANDON
    offer_to_writers();
#endif
    slot = NONE
}

inline release() {
    read++;
#ifdef MUTANT_OFFER_BEFORE_FREE
    offer_to_writers();
#endif
    d_step {
        assert((delivered & BIT(first_half[slot])) == 0);
        delivered = delivered | BIT(first_half[slot]);
        state[slot] = FREE
    };
#if !defined(MUTANT_NO_WAKE_OF_WRITERS) && !defined(MUTANT_OFFER_BEFORE_FREE)
    offer_to_writers()
#endif
}

inline give_back() {
    d_step { returned++; give_backs++ };
    d_step {
#if defined(MUTANT_GIVE_BACK_AS_FREE)
        state[slot] = FREE;
#elif defined(MUTANT_GIVE_BACK_UNORDERED)
        state[slot] = WORD(READY, last_sequence + 1); note_returned(slot);
#else
        state[slot] = WORD(READY, head_sequence[slot]); note_returned(slot);
#endif
    };
#ifndef MUTANT_NO_WAKE_AFTER_GIVE_BACK
    offer_to_readers();
#endif
#if defined(DROP) && !defined(MUTANT_NO_OFFER_TO_DROP)
    offer_to_writers(); // they may drop it
#endif
    skip
}

#define LOCALS \
    byte slot = NONE, slices, k, word, available, rank, place, first, probe, since, oldest = NONE, oldest_word, ready; \
    byte reaping, reaped, sequence, trims; \
    bool changed, quit

// One slice: the signal is loaded, then an attempt is made, slots of the dead are reclaimed, and the process sleeps. The
// attempt after the sleep is that of the next slice.
#ifdef MUTANT_ATTEMPT_BEFORE_SIGNAL
#define SEE_AND_ATTEMPT(attempt) attempt; changed_for[me] = false
#else
#define SEE_AND_ATTEMPT(attempt) changed_for[me] = false; attempt
#endif
#if KILLS == 0
#define TRY_AGAIN(attempt, reap_dead) skip // nobody is dead
#else
#define TRY_AGAIN(attempt, reap_dead) \
    if \
    :: slot == NONE -> \
       reap_dead; \
       if \
       :: reaped > 0 -> reaped = 0; attempt \
       :: else \
       fi \
    :: else \
    fi
#endif
#define WAIT_IN_SLICES(tag, attempt, reap_dead, nothing_left) \
    do \
    :: slot == NONE && !quit -> \
       SEE_AND_ATTEMPT(attempt); \
       TRY_AGAIN(attempt, reap_dead); \
       if \
       :: slot == NONE -> sleep(tag, nothing_left) \
       :: else \
       fi \
    :: else -> changed_for[me] = false; break \
    od

inline claim_as_newcomer_or_join() {
    if
    :: true -> try_claim() // nobody waits, or this process overtakes
    :: A_WRITER_WAITS // and it may not overtake
    fi;
    if
    :: slot == NONE -> join(FREE)
    :: else
    fi
}

inline take_as_newcomer_or_join() {
    try_take();
    if
    :: slot == NONE -> join(READY)
    :: else
    fi
}

// look, rank
inline look(tag) {
    d_step {
        called[me] = false;
        rank = turn[me] - 1
    }
}

inline leave_served(tag) {
    if
    :: slot != NONE ->
       d_step { vacate(me, tag) };
       call_waiters(tag)
    :: else
    fi
}

inline claim_in_turn() {
    look(FREE);
    count_available(FREE, rank + 1);
    if
    :: atomic { available <= rank -> rank = 0; d_step { call_first(FREE) } }
    :: atomic { else -> available = 0; rank = 0 };
       try_claim();
       leave_served(FREE)
    fi
}

inline take_in_turn() {
    atomic { look(READY); rank = 0 };
    try_take();
    leave_served(READY)
}

#if defined(MUTANT_NO_REAP)
#define REAP_ALL skip
#define REAP_READING skip
#elif defined(MUTANT_NO_REAP_OF_WRITERS)
#define REAP_ALL reap(READING)
#define REAP_READING reap(READING)
#else
#define REAP_ALL reap(WRITING); reap(READING)
#define REAP_READING reap(READING)
#endif

#if WRITERS == 1
#define WRITERS_ARE_GONE ended[1]
#else
#define WRITERS_ARE_GONE (ended[1] && ended[2])
#endif
#if READERS == 1
#define READERS_ARE_GONE ended[WRITERS + 1]
#else
#define READERS_ARE_GONE (ended[WRITERS + 1] && ended[WRITERS + 2])
#endif
#ifdef DROP
#define NOTHING_TO_CLAIM false
#define NOTHING_TO_TAKE WRITERS_ARE_GONE
#else
#define NOTHING_TO_CLAIM READERS_ARE_GONE
#define NOTHING_TO_TAKE WRITERS_ARE_GONE && OUTSTANDING == 0
#endif

proctype Writer(byte me) {
    LOCALS;
    byte item;
    {
        do
        :: item < ITEMS && !quit ->
#ifdef DROP
           WAIT_IN_SLICES(FREE, try_claim(), REAP_ALL, NOTHING_TO_CLAIM);
#else
           claim_as_newcomer_or_join();
           WAIT_IN_SLICES(FREE, claim_in_turn(), REAP_ALL, NOTHING_TO_CLAIM);
#endif
           if
           :: quit
#if ABANDONS > 0
           :: !quit && abandons < ABANDONS ->
              abandon();
              if
              :: quit = true // it writes no more
              :: skip
              fi
#endif
           :: !quit ->
#ifdef MUTANT_READY_BEFORE_PAYLOAD
              first_half[slot] = ITEM(me, item);
              commit();
              second_half[slot] = ITEM(me, item);
#else
              write_payload();
              commit();
#endif
              d_step { slot = NONE; item++ }
           fi
        :: else -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

// Reads until all writers have ended and every item was delivered; until it has had enough, with drop_oldest or after it
// gave a slot back.
proctype Reader(byte me) {
    LOCALS;
    byte first_seen;
    {
        do
        :: !quit ->
           take_as_newcomer_or_join();
           WAIT_IN_SLICES(READY, take_in_turn(), REAP_READING, NOTHING_TO_TAKE);
           if
           :: quit
           :: else ->
#ifdef MUTANT_FREE_BEFORE_READ
              release();
#endif
              first_seen = first_half[slot];
              assert(second_half[slot] == first_seen);
              if
#if GIVE_BACKS > 0
              :: give_backs < GIVE_BACKS ->
                 give_back();
                 if
                 :: quit = true // it reads no more
                 :: skip
                 fi
#endif
#ifdef MUTANT_FREE_BEFORE_READ
              :: skip
#else
              :: release()
#endif
              fi;
              d_step { slot = NONE; first_seen = 0 }
           fi
#ifdef DROP
        :: break
#endif
        :: quit -> break
        od
    } UNTIL_KILLED;
    ended[me] = true
}

// When all processes have ended: no slot is lost, and every item is accounted for.
proctype Judge() {
    byte slot, unread, held, k, lost;
    atomic {
        WRITERS_ARE_GONE && READERS_ARE_GONE ->
        do
        :: slot < SLOTS ->
           if
           :: TAG(state[slot]) == READY -> unread++
           :: TAG(state[slot]) == READING || TAG(state[slot]) == WRITING ->
              assert(dead[DETAIL(state[slot])]); // the next process that needs a slot reclaims it
              held = held + (TAG(state[slot]) == READING);
              // A claim that dropped an unread item and died before it counted it: counted when it is reclaimed.
              abandoned = abandoned + (TAG(state[slot]) == WRITING)
           :: else
           fi;
           slot++
        :: else -> break
        od;
        do
        :: k < WRITERS * ITEMS -> lost = lost + ((OUTSTANDING & BIT(k)) != 0); k++
        :: else -> break
        od;
        lost = lost - unread - held; // committed, and neither delivered nor in a slot
#ifdef DROP
        assert(lost <= dropped + abandoned + (KILLS > 1 -> KILLS - 1 : 0));
        assert(KILLS > 0 || unread <= UNREAD_LIMIT);
#else
        assert(lost == 0);
#endif
        // Each death can make the counters wrong by one.
        assert(written + KILLS >= read + dropped + unread + held);
        assert(written <= read + dropped + unread + held + KILLS)
    }
}

init {
    byte p;
    atomic {
        p = 1;
        do
        :: p <= WRITERS -> run Writer(p); p++
        :: p > WRITERS && p <= PROCESSES -> run Reader(p); p++
        :: else -> break
        od;
        run Judge()
    }
}
