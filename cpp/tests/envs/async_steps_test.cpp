#include "envs/async_steps.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/resource.h>

#include "support/check.hpp"
#include "os/clock.hpp"
#include "support/hosted_envs.hpp"
#include "support/processes.hpp"

using namespace memlane;
using namespace std::chrono_literals;

namespace {

constexpr std::int32_t most_envs = 512;

// Environments whose step waits while their gate is shut. Each step is counted twice: in the state, which is plain memory
// (ThreadSanitizer detects two concurrent steps of one environment), and in atomics that the test reads meanwhile.
std::array<std::atomic<bool>, most_envs> shut{};
std::array<std::atomic<int>, most_envs> begun{}, stepped{};

void gated_reset(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    for (std::int32_t i = begin; i < end; ++i)
        static_cast<std::int64_t *>(envs->observations[0])[i] = -1;
}

void gated_step(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    for (std::int32_t i = begin; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        ++begun[at];
        while (shut[at])
            usleep(100);
        const std::int64_t count = ++static_cast<std::int64_t *>(envs->state)[i];
        static_cast<std::int64_t *>(envs->observations[0])[i] = count;
        const std::int64_t action = static_cast<const std::int64_t *>(envs->actions[0])[i];
        envs->rewards[i] = static_cast<double>(action);
        envs->terminated[i] = action % 5 == 4;
        ++stepped[at];
    }
}

const memlane_spec &gated() {
    static const memlane_field observations[] = {field(MEMLANE_INT64)};
    static const memlane_field actions[] = {choices(0, 1'000'000)};
    static const memlane_spec spec = [] {
        memlane_spec declared{};
        declared.abi = MEMLANE_ENV_ABI;
        declared.spec_bytes = sizeof declared;
        declared.name = "Gated";
        declared.observations = observations, declared.num_observations = 1;
        declared.actions = actions, declared.num_actions = 1;
        declared.state_bytes = sizeof(std::int64_t);
        declared.reset = gated_reset, declared.step = gated_step;
        return declared;
    }();
    return spec;
}

// The number of steps of each environment, from its own state.
const std::int64_t *steps_of(const Hosted &hosted) {
    return reinterpret_cast<const std::int64_t *>(hosted.host.buffers().state);
}

using Envs = std::vector<std::int32_t>;

Envs all_of(std::int32_t count) {
    Envs envs(static_cast<std::size_t>(count));
    std::iota(envs.begin(), envs.end(), 0);
    return envs;
}

// If a step never completes, the test harness ends the test.
Envs receive(AsyncSteps &async_steps, std::size_t at_least) {
    while (!async_steps.wait(at_least, 1s)) {
    }
    return async_steps.receive();
}

bool ascending(const Envs &envs) {
    return std::adjacent_find(envs.begin(), envs.end(), std::greater_equal<>()) == envs.end();
}

std::ptrdiff_t threads_here() {
    using std::filesystem::directory_iterator;
    return std::distance(directory_iterator("/proc/self/task"), directory_iterator());
}

// So few that each is its own chunk and does not wait for its neighbour: see AsyncSteps::Shared::run.
constexpr std::int32_t single_chunks = 16;

} // namespace

// ---------------------------------------------------------------------------------------------------- send and receive

TEST("async steps: each environment is stepped and received once per send, in order") {
    Rng dice(1);
    for (const int threads : {-1, 1, 2, 5})
        for (const std::int32_t count : {1, 7, 64, 333}) {
            Hosted hosted(gated(), count, Autoreset::disabled);
            AsyncSteps async_steps(hosted.host, threads);
            for (int round = 1; round <= 6; ++round) {
                Envs envs = all_of(count);
                if (round % 2 == 0)
                    std::shuffle(envs.begin(), envs.end(), dice.engine());
                for (const std::int32_t env : envs)
                    hosted.actions()[env] = 5 * env + round;
                async_steps.send(envs);
                CHECK_EQ(async_steps.in_flight_count(), envs.size());
                const Envs back = receive(async_steps, envs.size());
                CHECK(back == all_of(count));
                CHECK_EQ(async_steps.in_flight_count(), 0u);
                CHECK(async_steps.receive().empty());
                for (const std::int32_t env : envs) {
                    CHECK_EQ(hosted.observations<std::int64_t>()[env], round);
                    CHECK(hosted.host.buffers().rewards[env] == 5 * env + round);
                    CHECK(!async_steps.in_flight(env));
                }
            }
        }
}

TEST("async steps: an asynchronous step gives the same as a synchronous one, also at ends and limits") {
    for (const Autoreset mode : {Autoreset::next_step, Autoreset::same_step}) {
        Hosted sent(gated(), 100, mode, 4), stayed(gated(), 100, mode, 4);
        AsyncSteps async_steps(sent.host, 3);
        Rng dice(2);
        for (int round = 0; round < 20; ++round) {
            for (std::int32_t env = 0; env < 100; ++env)
                sent.actions()[env] = stayed.actions()[env] = dice.between(0, 30);
            async_steps.send(all_of(100));
            stayed.host.step(1);
            CHECK_EQ(receive(async_steps, 100).size(), 100u);
            CHECK(sent.same_as(stayed));
        }
    }
}

TEST("async steps: environments that were not sent are not stepped") {
    Hosted hosted(gated(), 10);
    AsyncSteps async_steps(hosted.host, 2);
    async_steps.send(Envs{7, 2, 3});
    CHECK(receive(async_steps, 3) == (Envs{2, 3, 7}));
    for (std::int32_t env = 0; env < 10; ++env)
        CHECK_EQ(stepped[static_cast<std::size_t>(env)].load(), env == 2 || env == 3 || env == 7 ? 1 : 0);
}

TEST("async steps: to send no environments does nothing") {
    Hosted hosted(gated(), 3);
    AsyncSteps async_steps(hosted.host, 2);
    async_steps.send({});
    CHECK_EQ(async_steps.in_flight_count(), 0u);
    CHECK(async_steps.wait(0, 0ns));
    CHECK(!async_steps.wait(1, 5ms));
    CHECK(async_steps.receive().empty());
}

// -------------------------------------------------------------------------------------------------------------- waiting

TEST("async steps: a wait for steps that do not complete ends after its timeout") {
    Hosted hosted(gated(), 3);
    AsyncSteps async_steps(hosted.host, 2);
    for (const bool sent : {false, true}) {
        if (sent) {
            shut[1] = true;
            async_steps.send(Envs{1});
        }
        const std::int64_t begin = now_ns();
        CHECK(!async_steps.wait(1, 30ms));
        const std::int64_t took = now_ns() - begin;
        CHECK(took >= 30 * ms && took < 2 * second);
        CHECK(!async_steps.wait(1, 0ns));
        CHECK(async_steps.wait(0, 1s)); // zero steps are complete
        CHECK(async_steps.receive().empty());
        CHECK_EQ(async_steps.in_flight_count(), sent ? 1u : 0u);
        CHECK_EQ(async_steps.in_flight(1), sent);
    }
    shut[1] = false;
    CHECK(receive(async_steps, 1) == Envs{1});
}

TEST("async steps: a wait ends as soon as enough steps are complete") {
    Hosted hosted(gated(), 8);
    for (const std::size_t held : {1u, 4u, 6u})
        shut[held] = true;
    AsyncSteps async_steps(hosted.host, 4); // one to spare
    async_steps.send(all_of(8));
    const std::int64_t begin = now_ns();
    CHECK(async_steps.wait(5, 20s));
    CHECK(now_ns() - begin < 10 * second);
    CHECK(async_steps.receive() == (Envs{0, 2, 3, 5, 7}));
    CHECK_EQ(async_steps.in_flight_count(), 3u);
    for (std::int32_t env = 0; env < 8; ++env)
        CHECK_EQ(async_steps.in_flight(env), env == 1 || env == 4 || env == 6);
    CHECK(!async_steps.wait(1, 5ms));
    std::thread opener([] {
        usleep(10'000);
        shut[4] = false;
    });
    CHECK(async_steps.wait(1, 20s)); // woken, not timed out
    CHECK(now_ns() - begin < 10 * second);
    CHECK(async_steps.receive() == Envs{4});
    opener.join();
    shut[1] = shut[6] = false;
    CHECK(receive(async_steps, 2) == (Envs{1, 6}));
}

TEST("async steps: completed steps that are not received yet are still in flight") {
    Hosted hosted(gated(), 2);
    AsyncSteps async_steps(hosted.host, 1);
    async_steps.send(Envs{0});
    CHECK(async_steps.wait(1, 20s));
    CHECK(async_steps.in_flight(0));
    CHECK_EQ(async_steps.in_flight_count(), 1u);
    async_steps.send(Envs{1});
    CHECK(async_steps.wait(2, 20s));
    CHECK(async_steps.receive() == (Envs{0, 1}));
    CHECK(!async_steps.in_flight(0));
}

TEST("async steps: a slow environment does not hold back the others") {
    Hosted hosted(gated(), single_chunks);
    AsyncSteps async_steps(hosted.host, 2);
    shut[0] = true;
    async_steps.send(all_of(single_chunks));
    std::vector<int> back(single_chunks);
    for (int round = 0; round < 40; ++round) {
        const Envs envs = receive(async_steps, 1);
        for (const std::int32_t env : envs)
            ++back[static_cast<std::size_t>(env)];
        async_steps.send(envs);
    }
    while (async_steps.in_flight_count() > 1)
        receive(async_steps, 1);
    CHECK(async_steps.in_flight(0));
    CHECK_EQ(back[0], 0);
    CHECK(*std::min_element(back.begin() + 1, back.end()) >= 1);
    shut[0] = false;
    CHECK(receive(async_steps, 1) == Envs{0});
    CHECK_EQ(stepped[0].load(), 1);
}

TEST("async steps: environments are stepped in the order in which they were sent") {
    Hosted hosted(gated(), 4, Autoreset::disabled);
    AsyncSteps async_steps(hosted.host, 1);
    shut[0] = true;
    async_steps.send(Envs{0});
    await([] { return begun[0] == 1; });
    async_steps.send(Envs{3});
    async_steps.send(Envs{1});
    shut[3] = shut[1] = true;
    shut[0] = false;
    await([] { return begun[3] == 1; });
    CHECK_EQ(begun[1].load(), 0);
    shut[3] = shut[1] = false;
    CHECK_EQ(receive(async_steps, 3).size(), 3u);
}

// ----------------------------------------------------------------------------------------------------------------- races

// Race: environments are sent again while others are in flight, and complete at any moment.
//   each is received as often as it was sent, with all results of its step visible  acceptable
//   one is received twice, never, or with results of an earlier step                FORBIDDEN
TEST("async steps: concurrent sends and completions lose no environment and step none twice") {
    for (const int threads : {1, 2, 4}) {
        constexpr std::int32_t count = 150;
        Hosted hosted(gated(), count, Autoreset::disabled);
        AsyncSteps async_steps(hosted.host, threads);
        Rng dice(static_cast<std::uint64_t>(threads));
        std::vector<std::int64_t> sent(count), received(count);
        Envs idle = all_of(count);
        for (int turn = 0; turn < check::times(4'000); ++turn) {
            std::shuffle(idle.begin(), idle.end(), dice.engine());
            const auto count_sent = static_cast<std::size_t>(dice.between(0, static_cast<std::int64_t>(idle.size())));
            const Envs going(idle.end() - static_cast<std::ptrdiff_t>(count_sent), idle.end());
            idle.resize(idle.size() - count_sent);
            for (const std::int32_t env : going)
                hosted.actions()[env] = ++sent[static_cast<std::size_t>(env)];
            async_steps.send(going);
            const std::size_t in_flight = async_steps.in_flight_count();
            const std::int64_t enough = dice.between(0, static_cast<std::int64_t>(in_flight) / 4);
            const Envs back = receive(async_steps, static_cast<std::size_t>(enough));
            CHECK(ascending(back));
            CHECK_EQ(async_steps.in_flight_count(), in_flight - back.size());
            for (const std::int32_t env : back) {
                const auto at = static_cast<std::size_t>(env);
                CHECK_EQ(++received[at], sent[at]);
                CHECK_EQ(hosted.observations<std::int64_t>()[env], sent[at]);
                CHECK(hosted.host.buffers().rewards[env] == static_cast<double>(sent[at]));
            }
            idle.insert(idle.end(), back.begin(), back.end());
        }
        receive(async_steps, async_steps.in_flight_count());
        for (std::size_t env = 0; env < sent.size(); ++env)
            CHECK_EQ(steps_of(hosted)[env], sent[env]);
    }
}

// Race: the object is destroyed while its threads are anywhere between a wait and a step.
//   each environment that was sent has stepped once or not at all, and none steps later  acceptable
//   the destructor hangs, or a step runs after it                                        FORBIDDEN
TEST("async steps: the destructor does not wait for steps that have not begun, and no step runs after it") {
    for (int turn = 0; turn < check::times(160); ++turn) {
        constexpr std::int32_t count = 300;
        Hosted hosted(gated(), count);
        std::for_each(stepped.begin(), stepped.end(), [](std::atomic<int> &times) { times = 0; });
        {
            AsyncSteps async_steps(hosted.host, 1 + turn % 4);
            async_steps.send(all_of(count));
            if (turn % 3 == 1)
                busy_wait(20'000);
            if (turn % 3 == 2)
                async_steps.wait(1, 1s);
        }
        for (std::int32_t env = 0; env < count; ++env) {
            const int times = stepped[static_cast<std::size_t>(env)];
            CHECK(times == 0 || times == 1);
            CHECK_EQ(steps_of(hosted)[env], times);
        }
    }
}

TEST("async steps: the destructor waits for a step that has begun") {
    Hosted hosted(gated(), 10);
    shut[0] = true;
    std::atomic<bool> opened = false;
    std::thread opener;
    {
        AsyncSteps async_steps(hosted.host, 1);
        async_steps.send(all_of(10));
        await([] { return begun[0] == 1; });
        opener = std::thread([&] {
            usleep(20'000);
            opened = true;
            shut[0] = false;
        });
    }
    CHECK(opened.load());
    CHECK_EQ(stepped[0].load(), 1);
    CHECK_EQ(begun[9].load(), 0);
    opener.join();
}

#ifdef COUNTS_ALLOCATIONS

// Of three environments one is always being stepped and one waits for the thread: the usual state when a caller sends each
// environment again as soon as it is received.
TEST("async steps: the queue does not grow while it is never empty") {
    Hosted hosted(gated(), 3, Autoreset::disabled);
    AsyncSteps async_steps(hosted.host, 1);
    shut[0] = shut[1] = shut[2] = true;
    async_steps.send(all_of(3));
    largest_allocation = 0;
    for (int i = 0; i < 600; ++i) {
        const std::int32_t first = i % 3;
        const auto at = static_cast<std::size_t>(first), next = static_cast<std::size_t>((i + 1) % 3);
        const int before = begun[next];
        shut[at] = false;
        const Envs back = receive(async_steps, 1);
        CHECK(back == Envs{first});
        while (begun[next] == before)
            sched_yield();
        shut[at] = true;
        async_steps.send(back);
    }
    CHECK(largest_allocation <= 512);
    shut[0] = shut[1] = shut[2] = false;
    receive(async_steps, 3);
}

#endif

// ------------------------------------------------------------------------------------------------------------- threads

TEST("async steps: threads are started by the first send and end with the object") {
    std::thread([] {}).join(); // with the first one ThreadSanitizer starts threads of its own
    usleep(20'000);            // a joined thread may still be listed for a moment
    const std::ptrdiff_t before = threads_here();
    Hosted hosted(gated(), 4);
    {
        AsyncSteps async_steps(hosted.host, 3);
        CHECK(!async_steps.wait(1, 0ns));
        CHECK(async_steps.receive().empty());
        CHECK_EQ(threads_here(), before);
        async_steps.send(Envs{1});
        CHECK_EQ(threads_here(), before + 3);
        async_steps.send(Envs{2});
        CHECK_EQ(threads_here(), before + 3);
        receive(async_steps, 2);
    }
    await([&] { return threads_here() == before; });
}

TEST("async steps: the threads block the process's signals, and the mask of the calling thread is unchanged") {
    Hosted hosted(gated(), 4);
    AsyncSteps async_steps(hosted.host, 3);
    async_steps.send(all_of(4));
    receive(async_steps, 4);
    sigset_t one, after, pending;
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    CHECK_EQ(sigismember(&after, SIGUSR1), 0);
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &one, nullptr);
    kill(getpid(), SIGUSR1); // would end the process on any thread that takes it
    usleep(20'000);
    sigpending(&pending);
    CHECK_EQ(sigismember(&pending, SIGUSR1), 1);
    signal(SIGUSR1, SIG_IGN);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // they need the whole address space

TEST("async steps: if only some threads can be started they do the work; if none can, send throws") {
    Hosted hosted(gated(), 20);
    rlimit before{};
    CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
    rlimit limit = before;
    limit.rlim_cur = 64 << 20; // room for a few stacks of 8 MB
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    {
        AsyncSteps few(hosted.host, 64);
        few.send(all_of(20));
        CHECK(threads_here() > 1 && threads_here() < 60);
        CHECK(receive(few, 20) == all_of(20));
    }
    // The stack of an ended thread is reused for the next one. It is too small for the stacks requested now.
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, 128 << 20);
    pthread_setattr_default_np(&large);
    AsyncSteps none(hosted.host, 2);
    CHECK_THROWS(std::system_error, none.send(all_of(20)));
    CHECK_EQ(none.in_flight_count(), 0u);
    CHECK(!none.in_flight(3));
    CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
    none.send(all_of(20)); // threads can be started again
    CHECK(receive(none, 20) == all_of(20));
}

#endif

// ---------------------------------------------------------------------------------------------------------------- fork

// ThreadSanitizer cannot follow threads that start after a fork() of a process with threads.
#if !defined(__SANITIZE_THREAD__)

TEST("async steps: in a child forked while steps are in flight none is in flight, and it can send its own") {
    Hosted hosted(gated(), 10, Autoreset::disabled);
    AsyncSteps async_steps(hosted.host, 2);
    shut[0] = shut[1] = true;
    async_steps.send(all_of(10));
    await([] { return begun[0] == 1 && begun[1] == 1; }); // both threads wait at a gate, the others in the queue
    Child child([&] {
        CHECK_EQ(async_steps.in_flight_count(), 0u);
        for (std::int32_t env = 0; env < 10; ++env)
            CHECK(!async_steps.in_flight(env));
        CHECK(!async_steps.wait(1, 5ms));
        CHECK(async_steps.receive().empty());
        shut[0] = shut[1] = false;
        for (int round = 1; round <= 3; ++round) {
            async_steps.send(all_of(10));
            CHECK(receive(async_steps, 10) == all_of(10));
            for (std::int32_t env = 0; env < 10; ++env)
                CHECK_EQ(hosted.observations<std::int64_t>()[env], round);
        }
        shut[3] = true;
        const int begun_before = begun[3];
        async_steps.send(Envs{3});
        // The thread waits at its gate: one that allocates while it is forked leaves a locked allocator to the child, if
        // the allocator is that of AddressSanitizer.
        await([&] { return begun[3] == begun_before + 1; });
        Child grandchild([&] {
            CHECK_EQ(async_steps.in_flight_count(), 0u);
            async_steps.send(Envs{4});
            CHECK(receive(async_steps, 1) == Envs{4});
        });
        CHECK_EQ(grandchild.join(), 0);
        shut[3] = false;
        CHECK(receive(async_steps, 1) == Envs{3});
    });
    CHECK_EQ(child.join(), 0);
    CHECK_EQ(async_steps.in_flight_count(), 10u); // those of the parent are unchanged
    shut[0] = shut[1] = false;
    CHECK(receive(async_steps, 10) == all_of(10));
    for (std::int32_t env = 0; env < 10; ++env)
        CHECK_EQ(hosted.observations<std::int64_t>()[env], 1);
}

TEST("async steps: the destructor in a forked child does not wait for steps of its parent") {
    Hosted hosted(gated(), 4);
    auto async_steps = std::make_unique<AsyncSteps>(hosted.host, 2);
    shut[0] = true;
    async_steps->send(all_of(4));
    await([] { return begun[0] == 1; });
    Child child([&] { async_steps.reset(); });
    CHECK(child.dies_within(10 * second));
    CHECK_EQ(child.join(), 0);
    shut[0] = false;
    CHECK(receive(*async_steps, 4) == all_of(4));
}

#endif
