// A signal and a quorum whose words an input overwrites.
#pragma once

#include "fuzz/guarded_memory.hpp"
#include "fuzz/lane.hpp"
#include "fuzz/promises.hpp"
#include "sync/quorum.hpp"
#include "sync/signal.hpp"

namespace memlane::fuzz {

class SignalLane final : public Lane {
  public:
    explicit SignalLane(Input &input)
        : cell_(*reinterpret_cast<SignalCell *>(GuardedMemory::zeroed("signal", sizeof(SignalCell)))),
          quorum_(*reinterpret_cast<QuorumCell *>(GuardedMemory::zeroed("quorum", sizeof(QuorumCell)))),
          spin_(input.choose<std::int64_t>({0, 0, 0, 1000})) {
        places_.add_control(reinterpret_cast<std::byte *>(&cell_), sizeof(SignalCell), 2);
        places_.add_control(reinterpret_cast<std::byte *>(&quorum_), sizeof(QuorumCell), 2);
    }

  private:
    void call_one(std::uint8_t choice, Input &input) override {
        const std::int64_t number = input.word();
        const auto check = [&](const char *by, const WaitResult &result) {
            require(result.end != WaitEnd::reached || result.value >= number, by, "reached nothing");
            require(result.end != WaitEnd::peer_died, by, "a dead process, and none is watched");
        };
        switch (choice % 7) {
        case 0:
            return call("signal_store", [&] { signal_store(cell_, number); });
        case 1:
            return call("signal_add", [&] { signal_add(cell_, number); });
        case 2:
            return call("signal_compare_and_swap", [&] { signal_compare_and_swap(cell_, see(cell_.value), number); });
        case 3:
            return call("signal_wake", [&] { signal_wake(cell_); });
        case 4:
            return call("signal_wait",
                        [&] { check("signal_wait", signal_wait(cell_, number, deadline_ns(input), {}, spin_)); });
        case 5:
            return call("quorum_arrive", [&] { quorum_arrive(quorum_, number); });
        default:
            return call("quorum_wait",
                        [&] { check("quorum_wait", quorum_wait(quorum_, number, deadline_ns(input), {}, spin_)); });
        }
    }

    SignalCell &cell_;
    QuorumCell &quorum_;
    Spin spin_;
};

} // namespace memlane::fuzz
