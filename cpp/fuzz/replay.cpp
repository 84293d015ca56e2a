#include "fuzz/replay_lane.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    memlane::fuzz::Input input(data, size);
    memlane::fuzz::ReplayLane lane(input);
    while (!input.empty())
        lane.act(input);
    return 0;
}
