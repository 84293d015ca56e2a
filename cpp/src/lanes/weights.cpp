#include "lanes/weights.hpp"

#include <array>
#include <limits>

#include "os/process.hpp"
#include "sync/copy.hpp"

namespace memlane {

Weights::Weights(std::byte *control, std::byte *buffers, int count, std::size_t stride_bytes)
    : control_(reinterpret_cast<WeightsControl *>(control)), buffers_(buffers), count_(count), stride_bytes_(stride_bytes) {}

bool Weights::can_be_claimed(int index, std::int64_t state) const {
    if (state > 0 && process_alive(state))
        return false;
    // Loaded after the writer's death or mark was seen (PAIR publish/see, partner: Weights::publish): if this buffer is
    // not the latest now, it never will be again before it is claimed. Loaded earlier, a buffer that was published in
    // between could be claimed and overwritten while it is the latest.
    const std::int64_t latest = see(control_->latest.value);
    return latest == 0 || buffer_of(latest) != index;
}

int Weights::claim(std::int64_t process) {
    for (;;) {
        const std::int64_t latest = see(control_->latest.value);
        std::array<std::int64_t, max_buffers> states;
        int oldest = -1;
        std::int64_t age = std::numeric_limits<std::int64_t>::max();
        for (int index = 0; index < count_; ++index) {
            const std::int64_t state = states[static_cast<std::size_t>(index)] = see(control_->state[index]);
            if (!can_be_claimed(index, state))
                continue;
            const std::int64_t version = state < 0 ? -state : 0; // the oldest version has the fewest readers left
            if (version < age) {
                age = version;
                oldest = index;
            }
        }
        // PAIR claim/unchanged, partner: Weights::read. The claim comes before the stores that overwrite the buffer:
        // otherwise a reader could accept a copy that has some of them.
        if (oldest >= 0) {
            if (publish_if(control_->state[oldest], states[static_cast<std::size_t>(oldest)], process))
                return oldest;
            continue;
        }
        // Buffers that are released and claimed during the search can each seem claimed in turn. Only if no word
        // changed meanwhile were all of them claimed at the same time.
        bool moved = see(control_->latest.value) != latest;
        for (int index = 0; index < count_; ++index)
            moved |= see(control_->state[index]) != states[static_cast<std::size_t>(index)];
        if (!moved)
            return -1;
    }
}

std::int64_t Weights::publish(std::int64_t process, std::span<const Part> parts) {
    const int index = claim(process);
    if (index < 0)
        return -1;
    for (const Part &part : parts)
        copy_bytes(buffer(index) + part.offset, part.data, part.bytes);
    for (;;) {
        const std::int64_t latest = see(control_->latest.value);
        const std::int64_t version = version_of(latest) + 1;
        // PAIR publish/see, partner: Weights::read. The buffer's content is stored before `latest`: otherwise a reader
        // could load what the buffer held before.
        if (!signal_compare_and_swap(control_->latest, latest, version << 8 | index))
            continue;
        // PAIR publish/see, partner: Weights::can_be_claimed. A process that sees the mark sees this `latest` or a
        // later one.
        memlane::publish(control_->state[index], -version);
        return version;
    }
}

std::int64_t Weights::read(std::span<const Part> parts) {
    for (;;) {
        // PAIR publish/see, partner: Weights::publish. The buffer's content is loaded after `latest`.
        const std::int64_t latest = see(control_->latest.value);
        if (latest == 0)
            return 0;
        const int index = buffer_of(latest);
        for (const Part &part : parts)
            copy_bytes(part.data, buffer(index) + part.offset, part.bytes);
        // PAIR claim/unchanged, partner: Weights::claim. No writer has claimed the buffer if it still bears the mark of
        // its version; or, if its writer died or was delayed before the mark, if it still is the latest, which no writer
        // may claim.
        if (unchanged(control_->state[index], -version_of(latest)) || unchanged(control_->latest.value, latest))
            return version_of(latest);
        control_->retries.fetch_add(1, std::memory_order_relaxed);
    }
}

} // namespace memlane
