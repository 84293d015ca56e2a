#include "envs/async_steps.hpp"

#include <algorithm>
#include <system_error>

#include <pthread.h>

#include "os/clock.hpp"
#include "os/own_signals.hpp"

namespace memlane {

// A thread takes as many environments at a time as take about this long.
constexpr double chunk_ns = 5'000;

namespace {

// The number of forks between the first process and this one. Not a pid: in two pid namespaces two processes may have the
// same.
int forks = 0;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { ++forks; });

} // namespace

AsyncSteps::Shared::Shared(Host &host, int threads)
    : host(host), status(static_cast<std::size_t>(host.num_envs())), num_threads(threads), owner(forks) {}

AsyncSteps::AsyncSteps(Host &host, int threads) : host_(host), threads_(std::max(threads, 1)) {}

AsyncSteps::~AsyncSteps() {
    if (!shared_)
        return;
    if (shared_->owner != forks) {
        shared_.release(); // the parent's threads do not exist here and cannot be joined
        return;
    }
    {
        const std::lock_guard lock(shared_->mutex);
        shared_->quit = true;
    }
    shared_->work_added.notify_all();
    for (auto &thread : shared_->threads)
        thread.join();
}

AsyncSteps::Shared &AsyncSteps::shared() {
    if (shared_ && shared_->owner != forks)
        shared_.release();
    if (!shared_)
        shared_ = std::make_unique<Shared>(host_, threads_);
    return *shared_;
}

void AsyncSteps::send(std::span<const std::int32_t> envs) {
    Shared &state = shared();
    if (state.threads.empty()) {
        const OwnSignals blocked;
        try {
            for (int i = 0; i < state.num_threads; ++i)
                state.threads.emplace_back([&state] { state.run(); });
        } catch (const std::system_error &) {
            if (state.threads.empty())
                throw; // no thread could be started; otherwise those that were do the work
        }
    }
    {
        const std::lock_guard lock(state.mutex);
        state.queue.erase(state.queue.begin(), state.queue.begin() + static_cast<std::ptrdiff_t>(state.next));
        state.next = 0;
        for (const std::int32_t env : envs) {
            state.queue.push_back(env);
            state.status[static_cast<std::size_t>(env)] = Status::sent;
        }
        state.in_flight += envs.size();
    }
    state.work_added.notify_all();
}

void AsyncSteps::Shared::run() {
    std::vector<std::int32_t> mine;
    std::unique_lock lock(mutex);
    for (;;) {
        work_added.wait(lock, [this] { return quit || next < queue.size(); });
        if (quit)
            return;
        // A few at a time, so that the overhead of the queue does not dominate short steps. But an environment waits for
        // those before it in the chunk, so only as many as take a few microseconds, and few enough to leave some for the
        // other threads.
        const double short_enough = env_ns == 0 ? 1 : chunk_ns / env_ns;
        const std::size_t fair = (queue.size() - next) / (threads.size() * 4 + 1);
        const std::size_t count =
            static_cast<std::size_t>(std::clamp(std::min(short_enough, static_cast<double>(fair)), 1.0, 64.0));
        mine.assign(queue.begin() + static_cast<std::ptrdiff_t>(next),
                    queue.begin() + static_cast<std::ptrdiff_t>(next + count));
        next += count;
        lock.unlock();
        const std::int64_t begin_ns = now_ns();
        for (std::size_t i = 0; i < count;) {
            std::size_t j = i + 1;
            while (j < count && mine[j] == mine[j - 1] + 1)
                ++j;
            host.step_range(mine[i], mine[j - 1] + 1);
            i = j;
        }
        const double ns = static_cast<double>(now_ns() - begin_ns) / static_cast<double>(count);
        lock.lock();
        env_ns = update_mean(env_ns, ns);
        for (const std::int32_t env : mine)
            status[static_cast<std::size_t>(env)] = Status::completed;
        completed += count;
        work_completed.notify_all();
    }
}

bool AsyncSteps::wait(std::size_t min_completed, std::chrono::nanoseconds timeout) {
    Shared &state = shared();
    std::unique_lock lock(state.mutex);
    return state.work_completed.wait_for(lock, timeout, [&] { return state.completed >= min_completed; });
}

std::vector<std::int32_t> AsyncSteps::receive() {
    Shared &state = shared();
    const std::lock_guard lock(state.mutex);
    std::vector<std::int32_t> envs;
    envs.reserve(state.completed);
    for (std::size_t env = 0; env < state.status.size() && envs.size() < state.completed; ++env)
        if (state.status[env] == Status::completed) {
            state.status[env] = Status::idle;
            envs.push_back(static_cast<std::int32_t>(env));
        }
    state.in_flight -= envs.size();
    state.completed = 0;
    return envs;
}

bool AsyncSteps::in_flight(std::int32_t env) {
    Shared &state = shared();
    const std::lock_guard lock(state.mutex);
    return state.status[static_cast<std::size_t>(env)] != Status::idle;
}

std::size_t AsyncSteps::in_flight_count() {
    Shared &state = shared();
    const std::lock_guard lock(state.mutex);
    return state.in_flight;
}

} // namespace memlane
