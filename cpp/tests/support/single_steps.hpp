// A child process that runs one machine instruction at a time, so that a test can kill it, or hold it, at every one of them.
//
// What a random instant hits once in a million runs is hit for certain, in every run. x86-64 only: elsewhere an atomic
// exchange can be a loop of instructions that never ends when each is interrupted. And not under sanitizers, whose own
// instructions are a hundred times as many as ours.
#pragma once

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MEMLANE_STEPPED

#include <cstring>
#include <stdexcept>
#include <vector>

#include <sys/ptrace.h>

#include "support/check.hpp"
#include "os/process.hpp"
#include "support/processes.hpp"
#include "sync/words.hpp"

class Stepped {
  public:
    // `body` is given the process that it runs in. Held before instruction `at`, or before the last.
    template <class Body>
    explicit Stepped(Body body, int at = 0)
        : child_([this, &body] {
              const std::int64_t me = memlane::this_process();
              CHECK_EQ(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr), 0);
              raise(SIGSTOP); // from here on the parent steps
              body(me);
              memlane::publish(*over_, 1);
          }) {
        await_stop();
        for (int i = 0; i < at; ++i)
            step();
    }

    // Runs one instruction, and says whether the body goes on after it.
    bool step() {
        if (memlane::see(*over_) != 0)
            return false;
        ptrace(PTRACE_SINGLESTEP, child_.pid(), nullptr, nullptr);
        await_stop();
        return memlane::see(*over_) == 0;
    }
    // Runs it to its end and returns its exit code.
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
            throw std::runtime_error("a stepped child ended, or may not be traced here");
    }

    Shared<memlane::Word> over_;
    Child child_;
};

// Prepares, lets a child begin `body`, and calls `act` with the child held before an instruction of it; for each one in turn.
template <class Prepare, class Body, class Act> void at_every_instruction(Prepare prepare, Body body, Act act) {
    prepare();
    body(memlane::this_process()); // once here: the first call of a function looks it up, in thousands of instructions
    prepare();
    int length = 0;
    for (Stepped whole(body); whole.step();)
        ++length;
    for (int at = 0; at <= length; ++at) {
        prepare();
        Stepped child(body, at);
        act(child);
    }
}

// The same for a child that is to be killed: held at the beginning, and after each instruction that changed `shared`. All
// that a killed process leaves is what it stored, so between two changes every instruction is the same to the others. `act`
// is told the instruction's number too.
template <class Memory, class Prepare, class Body, class Act>
void after_every_change(const Memory &shared, Prepare prepare, Body body, Act act) {
    prepare();
    body(memlane::this_process());
    prepare();
    std::vector<int> changes{0};
    std::vector<std::byte> before(sizeof(Memory));
    std::memcpy(before.data(), &shared, sizeof(Memory));
    Stepped whole(body);
    for (int at = 1; whole.step(); ++at)
        if (std::memcmp(before.data(), &shared, sizeof(Memory)) != 0) {
            std::memcpy(before.data(), &shared, sizeof(Memory));
            changes.push_back(at);
        }
    CHECK(changes.size() > 1);
    for (const int at : changes) {
        prepare();
        Stepped child(body, at);
        act(child, at);
    }
}

#endif
