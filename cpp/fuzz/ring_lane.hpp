// A ring whose control words and slot heads an input overwrites.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz/guarded_memory.hpp"
#include "fuzz/lane.hpp"
#include "fuzz/life.hpp"
#include "fuzz/promises.hpp"
#include "lanes/ring.hpp"

namespace memlane::fuzz {

class RingLane final : public Lane {
  public:
    explicit RingLane(Input &input)
        : count_(input.choose({1, 2, 3, 4, 7, 16, 64, 256})),
          // A slot without content, small ones, and one whose offsets need more than 32 bits.
          stride_bytes_(input.choose<std::size_t>({64, 128, 4160, (1 << 20) + 64, (std::size_t{1} << 31) + 64})),
          control_(GuardedMemory::zeroed("ring control", sizeof(RingControl))),
          slots_(GuardedMemory::zeroed("ring slots", static_cast<std::size_t>(count_) * stride_bytes_)),
          ring_(control_, slots_, count_, stride_bytes_, std::max<std::int64_t>(1, count_ - input.byte() % 4),
                (input.byte() & 1) != 0 ? Overflow::block : Overflow::drop_oldest, life()) {
        places_.add_control(control_, offsetof(RingControl, writers), 4);
        // The wait queues, all of whose words count.
        places_.add(control_ + offsetof(RingControl, writers), 2 * sizeof(WaitQueue) / sizeof(Word));
        places_.add(slots_, sizeof(SlotHead) / sizeof(Word), static_cast<std::size_t>(count_), stride_bytes_);
    }

  private:
    void call_one(std::uint8_t choice, Input &input) override {
        switch (choice % 12) {
        case 0:
        case 1:
            return call("try_claim", [&] { hold("try_claim", claimed_, ring_.try_claim(this_process())); });
        case 2:
            return call("wait_claim", [&] {
                const WaitResult result = ring_.wait_claim(this_process(), deadline_ns(input), {}, spin_);
                hold("wait_claim", claimed_, result.end == WaitEnd::reached ? result.value : -1);
            });
        case 3:
        case 4:
            return end(claimed_, input, [&](std::int64_t slot) { call("commit", [&] { ring_.commit(slot); }); });
        case 5:
            return end(claimed_, input, [&](std::int64_t slot) { call("abandon", [&] { ring_.abandon(slot); }); });
        case 6:
            return call("try_take", [&] { hold("try_take", taken_, ring_.try_take(this_process())); });
        case 7:
            return call("wait_take", [&] {
                const WaitResult result = ring_.wait_take(this_process(), deadline_ns(input), {}, spin_);
                hold("wait_take", taken_, result.end == WaitEnd::reached ? result.value : -1);
            });
        case 8:
            return end(taken_, input, [&](std::int64_t slot) { call("release", [&] { ring_.release(slot); }); });
        case 9:
            return end(taken_, input, [&](std::int64_t slot) { call("give_back", [&] { ring_.give_back(slot); }); });
        case 10:
            return call("reap", [&] {
                const std::int64_t reaped = ring_.reap();
                require(reaped >= 0 && reaped <= 2 * count_, "reap", "more slots than the ring has");
            });
        default:
            return call("unread", [&] {
                const std::int64_t unread = ring_.unread();
                require(unread >= 0 && unread <= count_, "unread", "more slots than the ring has");
            });
        }
    }

    // A slot that the ring has handed out: the caller may use all of its bytes.
    void hold(const char *by, std::vector<std::int64_t> &held, std::int64_t slot) {
        if (slot == -1)
            return;
        require(slot >= 0 && slot < count_, by, "a slot that the ring does not have");
        held.push_back(slot);
        std::byte *payload = reinterpret_cast<std::byte *>(&ring_.head(slot)) + sizeof(SlotHead);
        if (const std::size_t bytes = stride_bytes_ - sizeof(SlotHead); bytes > 0) {
            std::memset(payload, 0x5A, std::min<std::size_t>(bytes, 64));
            payload[bytes - 1] = std::byte{0x5A};
        }
    }
    template <class End> static void end(std::vector<std::int64_t> &held, Input &input, End how) {
        if (held.empty())
            return;
        const auto at = held.begin() + static_cast<std::ptrdiff_t>(input.byte() % held.size());
        const std::int64_t slot = *at;
        held.erase(at);
        how(slot);
    }

    std::int64_t count_;
    std::size_t stride_bytes_;
    std::byte *control_, *slots_;
    Ring ring_;
    Spin spin_{0};
    std::vector<std::int64_t> claimed_, taken_;
};

} // namespace memlane::fuzz
