// The step loop of the workers (cpp/python/vector/step_loop.hpp, commands.hpp) and the supervisor (vector/supervisor.py)
// with on_error="restart": commands, the quorum with its two cells, messages through a pipe that may be full, and workers
// that die at any line and are restarted.
//
// Promises: a call returns when every environment has made exactly this step, or was truncated in it because its worker
// was restarted; no environment is stepped twice for one action; no row changes after its result was handed out; every
// restart shows as one truncated step; every worker answers a message once; every call ends, and needs no poll.
//
// A signal and the quorum are a value here: signal.pml and quorum.pml show that their waits end with it. Not modelled:
// step_timeout, Ctrl-C, the limit of restarts, environments that raise.
//
// small: calls   WORKERS=2 ENVS_EACH=1 CALLS=2 KILLS=1 STEPS=1 MESSAGES=1
// small: sends   WORKERS=1 ENVS_EACH=2 CALLS=2 KILLS=0 STEPS=1 SENDS=3
// small: killed  WORKERS=2 ENVS_EACH=1 CALLS=1 KILLS=1 SENDS=1
// large: calls   WORKERS=2 ENVS_EACH=1 CALLS=2 KILLS=2 STEPS=1 MESSAGES=2
// large: sends   WORKERS=2 ENVS_EACH=1 CALLS=2 KILLS=1 STEPS=1 SENDS=2
//
// mutant: GO_BEFORE_COMMAND       calls   a worker is woken before its command word is stored
// mutant: ARRIVE_BEFORE_FINISHED  calls   a worker arrives before it counts the command as finished
// mutant: COUNT_STAYS_VALID       calls   the count of arrivals is used after a restart as if none had died
// mutant: SAME_CELL               calls   counting begins again in the same cell, where a late worker may still arrive
// mutant: NO_DRAIN                calls   messages are not read before the cell changes: a worker waits for the pipe
// mutant: MESSAGE_LOST            calls   a worker that is restarted does not get the message again
// mutant: NO_TRUNCATION           calls   a worker that is restarted outside of a step goes on as if nothing had happened
// mutant: NUMBER_NOT_CHECKED      sends   a worker takes the word of a later command for that of its own
// mutant: COMPLETED_BEFORE_ROW    sends   a sent step is marked as completed before its row is written
// mutant: ARRIVED_LOADED_LATE     sends   the parent counts what is ready before it loads the arrivals
// mutant: REQUEST_AFTER_COMMAND   sends   the command is issued before the step is requested
// mutant: REQUEST_NOT_COMPLETED   killed  a restart leaves the step of the dead worker requested

#ifndef STEPS
#define STEPS 0
#endif
#ifndef MESSAGES
#define MESSAGES 0 // 1: calls of methods; 2: infos of steps, too
#endif
#ifndef SENDS
#define SENDS 0 // calls of `send` before everything must be received
#endif
#define ENVS (WORKERS * ENVS_EACH)
#define NONE 255
#define TRUNCATED 254

// Commands, and messages to a worker.
#define STEP 0
#define SEND 1
#define MESSAGE 2
#define CALL 1
#define NO_OP 2
#define TAKE_OVER 3

// The step segment.
short command[WORKERS]; // number << 4 | cell << 2 | command
byte go[WORKERS];
byte finished[WORKERS], messages_sent[WORKERS]; // progress words
byte arrived[2];
byte requested[ENVS], completed[ENVS];
byte action[ENVS], row[ENVS];

// The pipe to and from each worker. `up`: no message, a whole one, or the first part of a long one.
chan down[WORKERS] = [2] of { byte, byte };
#define WHOLE 1
#define PART 2
byte up[WORKERS];

// Processes of each worker: started, dead, and the last one that has mapped the step segment.
byte lives[WORKERS], deaths[WORKERS], bound[WORKERS];
#define DEAD(w) (deaths[w] == lives[w])

// For assertions.
bool due[ENVS];     // a result of this environment was not handed out
bool stepped[ENVS]; // for the current action, by the current process
bool owed[ENVS];    // its worker was restarted and the truncation was not handed out

#if KILLS > 0
#define UNTIL_KILLED unless { deaths[w] >= life }
byte kills;
active proctype Killer() {
    do
    :: d_step { kills < KILLS && !DEAD(0) && bound[0] > 0 -> deaths[0]++; kills++ } // not before the first command
#if WORKERS > 1
    :: d_step { kills < KILLS && !DEAD(1) && bound[1] > 0 -> deaths[1]++; kills++ }
#endif
    :: break // no further death
    od
}
#else
#define UNTIL_KILLED
#endif

// ---------------------------------------------------------------------------------------------------------- a worker

#define ENV(i) (w * ENVS_EACH + (i))

inline make_step(i) {
    value = action[ENV(i)];
    d_step {
        assert(due[ENV(i)] && !stepped[ENV(i)]);
        stepped[ENV(i)] = true;
        row[ENV(i)] = (pending_truncation[i] -> TRUNCATED : value);
        pending_truncation[i] = false;
        value = 0
    }
}

inline finish_command(arrivals) {
#ifdef MUTANT_ARRIVE_BEFORE_FINISHED
    arrived[cell] = arrived[cell] + arrivals;
    finished[w] = last - first
#else
    finished[w] = last - first;
    arrived[cell] = arrived[cell] + arrivals
#endif
}

// The message is counted, then as much of it as the pipe takes is sent; the rest after the arrival.
inline post_message() {
    messages_sent[w]++;
    if
    :: up[w] = WHOLE
    :: up[w] = PART
    fi
}

proctype Worker(byte w; byte life) {
    byte first, last, number, cell, order, i, value, kind, mask;
    bool pending_truncation[ENVS_EACH];
    {
        d_step { first = go[w]; last = first };
        bound[w] = life;
end_idle:
        do
        :: go[w] > last ->
           last++;
           d_step { number = command[w] >> 4; cell = command[w] >> 2 & 3; order = command[w] & 3 };
           if
           :: order == SEND -> // also when the word is a later command's
              do
              :: i < ENVS_EACH ->
                 value = requested[ENV(i)];
                 if
                 :: value != completed[ENV(i)] ->
#ifdef MUTANT_COMPLETED_BEFORE_ROW
                    completed[ENV(i)] = value;
                    make_step(i);
#else
                    number = value;
                    make_step(i);
                    completed[ENV(i)] = number;
#endif
                    arrived[cell] = arrived[cell] + 1
                 :: else
                 fi;
                 d_step { i++; value = 0 }
              :: else -> break
              od;
              finish_command(0)
#ifndef MUTANT_NUMBER_NOT_CHECKED
           :: order != SEND && number != last -> finish_command(0) // a `send` that was done with the one before it
           :: order == STEP && number == last ->
#else
           :: order == STEP ->
#endif
              do
              :: i < ENVS_EACH -> make_step(i); i++
              :: else -> break
              od;
              if
              :: finish_command(ENVS_EACH)
#if MESSAGES > 1
              :: post_message(); finish_command(ENVS_EACH); up[w] != PART // infos
#endif
              fi
#ifndef MUTANT_NUMBER_NOT_CHECKED
           :: order == MESSAGE && number == last ->
#else
           :: order == MESSAGE ->
#endif
              down[w] ? kind, mask;
              if
              :: kind == CALL -> post_message(); finish_command(ENVS_EACH); up[w] != PART
              :: kind == NO_OP -> finish_command(ENVS_EACH)
              :: kind == TAKE_OVER -> // environments that were in a step are truncated now, the others in their next step
                 do
                 :: i < ENVS_EACH ->
                    d_step {
#ifndef MUTANT_NO_TRUNCATION
                        pending_truncation[i] = !(mask >> i & 1);
#endif
                        if
                        :: mask >> i & 1 -> assert(due[ENV(i)]); row[ENV(i)] = TRUNCATED
                        :: else
                        fi;
                        i++
                    }
                 :: else -> break
                 od;
                 finish_command(ENVS_EACH)
              fi
           fi;
           d_step { number = 0; cell = 0; order = 0; i = 0; kind = 0; mask = 0 }
        od
    } UNTIL_KILLED
}

// -------------------------------------------------------------------------------------------------------- the parent

#define PENDING(w) (finished[w] != go[w] - issued_before[w])
#define BUSY_AND_DEAD(w) (PENDING(w) && DEAD(w))
#if WORKERS == 1
#define ANY_DEAD DEAD(0)
#define FIRST_DEAD 0
#define NONE_BUSY (!PENDING(0))
#define ANY_BUSY_AND_DEAD BUSY_AND_DEAD(0)
#define FIRST_BUSY_AND_DEAD 0
#else
#define ANY_DEAD (DEAD(0) || DEAD(1))
#define FIRST_DEAD (DEAD(0) -> 0 : 1)
#define NONE_BUSY (!PENDING(0) && !PENDING(1))
#define ANY_BUSY_AND_DEAD (BUSY_AND_DEAD(0) || BUSY_AND_DEAD(1))
#define FIRST_BUSY_AND_DEAD (BUSY_AND_DEAD(0) -> 0 : 1)
#endif

#if ENVS == 1
#define ALL_SENT sent[0]
#define ANY_SENT sent[0]
#elif ENVS == 2
#define ALL_SENT (sent[0] && sent[1])
#define ANY_SENT (sent[0] || sent[1])
#else
#define ALL_SENT (sent[0] && sent[1] && sent[2] && sent[3])
#define ANY_SENT (sent[0] || sent[1] || sent[2] || sent[3])
#endif

inline issue(worker, order) {
#ifdef MUTANT_GO_BEFORE_COMMAND
    go[worker] = go[worker] + 1;
    command[worker] = go[worker] << 4 | cell << 2 | order
#else
    command[worker] = (go[worker] + 1) << 4 | cell << 2 | order;
    go[worker] = go[worker] + 1
#endif
}

// Reads all messages. A worker that dies in the middle of one is `failed`.
inline drain_messages() {
    w = 0;
    do
    :: w < WORKERS && failed == NONE ->
       if
       :: messages_sent[w] != messages_read[w] ->
          if
          :: d_step { up[w] == WHOLE || (up[w] == PART && !DEAD(w)) ->
                 up[w] = 0; messages_read[w]++; received[w]++
             }
          :: up[w] != WHOLE && DEAD(w) -> failed = w
          fi
       :: else -> w++
       fi
    :: else -> break
    od;
    w = 0
}

inline send_to_all(content) {
    w = 0;
    do
    :: w < WORKERS ->
       issue(w, MESSAGE);
       down[w] ! content, 0; // to a dead worker: the wait for its answer reports that
       d_step { expected = expected + ENVS_EACH; w++ }
    :: else -> break
    od;
    w = 0
}

// Counting begins in the other cell, where every worker arrives once.
inline resync() {
#ifndef MUTANT_NO_DRAIN
    drain_messages();
#endif
    if
    :: failed == NONE ->
#ifdef MUTANT_SAME_CELL
       d_step { invalid = false; expected = arrived[cell] };
#else
       d_step { invalid = false; cell = 1 - cell; expected = arrived[cell] };
#endif
       send_to_all(NO_OP)
    :: else
    fi
}

inline new_process() {
    atomic {
        finished[w] = 0; messages_sent[w] = 0; messages_read[w] = 0; received[w] = 0; up[w] = 0;
        issued_before[w] = go[w];
        do
        :: down[w] ? _, _
        :: empty(down[w]) -> break
        od;
        i = 0;
        do
        :: i < ENVS_EACH ->
           owed[ENV(i)] = true;
           stepped[ENV(i)] = false;
           mask = mask | (last_message[w] == NONE && (!ANY_SENT || sent[ENV(i)])) << i;
           i++
        :: else -> break
        od;
        i = 0;
        lives[w]++;
        run Worker(w, lives[w])
    }
}

// _restart_worker and _restore_worker, until a new process is where the dead one was.
inline restart_worker() {
    d_step {
        w = failed; failed = NONE; restored = false;
#ifndef MUTANT_COUNT_STAYS_VALID
        invalid = true
#endif
    };
    do
    :: !restored ->
       mask = 0;
       new_process();
       if
       :: bound[w] == lives[w] ->
          issue(w, MESSAGE);
          down[w] ! TAKE_OVER, mask;
          do
          :: before = arrived[cell];
             if
             :: PENDING(w) ->
                if
                :: arrived[cell] > before
                :: arrived[cell] <= before && DEAD(w) -> break
                fi
             :: else -> restored = true; break
             fi
          od
       :: bound[w] != lives[w] && DEAD(w)
       fi
    :: else -> break
    od;
    atomic {
        i = 0;
        do
        :: i < ENVS_EACH ->
#ifndef MUTANT_REQUEST_NOT_COMPLETED
           completed[ENV(i)] = requested[ENV(i)];
#endif
           i++
        :: else -> break
        od;
        i = 0; before = 0; mask = 0
    };
    if
#ifndef MUTANT_MESSAGE_LOST
    :: last_message[w] == CALL -> issue(w, MESSAGE); down[w] ! CALL, 0
#endif
    :: else
    fi;
    d_step { w = 0; restored = false }
}

// Waits until all workers have finished their commands and all messages are read.
inline wait_for_all() {
    done = false;
    do
    :: failed != NONE -> restart_worker()
    :: failed == NONE && !done && !invalid ->
       if
       :: arrived[cell] >= expected -> drain_messages(); done = (failed == NONE)
       :: d_step { arrived[cell] < expected && ANY_DEAD -> failed = FIRST_DEAD }
       fi
    :: failed == NONE && !done && invalid -> // the count is meaningless: until no worker is busy
       if
       :: NONE_BUSY -> resync()
       :: d_step { ANY_BUSY_AND_DEAD -> failed = FIRST_BUSY_AND_DEAD }
       fi
    :: failed == NONE && done -> break
    od;
    done = false
}

// The result of an environment is handed out.
inline hand_out(env) {
    assert(due[env]);
    if
    :: owed[env] -> assert(row[env] == TRUNCATED); owed[env] = false
    :: else -> assert(row[env] == action[env] && stepped[env])
    fi;
    due[env] = false
}

inline write_action(env) {
    action[env] = action[env] + 1; due[env] = true; stepped[env] = false
}

inline forget_messages() {
    d_step {
        last_message[0] = NONE; received[0] = 0;
#if WORKERS > 1
        last_message[1] = NONE; received[1] = 0;
#endif
    }
}

inline step_all() {
    d_step {
        i = 0;
        do
        :: i < ENVS -> write_action(i); i++
        :: else -> break
        od;
        i = 0
    };
    forget_messages();
    expected = expected + ENVS;
    do
    :: i < WORKERS -> issue(i, STEP); i++
    :: else -> break
    od;
    i = 0;
    wait_for_all();
    d_step {
        do
        :: i < ENVS -> hand_out(i); i++
        :: else -> break
        od;
        i = 0
    };
    forget_messages()
}

inline call_all() {
    forget_messages();
    d_step {
        do
        :: i < WORKERS -> last_message[i] = CALL; i++
        :: else -> break
        od;
        i = 0
    };
    send_to_all(CALL);
    wait_for_all();
    d_step {
        do
        :: i < WORKERS -> assert(received[i] == 1); i++
        :: else -> break
        od;
        i = 0
    };
    // What a worker has to do again if it dies later: this message, until the next command.
}

// Requests a step of some environments that wait for none, and issues the command to their workers.
inline send_some() {
    forget_messages();
    count = 0; mask = 0;
    do
    :: i < ENVS && !sent[i] ->
       if
       :: true ->
          d_step { write_action(i); sent[i] = true; count++; mask = mask | 1 << i / ENVS_EACH };
#ifdef MUTANT_REQUEST_AFTER_COMMAND
          ready[i] = true;
#else
          requested[i] = requested[i] + 1;
#endif
          i++
       :: i++
       fi
    :: i < ENVS && sent[i] -> i++
    :: else -> break
    od;
    atomic { i = 0; expected = expected + count };
    do
    :: i < WORKERS ->
       if
       :: mask >> i & 1 -> issue(i, SEND)
       :: else
       fi;
       i++
    :: else -> break
    od;
#ifdef MUTANT_REQUEST_AFTER_COMMAND
    i = 0;
    do
    :: i < ENVS ->
       if
       :: ready[i] -> requested[i] = requested[i] + 1; ready[i] = false
       :: else
       fi;
       i++
    :: else -> break
    od;
#endif
    atomic { i = 0; count = 0; mask = 0; sends++ }
}

// Waits until at least one of the sent environments is done, and takes the results of all that are.
inline receive() {
    done = false;
    do
    :: failed != NONE -> restart_worker()
    :: failed == NONE && !done ->
#ifndef MUTANT_ARRIVED_LOADED_LATE
       before = arrived[cell];
#endif
       count = 0;
       do
       :: i < ENVS ->
          d_step {
              ready[i] = sent[i] && completed[i] == requested[i];
              count = count + ready[i];
              i++
          }
       :: else -> break
       od;
       i = 0;
#ifdef MUTANT_ARRIVED_LOADED_LATE
       before = arrived[cell];
#endif
       if
       :: count > 0 -> done = true
       :: else ->
          assert(!NONE_BUSY || arrived[cell] != before);
          if
          :: arrived[cell] > before
          :: d_step { arrived[cell] <= before && ANY_BUSY_AND_DEAD -> failed = FIRST_BUSY_AND_DEAD }
          fi
       fi;
       before = 0
    :: failed == NONE && done -> break
    od;
    atomic {
        done = true;
        do
        :: i < ENVS -> done = done && (ready[i] || !sent[i]); i++
        :: else -> break
        od;
        i = 0; count = 0
    };
    if
    :: done && invalid -> resync(); wait_for_all() // all are received
    :: else
    fi;
    d_step {
        done = false;
        do
        :: i < ENVS ->
           if
           :: ready[i] -> hand_out(i); sent[i] = false; ready[i] = false
           :: else
           fi;
           i++
        :: else -> break
        od;
        i = 0
    }
}

proctype Parent() {
    byte calls, w, i, cell, expected, before, count, mask, sends, failed = NONE;
    byte issued_before[WORKERS], messages_read[WORKERS], received[WORKERS], last_message[WORKERS];
    bool sent[ENVS], ready[ENVS];
    bool invalid, restored, done;
    forget_messages();
    bound[0] == 1 && (WORKERS == 1 || bound[WORKERS - 1] == 1);
    do
    :: calls < CALLS ->
       if
#if STEPS > 0
       :: step_all()
#endif
#if MESSAGES > 0
       :: call_all()
#endif
#if SENDS > 0
       :: true ->
          do
          :: sends < SENDS && !ALL_SENT -> send_some()
          :: ANY_SENT -> receive()
          :: !ANY_SENT && sends > 0 -> break
          od;
          sends = 0
#endif
       fi;
       calls++
    :: else -> break
    od
}

init {
    atomic {
        lives[0] = 1;
        run Worker(0, 1);
#if WORKERS > 1
        lives[1] = 1;
        run Worker(1, 1);
#endif
        run Parent()
    }
}
