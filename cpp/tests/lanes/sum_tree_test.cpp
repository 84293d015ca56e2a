#include "lanes/sum_tree.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <list>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "support/check.hpp"
#include "support/processes.hpp"
#include "support/single_steps.hpp"

using namespace memlane;

namespace {

// Priorities in these tests are integers, so every sum is exact and is compared exactly.
constexpr int max_leaves = 5000;

struct alignas(64) Memory {
    std::array<std::byte, 64 * 1024> bytes;

    SumTree tree(std::int64_t count) {
        CHECK(SumTree::bytes(count) <= sizeof bytes);
        return {bytes.data(), count};
    }
};

std::int64_t find(const SumTree &tree, double at) {
    std::int64_t leaf = -2;
    tree.find({&at, 1}, {&leaf, 1});
    return leaf;
}

double sum_of_leaves(const SumTree &tree) {
    double sum = 0;
    for (std::int64_t leaf = 0; leaf < tree.count(); ++leaf)
        sum += static_cast<double>(tree.priority(leaf));
    return sum;
}

// The total is that of the leaves, and every leaf with a priority is found at the first prefix sum of its range and
// right before the end of its range.
void expect_consistent(const SumTree &tree) {
    CHECK_EQ(tree.total(), sum_of_leaves(tree));
    std::vector<double> at;
    std::vector<std::int64_t> expected;
    double begin = 0;
    for (std::int64_t leaf = 0; leaf < tree.count(); ++leaf) {
        const auto priority = static_cast<double>(tree.priority(leaf));
        if (!(priority > 0))
            continue;
        at.insert(at.end(), {begin, begin + priority - 0.25});
        expected.insert(expected.end(), {leaf, leaf});
        begin += priority;
    }
    std::vector<std::int64_t> found(at.size(), -2);
    tree.find(at, found);
    CHECK(found == expected);
}

} // namespace

// ------------------------------------------------------------------------------------------------------ one process

TEST("in a sum tree of any size every prefix sum finds its leaf") {
    Rng rng(1);
    for (const std::int64_t count : {1, 2, 15, 16, 17, 31, 255, 256, 257, 272, 273, 4096, 4097, max_leaves}) {
        const auto memory = std::make_unique<Memory>();
        SumTree tree = memory->tree(count);
        CHECK_EQ(tree.total(), 0);
        CHECK_EQ(find(tree, 0), -1);
        std::vector<std::int64_t> leaves(static_cast<std::size_t>(count));
        std::iota(leaves.begin(), leaves.end(), 0);
        for (const std::int64_t leaf : leaves)
            tree.replace(leaf, 7, static_cast<float>(std::max<std::int64_t>(0, rng.between(-3, 9))));
        tree.refresh(leaves);
        expect_consistent(tree);
    }
}

TEST("a sum tree that is refreshed where it changed equals a plain model of it") {
    Rng rng(2);
    const auto memory = std::make_unique<Memory>();
    constexpr std::int64_t count = 700;
    SumTree tree = memory->tree(count);
    std::array<float, count> model{};
    for (int round = 0; round < check::times(1200); ++round) {
        std::vector<std::int64_t> changed;
        // Sometimes a few leaves, sometimes more than a level has nodes.
        for (std::int64_t changes = rng.between(0, round % 2 == 0 ? 4 : 90); changes > 0; --changes) {
            changed.push_back(rng.between(0, count - 1));
            const auto priority = static_cast<float>(rng.between(0, 1000));
            CHECK(tree.set(changed.back(), 0, priority));
            model[static_cast<std::size_t>(changed.back())] = priority;
        }
        tree.refresh(changed);
        for (std::int64_t leaf = 0; leaf < count; ++leaf)
            CHECK_EQ(tree.priority(leaf), model[static_cast<std::size_t>(leaf)]);
        CHECK_EQ(tree.total(), std::accumulate(model.begin(), model.end(), 0.0));
        if (round % 50 == 0)
            expect_consistent(tree);
    }
}

TEST("a priority is set only for the generation that it belongs to") {
    const auto memory = std::make_unique<Memory>();
    SumTree tree = memory->tree(20);
    tree.replace(3, 5, 2);
    CHECK(!tree.set(3, 4, 9));
    CHECK(!tree.set(3, 6, 9));
    CHECK_EQ(tree.priority(3), 2.0F);
    CHECK(tree.set(3, 5, 7));
    CHECK_EQ(tree.priority(3), 7.0F);
    CHECK_EQ(tree.generation(3), 5);
    tree.replace(3, 0xFFFFFFFF, 1);
    CHECK_EQ(tree.generation(3), 0xFFFFFFFF);
    CHECK(!tree.set(3, 0x7FFFFFFF, 9));
    CHECK(tree.set(3, 0xFFFFFFFF, 0));
    CHECK_EQ(tree.generation(3), 0xFFFFFFFF);
    CHECK_EQ(tree.priority(3), 0.0F);
}

TEST("a prefix sum past the end finds the last leaf with a priority above 0") {
    const auto memory = std::make_unique<Memory>();
    SumTree tree = memory->tree(600);
    const std::int64_t leaves[] = {5, 300};
    for (const std::int64_t leaf : leaves)
        tree.replace(leaf, 0, 3);
    tree.refresh(leaves);
    CHECK_EQ(find(tree, 6), 300);
    CHECK_EQ(find(tree, 1e9), 300);
    CHECK_EQ(find(tree, -1), 5);
}

TEST("a search below outdated nodes finds a leaf with priority 0, and all nodes are right after refresh_all") {
    const auto memory = std::make_unique<Memory>();
    SumTree tree = memory->tree(600);
    const std::int64_t leaf = 300;
    tree.replace(leaf, 0, 3);
    tree.refresh({&leaf, 1});
    tree.replace(leaf, 1, 0); // by a process that died before its refresh
    tree.replace(17, 0, 5);
    CHECK_EQ(tree.total(), 3.0);
    CHECK_EQ(find(tree, 1), -1);
    tree.refresh_all();
    expect_consistent(tree);
}

TEST("small priorities beside large ones are not lost however often the large ones change") {
    const auto memory = std::make_unique<Memory>();
    SumTree tree = memory->tree(32);
    const std::int64_t small = 20;
    tree.replace(small, 0, 1e-6F);
    tree.refresh({&small, 1});
    for (std::int64_t i = 0; i < check::times(8000); ++i) {
        const std::int64_t leaf = i % 16;
        tree.replace(leaf, 0, i % 3 == 0 ? 1e6F : 0.1F);
        tree.refresh({&leaf, 1});
    }
    for (std::int64_t leaf = 0; leaf < 16; ++leaf) {
        tree.replace(leaf, 0, 0);
        tree.refresh({&leaf, 1});
    }
    CHECK_EQ(tree.total(), static_cast<double>(1e-6F));
    CHECK_EQ(find(tree, 0), small);
}

// Regression: in a file whose padding of a level was damaged, `find` used to continue from a node that does not exist
// and read outside of the tree (here: into a guard page). SumTree::find now ignores a child at or beyond the count of
// its level.
TEST("damaged nodes never lead outside of the tree") {
    constexpr std::int64_t count = 4097; // 4112 leaves, 272, 32 and 16 nodes
    const std::size_t bytes = SumTree::bytes(count);
    const std::size_t page = 4096, mapped = (bytes + page - 1) / page * page;
    auto *begin = static_cast<std::byte *>(
        mmap(nullptr, mapped + (1 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    CHECK_EQ(mprotect(begin, mapped, PROT_READ | PROT_WRITE), 0);
    std::byte *memory = begin + mapped - bytes;
    SumTree tree(memory, count);
    tree.replace(3, 0, 1);
    tree.refresh_all();
    const float damaged = 1e9F;
    std::memcpy(memory + bytes - sizeof damaged, &damaged, sizeof damaged); // the last word of the padding of the top level
    for (const double at : {0.0, 0.5, 1.5, 1e6, 1e9}) {
        const std::int64_t leaf = find(tree, at);
        CHECK(leaf >= -1 && leaf < count);
    }
}

// ------------------------------------------------------------------------------------------ killed, stopped anywhere

#if defined(MEMLANE_STEPPED)

// A process is stopped in its refresh while another changes a neighbour and refreshes; then it continues.
//   all nodes are the sums of their children   acceptable
//   a sum from before the other's change       FORBIDDEN
TEST("a process stopped anywhere in a refresh leaves no outdated sum") {
    Shared<Memory> memory;
    constexpr std::int64_t count = 300;
    SumTree tree = memory->tree(count);
    const std::int64_t theirs = 33, ours = 34;
    const auto set_if_drawable = [&](std::int64_t leaf, float priority) {
        tree.replace(leaf, 1, priority);
        tree.refresh({&leaf, 1});
    };
    const auto prepare = [&] {
        memory->bytes = {};
        set_if_drawable(200, 100);
    };
    const auto body = [&](std::int64_t) { set_if_drawable(theirs, 3); };
    prepare();
    body(0);
    prepare();
    int length = 0;
    for (SteppedChild child(body); child.step();)
        ++length;
    for (int at = 0; at <= length; at += 7) { // each sum takes many more instructions than that
        prepare();
        SteppedChild child(body, at);
        set_if_drawable(ours, 5);
        CHECK_EQ(child.finish(), 0);
        CHECK_EQ(tree.total(), 108.0);
        CHECK_EQ(find(tree, 0), theirs);
        CHECK_EQ(find(tree, 3), ours);
        CHECK_EQ(find(tree, 8), 200);
    }
}

TEST("sums that a process killed at any change leaves outdated are corrected by the refresh of a neighbour") {
    Shared<Memory> memory;
    SumTree tree = memory->tree(300);
    const std::int64_t theirs = 33, ours = 34;
    after_every_change(
        *memory, [&] { memory->bytes = {}; },
        [&](std::int64_t) {
            tree.replace(theirs, 1, 3);
            tree.refresh({&theirs, 1});
        },
        [&](SteppedChild &child, int) {
            child.kill();
            CHECK(tree.total() == 0 || tree.total() == 3);
            const std::int64_t found = find(tree, 0);
            CHECK(found == -1 || found == theirs);
            tree.replace(ours, 1, 5);
            tree.refresh({&ours, 1});
            expect_consistent(tree);
        });
}

#endif

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: two parties change two leaves of the same node at the same moment, and each refreshes once.
//   the nodes are the sums of their children               acceptable
//   a sum of the slower party without the other's change   FORBIDDEN
struct Duel {
    static constexpr int rounds = check::slowdown == 1 ? 40'000 : check::times(16'000);
    static constexpr std::int64_t count = 300;
    Memory memory;
    SpinBarrier<2> before, after, checked;

    void change_and_refresh(SumTree tree, int party) {
        Rng rng(static_cast<std::uint64_t>(party));
        for (int round = 0; round < rounds; ++round) {
            before.arrive_and_wait();
            const std::int64_t base = round % 18 * 16;
            const std::int64_t leaves[] = {base + 2 * rng.between(0, 7) + party};
            tree.set(leaves[0], 0, static_cast<float>(rng.between(0, 100)));
            tree.refresh(leaves);
            after.arrive_and_wait();
            if (party == 0)
                CHECK_EQ(tree.total(), sum_of_leaves(tree));
            checked.arrive_and_wait();
        }
    }
};

} // namespace

TEST("two threads that refresh the same nodes at once leave sums with both changes") {
    const auto duel = std::make_unique<Duel>();
    SumTree tree = duel->memory.tree(Duel::count);
    std::thread other([&] { duel->change_and_refresh(tree, 1); });
    duel->change_and_refresh(tree, 0);
    other.join();
    expect_consistent(tree);
}

TEST("two processes that refresh the same nodes at once leave sums with both changes") {
    Shared<Duel> duel;
    SumTree tree = duel->memory.tree(Duel::count);
    Child other([&] { duel->change_and_refresh(tree, 1); });
    duel->change_and_refresh(tree, 0);
    CHECK_EQ(other.join(), 0);
    expect_consistent(tree);
}

// Race: four processes change leaves and refresh at random, two others search all the time.
//   a search finds a leaf or none; in the end the tree is consistent   acceptable
TEST("several processes that change, refresh and search leave a consistent tree") {
    Shared<Memory> memory;
    SumTree tree = memory->tree(max_leaves);
    Shared<std::atomic<int>> writing;
    *writing = 4;
    std::list<Child> children;
    for (std::uint64_t party = 0; party < 4; ++party)
        children.emplace_back([&, party] {
            Rng rng(party);
            for (int round = 0; round < (check::slowdown == 1 ? 5000 : check::times(1000)); ++round) {
                std::vector<std::int64_t> changed;
                for (std::int64_t changes = rng.between(1, 40); changes > 0; --changes) {
                    changed.push_back(rng.between(0, max_leaves - 1));
                    tree.set(changed.back(), 0, static_cast<float>(rng.between(0, 3)));
                }
                tree.refresh(changed);
            }
            --*writing;
        });
    for (std::uint64_t party = 0; party < 2; ++party)
        children.emplace_back([&, party] {
            Rng rng(10 + party);
            std::array<double, 100> at;
            std::array<std::int64_t, 100> found;
            while (*writing > 0) {
                for (double &each : at)
                    each = tree.total() * static_cast<double>(rng.between(0, 999)) / 1000;
                tree.find(at, found);
                CHECK(std::ranges::all_of(found, [](std::int64_t leaf) { return leaf >= -1 && leaf < max_leaves; }));
            }
        });
    for (Child &child : children)
        CHECK_EQ(child.join(), 0);
    expect_consistent(tree);
}
