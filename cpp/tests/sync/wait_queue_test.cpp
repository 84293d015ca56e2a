#include "sync/wait_queue.hpp"

#include <array>
#include <thread>
#include <vector>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"
#include "support/single_steps.hpp"

using namespace memlane;

namespace {

// A queue with waiters that look when the test says so.
template <int count> struct Scene {
    WaitQueue queue{};
    SignalCell changed{};
    std::array<WaitPlace, count> place;

    Scene() {
        for (WaitPlace &each : place)
            CHECK(queue.join(each));
    }
    std::int64_t calls(int waiter) const { return see(queue.signal(place[static_cast<std::size_t>(waiter)].index).value); }
    std::array<std::int64_t, count> all_calls() const {
        std::array<std::int64_t, count> all;
        for (int waiter = 0; waiter < count; ++waiter)
            all[static_cast<std::size_t>(waiter)] = calls(waiter);
        return all;
    }
    void look(int waiter) { queue.look(place[static_cast<std::size_t>(waiter)], changed); }
    std::int64_t rank(int waiter) { return queue.rank(place[static_cast<std::size_t>(waiter)]); }
    bool holds(int waiter) const { return queue.holds(place[static_cast<std::size_t>(waiter)]); }
    void leave(int waiter) { queue.leave(place[static_cast<std::size_t>(waiter)], changed); }
};

void sleep_for_a_slice() { usleep(slice_ns / 1000); }

using Calls = std::array<std::int64_t, 4>;

} // namespace

TEST("as many waiters are called as things are available, in the order of their arrival") {
    Scene<4> scene;
    scene.queue.call(0);
    CHECK(scene.all_calls() == Calls({0, 0, 0, 0}));
    scene.queue.call(1);
    scene.queue.call(1);
    CHECK(scene.all_calls() == Calls({1, 0, 0, 0}));
    scene.queue.call(3);
    CHECK(scene.all_calls() == Calls({1, 1, 1, 0}));
    scene.look(0);
    scene.queue.call(3); // the first has looked: it may have found nothing
    CHECK(scene.all_calls() == Calls({2, 1, 1, 0}));
    scene.queue.call(100);
    CHECK(scene.all_calls() == Calls({2, 1, 1, 1}));
}

TEST("a waiter that leaves makes room for those behind it, wherever its place was") {
    Scene<4> scene;
    scene.leave(1);
    CHECK_EQ(scene.rank(0), 0);
    CHECK_EQ(scene.rank(2), 1);
    WaitPlace last;
    CHECK(scene.queue.join(last)); // takes the place that became free, as the last
    CHECK_EQ(scene.queue.rank(last), 3);
    CHECK_EQ(scene.rank(3), 2);
    for (const int waiter : {0, 2, 3})
        scene.leave(waiter);
    CHECK_EQ(scene.queue.rank(last), 0);
    scene.queue.leave(last, scene.changed);
    CHECK(scene.queue.empty());
}

TEST("a queue with all places taken refuses, and takes the next waiter when one leaves") {
    Scene<WaitQueue::places> scene;
    WaitPlace one_more;
    CHECK(!scene.queue.join(one_more));
    CHECK(!scene.queue.holds(one_more));
    scene.leave(77);
    CHECK(scene.queue.join(one_more));
    CHECK_EQ(scene.queue.rank(one_more), WaitQueue::places - 1);
    CHECK_EQ(scene.queue.last_ticket(), WaitQueue::places + 1);
}

TEST("a waiter that was called and does not look for a slice is removed, and one that was not called is not") {
    Scene<3> scene;
    scene.queue.call(1);
    CHECK(scene.queue.next_stuck_ns() > now_ns());
    CHECK(scene.queue.next_stuck_ns() <= now_ns() + slice_ns);
    sleep_for_a_slice();
    CHECK_EQ(scene.rank(2), 1);
    CHECK(!scene.holds(0));
    CHECK(scene.holds(1));
    scene.leave(0); // has no effect: the place is not its own
    CHECK(scene.holds(1) && scene.holds(2));
}

TEST("a waiter that looks in time is not removed") {
    Scene<2> scene;
    for (int i = 0; i < 3; ++i) {
        scene.queue.call(1);
        scene.look(0);
        sleep_for_a_slice();
        CHECK_EQ(scene.rank(1), 1);
    }
    CHECK(scene.holds(0));
    CHECK_EQ(scene.queue.next_stuck_ns(), forever_ns);
}

TEST("when one waiter is stuck, all are called, so that all that are stuck are removed a slice later") {
    Scene<5> scene;
    scene.queue.call(1);
    sleep_for_a_slice();
    CHECK_EQ(scene.rank(4), 3);
    for (int waiter = 1; waiter < 4; ++waiter)
        CHECK_EQ(scene.calls(waiter), 1);
    scene.look(3);
    sleep_for_a_slice();
    CHECK_EQ(scene.rank(4), 1);
    CHECK(scene.holds(3));
    CHECK(!scene.holds(1) && !scene.holds(2));
}

// Race: threads join, hold their place for a moment and leave.
//   each place has one waiter at a time  acceptable
//   two                                  FORBIDDEN
TEST("a place of a queue belongs to one waiter at a time, and all places are free afterwards") {
    WaitQueue queue{};
    SignalCell changed{};
    std::array<std::atomic<int>, WaitQueue::places> held{};
    std::atomic<int> shared{0}, lost{0};
    constexpr int threads = 3, rounds = check::times(100'000);
    std::vector<std::thread> waiters;
    for (int i = 0; i < threads; ++i)
        waiters.emplace_back([&] {
            for (int round = 0; round < rounds; ++round) {
                WaitPlace place;
                if (!queue.join(place))
                    continue;
                const auto index = static_cast<std::size_t>(place.index);
                shared += held[index].exchange(1) != 0;
                queue.call(1);
                queue.look(place, changed);
                lost += !queue.holds(place);
                held[index] = 0;
                queue.leave(place, changed);
            }
        });
    for (std::thread &thread : waiters)
        thread.join();
    CHECK_EQ(shared.load(), 0);
    CHECK_EQ(lost.load(), 0);
    CHECK(queue.empty());
    CHECK_EQ(queue.last_ticket(), threads * rounds);
}

// ------------------------------------------------------------------------------------------- at every instruction

#if defined(MEMLANE_STEPPED)

// The child is stopped at an instruction of its wait while a waiter that came before it is served; then it continues.
TEST("a waiter stopped at any instruction does not delay those before it, and leaves nothing when it continues") {
    struct Memory {
        WaitQueue queue;
        SignalCell changed;
    };
    Shared<Memory> memory;
    WaitPlace first;
    at_every_instruction(
        [&] {
            new (&*memory) Memory{};
            CHECK(memory->queue.join(first));
        },
        [&](std::int64_t) {
            WaitPlace second;
            memory->queue.join(second);
            memory->queue.look(second, memory->changed);
            memory->queue.rank(second);
            memory->queue.leave(second, memory->changed);
        },
        [&](SteppedChild &waiting) {
            memory->queue.call(1);
            CHECK_EQ(see(memory->queue.signal(first).value), 1);
            memory->queue.look(first, memory->changed);
            CHECK(memory->queue.holds(first));
            CHECK_EQ(memory->queue.rank(first), 0);
            memory->queue.leave_served(first, memory->changed);
            CHECK_EQ(waiting.finish(), 0);
            CHECK(memory->queue.empty());
        });
}

#endif
