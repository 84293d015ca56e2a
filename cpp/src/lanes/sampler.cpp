#include "lanes/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sync/copy.hpp"
#include "sync/pool.hpp"
#include "sync/prefetch.hpp"

namespace memlane {

namespace {

// Linked rows are prefetched one link at a time: a row must be in the cache before its link to the next row can be
// read. So each link of a row is prefetched `rows_between` rows after the one before, for at most `max_stages` links.
// Three steps took 1.6 ms for 4096 rows when only the first row was prefetched; 64 stacks of 4 frames of 84 x 84 bytes
// took 145 instead of 131 us when only the rows after it were.
constexpr std::size_t rows_between = 8;
constexpr std::size_t max_stages = 8;
// Draws before all rows are scanned. If nine of ten rows cannot be drawn, a thousand draws all fail once in 10^45
// times.
constexpr int max_draws = 1000;

template <class T> T load(const std::byte *from) {
    T value;
    copy_bytes(reinterpret_cast<std::byte *>(&value), from, sizeof value);
    return value;
}

template <class T> void store(std::byte *row, std::int64_t offset, T value) {
    if (offset >= 0)
        std::memcpy(row + offset, &value, sizeof value);
}

} // namespace

Sampler::Sampler(Replay &replay, SampleSpec spec, Rng &rng)
    : replay_(replay), spec_(std::move(spec)), rng_(rng),
      linked_(spec_.steps > 0 || std::any_of(spec_.copies.begin(), spec_.copies.end(),
                                             [](const FieldCopy &copy) { return copy.from_next || copy.stack > 1; })),
      plain_(!linked_ && spec_.copies.size() == 1 && spec_.length == 1 && spec_.version < 0) {}

// ----------------------------------------------------------------------------------------------------- one batch row

// The row with this sequence number. Keeps the addresses, so that the division for the slot is done once.
Sampler::Row Sampler::row(std::int64_t sequence) const {
    const std::int64_t slot = replay_.slot_of(sequence);
    return {sequence, &replay_.head(slot), replay_.payload(slot)};
}

// The i-th drawn row. If the slot does not hold a row that can be drawn, its sequence number is -1.
Sampler::Row Sampler::drawn(std::size_t i) const {
    const std::int64_t slot = slots_[i];
    Row row{sequences_[i], &replay_.head(slot), replay_.payload(slot)};
    if (row.sequence == 0) {
        const std::int64_t word = see(row.head->state);
        row.sequence = row_state(word) == RowState::complete ? row_detail(word) : -1;
    }
    return row;
}

// Whether the row is still stored; if so, its state is added to the chain, to be checked again after the copy.
bool Sampler::add_to_chain(const Row &row, bool tails, Chain &chain) const {
    const std::int64_t word = see(row.head->state); // PAIR publish/see, partner: Replay::add
    if (word != row_word(RowState::complete, row.sequence) && !(tails && word == row_word(RowState::tail, row.sequence)))
        return false;
    chain.push_back({row.head, word});
    return true;
}

bool Sampler::flag(const Row &row, std::size_t field) const {
    return load<std::uint8_t>(row.payload + replay_.shape().fields[field].offset) != 0;
}

// Copies a field, with the frames before it if it is stacked. False if one of those rows is no longer stored.
//
// The links are followed first and the oldest frame is copied first: most rows of a stream are behind each other in
// memory, and the processor prefetches forwards. Copied newest first, 64 transitions of 4 frames of 84 x 84 bytes took
// 165 instead of 145 us.
bool Sampler::copy_field(const FieldCopy &copy, const Row &row, std::byte *to, Chain &chain) const {
    const std::size_t begin = chain.size();
    for (Row at = row; chain.size() - begin + 1 < static_cast<std::size_t>(copy.stack);) {
        const std::int64_t previous = at.head->previous.load(std::memory_order_relaxed);
        if (previous <= 0)
            break;
        at = this->row(previous);
        if (!add_to_chain(at, false, chain))
            return false;
    }
    const auto append = [&](const RowHead *from) {
        copy_bytes(to, reinterpret_cast<const std::byte *>(from) + head_bytes(replay_.shape().linked) + copy.from,
                   copy.bytes);
        to += copy.bytes;
    };
    // If the episode starts here, its first frame is repeated.
    for (std::size_t found = chain.size() - begin + 1; found < static_cast<std::size_t>(copy.stack); ++found)
        append(chain.size() > begin ? chain.back().head : row.head);
    for (std::size_t i = chain.size(); i > begin; --i)
        append(chain[i - 1].head);
    copy_bytes(to, row.payload + copy.from, copy.bytes);
    return true;
}

// Follows up to n steps from `first`, writes reward, discount and the like, and sets `next_row` to the row after the
// last step. False if not even one step is stored.
bool Sampler::walk_steps(const Row &first, Row &next_row, std::byte *out, Chain &chain) const {
    const Transition &transition = replay_.shape().transition;
    const std::size_t reward_at = replay_.shape().fields[transition.reward].offset;
    double sum = 0, discount = 1;
    bool terminated = false, truncated = false;
    int horizon = 0;
    for (Row at = first;;) {
        const std::int64_t next = see(at.head->next); // PAIR publish/see, partner: Replay::add
        if (next <= 0) { // this row has no successor yet: the steps end before it
            next_row = at;
            if (horizon == 0)
                return false;
            break;
        }
        const std::byte *reward = at.payload + reward_at;
        sum += discount * (transition.reward_is_double ? load<double>(reward) : static_cast<double>(load<float>(reward)));
        discount *= spec_.gamma;
        ++horizon;
        terminated = flag(at, transition.terminated);
        truncated = flag(at, transition.truncated);
        const bool last = terminated || truncated || horizon == spec_.steps;
        next_row = next == at.sequence ? at : row(next);
        if (next != at.sequence && !add_to_chain(next_row, last, chain))
            return false;
        if (last)
            break;
        if (next == at.sequence) // only the end of an episode links to itself: the row was overwritten meanwhile
            return false;
        at = next_row;
    }
    if (transition.reward_is_double)
        store(out, spec_.reward, sum);
    else
        store(out, spec_.reward, static_cast<float>(sum));
    store(out, spec_.terminated, terminated);
    store(out, spec_.truncated, truncated);
    store(out, spec_.discount, terminated ? 0.0F : static_cast<float>(discount));
    store(out, spec_.horizon, horizon);
    return true;
}

bool Sampler::copy_row(const Row &row, std::byte *out, Chain &chain) const {
    chain.clear();
    if (!add_to_chain(row, false, chain))
        return false;
    // The drawn row first: walk_steps overwrites its reward, terminated and truncated.
    for (const FieldCopy &copy : spec_.copies)
        if (!copy.from_next && !copy_field(copy, row, out + copy.to, chain))
            return false;
    if (spec_.steps > 0) {
        Row next_row = row;
        if (!walk_steps(row, next_row, out, chain))
            return false;
        for (const FieldCopy &copy : spec_.copies)
            if (copy.from_next && !copy_field(copy, next_row, out + copy.to, chain))
                return false;
    }
    store(out, spec_.key, row.sequence);
    if (spec_.version >= 0)
        store(out, spec_.version, row.head->version.load(std::memory_order_relaxed));
    store(out, spec_.valid, true);
    // PAIR claim/unchanged, partner: Replay::add. The copy is valid only if no row of the chain changed before its end.
    return std::all_of(chain.begin(), chain.end(), [](const Seen &seen) { return unchanged(seen.head->state, seen.word); });
}

// The sequence number of the next row in the same episode; 0 if there is none, -1 if `row` itself is no longer stored.
std::int64_t Sampler::successor(const Row &row) const {
    const Transition &transition = replay_.shape().transition;
    const std::int64_t next = see(row.head->next); // PAIR publish/see, partner: Replay::add
    const bool ended = flag(row, transition.terminated) || flag(row, transition.truncated);
    // PAIR claim/unchanged, partner: Replay::add. `next` and the flags were loaded from this row, not from a newer one.
    if (!unchanged(row.head->state, row_word(RowState::complete, row.sequence)))
        return -1;
    return ended || next <= 0 ? 0 : next;
}

// Whether the row is stored and nothing follows it yet.
bool Sampler::is_newest(const Row &row) const {
    const std::int64_t next = see(row.head->next);
    // PAIR claim/unchanged, partner: Replay::add. `next` was loaded from this row, not from a newer one.
    return next <= 0 && unchanged(row.head->state, row_word(RowState::complete, row.sequence));
}

// Copies `first` and the rows after it, spec.length in all; pads with zeros where the episode, or what is stored of it,
// ends earlier.
bool Sampler::copy_sequence(const Row &first, std::byte *out, Chain &chain) const {
    if (first.sequence < 0)
        return false;
    Row at = first;
    for (int i = 0; i < spec_.length; ++i, out += spec_.row_bytes) {
        if (at.sequence == 0 || !copy_row(at, out, chain)) {
            // A row that was overwritten meanwhile, or whose neighbours were, does not end the sequence: draw another one.
            if (i == 0 || (at.sequence != 0 && !is_newest(at)))
                return false;
            std::memset(out, 0, spec_.row_bytes * static_cast<std::size_t>(spec_.length - i));
            return true;
        }
        if (i + 1 == spec_.length)
            break;
        const std::int64_t next = successor(at);
        if (next < 0)
            return false;
        at = next > 0 ? row(next) : Row{};
    }
    return true;
}

// always_inline: see prefetch.hpp.
[[gnu::always_inline]] inline void Sampler::prefetch(std::int64_t slot) const {
    prefetch_row<false>(reinterpret_cast<const std::byte *>(&replay_.head(slot)), replay_.shape().stride_bytes);
}

// Prefetches the row that the one in `slot` is linked to and sets `slot` to it. Unverified: a wrong guess costs only time.
template <Word RowHead::*link> void Sampler::prefetch_linked(std::int64_t &slot) const {
    const std::int64_t sequence = (replay_.head(slot).*link).load(std::memory_order_relaxed);
    if (sequence > 0)
        prefetch(slot = replay_.slot_of(sequence));
}

// The fast path: each batch row is one contiguous copy of one row. All values are in local variables: the compiler must
// assume that a store of bytes changes any member, so it reloaded members for every row (180 instead of 124 us per 4096
// rows). prefetch_lines, not prefetch_row: prefetching the row's last line, too, gained nothing.
void Sampler::copy_plain(std::size_t begin, std::size_t end, std::byte *out) {
    const std::int64_t *const slots = slots_.data();
    const std::int64_t *const sequences = sequences_.data();
    std::uint8_t *const copied = copied_.data();
    const std::size_t stride = replay_.shape().stride_bytes, row_bytes = spec_.row_bytes;
    const auto *const rows = reinterpret_cast<const std::byte *>(&replay_.head(0));
    const FieldCopy copy = spec_.copies.front();
    const std::size_t from = static_cast<std::size_t>(replay_.payload(0) - rows) + copy.from;
    const std::int64_t key = spec_.key;
    for (std::size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < end)
            prefetch_lines<false>(rows + static_cast<std::size_t>(slots[i + rows_ahead]) * stride, stride);
        const std::byte *row = rows + static_cast<std::size_t>(slots[i]) * stride;
        const Word &state = reinterpret_cast<const RowHead *>(row)->state;
        const std::int64_t word = see(state); // PAIR publish/see, partner: Replay::add
        bool valid = row_state(word) == RowState::complete && (sequences[i] == 0 || sequences[i] == row_detail(word));
        if (valid) {
            std::byte *to = out + i * row_bytes;
            copy_bytes(to + copy.to, row + from, copy.bytes);
            store(to, key, row_detail(word));
            valid = unchanged(state, word); // PAIR claim/unchanged, partner: Replay::add
        }
        copied[i] = valid;
    }
}

// ----------------------------------------------------------------------------------------------------------- drawing

// Draws a slot, and accepts any row that is in it when it is copied: the row stays drawable while a newer row for the
// same slot has only been reserved.
inline void Sampler::draw_uniformly(std::size_t i, std::int64_t last) {
    const std::int64_t first = last < replay_.capacity() ? 1 : 0; // row 1 is in slot 1; slot 0 is filled last in a round
    const std::int64_t used = std::clamp<std::int64_t>(last, 1, replay_.capacity());
    slots_[i] =
        std::min(first + static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(used))), replay_.capacity() - 1);
    sequences_[i] = 0;
}

void Sampler::draw_by_priority(std::span<const double> prefix_sums, double total, std::size_t begin) {
    std::span<std::int64_t> leaves(slots_.data() + begin, prefix_sums.size());
    replay_.tree().find(prefix_sums, leaves);
    const Generations newest(replay_.capacity(), see(replay_.control().reserved.last));
    for (std::size_t i = 0; i < prefix_sums.size(); ++i) {
        sequences_[begin + i] = -1;
        if (leaves[i] < 0) {
            leaves[i] = 0;
            continue;
        }
        // Slot and generation give the sequence number. The row itself is not read here: it is not in the cache yet.
        const SumTree::Leaf leaf = replay_.tree().at(leaves[i]);
        if (!SumTree::counts(leaf.priority)) // overwritten since `find`; the new row has no priority yet
            continue;
        const std::int64_t sequence = newest.sequence(leaves[i], leaf.generation);
        if (sequence <= 0) // reserved after `newest` was loaded: draw again
            continue;
        sequences_[begin + i] = sequence;
        probabilities_[begin + i] = static_cast<double>(leaf.priority) / total;
    }
}

bool Sampler::sample(std::int64_t count, std::byte *out, double beta, int threads) {
    const auto rows = static_cast<std::size_t>(count);
    const bool weighted = replay_.prioritised();
    rng_.repair();
    const std::size_t stages_after =
        linked_ ? std::min(static_cast<std::size_t>(spec_.steps + spec_.length - 1), max_stages) : 0;
    std::size_t stages_before = 0;
    for (const FieldCopy &copy : spec_.copies)
        stages_before = std::max(stages_before, std::min(static_cast<std::size_t>(copy.stack - 1), max_stages));
    const std::size_t stages = std::max(stages_after, stages_before);
    slots_.resize(rows);
    sequences_.resize(rows);
    copied_.resize(rows);
    slots_after_.resize(stages_after > 0 ? rows : 0);
    slots_before_.resize(stages_before > 0 ? rows : 0);
    double total = 0;
    if (weighted) {
        prefix_sums_.resize(rows);
        probabilities_.resize(rows);
        total = replay_.tree().total();
        if (!(total > 0)) { // the nodes may be out of date: a process died after it changed leaves, before it refreshed them
            replay_.tree().refresh_all();
            total = replay_.tree().total();
        }
        if (!(total > 0))
            return false;
        for (std::size_t i = 0; i < rows; ++i) // stratified: one draw from each of `rows` equal parts, for less variance
            prefix_sums_[i] = (static_cast<double>(i) + rng_.unit()) / static_cast<double>(rows) * total;
        draw_by_priority(prefix_sums_, total, 0);
    }
    const std::size_t sequence_bytes = spec_.row_bytes * static_cast<std::size_t>(spec_.length);
    threads = threads_for(rows * sequence_bytes, threads);
    const std::int64_t last = see(replay_.control().reserved.last);
    for (std::size_t i = 0; i < rows && !weighted; ++i)
        draw_uniformly(i, last);

    run_in_parts(rows, threads, [&](std::size_t begin, std::size_t end) {
        if (plain_)
            return copy_plain(begin, end, out);
        Chain chain;
        const std::size_t ahead = rows_ahead + stages * rows_between;
        const auto prefetch_for = [&](std::size_t i) { // row i, and the next linked row of those further back
            if (i < end) {
                prefetch(slots_[i]);
                if (stages_after > 0)
                    slots_after_[i] = slots_[i];
                if (stages_before > 0)
                    slots_before_[i] = slots_[i];
            }
            for (std::size_t stage = 1; stage <= stages_after && i >= begin + stage * rows_between; ++stage)
                if (const std::size_t earlier = i - stage * rows_between; earlier < end)
                    prefetch_linked<&RowHead::next>(slots_after_[earlier]);
            for (std::size_t stage = 1; stage <= stages_before && i >= begin + stage * rows_between; ++stage)
                if (const std::size_t earlier = i - stage * rows_between; earlier < end)
                    prefetch_linked<&RowHead::previous>(slots_before_[earlier]);
        };
        for (std::size_t i = begin; i < std::min(begin + ahead, end); ++i)
            prefetch_for(i);
        for (std::size_t i = begin; i < end; ++i) {
            prefetch_for(i + ahead);
            copied_[i] = copy_sequence(drawn(i), out + i * sequence_bytes, chain);
        }
    });

    std::int64_t redrawn = 0;
    Chain chain;
    Scan scan;
    for (std::size_t i = 0; i < rows; ++i) {
        for (int attempt = 0; !copied_[i] && !scan.done && attempt < max_draws; ++attempt) {
            if (weighted) {
                total = replay_.tree().total();
                if (!(total > 0)) // briefly, while the only rows with a priority are overwritten
                    continue;
                const double prefix_sum = rng_.unit() * total;
                draw_by_priority({&prefix_sum, 1}, total, i);
            } else {
                draw_uniformly(i, see(replay_.control().reserved.last));
            }
            copied_[i] = copy_sequence(drawn(i), out + i * sequence_bytes, chain);
            ++redrawn;
        }
        if (!copied_[i] && !draw_by_scan(i, out + i * sequence_bytes, chain, scan))
            return false;
    }
    if (redrawn > 0)
        replay_.control().drawn.redrawn.fetch_add(redrawn, std::memory_order_relaxed);
    if (weighted)
        write_weights(count, out, beta);
    return true;
}

void Sampler::scan_slots(std::size_t i, std::byte *out, Chain &chain, Scan &scan) {
    scan.done = true;
    const bool weighted = replay_.prioritised();
    if (weighted) // nodes above the remaining rows may be out of date for good, if a writer died
        replay_.tree().refresh_all();
    double sum = 0;
    sequences_[i] = 0;
    for (std::int64_t slot = 0; slot < replay_.capacity(); ++slot) {
        slots_[i] = slot;
        const float priority = weighted ? replay_.tree().priority(slot) : 1;
        if (!SumTree::counts(priority) || !copy_sequence(drawn(i), out, chain))
            continue;
        scan.slots.push_back(slot);
        scan.prefix_sums.push_back(sum += static_cast<double>(priority));
    }
}

// For a replay with so few usable rows that random draws do not find them. All slots are looked at once per batch: once
// per row took 5 s (10 s with priorities) for 4096 rows of a replay with one usable row in a million slots.
bool Sampler::draw_by_scan(std::size_t i, std::byte *out, Chain &chain, Scan &scan) {
    if (!scan.done)
        scan_slots(i, out, chain, scan);
    if (scan.slots.empty())
        return false;
    const double prefix_sum = rng_.unit() * scan.prefix_sums.back();
    const auto first = static_cast<std::size_t>(
        std::upper_bound(scan.prefix_sums.begin(), scan.prefix_sums.end(), prefix_sum) - scan.prefix_sums.begin());
    sequences_[i] = 0;
    for (std::size_t step = 0; step < scan.slots.size(); ++step) { // the next one if a row was overwritten since the scan
        slots_[i] = scan.slots[(first + step) % scan.slots.size()];
        const float priority = replay_.prioritised() ? replay_.tree().priority(slots_[i]) : 1;
        if (!SumTree::counts(priority) || !copy_sequence(drawn(i), out, chain))
            continue;
        if (replay_.prioritised())
            // At least this priority as total: the row may be overwritten by now, and the total may have become 0.
            probabilities_[i] = priority / std::max(replay_.tree().total(), static_cast<double>(priority));
        return true;
    }
    return false;
}

void Sampler::write_weights(std::int64_t count, std::byte *out, double beta) const {
    if (spec_.weight < 0)
        return;
    const double smallest = *std::min_element(probabilities_.begin(), probabilities_.begin() + count);
    for (std::int64_t i = 0; i < count; ++i) {
        const auto weight = static_cast<float>(std::pow(probabilities_[static_cast<std::size_t>(i)] / smallest, -beta));
        for (int step = 0; step < spec_.length; ++step) {
            std::byte *row = out + static_cast<std::size_t>(i * spec_.length + step) * spec_.row_bytes;
            if (spec_.valid < 0 || row[spec_.valid] != std::byte{0})
                store(row, spec_.weight, weight);
        }
    }
}

} // namespace memlane
