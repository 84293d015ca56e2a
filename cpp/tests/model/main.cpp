// Runs the litmus tests, the scenarios, and each scenario's mutants: see docs/verification.md.
//
//   model_tests                     litmus tests, scenarios within the quick bounds, a mutant for every PAIR
//   model_tests --deep [SECONDS]    the same within the deep bounds, for 600 s or SECONDS per scenario, and more random
//                                   executions; also the mutants that are listed as harmless
//   model_tests WORDS               only scenarios and litmus tests whose sentence contains WORDS; no mutants
//   model_tests --replay SENTENCE PREEMPTIONS,STALE,DEATHS CHOICES
//                                   repeats one execution, with its trace
//   model_tests --traces            prints the trace of each mutant's failure, too

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include <poll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "scenario.hpp"

using namespace memlane::model;
using scenarios::Litmus;
using scenarios::Scenario;

namespace scenarios {

std::vector<Scenario> &all() {
    static std::vector<Scenario> list;
    return list;
}
std::vector<Litmus> &litmus_tests() {
    static std::vector<Litmus> list;
    return list;
}

} // namespace scenarios

namespace {

bool deep = false;
std::int64_t deep_seconds = 600; // for one scenario
bool traces = false;

double seconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

// ------------------------------------------------------------------------------------------------------ choices as text

// "0*12 1 0 2": the options in order, repetitions with their number.
std::string to_text(const std::vector<int> &choices) {
    std::ostringstream text;
    for (std::size_t i = 0; i < choices.size();) {
        std::size_t end = i;
        while (end < choices.size() && choices[end] == choices[i])
            ++end;
        text << (i > 0 ? " " : "") << choices[i];
        if (end - i > 1)
            text << '*' << end - i;
        i = end;
    }
    return text.str();
}

std::vector<int> from_text(const std::string &text) {
    std::vector<int> choices;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        int option = 0, times = 1;
        if (std::sscanf(word.c_str(), "%d*%d", &option, &times) < 1)
            throw std::invalid_argument("expected choices such as '0*12 1 0 2', found '" + word + "'");
        choices.insert(choices.end(), static_cast<std::size_t>(times), option);
    }
    return choices;
}

std::string to_text(const Bounds &bounds) {
    return std::to_string(bounds.preemptions) + "," + std::to_string(bounds.stale) + "," + std::to_string(bounds.deaths);
}

// The failure of a scenario with its trace, and how to repeat it.
std::string describe(const Scenario &scenario, Search search, const Outcome &failed) {
    search.random = false;
    search.trace = true;
    search.replay = failed.choices;
    search.max_executions = 1;
    const Outcome again = explore(scenario.body, search);
    std::ostringstream text;
    text << "    " << failed.failure << "\n" << again.trace;
    if (again.failure != failed.failure)
        text << "    the repetition ended differently: " << (again.failure.empty() ? "no failure" : again.failure) << "\n";
    if (search.mutants.empty())
        text << "    repeat: model_tests --replay '" << scenario.sentence << "' " << to_text(search.bounds) << " '"
             << to_text(failed.choices) << "'\n";
    return text.str();
}

// ------------------------------------------------------------------------------------------------------------ processes

struct Job {
    std::function<std::string()> work; // in a child process; what it returns begins with "ok " or "FAIL "
    pid_t pid = -1;
    int pipe = -1;
    std::string result = {};
};

// Runs the jobs, as many at a time as there are cores. Their results are printed in their order.
int run(std::vector<Job> jobs) {
    const auto cores = static_cast<std::size_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
    int failed = 0;
    std::size_t begun = 0, printed = 0;
    std::vector<Job *> running;
    while (printed < jobs.size()) {
        while (begun < jobs.size() && running.size() < cores) {
            Job &job = jobs[begun++];
            int ends[2];
            if (pipe(ends) != 0)
                throw std::runtime_error("pipe failed");
            std::fflush(nullptr);
            job.pid = fork();
            if (job.pid < 0)
                throw std::runtime_error("fork failed");
            if (job.pid == 0) {
                close(ends[0]);
                const std::string result = job.work();
                for (std::size_t at = 0; at < result.size();) {
                    const ssize_t written = write(ends[1], result.data() + at, result.size() - at);
                    if (written <= 0)
                        _exit(2);
                    at += static_cast<std::size_t>(written);
                }
                _exit(0);
            }
            close(ends[1]);
            job.pipe = ends[0];
            running.push_back(&job);
        }
        std::vector<pollfd> polls;
        for (const Job *job : running)
            polls.push_back({job->pipe, POLLIN, 0});
        if (::poll(polls.data(), polls.size(), -1) < 0)
            continue;
        for (std::size_t i = polls.size(); i-- > 0;) {
            if (polls[i].revents == 0)
                continue;
            Job &job = *running[i];
            char buffer[4096];
            const ssize_t bytes = read(job.pipe, buffer, sizeof buffer);
            if (bytes > 0) {
                job.result.append(buffer, static_cast<std::size_t>(bytes));
                continue;
            }
            close(job.pipe);
            int status = 0;
            waitpid(job.pid, &status, 0);
            if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                job.result = "FAIL the process of this job ended with status " + std::to_string(status) + "\n" + job.result;
            job.pid = 0;
            running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
        }
        for (; printed < jobs.size() && jobs[printed].pid == 0; ++printed) {
            failed += !jobs[printed].result.starts_with("ok ");
            std::fputs(jobs[printed].result.c_str(), stdout);
            std::fflush(stdout);
        }
    }
    return failed;
}

// --------------------------------------------------------------------------------------------------------- litmus tests

std::string run_litmus(const Litmus &litmus) {
    const Outcome outcome = explore(litmus.body, {.bounds = {30, 30, 1}, .max_executions = 10'000'000});
    const auto listed = [](const std::set<std::string> &results) {
        std::string text;
        for (const std::string &result : results)
            text += " " + result;
        return text.empty() ? " none" : text;
    };
    std::string fault;
    if (!outcome.failure.empty())
        fault = outcome.failure;
    else if (!outcome.complete)
        fault = "not all executions were explored";
    else if (outcome.observed != litmus.possible)
        fault = "expected the results" + listed(litmus.possible) + ", found" + listed(outcome.observed);
    return (fault.empty() ? "ok   litmus: " : "FAIL litmus: ") + std::string(litmus.sentence) + " (" +
           std::to_string(outcome.executions) + " executions)" + (fault.empty() ? "" : ": " + fault) + "\n";
}

// ------------------------------------------------------------------------------------------------------------ scenarios

// A random search may leave a thread more often and read older stores than an exhaustive one.
constexpr Bounds random_bounds{24, 12, 1};
// For one scenario. The quick bounds take seconds; a machine with many other tasks may need minutes.
constexpr std::int64_t quick_seconds = 1'800;

Bounds random_for(const Scenario &scenario) {
    Bounds bounds = random_bounds;
    bounds.deaths = scenario.quick.deaths;
    return bounds;
}

std::string run_scenario(const Scenario &scenario) {
    const double begin = seconds();
    const Bounds bounds = deep ? scenario.deep : scenario.quick;
    const Search exhaustive{.bounds = bounds,
                            .max_executions = 1'000'000'000'000,
                            .max_seconds = deep ? deep_seconds : quick_seconds};
    const Outcome all = explore(scenario.body, exhaustive);
    const Search random{.bounds = random_for(scenario),
                        .max_executions = deep ? 1'000'000 : 10'000,
                        .max_seconds = deep ? deep_seconds : quick_seconds,
                        .random = true,
                        .seed = 7};
    const Outcome drawn = all.failure.empty() ? explore(scenario.body, random) : Outcome{};
    const bool fine = all.failure.empty() && drawn.failure.empty() && (all.complete || deep);
    std::ostringstream text;
    text << (fine ? "ok   " : "FAIL ") << scenario.sentence << " (bounds " << to_text(bounds) << ": "
         << all.executions + all.merged << " executions, " << all.states << " states; " << drawn.executions << " random; ";
    text.precision(1);
    text << std::fixed << seconds() - begin << " s)\n";
    if (!all.failure.empty())
        text << describe(scenario, exhaustive, all);
    if (!drawn.failure.empty())
        text << describe(scenario, random, drawn);
    if (all.failure.empty() && !all.complete)
        text << "    not complete: the time for one scenario is over\n";
    return text.str();
}

// -------------------------------------------------------------------------------------------------------------- mutants

// A comment that names a pair, in the sources.
struct Pair {
    std::string file;
    std::uint32_t line;
    std::string name; // such as publish/see
    std::string text; // of the line
};

std::vector<Pair> pairs_in_sources() {
    const std::filesystem::path root = MEMLANE_SOURCES;
    std::vector<Pair> pairs;
    const std::regex name("PAIR ([a-z]+/[a-z]+)");
    for (const auto &entry : std::filesystem::recursive_directory_iterator(root)) {
        if (entry.path().extension() != ".cpp" && entry.path().extension() != ".hpp")
            continue;
        std::ifstream source(entry.path());
        std::uint32_t number = 0;
        for (std::string line; std::getline(source, line);) {
            ++number;
            for (std::sregex_iterator found(line.begin(), line.end(), name), end; found != end; ++found)
                pairs.push_back({std::filesystem::relative(entry.path(), root).generic_string(), number, (*found)[1], line});
        }
    }
    std::sort(pairs.begin(), pairs.end(),
              [](const Pair &a, const Pair &b) { return std::tie(a.file, a.line) < std::tie(b.file, b.line); });
    return pairs;
}

// Pairs without a mutant of their own, and why. `text` is part of the line of the comment.
struct Exception {
    const char *file, *text, *reason;
};
constexpr Exception exceptions[] = {
    {"sync/pool.cpp", "PAIR publish/see",
     "the pool's threads are not explored; its accesses are those of sync/signal.cpp, which are"},
    {"sync/quorum.hpp", "PAIR publish/see, partner: quorum_arrive", "the load is that of signal_wait in sync/signal.cpp"},
    {"lanes/ring.cpp", "PAIR offer/look", "its accesses are those of signal_add and WaitQueue::empty, which have mutants"},
};

// An access in the sources: part of its line, its kind and, where a line has two, its column.
struct Place {
    const char *file, *code;
    AccessKind kind;
    std::uint32_t column = 0;
};
// Comments above a call, or whose pair has an access elsewhere, too: all accesses that they are about.
struct Elsewhere {
    const char *file, *text; // `text` is part of the line of the comment
    Place access;
};
constexpr Elsewhere elsewhere[] = {
    {"sync/wait_queue.cpp",
     "PAIR publish/see, partner: call_place",
     {"sync/wait_queue.hpp", "bits[index / 64].load(", AccessKind::load}},
    {"sync/wait_queue.cpp",
     "for_each(Select::not_called",
     {"sync/wait_queue.hpp", "waiting_[word].load(", AccessKind::load}},
    {"sync/wait_queue.cpp", "for_each(Select::not_called", {"sync/wait_queue.hpp", "called_[word].load(", AccessKind::load}},
    {"sync/wait_queue.cpp", "or set by `join`", {"sync/wait_queue.cpp", "waiting_[word].fetch_or(", AccessKind::change}},
    {"sync/wait_queue.cpp",
     "or set by `join`",
     {"sync/wait_queue.cpp", "called_[place.index / 64].fetch_and(", AccessKind::change}},
    {"sync/wait_queue.cpp", "or set by `join`", {"sync/wait_queue.cpp", "(changed.value.load(", AccessKind::load}},
};
// Lines whose order no scenario can miss, because another line orders the same accesses, too. Such a line is weakened
// together with the other one (a fence is left out, another access is relaxed): that must fail, so the pair is explored.
// A deep run also checks that the first alone still does not fail.
struct Redundancy {
    Place line, other;
    const char *reason;
};
constexpr Redundancy redundancies[] = {
    {{"lanes/ring.cpp", "const std::int64_t word = see(state);", AccessKind::load},
     {"lanes/ring.cpp", "publish_if(state, word, claim_word))", AccessKind::change},
     "in claim_free, the exchange that follows acquires the same word"},
    {{"lanes/ring.cpp", "fence(std::memory_order_seq_cst);", AccessKind::fence},
     {"sync/signal.cpp", "cell.value.fetch_add(amount,", AccessKind::change},
     "between `ready` and the count, each writer adds to `written`: the later one acquires what the earlier one stored"},
    {{"lanes/sampler.cpp", "const std::int64_t next = see(at.head->next);", AccessKind::load},
     {"lanes/sampler.cpp", "const std::int64_t word = see(row.head->state); // PAIR", AccessKind::load},
     "the state of the row that the link leads to is acquired, too"},
    {{"lanes/sampler.cpp", "return next <= 0 && unchanged(row.head->state", AccessKind::fence},
     {"lanes/sampler.cpp", "const std::int64_t next = see(", AccessKind::load},
     "in is_newest, `next` is the only load before, and it acquires; so does that of walk_steps before"},
    {{"lanes/weights.cpp", "memlane::publish(control_->state[index], -version);", AccessKind::store},
     {"sync/signal.cpp", "if (!publish_if(cell.value, expected, value))", AccessKind::fence},
     "the exchange of `latest` before it ends with a release fence"},
    {{"lanes/weights.cpp", "|| unchanged(control_->latest.value, latest)", AccessKind::fence, 76},
     {"lanes/weights.cpp", "|| unchanged(control_->latest.value, latest)", AccessKind::fence, 18},
     "the fence of the first comparison on this line is enough for both"},
};
// Lines whose order is not needed at all.
constexpr Redundancy not_needed[] = {
    {{"lanes/sampler.cpp", "const std::int64_t next = see(row.head->next); // PAIR", AccessKind::load},
     {},
     "in successor, the fence of `unchanged` acquires what this load has read"},
    {{"sync/signal.cpp", "cell.gate.compare_exchange_strong(gate, gate + 1", AccessKind::change},
     {},
     "the load before it is ordered with the sleeper's change of the gate; of the exchange, only that it is one step "
     "counts"},
};

const char *name_of(std::memory_order order) {
    constexpr const char *names[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
    return names[static_cast<int>(order)];
}

std::string line_of(const Site &site) {
    std::ifstream source(std::filesystem::path(MEMLANE_SOURCES) / site.file);
    std::string line;
    for (std::uint32_t number = 0; number < site.line && std::getline(source, line); ++number) {
    }
    return line;
}

bool is_at(const Site &site, const Place &place) {
    return site.kind == place.kind && site.file == place.file && (place.column == 0 || place.column == site.column) &&
           line_of(site).find(place.code) != std::string::npos;
}

// What a pair of this name needs from a site, taken away.
std::vector<Mutant> mutants_of(const std::string &pair, std::size_t index) {
    const Site &site = sites()[index];
    const bool is_fence = site.kind == AccessKind::fence;
    const auto weaker = [&](std::memory_order order) { return Mutant{index, false, order}; };
    if (pair == "claim/unchanged")
        return is_fence ? std::vector{Mutant{index, true, site.order}} : std::vector<Mutant>{};
    if (pair == "publish/see")
        return is_fence ? std::vector<Mutant>{} : std::vector{weaker(std::memory_order_relaxed)};
    if (pair == "refresh/refresh")
        return {weaker(std::memory_order_acquire), weaker(std::memory_order_release)};
    // The pairs that need sequential consistency: what is left is acquire and release.
    if (site.order != std::memory_order_seq_cst || (pair == "commit/trim" && !is_fence))
        return {};
    return {weaker(site.kind == AccessKind::load    ? std::memory_order_acquire
                   : site.kind == AccessKind::store ? std::memory_order_release
                                                    : std::memory_order_acq_rel)};
}

// A comment stands at most this many lines above its access.
constexpr std::uint32_t comment_lines = 14;

// The sites that a comment is about: those of the first line at or below it that has one of the right kind; for the pairs
// that consist of a store and a load on each side, and in words.hpp, where both sides have one comment, also those of the
// lines below, up to the next comment of the pair.
std::vector<Mutant> mutants_of(const Pair &pair, const std::vector<Pair> &pairs) {
    std::vector<Mutant> listed;
    for (const Elsewhere &entry : elsewhere)
        if (pair.file == entry.file && pair.text.find(entry.text) != std::string::npos)
            for (std::size_t i = 0; i < sites().size(); ++i)
                if (is_at(sites()[i], entry.access))
                    for (const Mutant &mutant : mutants_of(pair.name, i))
                        listed.push_back(mutant);
    if (!listed.empty())
        return listed;
    const bool both = (pair.name != "publish/see" && pair.name != "claim/unchanged") || pair.file == "sync/words.hpp";
    std::uint32_t end = pair.line + comment_lines;
    for (const Pair &other : pairs)
        if (other.file == pair.file && other.name == pair.name && other.line > pair.line)
            end = std::min(end, other.line);
    std::map<std::uint32_t, std::vector<Mutant>> by_line;
    for (std::size_t i = 0; i < sites().size(); ++i) {
        const Site &site = sites()[i];
        // A comment about two pairs in a row, of which each has its own line, may share its access with the next comment.
        const bool below = site.line >= pair.line && (both ? site.line < end : site.line <= pair.line + comment_lines);
        if (site.file != pair.file || !below)
            continue;
        for (const Mutant &mutant : mutants_of(pair.name, i))
            by_line[site.line].push_back(mutant);
    }
    std::vector<Mutant> mutants;
    for (const auto &[line, of_line] : by_line) {
        mutants.insert(mutants.end(), of_line.begin(), of_line.end());
        if (!both)
            break;
    }
    return mutants;
}

std::string to_text(const Mutant &mutant) {
    const Site &site = sites()[mutant.site];
    constexpr const char *kinds[] = {"load", "store", "change", "fence"};
    return site.file + ":" + std::to_string(site.line) + ":" + std::to_string(site.column) + " " + name_of(site.order) +
           " " + kinds[static_cast<int>(site.kind)] +
           (mutant.removed ? " removed" : std::string(" as ") + name_of(mutant.order));
}

std::string to_text(std::span<const Mutant> mutants) {
    std::string text;
    for (const Mutant &mutant : mutants)
        text += (text.empty() ? "" : " and ") + to_text(mutant);
    return text;
}

// Searches for a failure of one of the scenarios, which execute the mutants' lines.
std::string run_mutants(const std::string &pair, const std::vector<Mutant> &mutants,
                        const std::vector<const Scenario *> &candidates) {
    const double begin = seconds();
    const std::int64_t tries[] = {2'000, 40'000, deep ? 400'000 : 0};
    for (const std::int64_t executions : tries)
        for (const Scenario *scenario : candidates) {
            Search search{.bounds = random_for(*scenario),
                          .max_executions = executions,
                          .random = true,
                          .seed = static_cast<std::uint64_t>(executions),
                          .mutants = mutants};
            Outcome outcome = explore(scenario->body, search);
            if (outcome.failure.empty() && executions == 40'000) {
                const Bounds &quick = scenario->quick;
                search = {.bounds = {quick.preemptions, quick.stale + 1, quick.deaths},
                          .max_executions = 2'000'000,
                          .mutants = mutants};
                outcome = explore(scenario->body, search);
            }
            if (outcome.failure.empty())
                continue;
            std::ostringstream text;
            text.precision(1);
            text << "ok   PAIR " << pair << ", mutant " << to_text(mutants) << ": fails in '" << scenario->sentence
                 << "': " << outcome.failure << " (" << std::fixed << seconds() - begin << " s)\n";
            if (traces)
                text << describe(*scenario, search, outcome);
            return text.str();
        }
    return "FAIL PAIR " + pair + ", mutant " + to_text(mutants) + ": no scenario fails (" +
           std::to_string(candidates.size()) + " execute it); add a scenario that does, or the order is not needed\n";
}

template <std::size_t count> const Redundancy *find(const Redundancy (&list)[count], const Mutant &mutant) {
    for (const Redundancy &entry : list)
        if (is_at(sites()[mutant.site], entry.line))
            return &entry;
    return nullptr;
}

// Adds the other lines of a redundancy, weakened.
void add_other(const Redundancy &redundancy, std::vector<Mutant> &mutants) {
    const std::size_t before = mutants.size();
    for (std::size_t i = 0; i < sites().size(); ++i)
        if (is_at(sites()[i], redundancy.other))
            mutants.push_back({i, redundancy.other.kind == AccessKind::fence, std::memory_order_relaxed});
    if (mutants.size() == before)
        std::printf("FAIL no scenario executes '%s' of %s, which is listed as redundant with another line\n",
                    redundancy.other.code, redundancy.other.file);
}

int check_mutants() {
    // A few executions of each scenario show which lines it reaches.
    std::map<std::size_t, std::vector<const Scenario *>> reached;
    std::map<const Scenario *, double> cost;
    for (const Scenario &scenario : scenarios::all()) {
        forget_covered();
        const double begin = seconds();
        const Search search{.bounds = random_for(scenario), .max_executions = 2'000, .random = true, .seed = 3};
        if (const Outcome outcome = explore(scenario.body, search); !outcome.failure.empty()) {
            std::printf("FAIL %s\n%s", scenario.sentence, describe(scenario, search, outcome).c_str());
            return 1;
        }
        cost[&scenario] = seconds() - begin;
        for (std::size_t i = 0; i < sites().size(); ++i)
            if (covered(i))
                reached[i].push_back(&scenario);
    }
    for (auto &[site, candidates] : reached) // the short ones first
        std::sort(candidates.begin(), candidates.end(), [&](auto *a, auto *b) { return cost[a] < cost[b]; });

    const std::vector<Pair> pairs = pairs_in_sources();
    std::vector<Job> jobs;
    std::set<std::string> planned;
    int without = 0;
    const auto survives = [&](const std::string &pair, const Mutant &mutant, const char *reason) {
        std::printf("     PAIR %s, mutant %s alone: does not fail, because %s\n", pair.c_str(), to_text(mutant).c_str(),
                    reason);
        if (!deep)
            return;
        jobs.push_back({[pair, mutant, candidates = reached[mutant.site]] {
            const std::string result = run_mutants(pair, {mutant}, candidates);
            return (result.starts_with("FAIL") ? "ok   as listed: " : "FAIL not as listed: ") + result;
        }});
    };
    for (const Pair &pair : pairs) {
        const bool excepted = std::any_of(std::begin(exceptions), std::end(exceptions), [&](const Exception &exception) {
            return pair.file == exception.file && pair.text.find(exception.text) != std::string::npos;
        });
        if (excepted)
            continue;
        const std::vector<Mutant> mutants = mutants_of(pair, pairs);
        if (mutants.empty()) {
            ++without;
            std::printf("FAIL PAIR %s at %s:%u has no mutant: no scenario executes an access below the comment that is "
                        "stronger than relaxed\n",
                        pair.name.c_str(), pair.file.c_str(), pair.line);
        }
        for (const Mutant &mutant : mutants) {
            if (!planned.insert(to_text(mutant)).second)
                continue;
            if (const Redundancy *entry = find(not_needed, mutant)) {
                survives(pair.name, mutant, entry->reason);
                continue;
            }
            std::vector<Mutant> together{mutant};
            if (const Redundancy *entry = find(redundancies, mutant)) {
                survives(pair.name, mutant, entry->reason);
                add_other(*entry, together);
                without += together.size() == 1;
            }
            jobs.push_back({[name = pair.name, together, candidates = reached[mutant.site]] {
                return run_mutants(name, together, candidates);
            }});
        }
    }
    std::printf("%zu comments name a pair; %zu mutants\n", pairs.size(), planned.size());
    return without + run(std::move(jobs));
}

} // namespace

int main(int argc, char **argv) {
    std::string words;
    std::vector<std::string> replay;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--deep") == 0) {
            deep = true;
            if (i + 1 < argc && std::atoll(argv[i + 1]) > 0)
                deep_seconds = std::atoll(argv[++i]);
        } else if (std::strcmp(argv[i], "--traces") == 0)
            traces = true;
        else if (std::strcmp(argv[i], "--replay") == 0 && i + 3 < argc) {
            replay = {argv[i + 1], argv[i + 2], argv[i + 3]};
            i += 3;
        } else if (argv[i][0] != '-' && words.empty()) {
            words = argv[i];
        } else {
            std::fprintf(stderr, "unknown argument '%s'; see the start of cpp/tests/model/main.cpp\n", argv[i]);
            return 2;
        }
    }
    if (!replay.empty()) {
        for (const Scenario &scenario : scenarios::all()) {
            if (replay[0] != scenario.sentence)
                continue;
            Search search{.bounds = {}, .max_executions = 1, .trace = true, .replay = from_text(replay[2])};
            Bounds &bounds = search.bounds;
            if (std::sscanf(replay[1].c_str(), "%d,%d,%d", &bounds.preemptions, &bounds.stale, &bounds.deaths) != 3) {
                std::fprintf(stderr, "expected bounds such as 2,1,0, found '%s'\n", replay[1].c_str());
                return 2;
            }
            const Outcome outcome = explore(scenario.body, search);
            std::printf("%s%s\n", outcome.trace.c_str(), outcome.failure.empty() ? "no failure" : outcome.failure.c_str());
            return outcome.failure.empty() ? 0 : 1;
        }
        std::fprintf(stderr, "no scenario is called '%s'\n", replay[0].c_str());
        return 2;
    }
    const double begin = seconds();
    std::vector<Job> jobs;
    for (const Litmus &litmus : scenarios::litmus_tests())
        if (std::string(litmus.sentence).find(words) != std::string::npos)
            jobs.push_back({[&litmus] { return run_litmus(litmus); }});
    for (const Scenario &scenario : scenarios::all())
        if (std::string(scenario.sentence).find(words) != std::string::npos)
            jobs.push_back({[&scenario] { return run_scenario(scenario); }});
    const std::size_t count = jobs.size();
    int failed = run(std::move(jobs));
    if (words.empty() || words == "mutants")
        failed += check_mutants();
    std::printf("%zu litmus tests and scenarios, %d failed (%.0f s)\n", count, failed, seconds() - begin);
    return failed > 0 || (count == 0 && words != "mutants") ? 1 : 0;
}
