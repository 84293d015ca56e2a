// A drawer: draws batches ahead, in a thread of its own, in the order in which they were asked for.
//
// Who may call: the thread that owns the sampler; between `ask` and the end of a batch nobody else uses that sampler. The
// drawer's thread needs nothing of Python, so it draws while Python computes. It is made at the first batch, and again in a
// process that was forked, where it does not exist.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "lanes/sampler.hpp"

namespace memlane {

enum class Drawn { not_yet, whole, nothing_there, failed };

class BatchPrefetcher {
  public:
    BatchPrefetcher(Replay &replay, Sampler &sampler) : replay_(replay), sampler_(sampler) {}
    ~BatchPrefetcher() { end(let_go().get()); }
    BatchPrefetcher(const BatchPrefetcher &) = delete;
    BatchPrefetcher &operator=(const BatchPrefetcher &) = delete;

    // One more batch into `out`, which stays until it was taken, or until `stop`. Where a limiter holds back, the thread waits.
    void ask(std::int64_t count, std::byte *out, double beta, int threads);
    // How the oldest batch ended, if it has.
    Drawn oldest() const;
    // Forget the oldest, which has ended. What it failed of, if it did.
    std::exception_ptr take();
    // How many were asked for and not taken.
    std::size_t asked() const;

    // For waiting and ending without a lock of the caller's: what is waited for stays as long as somebody waits.
    struct Shared;
    std::shared_ptr<Shared> shared() const { return here() ? shared_ : nullptr; }
    // Until the oldest has ended, somebody calls `end`, or the deadline comes.
    static void wait(Shared &shared, std::int64_t deadline_ns);
    // Nothing is asked for any more; what is not drawn yet is not drawn any more. `end` is to be called with what this returns.
    std::shared_ptr<Shared> let_go();
    // Ends the thread, within a slice of a limiter's wait.
    static void end(Shared *shared);

  private:
    struct Job {
        std::int64_t count;
        std::byte *out;
        double beta;
        int threads;
        Drawn drawn = Drawn::not_yet;
        std::exception_ptr error = nullptr;
    };
    bool here() const; // the thread of this process, not one that a parent had
    void work(Shared &shared);
    bool wait_for_limiter(Shared &shared, std::int64_t count);

    Replay &replay_;
    Sampler &sampler_;
    std::shared_ptr<Shared> shared_;
};

// What the thread and its owner share. A forked child has another one: the locks of the parent's may be held for ever.
struct BatchPrefetcher::Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    std::size_t done = 0; // of the oldest
    bool stopping = false;
    std::thread thread;
    std::int64_t process = 0;
};

} // namespace memlane
