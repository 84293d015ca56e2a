// Weights whose control words an input overwrites.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "fuzz/guarded_memory.hpp"
#include "fuzz/lane.hpp"
#include "fuzz/life.hpp"
#include "fuzz/promises.hpp"
#include "lanes/weights.hpp"

namespace memlane::fuzz {

class WeightsLane final : public Lane {
  public:
    explicit WeightsLane(Input &input)
        : count_(2 + static_cast<int>(input.below(max_buffers - 1))),
          stride_bytes_(input.choose<std::size_t>({64, 192, (1 << 20) + 64, (std::size_t{1} << 31) + 64})),
          control_(GuardedMemory::zeroed("weights control", sizeof(WeightsControl))),
          buffers_(GuardedMemory::zeroed("weights buffers", static_cast<std::size_t>(count_) * stride_bytes_)),
          weights_(control_, buffers_, count_, stride_bytes_, life()) {
        places_.add_control(control_, sizeof(WeightsControl), 2);
        places_.add(control_ + offsetof(WeightsControl, state), 1, max_buffers, sizeof(Word));
    }

  private:
    // The first and the last bytes of a buffer.
    std::array<Part, 2> parts() { return {{{0, content_.data(), 32}, {stride_bytes_ - 32, content_.data() + 32, 32}}}; }

    void call_one(std::uint8_t choice, Input &input) override {
        WeightsControl &control = weights_.control();
        switch (choice % 8) {
        case 0:
        case 1:
            return call("publish", [&] {
                const std::int64_t version = weights_.publish(this_process(), parts());
                require(version == -1 || (version >= 1 && version <= max_version), "publish", "a version that cannot be");
            });
        case 2:
        case 3:
            return call("try_read", [&] {
                const std::int64_t version = weights_.try_read(parts());
                require(version >= -1 && version < max_version, "try_read", "a version that cannot be");
            });
        case 4:
            return call("latest", [&] {
                const std::int64_t latest = weights_.latest();
                require(latest == 0 || (version_of(latest) >= 1 && buffer_of(latest) < count_), "latest",
                        "a buffer that the weights do not have");
            });
        case 5:
            return call("signal_wait", [&] {
                const std::int64_t until = input.word();
                const WaitResult result = signal_wait(control.latest, until, deadline_ns(input), {}, spin_);
                require(result.end != WaitEnd::reached || result.value >= until, "signal_wait", "reached nothing");
            });
        default: // as a writer that is stopped after its claim leaves a buffer
            return control.state[input.below(static_cast<std::size_t>(count_))].store(this_process(),
                                                                                      std::memory_order_relaxed);
        }
    }

    int count_;
    std::size_t stride_bytes_;
    std::byte *control_, *buffers_;
    Weights weights_;
    Spin spin_{0};
    std::array<std::byte, 64> content_{};
};

} // namespace memlane::fuzz
