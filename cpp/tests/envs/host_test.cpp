#include "envs/host.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>

#include "support/check.hpp"
#include "support/hosted_envs.hpp"
#include "memlane/sincos.h"
#include "support/processes.hpp"

#define ENV(file) extern "C" const memlane_spec memlane_env_##file;
#include "built_in_envs.inc"
#undef ENV

using namespace memlane;

#ifdef COUNTS_ALLOCATIONS

std::atomic<std::int64_t> allocations{0};
std::atomic<std::size_t> largest_allocation{0};

namespace {

void *counted(std::size_t bytes, std::size_t alignment) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    if (bytes > largest_allocation.load(std::memory_order_relaxed))
        largest_allocation.store(bytes, std::memory_order_relaxed); // of two concurrent stores either may win
    void *memory = std::aligned_alloc(alignment, (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
    if (memory == nullptr)
        throw std::bad_alloc();
    return memory;
}

} // namespace

void *operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void *operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#endif

namespace {

// ------------------------------------------------------------------------ Counter: one agent, its action sets its flags

// Its action is what it writes into the flags: terminated + 256 * truncated.
constexpr std::int64_t go_on = 0, terminate = 1, cut = 256, both = terminate + cut;

struct Count {
    std::int32_t episode, count;
};

// The calls of the environments' functions, and the threads that made them.
struct Calls {
    std::mutex mutex;
    std::vector<std::pair<std::int32_t, std::int32_t>> steps, resets;
    std::set<std::thread::id> threads;
    bool kept = false; // off while speed or memory is measured

    void clear() {
        steps.clear();
        resets.clear();
        threads.clear();
    }
};
Calls calls;

void note(std::vector<std::pair<std::int32_t, std::int32_t>> &into, std::int32_t begin, std::int32_t end) {
    if (!calls.kept)
        return;
    const std::lock_guard lock(calls.mutex);
    into.emplace_back(begin, end);
    calls.threads.insert(std::this_thread::get_id());
}

void show_count(const memlane_envs *envs, std::int32_t i, const Count &now) {
    static_cast<Count *>(envs->observations[0])[i] = now;
    auto *bytes = static_cast<std::uint8_t *>(envs->observations[1]) + 3 * i;
    bytes[0] = static_cast<std::uint8_t>(now.episode);
    bytes[1] = static_cast<std::uint8_t>(now.count);
    bytes[2] = 7;
}

void count_reset(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    note(calls.resets, begin, end);
    for (std::int32_t i = begin; i < end; ++i) {
        Count &now = static_cast<Count *>(envs->state)[i];
        now = {now.episode + 1, 0};
        show_count(envs, i, now);
        static_cast<std::int16_t *>(envs->infos[0])[i] = static_cast<std::int16_t>(-now.episode);
        static_cast<double *>(envs->infos[1])[2 * i] = now.episode;
        static_cast<double *>(envs->infos[1])[2 * i + 1] = 0;
        CHECK_EQ(envs->steps[i], 0);
        CHECK_EQ(envs->alive[i], 1);
    }
}

void count_step(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    note(calls.steps, begin, end);
    CHECK(begin < end);
    for (std::int32_t i = begin; i < end; ++i) {
        // As documented in env.h.
        CHECK(envs->rewards[i] == 0 && envs->terminated[i] == 0 && envs->truncated[i] == 0);
        Count &now = static_cast<Count *>(envs->state)[i];
        CHECK_EQ(envs->steps[i], now.count);
        now.count += 1;
        show_count(envs, i, now);
        const std::int64_t action = static_cast<const std::int64_t *>(envs->actions[0])[i];
        envs->rewards[i] = 100 * now.episode + now.count;
        envs->terminated[i] = static_cast<std::uint8_t>(action & 255);
        envs->truncated[i] = static_cast<std::uint8_t>(action >> 8 & 255);
        static_cast<std::int16_t *>(envs->infos[0])[i] = static_cast<std::int16_t>(10 * now.count);
        static_cast<double *>(envs->infos[1])[2 * i] = now.episode;
        static_cast<double *>(envs->infos[1])[2 * i + 1] = now.count;
    }
}

memlane_spec counter(bool steps_past_end = false) {
    static const memlane_field observations[] = {field(MEMLANE_INT32, {2}, "count"), field(MEMLANE_UINT8, {3}, "bytes")};
    static const memlane_field actions[] = {choices(0, 65535)};
    static const memlane_field infos[] = {field(MEMLANE_INT16, {}, "tens"), field(MEMLANE_FLOAT64, {2}, "pair")};
    memlane_spec spec{};
    spec.abi = MEMLANE_ENV_ABI;
    spec.spec_bytes = sizeof spec;
    spec.name = "Counter";
    spec.observations = observations, spec.num_observations = MEMLANE_COUNT(observations);
    spec.actions = actions, spec.num_actions = MEMLANE_COUNT(actions);
    spec.infos = infos, spec.num_infos = MEMLANE_COUNT(infos);
    spec.state_bytes = sizeof(Count);
    spec.steps_past_end = steps_past_end;
    spec.reset = count_reset, spec.step = count_step;
    return spec;
}

std::string text(const Count &count) { return std::to_string(count.episode) + ":" + std::to_string(count.count); }

// "1:2 102 TC 2" is: first episode, second step; the reward; terminated and truncated; two steps counted.
std::string seen(const Hosted &hosted, std::int32_t env = 0) {
    const HostBuffers &all = hosted.host.buffers();
    const Count count = hosted.observations<Count>()[env];
    const std::uint8_t *bytes = hosted.observations<std::uint8_t>(1) + 3 * env;
    CHECK(bytes[0] == count.episode && bytes[1] == count.count && bytes[2] == 7);
    const auto flag = [](std::uint8_t value, char letter) {
        return std::string(1, value == 0 ? '-' : value == 1 ? letter : '?');
    };
    return text(count) + " " + std::to_string(static_cast<int>(all.rewards[env])) + " " + flag(all.terminated[env], 'T') +
           flag(all.truncated[env], 'C') + " " + std::to_string(all.steps[env]);
}

std::string infos_seen(const Hosted &hosted, std::int32_t env = 0) {
    const double *pair = hosted.infos<double>(1) + 2 * env;
    return std::to_string(hosted.infos<std::int16_t>()[env]) + " " + std::to_string(static_cast<int>(pair[0])) + ":" +
           std::to_string(static_cast<int>(pair[1]));
}

std::string last_seen(const Hosted &hosted, std::int32_t env = 0) {
    const Count count = hosted.last_observations<Count>()[env];
    const std::uint8_t *bytes = hosted.last_observations<std::uint8_t>(1) + 3 * env;
    CHECK(bytes[0] == count.episode && bytes[1] == count.count && (bytes[2] == 7 || count.episode == 0));
    const double *pair = hosted.last_infos<double>(1) + 2 * env;
    return text(count) + " " + std::to_string(hosted.last_infos<std::int16_t>()[env]) + " " +
           std::to_string(static_cast<int>(pair[0])) + ":" + std::to_string(static_cast<int>(pair[1]));
}

// Steps the only environment.
std::string after(Hosted &hosted, std::int64_t action, std::int32_t ended = 0) {
    hosted.actions()[0] = action;
    CHECK_EQ(hosted.host.step(1), ended);
    CHECK_EQ(hosted.host.buffers().ended[0], ended);
    return seen(hosted);
}

// --------------------------------------------------------------------------------------- Party: three agents, careless

// It writes the rows of all agents at every step, also of those that have left: the host must clear them. An agent's action
// sets its flags, as above. An agent with the action `absent` at a reset is not in the new game.
constexpr std::int32_t guests = 3;
constexpr std::int64_t absent = 1 << 16;

void party_write(const memlane_envs *envs, std::int32_t game, std::int32_t count) {
    for (std::int32_t row = game * guests; row < (game + 1) * guests; ++row) {
        auto *observation = static_cast<std::int32_t *>(envs->observations[0]) + 2 * row;
        observation[0] = row % guests + 1, observation[1] = count;
        static_cast<std::int32_t *>(envs->infos[0])[row] = 10 * count + row % guests;
    }
}

void party_reset(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    for (std::int32_t i = begin; i < end; ++i) {
        static_cast<std::int32_t *>(envs->state)[i] = 0;
        party_write(envs, i, 0);
        for (std::int32_t row = i * guests; row < (i + 1) * guests; ++row) {
            CHECK_EQ(envs->alive[row], 1);
            envs->alive[row] = static_cast<const std::int64_t *>(envs->actions[0])[row] != absent;
        }
    }
}

void party_step(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    note(calls.steps, begin, end);
    for (std::int32_t i = begin; i < end; ++i) {
        const std::int32_t count = ++static_cast<std::int32_t *>(envs->state)[i];
        party_write(envs, i, count);
        for (std::int32_t row = i * guests; row < (i + 1) * guests; ++row) {
            CHECK(envs->rewards[row] == 0 && envs->terminated[row] == 0 && envs->truncated[row] == 0);
            const std::int64_t action = static_cast<const std::int64_t *>(envs->actions[0])[row];
            envs->rewards[row] = 100 * (row % guests + 1) + count;
            envs->terminated[row] = static_cast<std::uint8_t>(action & 255);
            envs->truncated[row] = static_cast<std::uint8_t>(action >> 8 & 255);
        }
    }
}

memlane_spec party(bool steps_past_end = false) {
    static const memlane_field observations[] = {field(MEMLANE_INT32, {2})};
    static const memlane_field actions[] = {choices(0, absent)};
    static const memlane_field infos[] = {field(MEMLANE_INT32, {}, "tens")};
    memlane_spec spec{};
    spec.abi = MEMLANE_ENV_ABI;
    spec.spec_bytes = sizeof spec;
    spec.name = "Party";
    spec.observations = observations, spec.num_observations = 1;
    spec.actions = actions, spec.num_actions = 1;
    spec.infos = infos, spec.num_infos = 1;
    spec.num_agents = guests;
    spec.state_bytes = sizeof(std::int32_t);
    spec.steps_past_end = steps_past_end;
    spec.reset = party_reset, spec.step = party_step;
    return spec;
}

// "1:2 102 T- | ..." is: the first agent observes the second step, its reward, its flags. "*" marks agents in the game.
std::string party_seen(const Hosted &hosted, std::int32_t game = 0) {
    const HostBuffers &all = hosted.host.buffers();
    std::string words;
    for (std::int32_t row = game * guests; row < (game + 1) * guests; ++row) {
        const std::int32_t *observation = hosted.observations<std::int32_t>() + 2 * row;
        words += (row % guests == 0 ? "" : " | ") + std::to_string(observation[0]) + ":" + std::to_string(observation[1]) +
                 " " + std::to_string(static_cast<int>(all.rewards[row])) + " " +
                 (all.terminated[row] == 1   ? "T"
                  : all.terminated[row] == 0 ? "-"
                                             : "?") +
                 (all.truncated[row] == 1   ? "C"
                  : all.truncated[row] == 0 ? "-"
                                            : "?") +
                 (all.alive[row] == 1   ? "*"
                  : all.alive[row] == 0 ? ""
                                        : "?");
    }
    return words;
}

std::string party_after(Hosted &hosted, std::array<std::int64_t, guests> actions, std::int32_t ended = 0) {
    std::copy(actions.begin(), actions.end(), hosted.actions());
    CHECK_EQ(hosted.host.step(1), ended);
    CHECK_EQ(hosted.host.buffers().ended[0], ended);
    return party_seen(hosted);
}

// ----------------------------------------------------------------------------------------- Busy: takes a given time per step

std::int64_t busy_ns = 0, busy_ns_of_helpers = 0; // per environment
std::thread::id busy_caller;

void busy_reset(const memlane_envs *, std::int32_t, std::int32_t) {}

void busy_step(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    note(calls.steps, begin, end);
    const std::int64_t each = std::this_thread::get_id() == busy_caller ? busy_ns : busy_ns_of_helpers;
    if (each > 0)
        busy_wait(each * (end - begin));
    for (std::int32_t i = begin; i < end; ++i)
        envs->rewards[i] = 1;
}

memlane_spec busy() {
    static const memlane_field observations[] = {field(MEMLANE_FLOAT32)};
    static const memlane_field actions[] = {choices(0, 1)};
    busy_caller = std::this_thread::get_id();
    memlane_spec spec{};
    spec.abi = MEMLANE_ENV_ABI;
    spec.spec_bytes = sizeof spec;
    spec.name = "Busy";
    spec.observations = observations, spec.num_observations = 1;
    spec.actions = actions, spec.num_actions = 1;
    spec.reset = busy_reset, spec.step = busy_step;
    return spec;
}

int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// --------------------------------------------------------------------------------------------------- memlane's own

std::vector<const memlane_spec *> built_in() {
    std::vector<const memlane_spec *> specs;
#define ENV(file) specs.push_back(&memlane_env_##file);
#include "built_in_envs.inc"
#undef ENV
    return specs;
}

constexpr std::array<Autoreset, 3> all_modes = {Autoreset::next_step, Autoreset::same_step, Autoreset::disabled};

} // namespace

// --------------------------------------------------------------------------------------------------------- autoreset

TEST("host: with next-step autoreset an environment that ended is reset instead of its next step") {
    for (const bool past : {false, true}) {
        const memlane_spec spec = counter(past);
        Hosted one(spec, 1, Autoreset::next_step, 3);
        CHECK_EQ(seen(one), "1:0 0 -- 0");
        CHECK_EQ(infos_seen(one), "-1 1:0");
        CHECK_EQ(after(one, go_on), "1:1 101 -- 1");
        CHECK_EQ(infos_seen(one), "10 1:1");
        CHECK_EQ(after(one, go_on), "1:2 102 -- 2");
        CHECK_EQ(after(one, go_on, 1), "1:3 103 -C 3");
        CHECK_EQ(infos_seen(one), "30 1:3");
        CHECK_EQ(after(one, terminate), "2:0 0 -- 0"); // the action is ignored in a reset
        CHECK_EQ(infos_seen(one), "-2 2:0");
        CHECK_EQ(after(one, go_on), "2:1 201 -- 1");
        CHECK_EQ(after(one, terminate, 1), "2:2 202 T- 2");
        CHECK_EQ(after(one, go_on), "3:0 0 -- 0");
        CHECK_EQ(after(one, cut, 1), "3:1 301 -C 1");
        CHECK_EQ(after(one, go_on), "4:0 0 -- 0");
        CHECK_EQ(after(one, both, 1), "4:1 401 TC 1");
        CHECK_EQ(after(one, both), "5:0 0 -- 0");
        CHECK_EQ(last_seen(one), "0:0 0 0:0"); // no final observation is saved
    }
}

TEST("host: with same-step autoreset an environment that ended is reset in the same step and its final observation is "
     "saved") {
    for (const bool past : {false, true}) {
        const memlane_spec spec = counter(past);
        Hosted one(spec, 1, Autoreset::same_step, 3);
        CHECK_EQ(after(one, go_on), "1:1 101 -- 1");
        CHECK_EQ(last_seen(one), "0:0 0 0:0");
        CHECK_EQ(after(one, go_on), "1:2 102 -- 2");
        CHECK_EQ(after(one, go_on, 1), "2:0 103 -C 0");
        CHECK_EQ(last_seen(one), "1:3 30 1:3");
        CHECK_EQ(infos_seen(one), "-2 2:0");
        CHECK_EQ(after(one, go_on), "2:1 201 -- 1");
        CHECK_EQ(last_seen(one), "1:3 30 1:3"); // unchanged until the next end
        CHECK_EQ(after(one, terminate, 1), "3:0 202 T- 0");
        CHECK_EQ(last_seen(one), "2:2 20 2:2");
        CHECK_EQ(after(one, both, 1), "4:0 301 TC 0"); // two ends in a row
        CHECK_EQ(last_seen(one), "3:1 10 3:1");
    }
}

TEST("host: without autoreset only the caller starts a new episode") {
    const memlane_spec spec = counter();
    Hosted one(spec, 1, Autoreset::disabled, 2);
    CHECK_EQ(after(one, go_on), "1:1 101 -- 1");
    CHECK_EQ(after(one, go_on, 1), "1:2 102 -C 2");
    one.host.reset(nullptr);
    CHECK_EQ(seen(one), "2:0 0 -- 0");
    CHECK_EQ(one.host.buffers().ended[0], 0);
    CHECK_EQ(after(one, terminate, 1), "2:1 201 T- 1");
    CHECK_EQ(after(one, go_on, 1), "2:2 202 -C 2"); // without a reset the episode continues; the limit remains
    CHECK_EQ(after(one, go_on, 1), "2:3 203 -C 3");
    CHECK_EQ(last_seen(one), "0:0 0 0:0");
}

TEST("host: an episode that ends by itself at its limit is both terminated and truncated") {
    const memlane_spec spec = counter();
    for (const Autoreset mode : all_modes) {
        Hosted one(spec, 1, mode, 1);
        after(one, terminate, 1);
        CHECK_EQ(seen(one), mode == Autoreset::same_step ? "2:0 101 TC 0" : "1:1 101 TC 1");
    }
}

TEST("host: without a limit nothing is truncated") {
    const memlane_spec spec = counter();
    for (const std::int32_t limit : {0, -1}) {
        Hosted one(spec, 1, Autoreset::next_step, limit);
        for (int i = 0; i < 200; ++i)
            after(one, go_on);
        CHECK_EQ(seen(one), "1:200 300 -- 200");
    }
}

TEST("host: flags are 0 or 1 for any value that an environment writes") {
    const memlane_spec spec = counter();
    for (const std::int64_t value : {1, 2, 128, 254, 255}) {
        for (const Autoreset mode : {Autoreset::next_step, Autoreset::disabled}) {
            Hosted one(spec, 1, mode);
            CHECK_EQ(after(one, value, 1), "1:1 101 T- 1");
            one.host.reset(nullptr);
            CHECK_EQ(after(one, value * 256, 1), "2:1 201 -C 1");
            one.host.reset(nullptr);
            CHECK_EQ(after(one, value * 257, 1), "3:1 301 TC 1");
        }
        Hosted next(spec, 1, Autoreset::next_step), same(spec, 1, Autoreset::same_step);
        after(next, value, 1);
        CHECK_EQ(after(next, go_on), "2:0 0 -- 0");
        CHECK_EQ(after(same, value * 257, 1), "2:0 101 TC 0");
    }
    const memlane_spec several_agents = party();
    for (const std::int64_t value : {2, 255}) {
        Hosted game(several_agents, 1);
        CHECK_EQ(party_after(game, {value, value * 256, 0}), "1:1 101 T- | 2:1 201 -C | 3:1 301 --*");
    }
}

// -------------------------------------------------------------------------------------------------- against a plain model

namespace {

// The expected behaviour of a Counter, implemented a second time for one environment.
struct Model {
    std::int32_t episode = 1, count = 0, steps = 0;
    bool ended = false, terminated = false, truncated = false;
    double reward = 0;
    Count last{};

    void step(std::int64_t action, Autoreset mode, std::int32_t limit) {
        if (mode == Autoreset::next_step && ended) {
            *this = {episode + 1, 0, 0, false, false, false, 0, last};
            return;
        }
        count += 1, steps += 1;
        reward = 100 * episode + count;
        terminated = (action & 255) != 0;
        truncated = (action >> 8 & 255) != 0 || (limit > 0 && steps >= limit);
        ended = terminated || truncated;
        if (mode == Autoreset::same_step && ended) {
            last = {episode, count};
            episode += 1, count = 0, steps = 0;
        }
    }
};

void compare(const Hosted &hosted, const std::vector<Model> &models) {
    const HostBuffers &all = hosted.host.buffers();
    for (std::size_t i = 0; i < models.size(); ++i) {
        const Model &model = models[i];
        const Count now = hosted.observations<Count>()[i], last = hosted.last_observations<Count>()[i];
        CHECK(now.episode == model.episode && now.count == model.count);
        CHECK(last.episode == model.last.episode && last.count == model.last.count);
        CHECK(all.rewards[i] == model.reward);
        CHECK_EQ(all.terminated[i], model.terminated ? 1 : 0);
        CHECK_EQ(all.truncated[i], model.truncated ? 1 : 0);
        CHECK_EQ(all.ended[i], model.ended ? 1 : 0);
        CHECK_EQ(all.steps[i], model.steps);
    }
}

} // namespace

TEST("host: any mix of ends gives the results of a simple model, with steps past an end or without, on any number of "
     "threads") {
    Rng dice(1);
    for (const Autoreset mode : all_modes)
        for (const bool past : {false, true})
            for (const int threads : {1, 3})
                for (const std::int32_t envs : {1, 63, 64, 65, 200}) {
                    const memlane_spec spec = counter(past);
                    const std::int32_t limit = static_cast<std::int32_t>(dice.between(0, 6));
                    Hosted hosted(spec, envs, mode, limit);
                    std::vector<Model> models(static_cast<std::size_t>(envs));
                    for (int i = 0; i < 12; ++i) {
                        std::int32_t ended = 0;
                        for (std::size_t env = 0; env < models.size(); ++env) {
                            const std::int64_t kind = dice.between(0, 9);
                            hosted.actions()[env] = kind > 3    ? go_on
                                                    : kind == 3 ? both
                                                    : kind == 2 ? cut * 255
                                                                : terminate * 2;
                            models[env].step(hosted.actions()[env], mode, limit);
                            ended += models[env].ended;
                        }
                        CHECK_EQ(hosted.host.step(threads), ended);
                        compare(hosted, models);
                        if (mode == Autoreset::disabled && i % 4 == 3) { // some are reset, some continue
                            std::vector<std::uint8_t> mask(models.size());
                            for (std::size_t env = 0; env < models.size(); ++env)
                                if ((mask[env] = dice.between(0, 1) == 1))
                                    models[env] = {models[env].episode + 1, 0, 0, false, false, false, 0, {}};
                            hosted.host.reset(mask.data());
                            compare(hosted, models);
                        }
                    }
                }
}

// ------------------------------------------------------------------------------------------------------------- ranges

TEST("host: an environment that has ended is not stepped unless it allows that, and each other one is stepped once") {
    calls.kept = true;
    Rng dice(2);
    for (const int threads : {1, 2, 5})
        for (const std::int32_t envs : {1, 2, 64, 65, 333}) {
            const memlane_spec spec = counter();
            Hosted hosted(spec, envs);
            for (int i = 0; i < 30; ++i) {
                const std::vector<std::uint8_t> ended(hosted.host.buffers().ended, hosted.host.buffers().ended + envs);
                const int odds = i % 10; // from none to all
                for (std::int32_t env = 0; env < envs; ++env)
                    hosted.actions()[env] = dice.between(0, 8) < odds ? terminate : go_on;
                calls.clear();
                hosted.host.step(threads);
                std::vector<int> steps(ended.size()), resets(ended.size());
                for (const auto &[begin, end] : calls.steps)
                    for (std::int32_t env = begin; env < end; ++env)
                        ++steps[static_cast<std::size_t>(env)];
                for (const auto &[begin, end] : calls.resets)
                    for (std::int32_t env = begin; env < end; ++env)
                        ++resets[static_cast<std::size_t>(env)];
                for (std::size_t env = 0; env < ended.size(); ++env) {
                    CHECK_EQ(steps[env], ended[env] ? 0 : 1);
                    CHECK_EQ(resets[env], ended[env] ? 1 : 0);
                }
            }
        }
}

TEST("host: a range is not split when steps past an end are allowed") {
    calls.kept = true;
    const memlane_spec spec = counter(true);
    Hosted hosted(spec, 100);
    for (int env = 0; env < 100; env += 3)
        hosted.actions()[env] = terminate;
    for (int i = 0; i < 3; ++i) {
        calls.clear();
        hosted.host.step(1);
        CHECK_EQ(calls.steps.size(), 1u);
        CHECK(calls.steps[0] == std::pair(0, 100));
    }
}

TEST("host: a step of a range does not change the others") {
    const memlane_spec spec = counter();
    Hosted hosted(spec, 10, Autoreset::same_step, 1);
    CHECK_EQ(hosted.host.step_range(3, 7), 4);
    for (int env = 0; env < 10; ++env) {
        CHECK_EQ(seen(hosted, env), env >= 3 && env < 7 ? "2:0 101 -C 0" : "1:0 0 -- 0");
        CHECK_EQ(last_seen(hosted, env), env >= 3 && env < 7 ? "1:1 10 1:1" : "0:0 0 0:0");
    }
}

// -------------------------------------------------------------------------------------------------------------- reset

TEST("host: a reset starts new episodes where the mask is set, with one call per contiguous range") {
    calls.kept = true;
    using Runs = std::vector<std::pair<std::int32_t, std::int32_t>>;
    constexpr std::int32_t envs = 70;
    const auto mask_of = [](auto chosen) {
        std::vector<std::uint8_t> mask(envs);
        for (std::int32_t env = 0; env < envs; ++env)
            mask[static_cast<std::size_t>(env)] = chosen(env) ? 1 : 0;
        return mask;
    };
    Runs every_second;
    for (std::int32_t env = 1; env < envs; env += 2)
        every_second.emplace_back(env, env + 1);
    const std::vector<std::pair<std::vector<std::uint8_t>, Runs>> cases = {
        {mask_of([](int env) { return env == 0; }), {{0, 1}}},
        {mask_of([](int env) { return env == envs - 1; }), {{envs - 1, envs}}},
        {mask_of([](int env) { return env == 0 || env == envs - 1; }), {{0, 1}, {envs - 1, envs}}},
        {mask_of([](int env) { return env % 2 == 1; }), every_second},
        {mask_of([](int env) { return env >= 5 && env < 66 && env != 9; }), {{5, 9}, {10, 66}}},
        {mask_of([](int) { return true; }), {{0, envs}}},
        {mask_of([](int) { return false; }), {}},
    };
    for (const Autoreset mode : all_modes)
        for (const auto &[mask, runs] : cases) {
            const memlane_spec spec = counter();
            Hosted hosted(spec, envs, mode);
            std::fill_n(hosted.actions(), envs, both);
            hosted.host.step(1);
            const std::string before = seen(hosted);
            calls.clear();
            hosted.host.reset(mask.data());
            CHECK(calls.resets == runs);
            for (std::int32_t env = 0; env < envs; ++env) {
                const bool reset = mask[static_cast<std::size_t>(env)];
                const std::string restarted = mode == Autoreset::same_step ? "3:0 0 -- 0" : "2:0 0 -- 0";
                CHECK_EQ(seen(hosted, env), reset ? restarted : before);
                CHECK_EQ(hosted.host.buffers().ended[env], reset ? 0 : 1);
            }
        }
}

TEST("host: any value but 0 in a mask means yes") {
    const memlane_spec spec = counter();
    Hosted hosted(spec, 3);
    const std::uint8_t mask[] = {255, 0, 2};
    hosted.host.reset(mask);
    CHECK_EQ(seen(hosted, 0), "2:0 0 -- 0");
    CHECK_EQ(seen(hosted, 1), "1:0 0 -- 0");
    CHECK_EQ(seen(hosted, 2), "2:0 0 -- 0");
}

TEST("host: an environment that the caller resets after its end is stepped, not reset once more") {
    const memlane_spec spec = counter();
    Hosted one(spec, 1);
    after(one, terminate, 1);
    one.host.reset(nullptr);
    CHECK_EQ(after(one, go_on), "2:1 201 -- 1");
}

// ------------------------------------------------------------------------------------------------------ several agents

TEST("host: an agent that has ended leaves the game, and has zeros as observation and reward from then on") {
    for (const bool past : {false, true}) {
        const memlane_spec spec = party(past);
        Hosted game(spec, 1);
        CHECK_EQ(party_seen(game), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
        CHECK_EQ(party_after(game, {go_on, terminate, go_on}), "1:1 101 --* | 2:1 201 T- | 3:1 301 --*");
        CHECK_EQ(party_after(game, {go_on, both, go_on}), "1:2 102 --* | 0:0 0 -- | 3:2 302 --*");
        CHECK_EQ(party_after(game, {cut, go_on, go_on}), "1:3 103 -C | 0:0 0 -- | 3:3 303 --*");
        CHECK_EQ(party_after(game, {go_on, go_on, both}, 1), "0:0 0 -- | 0:0 0 -- | 3:4 304 TC");
        CHECK_EQ(game.host.buffers().steps[0], 4);
        CHECK_EQ(party_after(game, {both, both, both}), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
        CHECK_EQ(game.host.buffers().steps[0], 0);
        CHECK_EQ(party_after(game, {go_on, go_on, go_on}), "1:1 101 --* | 2:1 201 --* | 3:1 301 --*");
    }
}

TEST("host: at the limit a game is truncated for all agents still in it") {
    const memlane_spec spec = party();
    Hosted game(spec, 1, Autoreset::next_step, 2);
    CHECK_EQ(party_after(game, {go_on, terminate, go_on}), "1:1 101 --* | 2:1 201 T- | 3:1 301 --*");
    // The third agent terminates in that step, so it is not truncated as well.
    CHECK_EQ(party_after(game, {go_on, go_on, terminate}, 1), "1:2 102 -C | 0:0 0 -- | 3:2 302 T-");
    CHECK_EQ(party_after(game, {go_on, go_on, go_on}), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
}

TEST("host: with same-step autoreset a game that is over is reset and its final observations are saved") {
    const memlane_spec spec = party();
    Hosted game(spec, 1, Autoreset::same_step);
    CHECK_EQ(party_after(game, {terminate, go_on, go_on}), "1:1 101 T- | 2:1 201 --* | 3:1 301 --*");
    CHECK_EQ(party_after(game, {go_on, terminate, cut}, 1), "1:0 0 --* | 2:0 202 T-* | 3:0 302 -C*");
    const std::int32_t *last = game.last_observations<std::int32_t>();
    CHECK((std::vector<std::int32_t>(last, last + 6) == std::vector<std::int32_t>{0, 0, 2, 2, 3, 2}));
    CHECK_EQ(game.last_infos<std::int32_t>()[1], 21);
    CHECK_EQ(game.infos<std::int32_t>()[1], 1);
    CHECK_EQ(game.host.buffers().steps[0], 0);
}

TEST("host: without autoreset a game that is over is unchanged until the caller resets it") {
    const memlane_spec spec = party();
    Hosted game(spec, 1, Autoreset::disabled);
    CHECK_EQ(party_after(game, {terminate, terminate, cut}, 1), "1:1 101 T- | 2:1 201 T- | 3:1 301 -C");
    CHECK_EQ(party_after(game, {go_on, go_on, go_on}, 1), "0:0 0 -- | 0:0 0 -- | 0:0 0 --");
    game.host.reset(nullptr);
    CHECK_EQ(party_seen(game), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
}

TEST("host: an agent that reset excludes is out for that game") {
    const memlane_spec spec = party();
    Hosted game(spec, 1);
    game.actions()[0] = absent;
    game.host.reset(nullptr);
    CHECK_EQ(game.host.buffers().alive[0], 0);
    CHECK_EQ(party_after(game, {go_on, go_on, terminate}), "0:0 0 -- | 2:1 201 --* | 3:1 301 T-");
    CHECK_EQ(party_after(game, {go_on, terminate, go_on}, 1), "0:0 0 -- | 2:2 202 T- | 0:0 0 --");
    CHECK_EQ(party_after(game, {go_on, go_on, go_on}), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
}

TEST("host: games end and are reset independently") {
    calls.kept = true;
    const memlane_spec spec = party();
    Hosted games(spec, 3, Autoreset::next_step, 5);
    std::fill_n(games.actions() + guests, guests, terminate);
    CHECK_EQ(games.host.step(1), 1);
    std::fill_n(games.actions(), 3 * guests, go_on);
    calls.clear();
    CHECK_EQ(games.host.step(1), 0);
    CHECK((calls.steps == std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 1}, {2, 3}}));
    CHECK_EQ(party_seen(games, 0), "1:2 102 --* | 2:2 202 --* | 3:2 302 --*");
    CHECK_EQ(party_seen(games, 1), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
    CHECK_EQ(games.host.buffers().steps[1], 0);
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(games.host.step(1), i == 2 ? 2 : 0);
    CHECK_EQ(party_seen(games, 2), "1:5 105 -C | 2:5 205 -C | 3:5 305 -C");
    CHECK_EQ(games.host.step(1), 0);
    CHECK_EQ(party_seen(games, 0), "1:0 0 --* | 2:0 0 --* | 3:0 0 --*");
    CHECK_EQ(games.host.step(1), 1); // the second started one step after the others
}

// ------------------------------------------------------------------------------------------------------------- actions

TEST("host: one step may read its actions from another array") {
    for (const int threads : {0, 1, 3}) {
        const memlane_spec spec = counter();
        Hosted hosted(spec, 200);
        void *const own = hosted.host.buffers().actions[0];
        const std::vector<std::int64_t> foreign(200, terminate);
        CHECK_EQ(hosted.host.step(threads, foreign.data()), 200);
        CHECK(hosted.host.buffers().actions[0] == own);
        CHECK_EQ(hosted.actions()[0], 0);
        CHECK_EQ(hosted.host.step(threads), 0); // all are reset
        CHECK_EQ(hosted.host.step(threads), 0); // with the actions in the buffers, which end nothing
    }
}

TEST("host: values are within bounds when none is below or above them") {
    const memlane_field one = choices(-2, 3);
    const std::vector<std::int64_t> good = {-2, -1, 0, 1, 2, 3};
    CHECK(within_bounds(one, good.data(), good.size()));
    CHECK(within_bounds(one, nullptr, 0));
    for (const std::int64_t wrong : {std::int64_t{-3}, std::int64_t{4}, INT64_MIN, INT64_MAX, std::int64_t{1} << 32})
        for (std::size_t at = 0; at < good.size(); ++at) {
            std::vector<std::int64_t> numbers = good;
            numbers[at] = wrong;
            CHECK(!within_bounds(one, numbers.data(), numbers.size()));
            CHECK(within_bounds(one, numbers.data(), at)); // no more rows than requested are read
        }
}

TEST("host: each element of a row may have its own bounds") {
    const double lows[] = {0, -1, 5}, highs[] = {1, 1, 5};
    memlane_field row = choices(0, 9, {3});
    row.lows = lows, row.highs = highs;
    const std::vector<std::int64_t> good = {0, -1, 5, 1, 1, 5};
    CHECK(within_bounds(row, good.data(), 2));
    for (std::size_t at = 0; at < good.size(); ++at)
        for (const std::int64_t wrong : {std::int64_t{-2}, std::int64_t{6}, INT64_MIN, INT64_MAX}) {
            std::vector<std::int64_t> numbers = good;
            numbers[at] = wrong;
            CHECK(!within_bounds(row, numbers.data(), 2));
        }
    const std::int64_t edges[] = {2, 1, 5, 0, -1, 4};
    CHECK(!within_bounds(row, edges, 1));
    CHECK(!within_bounds(row, edges + 3, 1));
    // A common lower bound together with an upper bound per element.
    memlane_field mixed = choices(0, 9, {3});
    mixed.highs = highs;
    CHECK(within_bounds(mixed, std::array<std::int64_t, 3>{1, 0, 0}.data(), 1));
    CHECK(!within_bounds(mixed, std::array<std::int64_t, 3>{1, -1, 5}.data(), 1));
    CHECK(!within_bounds(mixed, std::array<std::int64_t, 3>{2, 0, 5}.data(), 1));
    mixed.lows = lows, mixed.highs = nullptr;
    CHECK(within_bounds(mixed, std::array<std::int64_t, 3>{9, 9, 9}.data(), 1));
    CHECK(!within_bounds(mixed, std::array<std::int64_t, 3>{9, 9, 4}.data(), 1));
}

TEST("host: each dtype has its size, and a row that of its elements") {
    const std::size_t bytes[] = {4, 8, 1, 1, 1, 2, 2, 4, 4, 8, 8}; // in the order of enum memlane_dtype
    for (std::int32_t dtype = MEMLANE_FLOAT32; dtype <= MEMLANE_UINT64; ++dtype)
        CHECK_EQ(item_bytes(dtype), bytes[dtype - 1]);
    for (const std::int32_t none : {0, -1, 12, 1 << 20})
        CHECK_EQ(item_bytes(none), 0u);
    CHECK_EQ(row_bytes(field(MEMLANE_INT16)), 2u);
    CHECK_EQ(row_bytes(field(MEMLANE_FLOAT32, {6})), 24u);
    CHECK_EQ(row_bytes(field(MEMLANE_UINT8, {84, 84})), 7056u);
    CHECK_EQ(row_bytes(field(MEMLANE_FLOAT64, {2, 3, 5, 7})), 1680u);
    CHECK_EQ(row_bytes(field(MEMLANE_UINT8, {1 << 16, 1 << 16})), std::size_t{1} << 32);
}

// ------------------------------------------------------------------------------------------------------------- threads

TEST("host: results are the same bit by bit on any number of threads, in memory that begins or ends at a guard page") {
    for (const memlane_spec *spec : built_in())
        for (const Autoreset mode : {Autoreset::next_step, Autoreset::same_step})
            for (const std::int32_t envs : {1, 63, 64, 65, 333}) {
                const bool large = row_bytes(spec->observations[0]) > 1000;
                if (large && check::slowdown > 1 && envs > 65)
                    continue; // images, which take long to draw under sanitizers
                std::vector<std::unique_ptr<Hosted>> all;
                for (const int threads : {1, 2, 3, 5})
                    all.push_back(
                        std::make_unique<Hosted>(*spec, envs, mode, 5, threads == 3 ? Fence::in_front : Fence::behind));
                for (int i = 0; i < (large ? 6 : 13); ++i) {
                    std::vector<std::int32_t> ended;
                    int next = 0;
                    for (const int threads : {1, 2, 3, 5}) {
                        Hosted &hosted = *all[static_cast<std::size_t>(next++)];
                        Rng dice(static_cast<std::uint64_t>(i));
                        choose_actions(hosted, dice);
                        ended.push_back(hosted.host.step(threads));
                    }
                    for (std::size_t other = 1; other < all.size(); ++other) {
                        CHECK_EQ(ended[other], ended[0]);
                        CHECK(all[other]->same_as(*all[0]));
                    }
                }
            }
}

TEST("host: how environments are split into ranges does not change a bit of the results") {
    for (const memlane_spec *spec : built_in()) {
        constexpr std::int32_t envs = 37;
        Hosted whole(*spec, envs, Autoreset::next_step, 40), cut_up(*spec, envs, Autoreset::next_step, 40);
        Rng cuts(3);
        for (int i = 0; i < check::times(240); ++i) {
            Rng dice(static_cast<std::uint64_t>(i)), same(static_cast<std::uint64_t>(i));
            choose_actions(whole, dice);
            choose_actions(cut_up, same);
            const std::int32_t ended = whole.host.step(1);
            std::int32_t sum = 0;
            for (std::int32_t begin = 0; begin < envs;) {
                const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(envs, begin + cuts.between(1, 9)));
                sum += cut_up.host.step_range(begin, end);
                begin = end;
            }
            CHECK_EQ(sum, ended);
            if (!whole.same_as(cut_up)) {
                check::fail(__FILE__, __LINE__, std::string(spec->name) + " differs at step " + std::to_string(i));
                break;
            }
        }
    }
}

TEST("host: the built-in environments give the same results with steps past an end and without") {
    for (const memlane_spec *spec : built_in()) {
        memlane_spec never = *spec, always = *spec;
        never.steps_past_end = 0, always.steps_past_end = 1;
        Hosted one(never, 70, Autoreset::next_step, 7), other(always, 70, Autoreset::next_step, 7);
        for (int i = 0; i < 30; ++i) {
            Rng dice(static_cast<std::uint64_t>(i)), same(static_cast<std::uint64_t>(i));
            choose_actions(one, dice);
            choose_actions(other, same);
            CHECK_EQ(one.host.step(1), other.host.step(1));
            if (!one.same_as(other)) {
                check::fail(__FILE__, __LINE__, std::string(spec->name) + " differs at step " + std::to_string(i));
                break;
            }
        }
    }
}

TEST("host: the built-in environments draw inside their image") {
    for (const memlane_spec *spec : built_in()) {
        if (spec->render == nullptr)
            continue;
        const std::size_t bytes =
            3 * static_cast<std::size_t>(spec->render_width) * static_cast<std::size_t>(spec->render_height);
        for (const Fence fence : {Fence::behind, Fence::in_front}) {
            const Fenced picture(bytes, fence);
            Hosted hosted(*spec, 2, Autoreset::next_step, 0, fence);
            Rng dice(4);
            for (int i = 0; i < 3; ++i) {
                hosted.host.render(1, picture.as<std::uint8_t>());
                for (int j = 0; j < 25; ++j) {
                    choose_actions(hosted, dice);
                    hosted.host.step(1);
                }
            }
            const std::uint8_t *pixels = picture.as<std::uint8_t>();
            CHECK(!std::all_of(pixels, pixels + bytes, [&](std::uint8_t pixel) { return pixel == pixels[0]; }));
        }
    }
}

TEST("host: a step uses the requested number of threads, at most one per block of environments") {
    calls.kept = true;
    const memlane_spec spec = counter();
    for (const std::int32_t envs : {1, 64, 65, 333})
        for (const int threads : {1, 2, 3, 5, 9}) {
            Hosted hosted(spec, envs);
            calls.clear();
            hosted.host.step(threads);
            CHECK_EQ(calls.threads.size(), static_cast<std::size_t>(std::min(threads, (envs + 63) / 64)));
            for (const auto &[begin, end] : calls.steps) {
                CHECK_EQ(begin % 64, 0);
                CHECK(end % 64 == 0 || end == envs);
            }
        }
}

TEST("host: a short step stays on one thread") {
    if (check::slowdown > 1)
        return; // not short under a sanitizer
    const memlane_spec spec = busy();
    bool alone = false;
    for (int tries = 0; tries < 10 && !alone; ++tries) { // it takes longer while another process uses the core
        Hosted hosted(spec, 256);
        CHECK_EQ(hosted.host.auto_threads(), 1); // nothing has been measured yet
        CHECK(hosted.host.step_ns() == 0);
        calls.kept = false;
        for (int i = 0; i < 100; ++i)
            hosted.host.step(0); // the first steps touch memory for the first time
        CHECK(hosted.host.step_ns() > 0);
        calls.kept = true;
        calls.clear();
        for (int i = 0; i < 100; ++i)
            hosted.host.step(0);
        alone = hosted.host.auto_threads() == 1 && calls.threads.size() == 1;
    }
    CHECK(alone);
}

TEST("host: a long step uses as many threads as there are cores and blocks") {
    const memlane_spec spec = busy();
    busy_ns = busy_ns_of_helpers = 2'000;
    for (const std::int32_t envs : {127, 128, 256}) {
        Hosted hosted(spec, envs);
        hosted.host.step(0);
        CHECK(hosted.host.step_ns() >= static_cast<double>(busy_ns * envs));
        const int threads = std::min(envs / 64, cores());
        CHECK_EQ(hosted.host.auto_threads(), threads);
        calls.kept = true;
        calls.clear();
        hosted.host.step(0);
        CHECK_EQ(calls.threads.size(), static_cast<std::size_t>(threads));
        calls.kept = false;
    }
}

TEST("host: a process that may use one core steps on one thread") {
    const int here = sched_getcpu();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(here), &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    const memlane_spec spec = busy();
    busy_ns = busy_ns_of_helpers = 2'000;
    Hosted hosted(spec, 256);
    calls.kept = true;
    for (int i = 0; i < 5; ++i)
        hosted.host.step(0);
    CHECK_EQ(hosted.host.auto_threads(), 1);
    CHECK_EQ(calls.threads.size(), 1u);
}

TEST("host: after a trial in which threads are slower a backoff follows, and a longer one after each further trial") {
    if (cores() < 2)
        return;
    const memlane_spec spec = busy();
    busy_ns = 60, busy_ns_of_helpers = 3'000;
    Hosted hosted(spec, 128);
    hosted.host.step(0);
    CHECK_EQ(hosted.host.auto_threads(), 2);
    for (const int rest : {1'000, 2'000}) {
        int shared = 0;
        calls.kept = false;
        for (; hosted.host.auto_threads() > 1 && shared < 1'000; ++shared)
            hosted.host.step(0);
        CHECK(shared > 16 && shared < 1'000); // a trial is at least that long
        calls.kept = true;
        calls.clear();
        int alone = 0;
        for (; hosted.host.auto_threads() == 1 && alone < 5'000; ++alone)
            hosted.host.step(0);
        CHECK_EQ(alone, rest);
        CHECK_EQ(calls.threads.size(), 1u);
    }
}

#ifdef COUNTS_ALLOCATIONS

TEST("host: a step allocates no memory, on any number of threads, with ends and without") {
    std::vector<memlane_spec> specs = {counter(), counter(true), party(), busy()};
    for (const memlane_spec *spec : built_in())
        specs.push_back(*spec);
    for (const memlane_spec &spec : specs)
        for (const Autoreset mode : {Autoreset::next_step, Autoreset::same_step}) {
            Hosted hosted(spec, 130, mode, 3);
            std::vector<std::int64_t> foreign(130 * static_cast<std::size_t>(std::max(spec.num_agents, 1)));
            for (const int threads : {0, 1, 2}) {
                hosted.host.step(threads); // the first step starts the threads
                hosted.host.step(2);
                const std::int64_t before = allocations;
                for (int i = 0; i < 12; ++i) {
                    hosted.host.step(threads);
                    if (spec.actions[0].dtype == MEMLANE_INT64)
                        hosted.host.step(threads, foreign.data());
                }
                hosted.host.reset(nullptr);
                CHECK_EQ(allocations - before, 0);
            }
        }
    const std::int64_t before = allocations;
    delete new int; // allocations are counted
    CHECK(allocations > before);
}

#endif

// ThreadSanitizer cannot follow threads that start after a fork() of a process with threads.
#if !defined(__SANITIZE_THREAD__)

TEST("host: a forked child steps with threads of its own, and so does its parent") {
    const memlane_spec spec = counter();
    Hosted hosted(spec, 333, Autoreset::next_step, 4), expected(spec, 333, Autoreset::next_step, 4);
    for (int i = 0; i < 6; ++i) {
        hosted.host.step(3);
        expected.host.step(1);
    }
    const auto go = [&](Hosted &it, int threads) {
        for (int i = 0; i < 7; ++i)
            it.host.step(threads);
    };
    Child child([&] {
        go(hosted, 3);
        go(expected, 1);
        CHECK(hosted.same_as(expected));
        calls.kept = true;
        hosted.host.step(5);
        CHECK_EQ(calls.threads.size(), 5u);
    });
    CHECK_EQ(child.join(), 0);
    CHECK(hosted.same_as(expected)); // the steps of the child do not affect the parent
    go(hosted, 3);
    go(expected, 1);
    CHECK(hosted.same_as(expected));
}

#endif

// ----------------------------------------------------------------------------------------------- init, settings, close

namespace {

int closed = 0;

const char *init_asks(const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
    CHECK(begin == 0 && end == envs->num_envs);
    for (std::int32_t i = begin; i < end; ++i)
        CHECK(static_cast<const Count *>(envs->state)[i].episode == 0); // all zeros
    return envs->settings[1] > 1 ? "too much" : nullptr;
}

} // namespace

TEST("host: init may return an error message, and close is called for all environments") {
    static const memlane_setting settings[] = {{"little", 0.5, 0, 1}, {"much", 1, 0, 2}};
    memlane_spec spec = counter();
    spec.settings = settings, spec.num_settings = 2;
    spec.init = init_asks;
    spec.close = [](const memlane_envs *envs, std::int32_t begin, std::int32_t end) {
        closed += end - begin;
        CHECK(envs->settings[0] == 0.5);
    };
    Hosted good(spec, 3); // checks that init returns no error
    good.host.close();
    CHECK_EQ(closed, 3);
    HostBuffers fresh = good.host.buffers();
    std::fill_n(reinterpret_cast<Count *>(fresh.state), 3, Count{});
    Host loud(spec, 3, Autoreset::next_step, 0, fresh, {0.5, 2});
    CHECK_EQ(std::string(loud.init()), "too much");
    const memlane_spec quiet = counter();
    Hosted nothing(quiet, 1);
    nothing.host.close(); // has no close function
}

// ------------------------------------------------------------------------------------------------------ random numbers

TEST("random numbers are those of SplitMix64, and within their bounds") {
    std::uint64_t word = 1234567; // expected: the output of the authors' program for this seed
    CHECK_EQ(memlane_random(&word), std::uint64_t{6457827717110365317u});
    CHECK_EQ(memlane_random(&word), std::uint64_t{3203168211198807973u});
    CHECK_EQ(memlane_random(&word), std::uint64_t{9817491932198370423u});
    std::array<int, 7> drawn{};
    double lowest = 1, highest = -1;
    for (int i = 0; i < 20'000; ++i) {
        const std::int32_t choice = memlane_choice(&word, 7);
        CHECK(choice >= 0 && choice < 7);
        ++drawn[static_cast<std::size_t>(std::clamp(choice, 0, 6))];
        const double number = memlane_uniform(&word, -0.05, 0.05);
        CHECK(number >= -0.05 && number < 0.05);
        lowest = std::min(lowest, number), highest = std::max(highest, number);
    }
    CHECK(lowest < -0.0499 && highest > 0.0499);
    for (const int times : drawn)
        CHECK(times > 2'500 && times < 3'200); // 2857 on average, with a deviation of 50
    CHECK_EQ(memlane_choice(&word, 1), 0);
}

// ------------------------------------------------------------------------------------------------------ sine and cosine

namespace {

constexpr long double quarter = 1.570796326794896619231321691639751442L;

// The larger of the two errors, compared with the C library in higher precision.
double error_at(double x) {
    double sine, cosine;
    memlane_sincos(x, &sine, &cosine);
    const long double sine_error = static_cast<long double>(sine) - sinl(static_cast<long double>(x));
    const long double cosine_error = static_cast<long double>(cosine) - cosl(static_cast<long double>(x));
    return static_cast<double>(std::max(std::fabs(sine_error), std::fabs(cosine_error)));
}

} // namespace

TEST("sincos: errors are below 1e-15 for angles up to a million, of either sign") {
    Rng dice(5);
    std::uniform_real_distribution<double> sizes(-12, 6);
    double worst = 0;
    for (int i = 0; i < check::times(400'000); ++i) {
        const double x = i % 2 == 0 ? std::pow(10.0, sizes(dice.engine()))
                                    : std::uniform_real_distribution<double>(0, 1e6)(dice.engine());
        worst = std::max({worst, error_at(x), error_at(-x)});
    }
    for (const double x : {0.0, 0x1p-1074, 0x1p-1022, 1e-300, 1e-8, 1.0, 1e6})
        worst = std::max({worst, error_at(x), error_at(-x)});
    CHECK(worst < 1e-15);
}

TEST("sincos: errors are below 1e-15 at, just before and just after every kind of quadrant and octant") {
    Rng dice(6);
    double worst = 0;
    for (int i = 0; i < check::times(40'000); ++i) {
        const std::int64_t n = i < 200 ? i : dice.between(0, 1'270'000); // in halves of a quarter turn: up to a million
        const auto edge = static_cast<double>(quarter / 2 * static_cast<long double>(n));
        for (const double x : {edge, std::nextafter(edge, 1e9), std::nextafter(edge, -1e9), edge + 1e-9, edge - 1e-9})
            worst = std::max({worst, error_at(x), error_at(-x)});
    }
    CHECK(worst < 1e-15);
}

TEST("sincos: signs are right in each quadrant") {
    for (int turn = -3; turn <= 3; ++turn)
        for (int which = 0; which < 4; ++which) {
            double sine, cosine;
            memlane_sincos(static_cast<double>(quarter * (4 * turn + which + 0.5L)), &sine, &cosine);
            const double half = std::sqrt(0.5);
            CHECK(std::fabs(sine - (which < 2 ? half : -half)) < 1e-14);
            CHECK(std::fabs(cosine - (which == 0 || which == 3 ? half : -half)) < 1e-14);
        }
}

TEST("sincos: the sine is odd, the cosine even, and both are exact at 0") {
    Rng dice(7);
    std::uniform_real_distribution<double> angles(-1e6, 1e6);
    for (int i = 0; i < check::times(100'000); ++i) {
        const double x = angles(dice.engine());
        double sine, cosine, other_sine, other_cosine;
        memlane_sincos(x, &sine, &cosine);
        memlane_sincos(-x, &other_sine, &other_cosine);
        CHECK(sine == -other_sine && cosine == other_cosine);
        CHECK(std::fabs(sine * sine + cosine * cosine - 1) < 4e-15);
    }
    double sine, cosine;
    memlane_sincos(0, &sine, &cosine);
    CHECK(sine == 0 && cosine == 1);
}
