// A batch prefetcher: draws batches in a background thread, in the order in which they were requested.
//
// Who may call: the thread that owns the sampler; from `request` until the batch is finished no other thread may use
// the sampler. The background thread does not need the GIL, so it draws while Python computes. It is started by the
// first request, and again by the first request in a forked child, where the parent's thread does not exist.
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
#include "os/mapping.hpp"

namespace memlane {

enum class BatchStatus {
    pending,           // not finished yet
    complete,          // all rows were drawn
    nothing_to_sample, // no row can be drawn
    failed,            // an exception, which `take` returns
};

class BatchPrefetcher {
  public:
    // `mapping` is the memory of the replay if its file may be truncated: `take` is followed by a look at `truncated()`.
    BatchPrefetcher(Replay &replay, Sampler &sampler, Mapping *mapping = nullptr)
        : replay_(replay), sampler_(sampler), mapping_(mapping) {}
    ~BatchPrefetcher() { stop(detach().get()); }
    BatchPrefetcher(const BatchPrefetcher &) = delete;
    BatchPrefetcher &operator=(const BatchPrefetcher &) = delete;

    // Requests one more batch into `out`, which must stay valid until the batch is taken or `stop` has returned. If the
    // limiter does not admit the batch, the thread waits.
    void request(std::int64_t count, std::byte *out, double beta, int threads);
    // The status of the oldest batch; `pending` if there is none.
    BatchStatus oldest() const;
    // Removes the oldest batch, which must be finished. Returns its exception if it failed.
    std::exception_ptr take();
    // The number of batches that were requested and not taken.
    std::size_t requested() const;

    // The state shared with the thread, for waiting and stopping while another thread may detach it: the shared pointer
    // keeps it alive. Null without a thread.
    struct Shared;
    std::shared_ptr<Shared> shared() const { return has_thread() ? shared_ : nullptr; }
    // Waits until the oldest batch is finished, `stop` is called, or the deadline passes.
    static void wait(Shared &shared, std::int64_t deadline_ns);
    // Gives up the thread and all requests; the caller must pass the result to `stop`.
    std::shared_ptr<Shared> detach();
    // Ends the thread and joins it; batches that are not drawn yet stay undrawn. Takes at most one slice, if the thread
    // waits for the limiter, or the rest of the batch that it is drawing.
    static void stop(Shared *shared);

  private:
    struct Job {
        std::int64_t count;
        std::byte *out;
        double beta;
        int threads;
        BatchStatus status = BatchStatus::pending;
        std::exception_ptr error = nullptr;
    };
    bool has_thread() const; // in this process; a parent's thread does not count
    void work(Shared &shared);
    bool wait_for_limiter(Shared &shared, std::int64_t count);

    Replay &replay_;
    Sampler &sampler_;
    Mapping *mapping_;
    std::shared_ptr<Shared> shared_;
};

// The state that the thread and its owner share. A forked child makes a new one: the parent's locks may be held for
// ever.
struct BatchPrefetcher::Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    std::size_t done = 0; // the first `done` jobs are finished
    bool stopping = false;
    std::thread thread;
    std::int64_t process = 0;
};

} // namespace memlane
