// AsyncSteps: steps of some environments that were sent, on threads of their own, until they are received.
//
// Who may call: one thread at a time. The threads are made at the first errand. They do not survive fork(); the child
// finds no errand under way, and makes its own threads at the next.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "envs/host.hpp"

namespace memlane {

class AsyncSteps {
  public:
    AsyncSteps(Host &host, int threads);
    ~AsyncSteps();
    AsyncSteps(const AsyncSteps &) = delete;
    AsyncSteps &operator=(const AsyncSteps &) = delete;

    // Steps these. None of them may be under way.
    void send(std::span<const std::int32_t> envs);
    // Waits until at least so many are back, or for `timeout`; whether they are.
    bool wait(std::size_t at_least, std::chrono::nanoseconds timeout);
    // Those that are back, in order; they are no longer under way.
    std::vector<std::int32_t> receive();
    bool under_way(std::int32_t env);
    // Sent and not yet received.
    std::size_t count();

  private:
    // All that the threads touch. A forked child leaves the parent's behind: its mutexes may be locked for ever.
    struct Shared {
        Host &host;
        std::mutex mutex;
        std::condition_variable sent, done;
        std::vector<std::int32_t> waiting; // a stack would starve the first: taken from `next` on
        std::size_t next = 0;
        std::vector<std::uint8_t> out; // by environment: 1 under way, 2 back
        std::size_t away = 0, back = 0;
        bool quit = false;
        double env_ns = 0; // a step of one, in the running mean; 0: not known yet
        std::vector<std::thread> threads;
        int wanted;
        int owner; // the process that made it: see `forks`
        explicit Shared(Host &host, int threads);
        void run();
    };
    Shared &shared();

    Host &host_;
    int threads_;
    std::unique_ptr<Shared> shared_;
};

} // namespace memlane
