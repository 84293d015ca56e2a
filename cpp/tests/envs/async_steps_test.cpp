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

// Environments that wait at a gate in their step, while it is shut. Each step counts twice: in the state, in plain memory
// (ThreadSanitizer sees two steps of one environment at once), and where the test can look while it runs.
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
        memlane_spec made{};
        made.abi = MEMLANE_ENV_ABI;
        made.spec_bytes = sizeof made;
        made.name = "Gated";
        made.observations = observations, made.num_observations = 1;
        made.actions = actions, made.num_actions = 1;
        made.state_bytes = sizeof(std::int64_t);
        made.reset = gated_reset, made.step = gated_step;
        return made;
    }();
    return spec;
}

// How often each has been stepped, as its own state has it.
const std::int64_t *steps_of(const Hosted &hosted) {
    return reinterpret_cast<const std::int64_t *>(hosted.host.buffers().state);
}

using Envs = std::vector<std::int32_t>;

Envs all_of(std::int32_t count) {
    Envs envs(static_cast<std::size_t>(count));
    std::iota(envs.begin(), envs.end(), 0);
    return envs;
}

// A test whose errands never come back is ended by the harness.
Envs receive(AsyncSteps &errands, std::size_t at_least) {
    while (!errands.wait(at_least, 1s)) {
    }
    return errands.receive();
}

bool ascending(const Envs &envs) {
    return std::adjacent_find(envs.begin(), envs.end(), std::greater_equal<>()) == envs.end();
}

std::ptrdiff_t threads_here() {
    using std::filesystem::directory_iterator;
    return std::distance(directory_iterator("/proc/self/task"), directory_iterator());
}

// As many as are handed out one by one, so that none shares the fate of its neighbour: see AsyncSteps::Shared::run.
constexpr std::int32_t handed_out_singly = 16;

} // namespace

// ----------------------------------------------------------------------------------------------------- there and back

TEST("errands: each environment steps once for each time that it is sent, and comes back once, in order") {
    Rng dice(1);
    for (const int threads : {-1, 1, 2, 5})
        for (const std::int32_t count : {1, 7, 64, 333}) {
            Hosted hosted(gated(), count, Autoreset::disabled);
            AsyncSteps errands(hosted.host, threads);
            for (int round = 1; round <= 6; ++round) {
                Envs envs = all_of(count);
                if (round % 2 == 0)
                    std::shuffle(envs.begin(), envs.end(), dice.engine());
                for (const std::int32_t env : envs)
                    hosted.actions()[env] = 5 * env + round;
                errands.send(envs);
                CHECK_EQ(errands.count(), envs.size());
                const Envs back = receive(errands, envs.size());
                CHECK(back == all_of(count));
                CHECK_EQ(errands.count(), 0u);
                CHECK(errands.receive().empty());
                for (const std::int32_t env : envs) {
                    CHECK_EQ(hosted.observations<std::int64_t>()[env], round);
                    CHECK(hosted.host.buffers().rewards[env] == 5 * env + round);
                    CHECK(!errands.under_way(env));
                }
            }
        }
}

TEST("errands: a step that was sent is the same as one of all, also at ends and limits") {
    for (const Autoreset mode : {Autoreset::next_step, Autoreset::same_step}) {
        Hosted sent(gated(), 100, mode, 4), stayed(gated(), 100, mode, 4);
        AsyncSteps errands(sent.host, 3);
        Rng dice(2);
        for (int round = 0; round < 20; ++round) {
            for (std::int32_t env = 0; env < 100; ++env)
                sent.actions()[env] = stayed.actions()[env] = dice.between(0, 30);
            errands.send(all_of(100));
            stayed.host.step(1);
            CHECK_EQ(receive(errands, 100).size(), 100u);
            CHECK(sent.same_as(stayed));
        }
    }
}

TEST("errands: environments that were not sent are not stepped") {
    Hosted hosted(gated(), 10);
    AsyncSteps errands(hosted.host, 2);
    errands.send(Envs{7, 2, 3});
    CHECK(receive(errands, 3) == (Envs{2, 3, 7}));
    for (std::int32_t env = 0; env < 10; ++env)
        CHECK_EQ(stepped[static_cast<std::size_t>(env)].load(), env == 2 || env == 3 || env == 7 ? 1 : 0);
}

TEST("errands: to send nobody is no errand") {
    Hosted hosted(gated(), 3);
    AsyncSteps errands(hosted.host, 2);
    errands.send({});
    CHECK_EQ(errands.count(), 0u);
    CHECK(errands.wait(0, 0ns));
    CHECK(!errands.wait(1, 5ms));
    CHECK(errands.receive().empty());
}

// -------------------------------------------------------------------------------------------------------------- waiting

TEST("errands: a wait for what does not come ends after its time") {
    Hosted hosted(gated(), 3);
    AsyncSteps errands(hosted.host, 2);
    for (const bool sent : {false, true}) {
        if (sent) {
            shut[1] = true;
            errands.send(Envs{1});
        }
        const std::int64_t begin = now_ns();
        CHECK(!errands.wait(1, 30ms));
        const std::int64_t took = now_ns() - begin;
        CHECK(took >= 30 * ms && took < 2 * second);
        CHECK(!errands.wait(1, 0ns));
        CHECK(errands.wait(0, 1s)); // nobody is enough
        CHECK(errands.receive().empty());
        CHECK_EQ(errands.count(), sent ? 1u : 0u);
        CHECK_EQ(errands.under_way(1), sent);
    }
    shut[1] = false;
    CHECK(receive(errands, 1) == Envs{1});
}

TEST("errands: a wait ends as soon as enough are back") {
    Hosted hosted(gated(), 8);
    for (const std::size_t held : {1u, 4u, 6u})
        shut[held] = true;
    AsyncSteps errands(hosted.host, 4); // one to spare
    errands.send(all_of(8));
    const std::int64_t begin = now_ns();
    CHECK(errands.wait(5, 20s));
    CHECK(now_ns() - begin < 10 * second);
    CHECK(errands.receive() == (Envs{0, 2, 3, 5, 7}));
    CHECK_EQ(errands.count(), 3u);
    for (std::int32_t env = 0; env < 8; ++env)
        CHECK_EQ(errands.under_way(env), env == 1 || env == 4 || env == 6);
    CHECK(!errands.wait(1, 5ms));
    std::thread opener([] {
        usleep(10'000);
        shut[4] = false;
    });
    CHECK(errands.wait(1, 20s)); // woken, not timed out
    CHECK(now_ns() - begin < 10 * second);
    CHECK(errands.receive() == Envs{4});
    opener.join();
    shut[1] = shut[6] = false;
    CHECK(receive(errands, 2) == (Envs{1, 6}));
}

TEST("errands: those that are back and not yet received are still under way") {
    Hosted hosted(gated(), 2);
    AsyncSteps errands(hosted.host, 1);
    errands.send(Envs{0});
    CHECK(errands.wait(1, 20s));
    CHECK(errands.under_way(0));
    CHECK_EQ(errands.count(), 1u);
    errands.send(Envs{1});
    CHECK(errands.wait(2, 20s));
    CHECK(errands.receive() == (Envs{0, 1}));
    CHECK(!errands.under_way(0));
}

TEST("errands: a slow environment does not hold back the others") {
    Hosted hosted(gated(), handed_out_singly);
    AsyncSteps errands(hosted.host, 2);
    shut[0] = true;
    errands.send(all_of(handed_out_singly));
    std::vector<int> back(handed_out_singly);
    for (int round = 0; round < 40; ++round) {
        const Envs envs = receive(errands, 1);
        for (const std::int32_t env : envs)
            ++back[static_cast<std::size_t>(env)];
        errands.send(envs);
    }
    while (errands.count() > 1)
        receive(errands, 1);
    CHECK(errands.under_way(0));
    CHECK_EQ(back[0], 0);
    CHECK(*std::min_element(back.begin() + 1, back.end()) >= 1);
    shut[0] = false;
    CHECK(receive(errands, 1) == Envs{0});
    CHECK_EQ(stepped[0].load(), 1);
}

TEST("errands: who waits longest is stepped first") {
    Hosted hosted(gated(), 4, Autoreset::disabled);
    AsyncSteps errands(hosted.host, 1);
    shut[0] = true;
    errands.send(Envs{0});
    await([] { return begun[0] == 1; });
    errands.send(Envs{3});
    errands.send(Envs{1});
    shut[3] = shut[1] = true;
    shut[0] = false;
    await([] { return begun[3] == 1; });
    CHECK_EQ(begun[1].load(), 0);
    shut[3] = shut[1] = false;
    CHECK_EQ(receive(errands, 3).size(), 3u);
}

// ----------------------------------------------------------------------------------------------------------------- races

// Race: environments are sent again while others are on their way, and come back at any moment.
//   each comes back as often as it was sent, its step done and all of it visible  acceptable
//   one comes back twice, never, or with what the step before left                FORBIDDEN
TEST("errands: many sends and returns at once lose nobody and step nobody twice") {
    for (const int threads : {1, 2, 4}) {
        constexpr std::int32_t count = 150;
        Hosted hosted(gated(), count, Autoreset::disabled);
        AsyncSteps errands(hosted.host, threads);
        Rng dice(static_cast<std::uint64_t>(threads));
        std::vector<std::int64_t> sent(count), received(count);
        Envs idle = all_of(count);
        for (int turn = 0; turn < check::times(4'000); ++turn) {
            std::shuffle(idle.begin(), idle.end(), dice.engine());
            const auto many = static_cast<std::size_t>(dice.between(0, static_cast<std::int64_t>(idle.size())));
            const Envs going(idle.end() - static_cast<std::ptrdiff_t>(many), idle.end());
            idle.resize(idle.size() - many);
            for (const std::int32_t env : going)
                hosted.actions()[env] = ++sent[static_cast<std::size_t>(env)];
            errands.send(going);
            const std::size_t away = errands.count();
            const std::int64_t enough = dice.between(0, static_cast<std::int64_t>(away) / 4);
            const Envs back = receive(errands, static_cast<std::size_t>(enough));
            CHECK(ascending(back));
            CHECK_EQ(errands.count(), away - back.size());
            for (const std::int32_t env : back) {
                const auto at = static_cast<std::size_t>(env);
                CHECK_EQ(++received[at], sent[at]);
                CHECK_EQ(hosted.observations<std::int64_t>()[env], sent[at]);
                CHECK(hosted.host.buffers().rewards[env] == static_cast<double>(sent[at]));
            }
            idle.insert(idle.end(), back.begin(), back.end());
        }
        receive(errands, errands.count());
        for (std::size_t env = 0; env < sent.size(); ++env)
            CHECK_EQ(steps_of(hosted)[env], sent[env]);
    }
}

// Race: the object goes while its threads are anywhere between a wait and a step.
//   each environment that was sent has stepped once or not at all, and none steps later  acceptable
//   the end hangs, or a step runs after it                                               FORBIDDEN
TEST("errands: the end does not wait for those not yet begun, and no step runs after it") {
    for (int turn = 0; turn < check::times(160); ++turn) {
        constexpr std::int32_t count = 300;
        Hosted hosted(gated(), count);
        std::for_each(stepped.begin(), stepped.end(), [](std::atomic<int> &times) { times = 0; });
        {
            AsyncSteps errands(hosted.host, 1 + turn % 4);
            errands.send(all_of(count));
            if (turn % 3 == 1)
                busy_wait(20'000);
            if (turn % 3 == 2)
                errands.wait(1, 1s);
        }
        for (std::int32_t env = 0; env < count; ++env) {
            const int times = stepped[static_cast<std::size_t>(env)];
            CHECK(times == 0 || times == 1);
            CHECK_EQ(steps_of(hosted)[env], times);
        }
    }
}

TEST("errands: the end waits for a step that has begun") {
    Hosted hosted(gated(), 10);
    shut[0] = true;
    std::atomic<bool> opened = false;
    std::thread opener;
    {
        AsyncSteps errands(hosted.host, 1);
        errands.send(all_of(10));
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

// Of three there is always one in its step and one that waits for the thread: the usual state of a caller who takes what is
// back and sends it again.
TEST("errands: the queue does not grow while somebody always waits in it") {
    Hosted hosted(gated(), 3, Autoreset::disabled);
    AsyncSteps errands(hosted.host, 1);
    shut[0] = shut[1] = shut[2] = true;
    errands.send(all_of(3));
    largest_allocation = 0;
    for (int i = 0; i < 600; ++i) {
        const std::int32_t first = i % 3;
        const auto at = static_cast<std::size_t>(first), next = static_cast<std::size_t>((i + 1) % 3);
        const int before = begun[next];
        shut[at] = false;
        const Envs back = receive(errands, 1);
        CHECK(back == Envs{first});
        while (begun[next] == before)
            sched_yield();
        shut[at] = true;
        errands.send(back);
    }
    CHECK(largest_allocation <= 512);
    shut[0] = shut[1] = shut[2] = false;
    receive(errands, 3);
}

#endif

// ------------------------------------------------------------------------------------------------------------- threads

TEST("errands: threads are made at the first errand and go with the object") {
    std::thread([] {}).join(); // with the first one ThreadSanitizer makes threads of its own
    usleep(20'000);            // who was joined may still be listed for a moment
    const std::ptrdiff_t before = threads_here();
    Hosted hosted(gated(), 4);
    {
        AsyncSteps errands(hosted.host, 3);
        CHECK(!errands.wait(1, 0ns));
        CHECK(errands.receive().empty());
        CHECK_EQ(threads_here(), before);
        errands.send(Envs{1});
        CHECK_EQ(threads_here(), before + 3);
        errands.send(Envs{2});
        CHECK_EQ(threads_here(), before + 3);
        receive(errands, 2);
    }
    await([&] { return threads_here() == before; });
}

TEST("errands: their threads leave the process's signals to the thread that called, whose mask stays as it was") {
    Hosted hosted(gated(), 4);
    AsyncSteps errands(hosted.host, 3);
    errands.send(all_of(4));
    receive(errands, 4);
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

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // they need all address space there is

TEST("errands: without enough threads to be had those that there are do the work; without any, sending is an error") {
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
    // A thread that has ended leaves its stack to the next one. It is too small for those that are wanted now.
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, 128 << 20);
    pthread_setattr_default_np(&large);
    AsyncSteps none(hosted.host, 2);
    CHECK_THROWS(std::system_error, none.send(all_of(20)));
    CHECK_EQ(none.count(), 0u);
    CHECK(!none.under_way(3));
    CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
    none.send(all_of(20)); // there are threads again
    CHECK(receive(none, 20) == all_of(20));
}

#endif

// ---------------------------------------------------------------------------------------------------------------- fork

// ThreadSanitizer cannot follow threads that start after a fork() of a process with threads.
#if !defined(__SANITIZE_THREAD__)

TEST("errands: a child forked while errands are under way finds none, and can send its own") {
    Hosted hosted(gated(), 10, Autoreset::disabled);
    AsyncSteps errands(hosted.host, 2);
    shut[0] = shut[1] = true;
    errands.send(all_of(10));
    await([] { return begun[0] == 1 && begun[1] == 1; }); // both threads stand at a gate, and the others wait
    Child child([&] {
        CHECK_EQ(errands.count(), 0u);
        for (std::int32_t env = 0; env < 10; ++env)
            CHECK(!errands.under_way(env));
        CHECK(!errands.wait(1, 5ms));
        CHECK(errands.receive().empty());
        shut[0] = shut[1] = false;
        for (int round = 1; round <= 3; ++round) {
            errands.send(all_of(10));
            CHECK(receive(errands, 10) == all_of(10));
            for (std::int32_t env = 0; env < 10; ++env)
                CHECK_EQ(hosted.observations<std::int64_t>()[env], round);
        }
        shut[3] = true;
        errands.send(Envs{3});
        Child grandchild([&] {
            CHECK_EQ(errands.count(), 0u);
            errands.send(Envs{4});
            CHECK(receive(errands, 1) == Envs{4});
        });
        CHECK_EQ(grandchild.join(), 0);
        shut[3] = false;
        CHECK(receive(errands, 1) == Envs{3});
    });
    CHECK_EQ(child.join(), 0);
    CHECK_EQ(errands.count(), 10u); // the parent's are as they were
    shut[0] = shut[1] = false;
    CHECK(receive(errands, 10) == all_of(10));
    for (std::int32_t env = 0; env < 10; ++env)
        CHECK_EQ(hosted.observations<std::int64_t>()[env], 1);
}

TEST("errands: a forked child that drops its parent's errands waits for nobody") {
    Hosted hosted(gated(), 4);
    auto errands = std::make_unique<AsyncSteps>(hosted.host, 2);
    shut[0] = true;
    errands->send(all_of(4));
    await([] { return begun[0] == 1; });
    Child child([&] { errands.reset(); });
    CHECK(child.dies_within(10 * second));
    CHECK_EQ(child.join(), 0);
    shut[0] = false;
    CHECK(receive(*errands, 4) == all_of(4));
}

#endif
