// A child process that runs one machine instruction at a time, so that a test can kill it, or stop it, at each of them.
//
// A window that a random kill hits once in a million runs is hit in every run. x86-64 only: elsewhere an atomic
// exchange can be a loop that never ends when each instruction is interrupted. Not under sanitizers, which execute a
// hundred times as many instructions.
#pragma once

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MEMLANE_STEPPED

#include <cstring>
#include <stdexcept>
#include <vector>

#include <sys/ptrace.h>

#include "support/check.hpp"
#include "support/life.hpp"
#include "support/processes.hpp"
#include "sync/words.hpp"

class SteppedChild {
  public:
    // `body` is called with the identity of the child. The child is stopped before instruction `at`, or before the last
    // one.
    template <class Body>
    explicit SteppedChild(Body body, int at = 0)
        : child_([this, &body] {
              const std::int64_t me = this_process();
              CHECK_EQ(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr), 0);
              raise(SIGSTOP); // from here on the parent single-steps this process
              body(me);
              memlane::publish(*over_, 1);
          }) {
        await_stop();
        for (int i = 0; i < at; ++i)
            step();
    }

    // Runs one instruction. Returns whether the body continues after it.
    bool step() {
        if (memlane::see(*over_) != 0)
            return false;
        ptrace(PTRACE_SINGLESTEP, child_.pid(), nullptr, nullptr);
        await_stop();
        return memlane::see(*over_) == 0;
    }
    // Runs the rest at full speed and returns the exit code.
    int finish() {
        ptrace(PTRACE_DETACH, child_.pid(), nullptr, nullptr);
        return child_.join();
    }
    void kill() {
        child_.kill(SIGKILL);
        child_.join();
    }

  private:
    void await_stop() {
        int status = 0;
        if (waitpid(child_.pid(), &status, 0) != child_.pid() || !WIFSTOPPED(status))
            throw std::runtime_error("a single-stepped child ended, or ptrace is not allowed here");
    }

    Shared<memlane::Word> over_;
    Child child_;
};

// For each instruction of `body`: calls `prepare`, starts `body` in a child, stops it before that instruction and calls
// `act(child)`.
template <class Prepare, class Body, class Act> void at_every_instruction(Prepare prepare, Body body, Act act) {
    prepare();
    body(this_process()); // once here: the first call of a function resolves its symbol, in thousands of instructions
    prepare();
    int length = 0;
    for (SteppedChild child(body); child.step();)
        ++length;
    for (int at = 0; at <= length; ++at) {
        prepare();
        SteppedChild child(body, at);
        act(child);
    }
}

// The same for a child that `act` kills: it is stopped at the beginning, and after each instruction that changed
// `shared`. A killed process leaves nothing but its stores, so all instructions between two changes are equivalent.
// Calls `act(child, instruction)`.
template <class Memory, class Prepare, class Body, class Act>
void after_every_change(const Memory &shared, Prepare prepare, Body body, Act act) {
    prepare();
    body(this_process());
    prepare();
    std::vector<int> changes{0};
    std::vector<std::byte> before(sizeof(Memory));
    std::memcpy(before.data(), &shared, sizeof(Memory));
    SteppedChild all(body);
    for (int at = 1; all.step(); ++at)
        if (std::memcmp(before.data(), &shared, sizeof(Memory)) != 0) {
            std::memcpy(before.data(), &shared, sizeof(Memory));
            changes.push_back(at);
        }
    CHECK(changes.size() > 1);
    for (const int at : changes) {
        prepare();
        SteppedChild child(body, at);
        act(child, at);
    }
}

#endif
