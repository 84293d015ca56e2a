// Weights: a writer or a reader dies or is stopped at any point of a call. The lines are those at the top of weights.hpp.

#include "lanes/weights.hpp"

#include <array>
#include <cstring>
#include <string>

#include "support/check.hpp"
#include "support/fault_points.hpp"
#include "support/processes.hpp"
#include "support/stamped_block.hpp"

using namespace memlane;
using namespace fault_points;

namespace {

using Block = StampedBlock<1200>; // 9,600 bytes: copies of several pieces

// In three parts that are not in the order of their offsets, like the tensors of a state dict.
std::array<Part, 3> parts_of(Block &block) {
    const auto part = [&](std::size_t begin, std::size_t end) {
        return Part{begin * 8, block.bytes() + begin * 8, (end - begin) * 8};
    };
    return {part(600, block.word.size()), part(0, 3), part(3, 600)};
}

struct Memory {
    WeightsControl control;
    alignas(64) Block buffer[3];
};

class TestedWeights {
  public:
    explicit TestedWeights(int buffers) : buffers_(buffers) {}

    void prepare() const {
        std::memset(static_cast<void *>(&*memory_), 0, sizeof(Memory));
        CHECK_EQ(publish(this_process(), 1), 1);
    }
    WeightsControl &control() const { return memory_->control; }
    Weights weights() const {
        return {reinterpret_cast<std::byte *>(&memory_->control), reinterpret_cast<std::byte *>(memory_->buffer), buffers_,
                sizeof(Block), life()};
    }
    std::int64_t publish(std::int64_t process, std::int64_t stamp) const {
        Block block = Block::of(stamp);
        return weights().publish(process, parts_of(block));
    }
    // The version, -1 if a writer overtook the copy; `stamp` is that of the copy.
    std::int64_t try_read(std::int64_t &stamp) const {
        Block block{};
        const std::int64_t version = weights().try_read(parts_of(block));
        stamp = block.stamp();
        return version;
    }
    std::string seen() const {
        std::int64_t claimed = 0;
        for (int i = 0; i < buffers_; ++i)
            claimed += see(control().state[i]) > 0;
        return listed({{"version", version_of(see(control().latest.value))}, {"claimed", claimed}});
    }
    // The others go on: one reads, and one publishes as often as there are buffers, and reads again each time.
    std::string recover() const {
        std::int64_t stamp = 0, version = try_read(stamp);
        const std::string text = "read version " + std::to_string(version) + " with stamp " + std::to_string(stamp);
        for (std::int64_t next = 10; next < 10 + buffers_; ++next) {
            CHECK_EQ(publish(this_process(), next), ++version);
            CHECK_EQ(try_read(stamp), version);
            CHECK_EQ(stamp, next);
        }
        return text;
    }

  private:
    int buffers_;
    Shared<Memory> memory_;
};

} // namespace

TEST("a writer of weights that dies at any point: the version before or its own, and the next writer has every buffer") {
    for (const int buffers : {2, 3}) {
        const TestedWeights tested(buffers);
        Table table;
        die_at_every_point(
            buffers == 2 ? "publish, 2 buffers" : "publish, 3 buffers", [&] { tested.prepare(); },
            [&](std::int64_t me) { CHECK_EQ(tested.publish(me, 2), 2); },
            [&](Child &) {
                std::string seen = tested.seen();
                table.add(std::move(seen), tested.recover());
            });
        CHECK_TABLE(table, //
                    {"version 1", "read version 1 with stamp 1"}, {"version 1, claimed 1", "read version 1 with stamp 1"},
                    {"version 2, claimed 1", "read version 2 with stamp 2"}, {"version 2", "read version 2 with stamp 2"});
    }
}

TEST("two writers of weights that die one after the other at any points leave a whole version and every buffer") {
    const TestedWeights tested(2);
    die_at_every_pair(
        "publish, then publish", [&] { tested.prepare(); }, [&](std::int64_t me) { tested.publish(me, 2); },
        [&](std::int64_t me) { CHECK(tested.publish(me, 3) > 1); },
        [&] {
            std::int64_t stamp = 0;
            CHECK(tested.try_read(stamp) >= 1);
            CHECK(stamp >= 1 && stamp <= 3);
            tested.recover();
        });
}

TEST("a reader of weights that dies at any point changes nothing for the others") {
    const TestedWeights tested(2);
    Table table;
    die_at_every_point(
        "read", [&] { tested.prepare(); },
        [&](std::int64_t) {
            std::int64_t stamp = 0;
            CHECK_EQ(tested.try_read(stamp), 1);
        },
        [&](Child &) {
            std::string seen = tested.seen();
            table.add(std::move(seen), tested.recover());
        });
    CHECK_TABLE(table, {"version 1", "read version 1 with stamp 1"});
}

TEST("a reader of weights that is stopped at any point gets a whole version or is told to retry") {
    for (const int buffers : {2, 3})
        for (const int publications : {1, 2, 3}) {
            const TestedWeights tested(buffers);
            Shared<Word> overtaken;
            const std::string name =
                "read beside " + std::to_string(publications) + " publications, " + std::to_string(buffers) + " buffers";
            stop_at_every_point(
                name.c_str(), [&] { tested.prepare(); },
                [&](std::int64_t) {
                    std::int64_t stamp = 0;
                    const std::int64_t version = tested.try_read(stamp);
                    CHECK(version == -1 || version == stamp); // never torn, never of another version
                    if (version == -1)
                        static_cast<std::atomic<std::int64_t> &>(*overtaken).fetch_add(1); // no fault point
                },
                [&](Child &) {
                    for (int i = 0; i < publications; ++i)
                        CHECK_EQ(tested.publish(this_process(), 2 + i), 2 + i);
                },
                [&] {});
            // One publication goes into another buffer than the one that is read; from two on, its buffer is overwritten.
            CHECK_EQ(see(*overtaken) > 0, publications > 1);
        }
}

TEST("a writer of weights that is stopped at any point holds up no other, and its version is whole when it goes on") {
    const TestedWeights tested(3);
    Shared<Word> published;
    stop_at_every_point(
        "publish beside a writer and a reader", [&] { tested.prepare(); },
        [&](std::int64_t me) {
            const std::int64_t version = tested.publish(me, 100);
            CHECK(version >= 2);
            static_cast<std::atomic<std::int64_t> &>(*published) = version; // no fault point
        },
        [&](Child &) {
            for (int i = 0; i < 3; ++i) {
                std::int64_t stamp = 0;
                const std::int64_t version = tested.publish(this_process(), 10 + i);
                CHECK(version > 1);
                CHECK_EQ(tested.try_read(stamp), version);
                CHECK_EQ(stamp, 10 + i);
            }
        },
        [&] {
            std::int64_t stamp = 0;
            const std::int64_t version = tested.try_read(stamp);
            CHECK_EQ(version, 5); // four publications after the first, each with a version of its own
            CHECK_EQ(stamp, see(*published) == 5 ? 100 : 12);
        });
    stop_at_every_point(
        "publish beside a writer and a reader, killed", [&] { tested.prepare(); },
        [&](std::int64_t me) { tested.publish(me, 100); },
        [&](Child &) {
            for (int i = 0; i < 3; ++i)
                CHECK(tested.publish(this_process(), 10 + i) > 1);
        },
        [&] { tested.recover(); }, Then::kill);
}
