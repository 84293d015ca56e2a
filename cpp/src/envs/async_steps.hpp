// AsyncSteps: steps environments on background threads, from send() until receive().
//
// Who may call: one thread at a time. The threads are started by the first send(). They do not survive fork(): in the
// child no environment is in flight, and its first send() starts its own threads.
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

    // Starts a step of each of these environments. None of them may be in flight.
    void send(std::span<const std::int32_t> envs);
    // Waits until at least `min_completed` steps are complete, for at most `timeout`. False: timeout.
    bool wait(std::size_t min_completed, std::chrono::nanoseconds timeout);
    // The environments whose step is complete, in ascending order; they are no longer in flight.
    std::vector<std::int32_t> receive();
    // Whether an environment was sent and not yet received.
    bool in_flight(std::int32_t env);
    // The number of environments in flight.
    std::size_t in_flight_count();

  private:
    enum class Status : std::uint8_t { idle, sent, completed };

    // Everything that the threads use. A forked child abandons its parent's: the mutex may be locked forever.
    struct Shared {
        Host &host;
        std::mutex mutex;
        std::condition_variable work_added, work_completed;
        std::vector<std::int32_t> queue; // first in, first out, so that none starves: valid from `next` on
        std::size_t next = 0;
        std::vector<Status> status; // by environment
        std::size_t in_flight = 0, completed = 0;
        bool quit = false;
        double env_ns = 0; // running mean of the duration of one environment's step; 0: not measured yet
        std::vector<std::thread> threads;
        int num_threads;
        int owner; // the process that created it: see `forks`
        explicit Shared(Host &host, int threads);
        void run();
    };
    Shared &shared();

    Host &host_;
    int threads_;
    std::unique_ptr<Shared> shared_;
};

} // namespace memlane
