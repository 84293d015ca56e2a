// The calls of all lanes beside a thread that overwrites their words all the time.
//
// Such an input does not repeat exactly: which word changes when is up to the scheduler. What is found so is a word that
// is loaded twice, checked the first time and used the second.

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "fuzz/replay_lane.hpp"
#include "fuzz/ring_lane.hpp"
#include "fuzz/signal_lane.hpp"
#include "fuzz/weights_lane.hpp"
#include "lanes/rng.hpp"

namespace memlane::fuzz {

namespace {

// One thread for all inputs: to start one takes longer than most inputs do.
class Scribbler {
  public:
    Scribbler() : thread_([this] { work(); }) { thread_.detach(); }

    // Overwrites random words of `places` with random ones of `values`, until `stop` has returned.
    void start(const Places &places, std::vector<std::int64_t> values, std::uint64_t seed) {
        places_ = &places;
        values_ = std::move(values);
        rng_.seed(seed);
        state_.store(State::working, std::memory_order_release);
        state_.notify_one();
    }
    void stop() {
        state_.store(State::stopping, std::memory_order_release);
        state_.wait(State::stopping, std::memory_order_acquire);
    }

  private:
    enum class State { idle, working, stopping };

    [[noreturn]] void work() {
        const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(rng_.below(bound)); };
        while (true) {
            state_.wait(State::idle, std::memory_order_acquire);
            while (state_.load(std::memory_order_acquire) == State::working)
                places_->pick(below).store(values_[below(values_.size())], std::memory_order_relaxed);
            state_.store(State::idle, std::memory_order_release);
            state_.notify_one();
        }
    }

    std::atomic<State> state_{State::idle};
    const Places *places_ = nullptr;
    std::vector<std::int64_t> values_;
    Rng rng_{};
    std::thread thread_;
};

std::unique_ptr<Lane> choose_lane(Input &input) {
    switch (input.byte() % 4) {
    case 0:
        return std::make_unique<RingLane>(input);
    case 1:
        return std::make_unique<WeightsLane>(input);
    case 2:
        return std::make_unique<SignalLane>(input);
    default:
        return std::make_unique<ReplayLane>(input);
    }
}

} // namespace

} // namespace memlane::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    using namespace memlane::fuzz;
    static Scribbler &scribbler = *new Scribbler; // never destroyed: its thread runs until the process ends
    Input input(data, size);
    const std::unique_ptr<Lane> lane = choose_lane(input);
    // Words that lanes store themselves, with wrong ones among them: a check that passes is needed before a check that fails.
    std::vector<std::int64_t> values{0, 1, 1 << 8, 1 << 8 | 1, 1 << 8 | 255, 1 << 2 | 2, 2 << 2 | 2, 2 << 2 | 3, -1};
    for (std::size_t count = 1 + input.below(16); count > 0; --count)
        values.push_back(input.word());
    const std::uint8_t seed = input.byte();
    scribbler.start(lane->places(), std::move(values), seed);
    constexpr int rounds = 8; // the same calls again: other words have changed meanwhile
    for (int round = 0; round < rounds; ++round)
        for (Input calls = input; !calls.empty();)
            lane->act(calls);
    scribbler.stop();
    return 0;
}
