#include "lanes/weights.hpp"

#include <array>
#include <string>

#include "sync/copy.hpp"

namespace memlane {

namespace {

// Publications for which writers use all buffers in turn after they overtook a reader. So a reader beside a writer that
// never pauses copies once more in at most one of so many publications.
constexpr std::int64_t rotated_versions = 256;

} // namespace

Weights::Weights(std::byte *control, std::byte *buffers, int count, std::size_t stride_bytes, Life &life)
    : control_(reinterpret_cast<WeightsControl *>(control)), buffers_(buffers), count_(count), stride_bytes_(stride_bytes),
      life_(&life) {}

std::int64_t Weights::latest() const {
    // PAIR publish/see, partner: Weights::publish. The content of the buffer is loaded after `latest`.
    const std::int64_t latest = see(control_->latest.value);
    const bool possible = version_of(latest) >= 1 && version_of(latest) < max_version && buffer_of(latest) < count_;
    if (latest != 0 && !possible) [[unlikely]]
        throw StrayWord("expected the latest version in one of " + std::to_string(count_) + " buffers, found version " +
                        std::to_string(version_of(latest)) + " in buffer " + std::to_string(buffer_of(latest)));
    return latest;
}

bool Weights::can_be_claimed(int index, std::int64_t state) const {
    if (state > 0 && life_->alive(state))
        return false;
    // Loaded after `claim` has seen the writer's mark, or its death: if this buffer is not the latest now, it never will be
    // again before it is claimed. Loaded earlier, a buffer that was published in between could be claimed and overwritten
    // while it is the latest.
    const std::int64_t latest = see(control_->latest.value);
    return latest == 0 || buffer_of(latest) != index;
}

int Weights::claim(std::int64_t process) {
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
        const std::int64_t latest = this->latest();
        const bool rotate = version_of(latest) < control_->rotate_until.load(std::memory_order_relaxed);
        std::array<std::int64_t, max_buffers> states;
        int chosen = -1;
        std::int64_t chosen_age = 0;
        for (int index = 0; index < count_; ++index) {
            // PAIR publish/see, partner: Weights::publish. `latest` is loaded after the mark of its buffer.
            const std::int64_t state = states[static_cast<std::size_t>(index)] = see(control_->state[index]);
            if (!can_be_claimed(index, state))
                continue;
            // Grows with the version. Not -state, which overflows for the smallest integer, if a stray process stored it.
            const std::int64_t age = state < 0 ? ~state : -1;
            // The oldest version has the fewest readers left; the newest is still in the cache.
            if (chosen < 0 || (rotate ? age < chosen_age : age > chosen_age)) {
                chosen = index;
                chosen_age = age;
            }
        }
        // PAIR claim/unchanged, partner: Weights::try_read. The claim comes before the stores that overwrite the buffer:
        // otherwise a reader could accept a copy that has some of them.
        if (chosen >= 0) {
            if (publish_if(control_->state[chosen], states[static_cast<std::size_t>(chosen)], process))
                return chosen;
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
    return -1;
}

std::int64_t Weights::publish(std::int64_t process, std::span<const Part> parts) {
    const int index = claim(process);
    if (index < 0)
        return -1;
    for (const Part &part : parts)
        copy_bytes(buffer(index) + part.offset, part.data, part.bytes);
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
        const std::int64_t latest = see(control_->latest.value);
        const std::int64_t version = version_of(latest) + 1;
        if (version < 1 || version > max_version) [[unlikely]]
            break; // changed since the claim, by no writer
        // PAIR publish/see, partner: Weights::latest. The buffer's content is stored before `latest`: otherwise a reader
        // could load what the buffer held before.
        if (!signal_compare_and_swap(control_->latest, latest, version << 8 | index))
            continue;
        // PAIR publish/see, partner: Weights::claim. A process that sees the mark sees this `latest` or a
        // later one.
        memlane::publish(control_->state[index], -version);
        return version;
    }
    memlane::publish(control_->state[index], 0); // nobody reads the buffer: the next writer may have it
    latest(); // throws if that was the cause
    return -1;
}

std::int64_t Weights::try_read(std::span<const Part> parts) {
    const std::int64_t latest = this->latest();
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
    // A hint: a writer that sees it late only overtakes this reader once more.
    control_->rotate_until.store(version_of(see(control_->latest.value)) + rotated_versions, std::memory_order_relaxed);
    return -1;
}

} // namespace memlane
