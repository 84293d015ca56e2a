// The list of scenarios. A scenario has a sentence as its name, bounds, and a body (see model/explorer.hpp).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "model/explorer.hpp"

namespace scenarios {

struct Scenario {
    const char *sentence;
    memlane::model::Bounds quick, deep; // of the exhaustive search: in every test run, and on demand
    void (*body)();
};
std::vector<Scenario> &all();

// A litmus test checks the checker: exactly these results are possible.
struct Litmus {
    const char *sentence;
    std::set<std::string> possible;
    void (*body)();
};
std::vector<Litmus> &litmus_tests();

struct Registered {
    Registered(const char *sentence, memlane::model::Bounds quick, memlane::model::Bounds deep, void (*body)()) {
        all().push_back({sentence, quick, deep, body});
    }
    Registered(const char *sentence, std::set<std::string> possible, void (*body)()) {
        litmus_tests().push_back({sentence, std::move(possible), body});
    }
};

} // namespace scenarios

#define SCENARIO_JOIN_(a, b) a##b
#define SCENARIO_NAME_(a, b) SCENARIO_JOIN_(a, b)
#define SCENARIO_BODY_ SCENARIO_NAME_(body_at_line_, __LINE__)
#define BOUNDS(preemptions, stale, deaths) (memlane::model::Bounds{preemptions, stale, deaths})
#define RESULTS(...) (std::set<std::string>{__VA_ARGS__})

// SCENARIO(sentence, BOUNDS(quick), BOUNDS(deep)) { body }, LITMUS(sentence, RESULTS(...)) { body }
#define SCENARIO(sentence, ...)                                                                                             \
    static void SCENARIO_BODY_();                                                                                           \
    static const scenarios::Registered SCENARIO_NAME_(registered_at_line_, __LINE__){sentence, __VA_ARGS__,                 \
                                                                                     SCENARIO_BODY_};                       \
    static void SCENARIO_BODY_()
#define LITMUS SCENARIO
