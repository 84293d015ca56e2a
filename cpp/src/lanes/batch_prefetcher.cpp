#include "lanes/batch_prefetcher.hpp"

#include <chrono>
#include <utility>

#include <pthread.h>

#include "os/clock.hpp"
#include "os/own_signals.hpp"
#include "os/process.hpp"

namespace memlane {

bool BatchPrefetcher::here() const { return shared_ && shared_->process == this_process(); }

void BatchPrefetcher::ask(std::int64_t count, std::byte *out, double beta, int threads) {
    if (!here()) {
        let_go();
        auto made = std::make_shared<Shared>();
        made->process = this_process();
        const OwnSignals own;
        made->thread = std::thread([this, made] { work(*made); });
        shared_ = std::move(made); // now that there is a thread to end
    }
    const std::lock_guard lock(shared_->mutex);
    shared_->jobs.push_back({count, out, beta, threads});
    shared_->changed.notify_all();
}

Drawn BatchPrefetcher::oldest() const {
    if (!here())
        return Drawn::not_yet;
    const std::lock_guard lock(shared_->mutex);
    return shared_->done > 0 ? shared_->jobs.front().drawn : Drawn::not_yet;
}

std::exception_ptr BatchPrefetcher::take() {
    const std::lock_guard lock(shared_->mutex);
    std::exception_ptr error = shared_->jobs.front().error;
    shared_->jobs.pop_front();
    --shared_->done;
    return error;
}

std::size_t BatchPrefetcher::asked() const {
    if (!here())
        return 0;
    const std::lock_guard lock(shared_->mutex);
    return shared_->jobs.size();
}

void BatchPrefetcher::wait(Shared &shared, std::int64_t deadline_ns) {
    std::unique_lock lock(shared.mutex);
    const std::int64_t left = deadline_ns - now_ns();
    if (left > 0)
        shared.changed.wait_for(lock, std::chrono::nanoseconds(left), [&] { return shared.done > 0 || shared.stopping; });
}

std::shared_ptr<BatchPrefetcher::Shared> BatchPrefetcher::let_go() {
    if (shared_ && !here()) {
        // Forked: the thread is not here, and nobody knows how it left its locks. It is left as it is, for ever; its handle
        // too, which a new thread of this process may have got.
        new std::shared_ptr<Shared>(std::move(shared_));
        shared_ = nullptr;
    }
    return std::exchange(shared_, nullptr);
}

void BatchPrefetcher::end(Shared *shared) {
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
    pthread_setname_np(pthread_self(), "memlane-drawer");
    std::unique_lock lock(state.mutex);
    for (;;) {
        state.changed.wait(lock, [&] { return state.stopping || state.done < state.jobs.size(); });
        if (state.stopping)
            return;
        Job &job = state.jobs[state.done]; // a deque: others may be added behind it, and only what is done is taken
        lock.unlock();
        const bool let_pass = wait_for_limiter(state, job.count);
        Drawn drawn = Drawn::not_yet;
        if (let_pass) {
            try {
                drawn = sampler_.sample(job.count, job.out, job.beta, job.threads) ? Drawn::whole : Drawn::nothing_there;
            } catch (...) { // no memory for what it notes down; whoever takes the batch hears of it
                drawn = Drawn::failed;
                job.error = std::current_exception();
            }
            if (drawn == Drawn::whole)
                signal_add(replay_.control().sampled, job.count);
            else
                replay_.refund_samples(job.count);
        }
        lock.lock();
        if (!let_pass)
            return;
        job.drawn = drawn;
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
        if (replay_.wait_for_leave(Side::samplers, count, forever_ns, {}, spin).end == WaitEnd::reached)
            return true;
    }
}

} // namespace memlane
