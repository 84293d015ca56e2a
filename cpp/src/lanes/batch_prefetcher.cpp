#include "lanes/batch_prefetcher.hpp"

#include <chrono>
#include <optional>
#include <utility>

#include <pthread.h>

#include "os/clock.hpp"
#include "os/own_signals.hpp"
#include "os/process.hpp"

namespace memlane {

bool BatchPrefetcher::has_thread() const { return shared_ && shared_->process == this_process(); }

void BatchPrefetcher::request(std::int64_t count, std::byte *out, double beta, int threads) {
    if (!has_thread()) {
        detach();
        auto shared = std::make_shared<Shared>();
        shared->process = this_process();
        const OwnSignals signals;
        shared->thread = std::thread([this, shared] { work(*shared); });
        shared_ = std::move(shared); // only now: `stop` joins the thread
    }
    const std::lock_guard lock(shared_->mutex);
    shared_->jobs.push_back({count, out, beta, threads});
    shared_->changed.notify_all();
}

BatchStatus BatchPrefetcher::oldest() const {
    if (!has_thread())
        return BatchStatus::pending;
    const std::lock_guard lock(shared_->mutex);
    return shared_->done > 0 ? shared_->jobs.front().status : BatchStatus::pending;
}

std::exception_ptr BatchPrefetcher::take() {
    const std::lock_guard lock(shared_->mutex);
    std::exception_ptr error = shared_->jobs.front().error;
    shared_->jobs.pop_front();
    --shared_->done;
    return error;
}

std::size_t BatchPrefetcher::requested() const {
    if (!has_thread())
        return 0;
    const std::lock_guard lock(shared_->mutex);
    return shared_->jobs.size();
}

void BatchPrefetcher::wait(Shared &shared, std::int64_t deadline_ns) {
    std::unique_lock lock(shared.mutex);
    const std::int64_t left_ns = deadline_ns - now_ns();
    if (left_ns > 0)
        shared.changed.wait_for(lock, std::chrono::nanoseconds(left_ns), [&] { return shared.done > 0 || shared.stopping; });
}

std::shared_ptr<BatchPrefetcher::Shared> BatchPrefetcher::detach() {
    if (shared_ && !has_thread()) {
        // In a forked child: the thread does not exist, and its locks are in an unknown state. The object is leaked on
        // purpose, with its std::thread, whose handle a new thread of this process may have got.
        new std::shared_ptr<Shared>(std::move(shared_));
        shared_ = nullptr;
    }
    return std::exchange(shared_, nullptr);
}

void BatchPrefetcher::stop(Shared *shared) {
    if (shared == nullptr)
        return;
    {
        const std::lock_guard lock(shared->mutex);
        shared->stopping = true;
        shared->changed.notify_all();
    }
    shared->thread.join();
}

void BatchPrefetcher::work(Shared &state) {
    pthread_setname_np(pthread_self(), "memlane-sampler");
    std::optional<TruncationGuard> guard;
    if (mapping_ != nullptr)
        guard.emplace(*mapping_);
    std::unique_lock lock(state.mutex);
    for (;;) {
        state.changed.wait(lock, [&] { return state.stopping || state.done < state.jobs.size(); });
        if (state.stopping)
            return;
        Job &job = state.jobs[state.done]; // stays valid without the lock: a deque, and only finished jobs are removed
        lock.unlock();
        bool admitted = false;
        BatchStatus status = BatchStatus::pending;
        try {
            admitted = wait_for_limiter(state, job.count);
            if (admitted)
                status = sampler_.sample(job.count, job.out, job.beta, job.threads) ? BatchStatus::complete
                                                                                    : BatchStatus::nothing_to_sample;
        } catch (...) { // no scratch memory for the sampler, or a wait in memory that is gone: `take` returns the exception
            status = BatchStatus::failed;
            job.error = std::current_exception();
        }
        if (status == BatchStatus::complete)
            signal_add(replay_.control().sampled, job.count);
        else if (admitted)
            replay_.refund_samples(job.count);
        lock.lock();
        if (status == BatchStatus::pending) // `stop` was called
            return;
        job.status = status;
        ++state.done;
        state.changed.notify_all();
    }
}

bool BatchPrefetcher::wait_for_limiter(Shared &state, std::int64_t count) {
    if (replay_.admit_samples(count))
        return true;
    replay_.count_held(Side::samplers);
    Spin spin(0);
    for (;;) {
        {
            const std::lock_guard lock(state.mutex);
            if (state.stopping)
                return false;
        }
        if (replay_.wait_admitted(Side::samplers, count, forever_ns, {}, spin).end == WaitEnd::reached)
            return true;
    }
}

} // namespace memlane
