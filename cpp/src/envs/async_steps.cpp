#include "envs/async_steps.hpp"

#include <algorithm>
#include <system_error>

#include <pthread.h>

#include "os/clock.hpp"
#include "os/own_signals.hpp"

namespace memlane {

// How long those that are taken together may take.
constexpr double chunk_ns = 5'000;

namespace {

// How many forks lie between the first process and this one. Not a pid: in two namespaces two processes may have the same.
int forks = 0;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { ++forks; });

} // namespace

AsyncSteps::Shared::Shared(Host &host, int threads)
    : host(host), out(static_cast<std::size_t>(host.num_envs())), wanted(threads), owner(forks) {}

AsyncSteps::AsyncSteps(Host &host, int threads) : host_(host), threads_(std::max(threads, 1)) {}

AsyncSteps::~AsyncSteps() {
    if (!shared_)
        return;
    if (shared_->owner != forks) {
        shared_.release(); // the parent's threads are not here to be joined
        return;
    }
    {
        const std::lock_guard lock(shared_->mutex);
        shared_->quit = true;
    }
    shared_->sent.notify_all();
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
    Shared &all = shared();
    if (all.threads.empty()) {
        const OwnSignals only;
        try {
            for (int i = 0; i < all.wanted; ++i)
                all.threads.emplace_back([&all] { all.run(); });
        } catch (const std::system_error &) {
            if (all.threads.empty())
                throw; // no thread left to be had; otherwise those made so far do the work
        }
    }
    {
        const std::lock_guard lock(all.mutex);
        all.waiting.erase(all.waiting.begin(), all.waiting.begin() + static_cast<std::ptrdiff_t>(all.next));
        all.next = 0;
        for (const std::int32_t env : envs) {
            all.waiting.push_back(env);
            all.out[static_cast<std::size_t>(env)] = 1;
        }
        all.away += envs.size();
    }
    all.sent.notify_all();
}

void AsyncSteps::Shared::run() {
    std::vector<std::int32_t> mine;
    std::unique_lock lock(mutex);
    for (;;) {
        sent.wait(lock, [this] { return quit || next < waiting.size(); });
        if (quit)
            return;
        // A few at a time, so that cheap environments are not all hand-over. But whoever is behind a slow one waits for it,
        // so only as many as take a few microseconds, and not more than leaves some for the others.
        const double cheap = env_ns == 0 ? 1 : chunk_ns / env_ns;
        const std::size_t fair = (waiting.size() - next) / (threads.size() * 4 + 1);
        const std::size_t many = static_cast<std::size_t>(std::clamp(std::min(cheap, static_cast<double>(fair)), 1.0, 64.0));
        mine.assign(waiting.begin() + static_cast<std::ptrdiff_t>(next),
                    waiting.begin() + static_cast<std::ptrdiff_t>(next + many));
        next += many;
        lock.unlock();
        const std::int64_t begin_ns = now_ns();
        for (std::size_t i = 0; i < many;) {
            std::size_t j = i + 1;
            while (j < many && mine[j] == mine[j - 1] + 1)
                ++j;
            host.step_range(mine[i], mine[j - 1] + 1);
            i = j;
        }
        const double ns = static_cast<double>(now_ns() - begin_ns) / static_cast<double>(many);
        lock.lock();
        env_ns = env_ns == 0 ? ns : env_ns + 0.125 * (ns - env_ns);
        for (const std::int32_t env : mine)
            out[static_cast<std::size_t>(env)] = 2;
        back += many;
        done.notify_all();
    }
}

bool AsyncSteps::wait(std::size_t at_least, std::chrono::nanoseconds timeout) {
    Shared &all = shared();
    std::unique_lock lock(all.mutex);
    return all.done.wait_for(lock, timeout, [&] { return all.back >= at_least; });
}

std::vector<std::int32_t> AsyncSteps::receive() {
    Shared &all = shared();
    const std::lock_guard lock(all.mutex);
    std::vector<std::int32_t> envs;
    envs.reserve(all.back);
    for (std::size_t env = 0; env < all.out.size() && envs.size() < all.back; ++env)
        if (all.out[env] == 2) {
            all.out[env] = 0;
            envs.push_back(static_cast<std::int32_t>(env));
        }
    all.away -= envs.size();
    all.back = 0;
    return envs;
}

bool AsyncSteps::under_way(std::int32_t env) {
    Shared &all = shared();
    const std::lock_guard lock(all.mutex);
    return all.out[static_cast<std::size_t>(env)] != 0;
}

std::size_t AsyncSteps::count() {
    Shared &all = shared();
    const std::lock_guard lock(all.mutex);
    return all.away;
}

} // namespace memlane
