// Model checks of lanes/weights.hpp. A reader copies a buffer that a writer may be overwriting: the copy reads any values
// that the memory model allows, and a torn one must be refused.

#include <array>

#include "lanes/weights.hpp"
#include "os/clock.hpp"
#include "scenario.hpp"

using namespace memlane;
using namespace memlane::model;

namespace {

constexpr std::size_t stride_bytes = 64;

struct Block {
    std::int64_t first, second;
    bool whole() const { return first == second; }
};

class SharedWeights {
  public:
    explicit SharedWeights(int buffers)
        : control_(shared_bytes(sizeof(WeightsControl))),
          buffers_(shared_bytes(static_cast<std::size_t>(buffers) * stride_bytes)),
          weights_(control_, buffers_, buffers, stride_bytes, life_) {
        name_word(&weights_.control().latest.value, "latest");
        name_word(&weights_.control().latest.gate, "gate");
        for (int buffer = 0; buffer < buffers; ++buffer) {
            name_word(&weights_.control().state[buffer], "state " + std::to_string(buffer));
            name_word(buffers_ + static_cast<std::size_t>(buffer) * stride_bytes, "buffer " + std::to_string(buffer));
        }
    }
    Weights &weights() { return weights_; }
    std::int64_t publish(std::int64_t value) {
        Block block{value, value};
        const std::array parts{Part{0, reinterpret_cast<std::byte *>(&block), sizeof block}};
        return weights_.publish(self(), parts);
    }
    // The version, as try_read returns it.
    std::int64_t read(Block &block) {
        const std::array parts{Part{0, reinterpret_cast<std::byte *>(&block), sizeof block}};
        return weights_.try_read(parts);
    }

  private:
    std::byte *control_, *buffers_;
    Life life_{-1};
    Weights weights_;
};

} // namespace

SCENARIO("a reader beside a writer gets whole versions", BOUNDS(3, 2, 0), BOUNDS(4, 4, 0)) {
    SharedWeights shared(2);
    shared.publish(101);
    start("writer", [&] {
        for (std::int64_t version = 2; version <= 4; ++version)
            require(shared.publish(100 + version) == version, "a single writer always finds a buffer");
    });
    start("reader", [&] {
        std::int64_t last = 1;
        for (int reads = 0; reads < 2; ++reads) {
            Block block{};
            const std::int64_t version = shared.read(block);
            require(version != 0, "there is a version");
            if (version < 0)
                continue;
            require(block.whole(), "a copy that is accepted is not torn");
            require(block.first == 100 + version, "a copy that is accepted is that of its version");
            require(version >= last, "versions do not go back");
            last = version;
        }
    });
    join();
    Block block{};
    require(shared.read(block) == 4 && block.whole() && block.first == 104, "the last version stays");
}

SCENARIO("the first version is seen whole or not at all", BOUNDS(8, 8, 0), BOUNDS(16, 16, 0)) {
    SharedWeights shared(2);
    start("writer", [&] { shared.publish(101); });
    start("reader", [&] {
        Block block{};
        const std::int64_t version = shared.read(block);
        require(version == 0 || version == 1, "there is one version");
        require(version == 0 || (block.whole() && block.first == 101), "the first version is whole");
    });
    join();
}

SCENARIO("a wait for the next version ends when it is published", BOUNDS(6, 5, 0), BOUNDS(16, 16, 0)) {
    SharedWeights shared(2);
    start("writer", [&] { shared.publish(101); });
    start("reader", [&] {
        Spin spin(0);
        while (signal_wait(shared.weights().control().latest, std::int64_t{1} << 8, forever_ns, {}, spin).end !=
               WaitEnd::reached) {
        }
        Block block{};
        require(shared.read(block) == 1 && block.whole(), "the awaited version can be read");
    });
    join();
}

SCENARIO("two writers and a reader: whole versions, none published twice, the latest stays", BOUNDS(2, 2, 0),
         BOUNDS(3, 3, 0)) {
    SharedWeights shared(3);
    shared.publish(1);
    std::int64_t a = 0, b = 0;
    start("writer 1", [&] { a = shared.publish(10); });
    start("writer 2", [&] { b = shared.publish(20); });
    start("reader", [&] {
        Block block{};
        const std::int64_t version = shared.read(block);
        require(version < 0 || block.whole(), "a copy that is accepted is not torn");
        require(version != 1 || block.first == 1, "a copy that is accepted is that of its version");
    });
    join();
    require(a + b == 5 && a != b, "two writers with three buffers publish versions 2 and 3");
    Block block{};
    require(shared.read(block) == 3 && block.first == (a == 3 ? 10 : 20) && block.whole(), "the latest version stays");
}

SCENARIO("two writers in turns never overwrite the latest version", BOUNDS(2, 2, 0), BOUNDS(3, 3, 0)) {
    SharedWeights shared(3);
    start("writer 1", [&] {
        shared.publish(10);
        shared.publish(11);
    });
    start("writer 2", [&] { shared.publish(20); });
    join();
    Block block{};
    require(shared.read(block) == 3 && block.whole(), "the latest version is whole");
}

SCENARIO("a writer that dies at any access costs no version and no buffer", BOUNDS(2, 2, 1), BOUNDS(3, 3, 1)) {
    SharedWeights shared(2);
    shared.publish(1);
    start("victim", [&] { shared.publish(10); }, Mortal::yes);
    start("writer", [&] {
        // While the victim lives, it may hold the only buffer that is not the latest.
        for (int attempt = 0; attempt < 2; ++attempt)
            shared.publish(20);
    });
    start("reader", [&] {
        Block block{};
        const std::int64_t version = shared.read(block);
        require(version < 0 || block.whole(), "a copy that is accepted is not torn");
    });
    join();
    Block block{};
    require(shared.read(block) > 0 && block.whole(), "the latest version is whole");
    const std::int64_t before = version_of(shared.weights().latest());
    require(shared.publish(30) == before + 1, "the next writer finds a buffer");
    require(shared.read(block) == before + 1 && block.first == 30, "and readers its version");
}
