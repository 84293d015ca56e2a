#include "model/explorer.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <new>
#include <unordered_map>
#include <utility>

#include <sys/mman.h>
#include <ucontext.h>

namespace memlane::model {

namespace {

// ------------------------------------------------------------------------------------- memory that a run allocates

// A run may end in the middle of any function, so no destructor frees what it allocated: it allocates from one block,
// which the next run uses from its start again.
constexpr std::size_t heap_bytes = std::size_t{8} << 20;
alignas(64) std::byte heap[heap_bytes];
std::size_t heap_used = 0;
bool in_run = false; // whether the code of a scenario is running, as opposed to the explorer's

// The explorer's own memory outlives a run: every function that a scenario calls begins with one of these.
class InExplorer {
  public:
    InExplorer() : before_(std::exchange(in_run, false)) {}
    ~InExplorer() { in_run = before_; }
    InExplorer(const InExplorer &) = delete;

  private:
    bool before_;
};

[[noreturn]] void give_up(const std::string &why) {
    std::fprintf(stderr, "model checker: %s\n", why.c_str());
    std::abort();
}

// ------------------------------------------------------------------------------------------------------ memory model

constexpr int max_words = 192;
constexpr std::size_t shared_size = 32 * 1024;
constexpr std::size_t granule = 4; // the smallest word

// A place in the modification order of a word; there is room between two for later stores.
using Stamp = std::uint32_t;
constexpr Stamp stamp_gap = 1 << 16;

struct View {
    std::array<Stamp, max_words> seen{};                // per word: the oldest store that may still be read
    std::array<std::uint32_t, max_threads> clock{};     // per thread: its last access that happens before
    // `words`: how many words there are so far.
    void join_seen(const View &other, int words) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(words); ++i)
            seen[i] = std::max(seen[i], other.seen[i]);
    }
    void join(const View &other, int words) {
        join_seen(other, words);
        for (std::size_t i = 0; i < clock.size(); ++i)
            clock[i] = std::max(clock[i], other.clock[i]);
    }
};

struct Store {
    Stamp stamp;
    std::uint64_t value;
    std::uint64_t id;   // the history of its thread; 0: the initial value
    bool changed;       // a read-modify-write read this store: its own store stays directly behind
    std::size_t view;   // what an acquire load of it gets to see: an index of `views`
};

struct SharedWord {
    std::size_t offset; // in shared memory
    std::size_t bytes;
    std::vector<Store> stores; // in modification order
    std::uint64_t hash;        // of the ids of `stores`; 0 if there is only the initial value
};

// The last accesses of a plain word.
struct PlainWord {
    std::size_t offset;
    int writer = -1;
    std::uint32_t write_clock = 0;
    std::array<std::uint32_t, max_threads> read_clocks{};
    std::array<Where, max_threads> read_where{};
    Where write_where{};
};

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t x = a ^ (b + 0x9E3779B97F4A7C15 + (a << 6) + (a >> 2));
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

bool acquires(std::memory_order order) {
    return order == std::memory_order_acquire || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}
bool releases(std::memory_order order) {
    return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}
bool sequential(std::memory_order order) { return order == std::memory_order_seq_cst; }

const char *name_of(std::memory_order order) {
    switch (order) {
    case std::memory_order_relaxed:
        return "relaxed";
    case std::memory_order_acquire:
        return "acquire";
    case std::memory_order_release:
        return "release";
    case std::memory_order_acq_rel:
        return "acq_rel";
    default:
        return "seq_cst";
    }
}

// ------------------------------------------------------------------------------------------------------------ threads

enum class FiberState { unused, runnable, sleeping, joining, ended, dead };

struct Fiber {
    ucontext_t context;
    std::byte *stack = nullptr;
    std::function<void()> run;
    std::string name;
    FiberState state = FiberState::unused;
    bool mortal = false;
    bool timed_out = false;        // its sleep ended with its slice
    std::size_t sleeps_on = 0;     // offset of the futex word
    View current, acquired, released; // what it must see; what an acquire fence adds; what its relaxed stores pass on
    std::uint64_t history = 0;     // a hash of all that it has loaded
};

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr int max_steps = 20'000; // a run with more accesses does not end
constexpr int max_slices = 8;
constexpr std::int64_t slice_ns = 100'000'000;

enum class Budget { free, preemption, stale, death };

struct Choice {
    int option, options;
    Budget budget;
};

// States that were seen, with the budgets that were left there.
class Seen {
  public:
    // Whether the state was seen with at least these budgets. If not, it is now.
    bool test_and_insert(std::uint64_t key, const std::array<int, 4> &left) {
        if (used_ * 2 >= slots_.size())
            grow();
        key |= 1; // 0 marks a free slot
        std::size_t i = key * 0x9E3779B97F4A7C15 >> shift_;
        while (slots_[i].key != 0 && slots_[i].key != key)
            i = (i + 1) & (slots_.size() - 1);
        Slot &slot = slots_[i];
        const auto p = static_cast<std::int8_t>(left[1]), s = static_cast<std::int8_t>(left[2]),
                   d = static_cast<std::int8_t>(left[3]);
        if (slot.key != 0 && slot.preemptions >= p && slot.stale >= s && slot.deaths >= d)
            return true;
        if (slot.key == 0) {
            if (used_ >= max_states)
                return false;
            ++used_;
        } else if (slot.preemptions > p || slot.stale > s || slot.deaths > d) {
            return false; // neither is larger: keep the first
        }
        slot = {key, p, s, d};
        return false;
    }
    std::int64_t states() const { return static_cast<std::int64_t>(used_); }
    void clear() {
        slots_.assign(1 << 14, {});
        used_ = 0;
        shift_ = 64 - 14;
    }

  private:
    struct Slot {
        std::uint64_t key = 0;
        std::int8_t preemptions = 0, stale = 0, deaths = 0;
    };
    // They take 512 MB. Those beyond are not remembered, and the search takes longer.
    static constexpr std::size_t max_states = std::size_t{1} << 24;
    void grow() {
        if (slots_.size() >= max_states * 2)
            return;
        std::vector<Slot> before = std::move(slots_);
        slots_.assign(before.size() * 2, {});
        --shift_;
        for (const Slot &slot : before) {
            if (slot.key == 0)
                continue;
            std::size_t i = slot.key * 0x9E3779B97F4A7C15 >> shift_;
            while (slots_[i].key != 0)
                i = (i + 1) & (slots_.size() - 1);
            slots_[i] = slot;
        }
    }
    std::vector<Slot> slots_ = std::vector<Slot>(1 << 14);
    std::size_t used_ = 0;
    int shift_ = 64 - 14;
};

// All state of the explorer: there is one, because the code under test knows no handle to pass.
struct Explorer {
    Explorer() { word_at.fill(-1); }

    // The search
    const Search *search = nullptr;
    std::vector<Choice> path;
    std::size_t depth = 0;
    std::array<int, 4> left{};
    Seen seen;
    std::uint64_t random = 1;
    std::uint64_t preemption_rate = 8;
    bool tracing = false;
    std::string trace;
    std::set<std::string> observed;

    // The run
    enum class End { complete, merged, failed } end{};
    std::string failure;
    ucontext_t scheduler;
    std::array<Fiber, max_threads> fibers;
    int threads = 0;
    int running = 0;
    int steps = 0;
    int slices = 0;
    int deaths = 0;
    bool slow = false; // let_slices_end was called
    std::int64_t now = 1'000'000'000;

    alignas(64) std::array<std::byte, shared_size> memory{};
    std::size_t memory_used = 0;
    std::array<std::int16_t, shared_size / granule> word_at; // index of `words`, or -1
    std::array<std::uint8_t, shared_size / granule> narrow{};
    std::array<SharedWord, max_words> words;
    int word_count = 0;
    // Of the search: the words that a thread has stored into while others ran. The search begins anew when it finds another.
    std::array<bool, shared_size / granule> varies{};
    bool found_varying = false;
    std::vector<View> views;
    std::size_t view_count = 0;
    View sequential_view; // only `seen`
    std::uint64_t memory_hash = 0, sequential_hash = 0;
    std::array<std::uint64_t, max_words> sequential_ids{}; // of the stores in sequential_view
    std::vector<PlainWord> plain;
    std::map<std::size_t, std::string> names;

    // The lines of the sources
    std::vector<Site> sites;
    std::vector<std::uint8_t> covered;
    std::unordered_map<std::uint64_t, std::size_t> site_of; // by the address of a source location and the kind

    Fiber &me() { return fibers[static_cast<std::size_t>(running)]; }

    // ------------------------------------------------------------------------------------------------------- choices

    std::uint64_t draw() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }

    // One of `options`; the first costs nothing, any other one unit of the budget. `needless`: the first is enough.
    int choose(int options, Budget budget, bool needless = false) {
        int &units = left[static_cast<std::size_t>(budget)];
        if (options <= 1 || (budget != Budget::free && units <= 0))
            return 0;
        int option = 0;
        if (depth < path.size()) {
            option = path[depth].option;
        } else if (needless) {
            path.push_back({0, 1, budget});
        } else if (search->random) {
            const auto others = static_cast<std::uint64_t>(options - 1);
            const std::uint64_t rate = budget == Budget::preemption ? preemption_rate : budget == Budget::stale ? 3 : 48;
            if (budget == Budget::free)
                option = static_cast<int>(draw() % static_cast<std::uint64_t>(options));
            else if (draw() % rate == 0)
                option = 1 + static_cast<int>(draw() % others);
            path.push_back({option, options, budget});
        } else {
            path.push_back({0, options, budget});
        }
        ++depth;
        if (option > 0 && budget != Budget::free)
            --units;
        return option;
    }

    // Makes the path the next one in depth-first order; false if there is none.
    bool advance() {
        while (!path.empty() && path.back().option + 1 >= path.back().options)
            path.pop_back();
        if (path.empty())
            return false;
        ++path.back().option;
        return true;
    }

    // ---------------------------------------------------------------------------------------------------- scheduling

    [[noreturn]] void leave_run(End how) {
        end = how;
        setcontext(&scheduler);
        give_up("setcontext failed");
    }

    [[noreturn]] void fail(std::string what) {
        failure = std::move(what);
        if (tracing)
            trace += "  " + failure + "\n";
        leave_run(End::failed);
    }

    bool enabled(int thread) const {
        const Fiber &fiber = fibers[static_cast<std::size_t>(thread)];
        if (fiber.state == FiberState::runnable)
            return true;
        if (fiber.state != FiberState::joining)
            return false;
        return std::all_of(fibers.begin() + 1, fibers.begin() + threads, [](const Fiber &other) {
            return other.state == FiberState::ended || other.state == FiberState::dead;
        });
    }

    std::uint64_t state_key() const {
        std::uint64_t key = mix(memory_hash, sequential_hash);
        key = mix(key, static_cast<std::uint64_t>(running));
        for (int i = 0; i < threads; ++i) {
            const Fiber &fiber = fibers[static_cast<std::size_t>(i)];
            key = mix(key, fiber.history);
            key = mix(key, static_cast<std::uint64_t>(fiber.state) << 1 | (fiber.timed_out ? 1 : 0));
        }
        return mix(key, static_cast<std::uint64_t>(slices));
    }

    // Lets a thread run: the running one or, if it cannot go on or is preempted, another one. Returns when the running
    // thread is chosen again; never, if it has ended. `needless`: no other thread need run before the next access.
    void schedule(bool needless = false) {
        const bool can_stay = enabled(running);
        std::array<int, max_threads> order;
        int count = 0;
        if (can_stay)
            order[static_cast<std::size_t>(count++)] = running;
        for (int i = 0; i < threads; ++i)
            if (i != running && enabled(i))
                order[static_cast<std::size_t>(count++)] = i;
        if (count == 0) {
            end_slice();
            return schedule();
        }
        if (needless) {
            choose(count, Budget::preemption, true);
            return;
        }
        if (threads > 1 && !search->random && depth >= path.size() && seen.test_and_insert(state_key(), left))
            leave_run(End::merged);
        const int next = order[static_cast<std::size_t>(choose(count, can_stay ? Budget::preemption : Budget::free))];
        if (next == running)
            return;
        const int before = std::exchange(running, next);
        swapcontext(&fibers[static_cast<std::size_t>(before)].context, &me().context);
    }

    // No thread can run: the kernel ends the sleep of those that sleep, after their slice.
    void end_slice() {
        const bool asleep = std::any_of(fibers.begin(), fibers.begin() + threads,
                                        [](const Fiber &fiber) { return fiber.state == FiberState::sleeping; });
        if (!asleep)
            fail("no thread can run");
        if (deaths == 0 && !slow)
            fail("a lost wake-up: every thread that has not ended sleeps");
        if (++slices > max_slices)
            fail("a wait that does not end: " + std::to_string(max_slices) + " slices passed");
        now += slice_ns;
        if (tracing)
            trace += "  (a slice ends: every sleeping thread wakes)\n";
        for (int i = 0; i < threads; ++i)
            if (Fiber &fiber = fibers[static_cast<std::size_t>(i)]; fiber.state == FiberState::sleeping) {
                fiber.state = FiberState::runnable;
                fiber.timed_out = true;
            }
    }

    // Before every access. `constant`: it is a load of what nothing changes while threads run. All the same whether the others
    // run before it or after it, so they run after it. The choice is counted, so that a random search and a repetition, which
    // do not know what is constant, make the same.
    void step(bool constant = false) {
        if (++steps > max_steps)
            fail("a run that does not end: " + std::to_string(max_steps) + " accesses");
        schedule(constant && leaves_out_constant());
        if (me().mortal && choose(2, Budget::death) == 1) {
            if (tracing)
                trace += "  " + me().name + ": dies\n";
            ++deaths;
            me().state = FiberState::dead;
            schedule();
            give_up("a thread that is dead runs");
        }
    }

    bool leaves_out_constant() const { return !search->random && !tracing && search->replay.empty(); }

    // -------------------------------------------------------------------------------------------------------- memory

    std::size_t offset_of(const void *word) const {
        const auto *at = static_cast<const std::byte *>(word);
        if (at < memory.data() || at >= memory.data() + memory_used)
            give_up("an atomic access outside shared memory: make it with model::shared");
        return static_cast<std::size_t>(at - memory.data());
    }
    bool is_shared(const void *word) const {
        const auto *at = static_cast<const std::byte *>(word);
        return at >= memory.data() && at < memory.data() + memory_used;
    }

    // Whether threads besides the running one have not ended.
    bool others_run() const {
        for (int i = 1; i < threads; ++i)
            if (const FiberState state = fibers[static_cast<std::size_t>(i)].state;
                i != running && state != FiberState::ended && state != FiberState::dead)
                return true;
        return running != 0 && threads > 1;
    }

    int index_of(const void *word, std::size_t bytes) {
        const std::size_t offset = offset_of(word);
        std::int16_t &index = word_at[offset / granule];
        if (index < 0) {
            if (offset % bytes != 0 && bytes > 1)
                give_up("an access that is not aligned to its size");
            if (word_count == max_words)
                give_up("a scenario with too many words");
            index = static_cast<std::int16_t>(word_count++);
            SharedWord &made = words[static_cast<std::size_t>(index)];
            made.offset = offset;
            made.bytes = bytes;
            made.hash = 0;
            std::uint64_t value = 0;
            std::memcpy(&value, memory.data() + offset, bytes);
            made.stores.clear();
            made.stores.push_back({stamp_gap, value, 0, false, 0});
        }
        return index;
    }

    std::size_t keep(const View &view) {
        if (view_count == views.size())
            views.emplace_back();
        views[view_count] = view;
        return view_count++;
    }

    void see_sequentially(int index, const Store &store) {
        const auto i = static_cast<std::size_t>(index);
        if (store.stamp <= sequential_view.seen[i])
            return;
        sequential_view.seen[i] = store.stamp;
        sequential_hash -= sequential_ids[i];
        sequential_ids[i] = mix(words[i].offset, store.id);
        sequential_hash += sequential_ids[i];
    }

    Stamp oldest_for(int index, std::memory_order order) {
        const auto i = static_cast<std::size_t>(index);
        return std::max(me().current.seen[i], sequential(order) ? sequential_view.seen[i] : 0);
    }

    void read(int index, std::size_t position, std::memory_order order) {
        const Store store = words[static_cast<std::size_t>(index)].stores[position];
        Fiber &fiber = me();
        ++fiber.current.clock[static_cast<std::size_t>(running)];
        if (store.view != 0) // 0: of the initial values, empty
            (acquires(order) ? fiber.current : fiber.acquired).join(views[store.view], word_count);
        Stamp &stamp = fiber.current.seen[static_cast<std::size_t>(index)];
        stamp = std::max(stamp, store.stamp);
        if (sequential(order))
            see_sequentially(index, store);
        fiber.history = mix(mix(fiber.history, store.id), store.value);
    }

    // Puts a store behind `position`. `chained`: it is the store of a read-modify-write that read that position.
    void write(int index, std::size_t position, std::uint64_t value, std::memory_order order, bool chained) {
        SharedWord &word = words[static_cast<std::size_t>(index)];
        if (bool &known = varies[word.offset / granule]; !known && others_run())
            known = found_varying = true;
        const bool last = position + 1 == word.stores.size();
        const Stamp before = word.stores[position].stamp;
        const Stamp stamp = last ? before + stamp_gap : before + (word.stores[position + 1].stamp - before) / 2;
        if (stamp == before)
            give_up("too many stores at one place of a modification order");
        Fiber &fiber = me();
        ++fiber.current.clock[static_cast<std::size_t>(running)];
        fiber.current.seen[static_cast<std::size_t>(index)] = stamp;
        const std::size_t view = keep(releases(order) ? fiber.current : fiber.released);
        Stamp &own = views[view].seen[static_cast<std::size_t>(index)];
        own = std::max(own, stamp);
        if (chained) {
            views[view].join(views[word.stores[position].view], word_count);
            word.stores[position].changed = true;
        }
        fiber.history = mix(fiber.history, 0x5704E);
        const Store store{stamp, value, mix(fiber.history, word.offset + 1), false, view};
        if (sequential(order))
            see_sequentially(index, store);
        word.stores.insert(word.stores.begin() + static_cast<std::ptrdiff_t>(position) + 1, store);
        memory_hash -= word.hash;
        std::uint64_t hash = word.offset;
        for (const Store &each : word.stores)
            hash = mix(hash, each.id);
        word.hash = hash;
        memory_hash += hash;
    }

    // -------------------------------------------------------------------------------------------------------- sites

    static std::string source_name(const char *file) {
        std::string name = file;
        const std::size_t at = name.rfind("cpp/src/");
        return at == std::string::npos ? name : name.substr(at + 8);
    }

    std::size_t find_site(Where where, AccessKind kind, std::memory_order order) {
        static_assert(sizeof(Where) == sizeof(std::uint64_t));
        const std::uint64_t key = std::bit_cast<std::uint64_t>(where) << 2 | static_cast<std::uint64_t>(kind);
        if (const auto found = site_of.find(key); found != site_of.end())
            return found->second;
        const Site site{source_name(where.file_name()), where.line(), where.column(), kind, order};
        std::size_t index = 0;
        while (index < sites.size() && !(sites[index].file == site.file && sites[index].line == site.line &&
                                         sites[index].column == site.column && sites[index].kind == kind))
            ++index;
        if (index == sites.size()) {
            sites.push_back(site);
            covered.push_back(0);
        }
        site_of.emplace(key, index);
        return index;
    }

    // The order of an access in this run; none: a fence that the mutant leaves out.
    std::memory_order effective(const Order &order, AccessKind kind, bool *removed = nullptr) {
        if (order.order == std::memory_order_relaxed)
            return order.order;
        const std::size_t site = find_site(order.where, kind, order.order);
        covered[site] = 1;
        std::size_t helper = site;
        if (std::bit_cast<std::uint64_t>(order.helper) != std::bit_cast<std::uint64_t>(order.where)) {
            helper = find_site(order.helper, kind, order.order);
            covered[helper] = 1;
        }
        for (const Mutant &mutant : search->mutants) {
            if (mutant.site != site && mutant.site != helper)
                continue;
            if (removed != nullptr)
                *removed = mutant.removed;
            return mutant.order;
        }
        return order.order;
    }

    // --------------------------------------------------------------------------------------------------------- trace

    std::string word_name(int index) const {
        const SharedWord &word = words[static_cast<std::size_t>(index)];
        auto found = names.upper_bound(word.offset);
        if (found == names.begin())
            return "word " + std::to_string(word.offset);
        --found;
        const std::size_t distance = word.offset - found->first;
        return distance == 0 ? found->second : found->second + "+" + std::to_string(distance);
    }

    void log(const Where &where, const std::string &what) {
        std::string line = source_name(where.file_name());
        line = line.substr(line.rfind('/') + 1) + ":" + std::to_string(where.line());
        if (line.starts_with("explorer.cpp:")) // `copy` is not told its line
            line = "copy";
        std::array<char, 96> start{};
        std::snprintf(start.data(), start.size(), "  %-10s %-22s ", me().name.c_str(), line.c_str());
        trace += start.data() + what + "\n";
    }

    std::string shown(std::uint64_t value) const { return std::to_string(static_cast<std::int64_t>(value)); }

    // ------------------------------------------------------------------------------------------------------ accesses

    std::uint64_t load(const void *at, std::size_t bytes, const Order &requested) {
        const std::memory_order order = effective(requested, AccessKind::load);
        step(!varies[offset_of(at) / granule]);
        const int index = index_of(at, bytes);
        const std::vector<Store> &stores = words[static_cast<std::size_t>(index)].stores;
        const Stamp oldest = oldest_for(index, order);
        int options = 0;
        while (options < static_cast<int>(stores.size()) &&
               stores[stores.size() - 1 - static_cast<std::size_t>(options)].stamp >= oldest)
            ++options;
        const std::size_t position = stores.size() - 1 - static_cast<std::size_t>(choose(options, Budget::stale));
        const std::uint64_t value = stores[position].value;
        read(index, position, order);
        if (tracing)
            log(requested.where, std::string("load ") + name_of(order) + " of " + word_name(index) + " reads " +
                                     shown(value) +
                                     (position + 1 < stores.size() ? ", the newest is " + shown(stores.back().value) : ""));
        return bytes < 8 ? value & ((std::uint64_t{1} << bytes * 8) - 1) : value;
    }

    void store(const void *at, std::size_t bytes, std::uint64_t value, const Order &requested) {
        const std::memory_order order = effective(requested, AccessKind::store);
        step();
        const int index = index_of(at, bytes);
        const std::vector<Store> &stores = words[static_cast<std::size_t>(index)].stores;
        const Stamp oldest = oldest_for(index, order);
        std::vector<std::size_t> &positions = positions_;
        positions.clear();
        for (std::size_t i = stores.size(); i-- > 0 && stores[i].stamp >= oldest;)
            if (!stores[i].changed)
                positions.push_back(i);
        const std::size_t position =
            positions[static_cast<std::size_t>(choose(static_cast<int>(positions.size()), Budget::stale))];
        const bool last = position + 1 == stores.size();
        write(index, position, value, order, false);
        if (tracing)
            log(requested.where, std::string("store ") + name_of(order) + " of " + shown(value) + " into " +
                                     word_name(index) + (last ? "" : ", before " + shown(stores[position + 2].value)));
    }

    // Reads a store and puts another directly behind it. Without `expected`, always; with it, only if the store read has that
    // value. Returns the value read.
    std::uint64_t change(const void *at, std::size_t bytes, Change change, std::uint64_t operand,
                         const std::uint64_t *expected, const Order &requested) {
        const std::memory_order order = effective(requested, AccessKind::change);
        step();
        const int index = index_of(at, bytes);
        const std::vector<Store> &stores = words[static_cast<std::size_t>(index)].stores;
        const Stamp oldest = oldest_for(index, order);
        std::vector<std::size_t> &positions = positions_;
        positions.clear();
        for (std::size_t i = stores.size(); i-- > 0 && stores[i].stamp >= oldest;)
            if (!stores[i].changed || (expected != nullptr && stores[i].value != *expected))
                positions.push_back(i);
        const std::size_t position =
            positions[static_cast<std::size_t>(choose(static_cast<int>(positions.size()), Budget::stale))];
        const std::uint64_t before = stores[position].value;
        const bool last = position + 1 == stores.size();
        if (expected != nullptr && before != *expected) {
            // The order of a failure is that of a success without the release half.
            read(index, position,
                 order == std::memory_order_acq_rel   ? std::memory_order_acquire
                 : order == std::memory_order_release ? std::memory_order_relaxed
                                                      : order);
            if (tracing)
                log(requested.where, std::string("exchange ") + name_of(order) + " of " + word_name(index) +
                                         " fails: " + shown(before) + " instead of " + shown(*expected));
            return before;
        }
        std::uint64_t after = change(before, operand);
        if (bytes < 8)
            after &= (std::uint64_t{1} << bytes * 8) - 1;
        read(index, position, order);
        write(index, position, after, order, true);
        if (tracing)
            log(requested.where, std::string("change ") + name_of(order) + " of " + word_name(index) + " from " +
                                     shown(before) + " to " + shown(after) +
                                     (last ? "" : ", before " + shown(stores[position + 2].value)));
        return before;
    }

    void fence(const Order &requested) {
        bool removed = false;
        const std::memory_order order = effective(requested, AccessKind::fence, &removed);
        if (removed)
            return;
        if (sequential(order))
            step();
        Fiber &fiber = me();
        if (acquires(order))
            fiber.current.join(fiber.acquired, word_count);
        if (sequential(order)) {
            fiber.history = mix(fiber.history, sequential_hash);
            fiber.current.join_seen(sequential_view, word_count);
            for (int index = 0; index < word_count; ++index) {
                const auto i = static_cast<std::size_t>(index);
                if (fiber.current.seen[i] <= sequential_view.seen[i])
                    continue;
                for (const Store &store : words[i].stores)
                    if (store.stamp == fiber.current.seen[i])
                        see_sequentially(index, store);
            }
        }
        if (releases(order))
            fiber.released = fiber.current;
        if (tracing)
            log(requested.where, std::string("fence ") + name_of(order));
    }

    std::vector<std::size_t> positions_;

    // ----------------------------------------------------------------------------------------------------------- run

    PlainWord &plain_at(std::size_t offset) {
        for (PlainWord &word : plain)
            if (word.offset == offset)
                return word;
        plain.emplace_back().offset = offset;
        return plain.back();
    }

    void run(const std::function<void()> &body);
};

Explorer &explorer() {
    static Explorer only;
    return only;
}

// The first function on the stack of a fiber.
void enter_fiber() {
    Explorer &e = explorer();
    std::string thrown;
    try {
        in_run = true;
        e.me().run();
        in_run = false;
    } catch (const std::exception &error) {
        in_run = false;
        thrown = std::string("threw ") + error.what();
    }
    if (!thrown.empty())
        e.fail(e.me().name + ": " + thrown);
    if (e.running == 0)
        e.leave_run(Explorer::End::complete);
    e.me().state = FiberState::ended;
    e.schedule();
    give_up("a thread that has ended runs");
}

void prepare(Fiber &fiber, std::string name, std::function<void()> run) {
    if (fiber.stack == nullptr) {
        void *memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED)
            give_up("no memory for a stack");
        fiber.stack = static_cast<std::byte *>(memory);
    }
    fiber.name = std::move(name);
    fiber.run = std::move(run);
    fiber.state = FiberState::runnable;
    fiber.mortal = false;
    fiber.timed_out = false;
    fiber.current = fiber.acquired = fiber.released = View{};
    fiber.history = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter_fiber, 0);
}

void Explorer::run(const std::function<void()> &body) {
    depth = 0;
    left = {0, search->bounds.preemptions, search->bounds.stale, search->bounds.deaths};
    end = End::complete;
    failure.clear();
    threads = 1;
    running = 0;
    steps = slices = deaths = 0;
    slow = false;
    now = 1'000'000'000;
    std::memset(memory.data(), 0, memory_used);
    std::fill_n(word_at.begin(), memory_used / granule, std::int16_t{-1});
    std::fill_n(narrow.begin(), memory_used / granule, std::uint8_t{0});
    memory_used = 0;
    word_count = 0;
    view_count = 0;
    keep(View{}); // of initial values
    sequential_view = View{};
    sequential_ids = {};
    memory_hash = sequential_hash = 0;
    plain.clear();
    names.clear();
    heap_used = 0;
    prepare(fibers[0], "body", body);
    swapcontext(&scheduler, &fibers[0].context);
    in_run = false;
    for (Fiber &fiber : fibers) // before their memory is used again
        fiber.run = nullptr;
}

} // namespace

// ---------------------------------------------------------------------------------------------------- for scenarios

std::byte *shared_bytes(std::size_t bytes) {
    const InExplorer here;
    Explorer &e = explorer();
    const std::size_t at = e.memory_used;
    e.memory_used += (bytes + 63) / 64 * 64;
    if (e.memory_used > shared_size)
        give_up("a scenario with too much shared memory");
    return e.memory.data() + at;
}

void narrow_words(const void *begin, std::size_t bytes) {
    Explorer &e = explorer();
    std::fill_n(e.narrow.begin() + static_cast<std::ptrdiff_t>(e.offset_of(begin) / granule), bytes / granule,
                std::uint8_t{1});
}

void name_word(const void *word, std::string name) {
    const InExplorer here;
    Explorer &e = explorer();
    if (e.tracing)
        e.names[e.offset_of(word)] = std::string(name.c_str()); // a copy in the explorer's own memory
}

std::int64_t start(const char *name, std::function<void()> run, Mortal mortal) {
    const InExplorer here;
    Explorer &e = explorer();
    if (e.threads == max_threads)
        give_up("a scenario with too many threads");
    Fiber &fiber = e.fibers[static_cast<std::size_t>(e.threads)];
    prepare(fiber, name, std::move(run));
    fiber.mortal = mortal == Mortal::yes;
    fiber.current = e.me().current;
    return ++e.threads;
}

void join() {
    const InExplorer here;
    Explorer &e = explorer();
    e.me().state = FiberState::joining;
    e.schedule();
    e.me().state = FiberState::runnable;
    for (int i = 1; i < e.threads; ++i)
        e.me().current.join(e.fibers[static_cast<std::size_t>(i)].current, e.word_count);
}

bool died(std::int64_t process) {
    return explorer().fibers[static_cast<std::size_t>(process - 1)].state == FiberState::dead;
}

std::int64_t self() { return explorer().running + 1; }

void require(bool holds, const char *what) {
    if (holds)
        return;
    const InExplorer here;
    Explorer &e = explorer();
    e.fail(e.me().name + ": expected that " + what);
}

int pick(int options) {
    const InExplorer here;
    Explorer &e = explorer();
    const int picked = e.choose(options, Budget::free);
    e.me().history = mix(e.me().history, static_cast<std::uint64_t>(picked));
    return picked;
}

void observe(const std::string &result) {
    const InExplorer here;
    explorer().observed.insert(std::string(result.c_str()));
}

void let_slices_end() { explorer().slow = true; }

void let_time_pass(std::int64_t nanoseconds) { explorer().now += nanoseconds; }

namespace {

// Fails the run if the last conflicting access of a plain word does not happen before this one.
void check_race(Explorer &e, const PlainWord &word, bool writes, const Where &where) {
    const View &view = e.me().current;
    const auto ordered = [&](int thread, std::uint32_t clock) {
        return view.clock[static_cast<std::size_t>(thread)] >= clock;
    };
    const auto race = [&](int other, const Where &there) {
        e.fail("a data race: " + e.me().name + " at line " + std::to_string(where.line()) + (writes ? " writes" : " reads") +
               " what " + e.fibers[static_cast<std::size_t>(other)].name + " accesses at line " +
               std::to_string(there.line()));
    };
    if (word.writer >= 0 && !ordered(word.writer, word.write_clock))
        race(word.writer, word.write_where);
    if (!writes)
        return;
    for (int thread = 0; thread < e.threads; ++thread)
        if (!ordered(thread, word.read_clocks[static_cast<std::size_t>(thread)]))
            race(thread, word.read_where[static_cast<std::size_t>(thread)]);
}

} // namespace

std::uint64_t read_plain(const void *word, Where where) {
    const InExplorer here;
    Explorer &e = explorer();
    const std::size_t offset = e.offset_of(word);
    PlainWord &plain = e.plain_at(offset);
    check_race(e, plain, false, where);
    const auto thread = static_cast<std::size_t>(e.running);
    plain.read_clocks[thread] = ++e.me().current.clock[thread];
    plain.read_where[thread] = where;
    std::uint64_t value = 0;
    std::memcpy(&value, e.memory.data() + offset, sizeof value);
    e.me().history = mix(e.me().history, value);
    if (e.tracing)
        e.log(where, "plain read of " + e.shown(value));
    return value;
}

void write_plain(void *word, std::uint64_t value, Where where) {
    const InExplorer here;
    Explorer &e = explorer();
    const std::size_t offset = e.offset_of(word);
    PlainWord &plain = e.plain_at(offset);
    check_race(e, plain, true, where);
    const auto thread = static_cast<std::size_t>(e.running);
    plain.writer = e.running;
    plain.write_clock = ++e.me().current.clock[thread];
    plain.write_where = where;
    std::memcpy(e.memory.data() + offset, &value, sizeof value);
    e.me().history = mix(e.me().history, 0x91A14);
    if (e.tracing)
        e.log(where, "plain write of " + e.shown(value));
}

// ------------------------------------------------------------------------------------------------------- for atomics

std::uint64_t load(const void *word, std::size_t bytes, Order order) {
    const InExplorer here;
    return explorer().load(word, bytes, order);
}

void store(void *word, std::size_t bytes, std::uint64_t value, Order order) {
    const InExplorer here;
    explorer().store(word, bytes, value, order);
}

std::uint64_t change(void *word, std::size_t bytes, Change change, std::uint64_t operand, Order order) {
    const InExplorer here;
    return explorer().change(word, bytes, change, operand, nullptr, order);
}

bool compare_exchange(void *word, std::size_t bytes, std::uint64_t &expected, std::uint64_t desired, Order order) {
    const InExplorer here;
    const std::uint64_t found = explorer().change(
        word, bytes, [](std::uint64_t, std::uint64_t operand) { return operand; }, desired, &expected, order);
    const bool changed = found == expected;
    expected = found;
    return changed;
}

void fence(Order order) {
    const InExplorer here;
    explorer().fence(order);
}

void copy(std::byte *to, const std::byte *from, std::size_t bytes) {
    const InExplorer here;
    Explorer &e = explorer();
    const bool loads = e.is_shared(from), stores = e.is_shared(to);
    if (!loads && !stores) {
        std::memcpy(to, from, bytes);
        return;
    }
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t offset = e.offset_of(loads ? from + done : to + done);
        const std::size_t widest = e.narrow[offset / granule] ? 4 : 8;
        const std::size_t piece = std::min(bytes - done, widest);
        if (offset % widest != 0)
            give_up("a copy that does not begin at a word");
        std::uint64_t value = 0;
        if (loads)
            value = e.load(from + done, piece, std::memory_order_relaxed);
        else
            std::memcpy(&value, from + done, piece);
        if (stores)
            e.store(to + done, piece, value, std::memory_order_relaxed);
        else
            std::memcpy(to + done, &value, piece);
        done += piece;
    }
}

// ----------------------------------------------------------------------------------- for the operating system's stand-ins

bool alive(std::int64_t process) {
    const InExplorer here;
    Explorer &e = explorer();
    e.step(process < 1 || process > e.threads || !e.fibers[static_cast<std::size_t>(process - 1)].mortal);
    const bool dead =
        process < 1 || process > e.threads || e.fibers[static_cast<std::size_t>(process - 1)].state == FiberState::dead;
    e.me().history = mix(e.me().history, dead ? 0xDEAD : 0xA11E);
    if (dead && process >= 1 && process <= e.threads) // the kernel has ended the process: all that it stored is visible
        e.me().current.join(e.fibers[static_cast<std::size_t>(process - 1)].current, e.word_count);
    if (e.tracing)
        e.trace += "  " + e.me().name + ": finds process " + std::to_string(process) + (dead ? " dead\n" : " alive\n");
    return !dead;
}

std::int64_t clock_ns() { return in_run ? explorer().now : 0; }

// The kernel compares the word and puts the thread to sleep in one step: a wake-up after a change of the word is not
// missed. It orders nothing else.
int futex_sleep(const void *word, std::uint32_t expected) {
    const InExplorer here;
    Explorer &e = explorer();
    e.step();
    const int index = e.index_of(word, sizeof expected);
    const std::size_t newest = e.words[static_cast<std::size_t>(index)].stores.size() - 1;
    const bool same = e.words[static_cast<std::size_t>(index)].stores[newest].value == expected;
    e.read(index, newest, std::memory_order_relaxed);
    if (e.tracing)
        e.trace += "  " + e.me().name + (same ? ": sleeps\n" : ": does not sleep, the gate has changed\n");
    if (!same)
        return EAGAIN;
    e.me().state = FiberState::sleeping;
    e.me().sleeps_on = e.offset_of(word);
    e.schedule();
    const bool timed_out = std::exchange(e.me().timed_out, false);
    e.me().history = mix(e.me().history, timed_out ? 0x71ED : 0x40CE);
    return timed_out ? ETIMEDOUT : 0;
}

void futex_wake(const void *word) {
    const InExplorer here;
    Explorer &e = explorer();
    e.step();
    const std::size_t offset = e.offset_of(word);
    for (int i = 0; i < e.threads; ++i)
        if (Fiber &fiber = e.fibers[static_cast<std::size_t>(i)];
            fiber.state == FiberState::sleeping && fiber.sleeps_on == offset)
            fiber.state = FiberState::runnable;
    e.me().history = mix(e.me().history, 0x3A4E);
    if (e.tracing)
        e.trace += "  " + e.me().name + ": wakes all that sleep\n";
}

// --------------------------------------------------------------------------------------------------- for the driver

const std::vector<Site> &sites() { return explorer().sites; }
bool covered(std::size_t site) { return explorer().covered[site] != 0; }
void forget_covered() { std::fill(explorer().covered.begin(), explorer().covered.end(), std::uint8_t{0}); }

Outcome explore(const std::function<void()> &body, const Search &search) {
    Explorer &e = explorer();
    Outcome outcome;
    e.search = &search;
    e.path.clear();
    e.seen.clear();
    e.tracing = search.trace;
    e.trace.clear();
    e.observed.clear();
    e.varies.fill(false);
    e.found_varying = false;
    for (const int option : search.replay)
        e.path.push_back({option, option + 1, Budget::free});
    const std::time_t end = std::time(nullptr) + search.max_seconds;
    for (std::int64_t execution = 0; execution < search.max_executions && std::time(nullptr) <= end; ++execution) {
        if (search.random) {
            e.path.clear();
            e.random = mix(search.seed, static_cast<std::uint64_t>(execution)) | 1;
            e.preemption_rate = std::uint64_t{2} << e.draw() % 5;
        }
        e.run(body);
        ++(e.end == Explorer::End::merged ? outcome.merged : outcome.executions);
        if (e.end == Explorer::End::failed) {
            outcome.failure = e.failure;
            for (const Choice &choice : e.path)
                outcome.choices.push_back(choice.option);
            while (!outcome.choices.empty() && outcome.choices.back() == 0)
                outcome.choices.pop_back();
            break;
        }
        if (e.tracing)
            break;
        if (!search.random && std::exchange(e.found_varying, false)) {
            e.path.clear();
            e.seen.clear();
            execution = outcome.executions = outcome.merged = 0;
            continue;
        }
        if (!search.random && !e.advance()) {
            outcome.complete = true;
            break;
        }
    }
    outcome.states = e.seen.states();
    outcome.trace = e.trace;
    outcome.observed = e.observed;
    return outcome;
}

} // namespace memlane::model

// Memory of a run comes from its block; see above. Not inline: the compiler would see `free` for what `new` returned.
[[gnu::noinline]] void *operator new(std::size_t bytes) {
    using namespace memlane::model;
    if (!in_run) {
        if (void *memory = std::malloc(bytes > 0 ? bytes : 1))
            return memory;
        throw std::bad_alloc();
    }
    const std::size_t at = heap_used;
    heap_used += (bytes + 15) / 16 * 16;
    if (heap_used > heap_bytes)
        give_up("a scenario that allocates too much");
    return heap + at;
}
[[gnu::noinline]] void operator delete(void *memory) noexcept {
    using namespace memlane::model;
    const auto *at = static_cast<std::byte *>(memory);
    if (at < heap || at >= heap + heap_bytes)
        std::free(memory);
}
void operator delete(void *memory, std::size_t) noexcept { operator delete(memory); }
