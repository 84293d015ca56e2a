#include "lanes/replay.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "os/clock.hpp"
#include "sync/copy.hpp"

namespace memlane {

namespace {

// Raises the number to `value` unless it is at least that high. Relaxed: no other data depends on it.
template <class T> void raise_to(Atomic<T> &highest, T value) {
    for (T known = highest.load(std::memory_order_relaxed); known < value;)
        if (highest.compare_exchange_weak(known, value, std::memory_order_relaxed))
            return;
}

// How often other processes may overtake one attempt before it is given up: they can do so a few times, not this
// often.
constexpr int max_overtakings = 1'000'000;

// An identity that no process has (os/life.hpp: a random number stands above 22 bits of pid). A slot of a file whose saver
// was killed is free for the next writer.
constexpr std::int64_t no_process = 1;

} // namespace

Replay::Replay(std::byte *control, std::byte *stored, std::byte *rows, std::byte *tree, Shape shape, Life &life)
    : control_(reinterpret_cast<ReplayControl *>(control)), stored_(reinterpret_cast<StoredWord *>(stored)), rows_(rows),
      shape_(std::move(shape)), life_(&life) {
    if (tree != nullptr)
        tree_.emplace(tree, shape_.capacity);
}

std::int64_t Replay::size() const {
    std::int64_t size = 0;
    const std::int64_t words = (shape_.capacity + 63) / 64;
    for (std::int64_t i = 0; i < words; ++i) {
        std::uint64_t word = stored_[i].load(std::memory_order_relaxed);
        if (i + 1 == words && shape_.capacity % 64 != 0) // bits that belong to no slot
            word &= (std::uint64_t{1} << shape_.capacity % 64) - 1;
        // Nearly all words of a replay are full or empty, and these two cases take a sixth of the time.
        size += word == ~std::uint64_t{0} ? 64 : word == 0 ? 0 : std::popcount(word);
    }
    return size;
}

// ----------------------------------------------------------------------------------------------------------- writers

// The slots that one call of `add` claims, and counts of what they held before.
struct Replay::Claims {
    Replay &replay;
    std::int64_t process = replay.life_->process();
    std::int64_t next, end; // the sequence numbers [next, end) are reserved
    std::int64_t evicted = 0, abandoned = 0, avoided = 0;
    std::int64_t not_a_sequence = 0; // what was found where a sequence number was expected
    std::int64_t alive = 0;          // a process that was alive a moment ago: asking for a million slots takes 0.5 s
    std::vector<std::int64_t> changed_leaves; // of the sum tree

    Claims(Replay &replay, std::int64_t rows) : replay(replay), next(reserve(rows)), end(wrapping_sum(next, rows)) {}

    // Reserves consecutive numbers and returns the first.
    std::int64_t reserve(std::int64_t count) const {
        return wrapping_sum(replay.control_->reserved.last.fetch_add(count, std::memory_order_relaxed), 1);
    }

    // Claims the next slot and returns its sequence number; 0 if other writers hold every slot.
    std::int64_t claim() {
        const std::int64_t claim_word = row_word(RowState::writing, process);
        int overtaken = 0;
        for (std::int64_t tries = 0; tries <= replay.capacity(); ++tries) {
            const std::int64_t sequence = next != end ? std::exchange(next, wrapping_sum(next, 1)) : reserve(1);
            if (!is_sequence(sequence)) {
                not_a_sequence = sequence;
                return 0;
            }
            // This process was stopped for a whole round after it reserved the number: the slot has a newer row.
            if (replay.control_->reserved.last.load(std::memory_order_relaxed) >= sequence + replay.capacity()) {
                ++avoided;
                // Does not count as a try: the slot need not be held by another writer.
                tries -= next != end || ++overtaken < max_overtakings;
                continue;
            }
            Word &state = replay.head(replay.slot_of(sequence)).state;
            const std::int64_t word = see(state);
            // A newer row, since the check above. A number beyond the last one comes from a stray store: overwrite it.
            if (row_state(word) != RowState::writing && row_detail(word) > sequence &&
                row_detail(word) <= replay.control_->reserved.last.load(std::memory_order_relaxed)) {
                ++avoided;
                continue;
            }
            const bool held = row_state(word) == RowState::writing;
            // PAIR claim/unchanged, partner: Sampler. Stores into the row come after this exchange; a sampler that copied
            // some of them finds `writing`, or a later state, when it loads the state again.
            if ((held && is_alive(row_detail(word))) || !publish_if(state, word, claim_word)) {
                ++avoided;
                continue;
            }
            abandoned += held;
            evicted += row_state(word) == RowState::complete;
            if (replay.tree_) {
                replay.tree_->replace(replay.slot_of(sequence), replay.generation_of(sequence), 0);
                changed_leaves.push_back(replay.slot_of(sequence));
            }
            return sequence;
        }
        return 0;
    }

    bool is_alive(std::int64_t other) {
        if (other != alive && replay.life_->alive(other))
            alive = other;
        return other == alive && other != 0;
    }

    // Gives the row a priority, so that it can be drawn. By generation: another row may be in the slot already.
    void make_drawable(std::int64_t sequence) {
        if (!replay.tree_)
            return;
        const std::int64_t slot = replay.slot_of(sequence);
        if (replay.tree_->set(slot, replay.generation_of(sequence),
                              replay.control_->priority.highest.load(std::memory_order_relaxed)))
            changed_leaves.push_back(slot);
    }

    // Refreshes the sum tree, updates the counters and signals the samplers.
    void finish(std::int64_t added) {
        if (replay.tree_)
            replay.tree_->refresh(changed_leaves);
        const auto increase = [](Word &counter, std::int64_t amount) {
            if (amount > 0)
                counter.fetch_add(amount, std::memory_order_relaxed);
        };
        increase(replay.control_->lost.evicted, evicted);
        increase(replay.control_->lost.abandoned, abandoned);
        increase(replay.control_->lost.avoided, avoided);
        signal_add(replay.control_->added, added);
    }
};

void Replay::write(std::int64_t slot, std::span<const Field> from, std::int64_t row) const {
    std::byte *to = payload(slot);
    for (std::size_t k = 0; k < from.size(); ++k)
        copy_bytes(to + shape_.fields[k].offset, from[k].data + static_cast<std::size_t>(row) * from[k].stride_bytes,
                   shape_.fields[k].bytes);
}

std::int64_t Replay::add(const AddRequest &request) {
    const auto skipped = [&](std::int64_t i) { return !request.skip.empty() && request.skip[static_cast<std::size_t>(i)]; };
    const auto has_final = [&](std::int64_t i) {
        return !request.has_final.empty() && request.has_final[static_cast<std::size_t>(i)];
    };
    const auto flag = [&](std::size_t field, std::int64_t i) {
        return request.fields[field].data[static_cast<std::size_t>(i) * request.fields[field].stride_bytes] != std::byte{0};
    };
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < request.count; ++i)
        rows += skipped(i) ? 0 : 1 + has_final(i);
    if (rows == 0)
        return 0;
    const bool linked = shape_.linked;
    Claims claims(*this, rows);
    if (tree_)
        claims.changed_leaves.reserve(static_cast<std::size_t>(2 * rows + request.count));

    std::int64_t added = 0;
    for (std::int64_t i = 0; i < request.count; ++i) {
        if (skipped(i))
            continue;
        const std::int64_t sequence = claims.claim();
        if (sequence == 0)
            break;
        const std::int64_t slot = slot_of(sequence);
        RowHead &row = head(slot);
        std::int64_t *newest = linked ? &request.newest[request.streams[static_cast<std::size_t>(i)]] : nullptr;
        const bool ended = linked && (flag(shape_.transition.terminated, i) || flag(shape_.transition.truncated, i));

        // The row's `next`: no successor yet (-sequence), its tail (which is published before the row itself), or none
        // ever (sequence).
        std::int64_t next = linked && !ended ? -sequence : sequence;
        if (has_final(i)) {
            const std::int64_t tail = claims.claim();
            if (tail == 0) {
                mark_stored(slot, false);
                publish(row.state, row_word(RowState::empty)); // give the row's slot back
                break;
            }
            RowHead &tail_head = head(slot_of(tail));
            for (std::size_t k = 0; k < request.finals.size(); ++k) {
                const FieldSlice &field = shape_.fields[request.final_fields[k]];
                copy_bytes(payload(slot_of(tail)) + field.offset,
                           request.finals[k].data + static_cast<std::size_t>(i) * request.finals[k].stride_bytes,
                           field.bytes);
            }
            tail_head.previous.store(sequence, std::memory_order_relaxed);
            tail_head.version.store(request.version, std::memory_order_relaxed);
            tail_head.next.store(-tail, std::memory_order_relaxed);
            mark_stored(slot_of(tail), false);
            publish(tail_head.state, row_word(RowState::tail, tail)); // PAIR publish/see, partner: Sampler
            next = tail;
        }
        write(slot, request.fields, i);
        const std::int64_t previous = linked ? *newest : 0;
        if (linked) {
            row.previous.store(previous, std::memory_order_relaxed);
            row.version.store(request.version, std::memory_order_relaxed);
            row.next.store(next, std::memory_order_relaxed);
            // The stream is cut until the row is linked: a writer that resumes it after a death in between starts an
            // episode.
            AtomicRef<std::int64_t>(*newest).store(0, std::memory_order_relaxed);
        }
        mark_stored(slot, true);
        // PAIR publish/see, partner: Sampler. The whole row is stored before its state.
        publish(row.state, row_word(RowState::complete, sequence));
        ++added;
        if (next > 0)
            claims.make_drawable(sequence);
        // PAIR publish/see, partner: Sampler. The link is stored after the row that it leads to. It is stored only if
        // the slot still holds the previous row (whose `next` is -previous).
        if (previous > 0 && publish_if(head(slot_of(previous)).next, -previous, sequence))
            claims.make_drawable(previous);
        if (linked)
            // PAIR none: one writer at a time uses a stream. Release: a stream never names a row that is not published.
            AtomicRef<std::int64_t>(*newest).store(ended ? 0 : sequence, std::memory_order_release);
    }
    claims.finish(added);
    if (claims.not_a_sequence != 0)
        throw ReplayDamaged("its last sequence number must be from 0 to 2^60, found " +
                            std::to_string(claims.not_a_sequence));
    return added;
}

// -------------------------------------------------------------------------------------------------------- priorities

std::int64_t Replay::set_priorities(std::span<const std::int64_t> sequences, std::span<const float> priorities) {
    std::vector<std::int64_t> changed_leaves;
    changed_leaves.reserve(sequences.size());
    float highest = 0;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        const std::int64_t slot = slot_of(sequences[i]);
        if (!tree_->set_if_drawable(slot, generation_of(sequences[i]), priorities[i]))
            continue;
        changed_leaves.push_back(slot);
        highest = std::max(highest, priorities[i]);
    }
    tree_->refresh(changed_leaves);
    raise_to(control_->priority.highest, highest);
    const auto stale = static_cast<std::int64_t>(sequences.size() - changed_leaves.size());
    if (stale > 0)
        control_->lost.stale.fetch_add(stale, std::memory_order_relaxed);
    return static_cast<std::int64_t>(changed_leaves.size());
}

// ----------------------------------------------------------------------------------------------------------- limiter

// `due` is the number of samples that are due: admitted transitions times ratio, minus admitted samples. The limiter
// keeps it within error_buffer of min_size * ratio, its value when sampling may start. PAIR none: each count is one
// word that (refunds apart) only grows, so an outdated value of the other count can only make a caller wait, and the
// next signal ends that wait.
bool Replay::admit_inserts(std::int64_t count) {
    const Limit &limit = shape_.limit;
    if (!(limit.ratio > 0))
        return true;
    Word &inserts = control_->admitted.inserts;
    for (std::int64_t known = see(inserts);;) {
        const auto after = static_cast<double>(wrapping_sum(known, count));
        const double due = after * limit.ratio - static_cast<double>(see(control_->admitted.samples));
        // Before min_size transitions are stored no writer waits: all samplers wait then, and nothing could end its
        // wait.
        if (see(control_->added.value) >= limit.min_size &&
            due > static_cast<double>(limit.min_size) * limit.ratio + limit.error_buffer)
            return false;
        if (inserts.compare_exchange_weak(known, wrapping_sum(known, count), std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
            if (known >= limit.min_size)
                raise_to(control_->admitted.largest_insert, count);
            return true;
        }
    }
}

bool Replay::admit_samples(std::int64_t count) {
    const Limit &limit = shape_.limit;
    if (!(limit.ratio > 0))
        return true;
    Word &samples = control_->admitted.samples;
    for (std::int64_t known = see(samples);;) {
        if (see(control_->added.value) < limit.min_size)
            return false;
        const auto after = static_cast<double>(wrapping_sum(known, count));
        const double due = static_cast<double>(see(control_->admitted.inserts)) * limit.ratio - after;
        if (due < static_cast<double>(limit.min_size) * limit.ratio - limit.error_buffer)
            return false;
        if (samples.compare_exchange_weak(known, wrapping_sum(known, count), std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
            raise_to(control_->admitted.largest_sample, count);
            return true;
        }
    }
}

WaitResult Replay::wait_admitted(Side side, std::int64_t count, std::int64_t deadline_ns, std::span<const int> pidfds,
                                 Spin &spin) {
    SignalCell &signal = side == Side::writers ? control_->sampled : control_->added; // changed by the other side
    // The signal is loaded before the attempt: a later change ends the wait at once.
    const std::int64_t seen = see(signal.value);
    if (admit(side, count))
        return {WaitEnd::reached, 0};
    WaitResult result = signal_wait(signal, wrapping_sum(seen, 1), deadline_ns, pidfds, spin);
    if (admit(side, count))
        return {WaitEnd::reached, 0};
    if (result.end == WaitEnd::reached) // not enough yet
        result.end = now_ns() < deadline_ns ? WaitEnd::paused : WaitEnd::timed_out;
    return result;
}

void Replay::count_held(Side side) {
    Word &held = side == Side::writers ? control_->admitted.held_writers : control_->admitted.held_samplers;
    held.fetch_add(1, std::memory_order_relaxed);
}

void Replay::refund_samples(std::int64_t count) {
    if (shape_.limit.ratio > 0)
        control_->admitted.samples.fetch_sub(count, std::memory_order_relaxed);
}

double Replay::required_error_buffer(std::int64_t insert, std::int64_t sample) const {
    insert = std::max(insert, control_->admitted.largest_insert.load(std::memory_order_relaxed));
    sample = std::max(sample, control_->admitted.largest_sample.load(std::memory_order_relaxed));
    return (static_cast<double>(insert) * shape_.limit.ratio + static_cast<double>(sample)) / 2;
}

// ------------------------------------------------------------------------------------------------------------ saving

std::int64_t Replay::save_rows(Replay &copy, std::int64_t begin, std::int64_t end) {
    std::int64_t changed = 0;
    const auto save_last_sequence = [&] { publish(copy.control_->reserved.last, see(control_->reserved.last)); };
    for (std::int64_t slot = begin; slot < end; ++slot) {
        RowHead &row = head(slot);
        RowHead &saved = copy.head(slot);
        const std::int64_t word = see(row.state);
        // A number that a stray store left is not carried into the file: the whole file would be refused.
        const bool stored = (row_state(word) == RowState::complete || row_state(word) == RowState::tail) &&
                            is_sequence(row_detail(word)) && slot_of(row_detail(word)) == slot;
        const std::int64_t next = shape_.linked ? see(row.next) : 0;
        if (!stored) {
            // The old row is being overwritten, and the new one is not complete yet.
            if (see(saved.state) != row_word(RowState::empty)) {
                publish(saved.state, row_word(RowState::empty));
                ++changed;
            }
        } else if (see(saved.state) != word) {
            // In the order of a writer: a process killed in here leaves a file without this row, not with half of it.
            publish(saved.state, row_word(RowState::writing, no_process));
            // PAIR none: no other process uses the copy. The fence keeps the stores of the row after `writing`, so that a
            // process that is killed in between leaves no torn row that seems complete.
            fence(std::memory_order_release);
            copy_bytes(reinterpret_cast<std::byte *>(&saved) + sizeof(Word),
                       reinterpret_cast<std::byte *>(&row) + sizeof(Word), shape_.stride_bytes - sizeof(Word));
            if (shape_.linked)
                saved.next.store(next, std::memory_order_relaxed);
            save_last_sequence(); // before the row, so that the file never holds a sequence number above its last one
            // PAIR claim/unchanged, partner: Claims::claim. A row that was overwritten during the copy is not saved.
            const std::int64_t result = unchanged(row.state, word) ? word : row_word(RowState::empty);
            copy.mark_stored(slot, row_state(result) == RowState::complete);
            publish(saved.state, result);
            ++changed;
        } else if (shape_.linked && saved.next.load(std::memory_order_relaxed) != next && unchanged(row.state, word)) {
            save_last_sequence();
            saved.next.store(next, std::memory_order_relaxed);
            ++changed;
        }
        const std::int64_t now = see(saved.state);
        copy.mark_stored(slot, row_state(now) == RowState::complete); // also for an empty slot: a save may have been killed
        if (tree_) {
            const SumTree::Leaf leaf = tree_->at(slot);
            const std::uint32_t generation = generation_of(row_detail(now));
            const bool own = row_state(now) == RowState::complete && leaf.generation == generation;
            copy.tree_->replace(slot, generation, own && SumTree::counts(leaf.priority) ? leaf.priority : 0);
        }
    }
    return changed;
}

void Replay::save_counters(Replay &copy) {
    if (copy.tree_)
        copy.tree_->refresh_all();
    const auto copy_word = [](Word &to, const Word &from) { to.store(see(from), std::memory_order_relaxed); };
    // A file that counts more rows than it has sequence numbers would be refused. Writers reserve a number before they count
    // its row, so `added` is loaded first; and it is stored last, because this process may be killed in between.
    const std::int64_t added = see(control_->added.value);
    copy_word(copy.control_->reserved.last, control_->reserved.last);
    publish(copy.control_->added.value, added); // PAIR none: no other process uses the copy
    copy_word(copy.control_->sampled.value, control_->sampled.value);
    copy_word(copy.control_->admitted.inserts, control_->admitted.inserts);
    copy_word(copy.control_->admitted.samples, control_->admitted.samples);
    copy_word(copy.control_->admitted.held_writers, control_->admitted.held_writers);
    copy_word(copy.control_->admitted.held_samplers, control_->admitted.held_samplers);
    copy_word(copy.control_->lost.evicted, control_->lost.evicted);
    copy_word(copy.control_->lost.abandoned, control_->lost.abandoned);
    copy_word(copy.control_->lost.avoided, control_->lost.avoided);
    copy_word(copy.control_->lost.stale, control_->lost.stale);
    copy_word(copy.control_->drawn.redrawn, control_->drawn.redrawn);
    copy.control_->priority.highest.store(control_->priority.highest.load(std::memory_order_relaxed),
                                          std::memory_order_relaxed);
}

bool Replay::counters_plausible() const {
    const std::int64_t added = see(control_->added.value),
                       last = see(control_->reserved.last); // in this order: writers may add
    const float highest = control_->priority.highest.load(std::memory_order_relaxed);
    const auto within = [](const Word &word, std::int64_t max) { return see(word) >= 0 && see(word) <= max; };
    const ReplayControl &all = *control_;
    bool plausible =
        within(all.reserved.last, max_sequence) && added >= 0 && added <= last && std::isfinite(highest) && highest >= 0;
    for (const Word *word : {&all.sampled.value, &all.admitted.inserts, &all.admitted.samples, &all.admitted.held_writers,
                             &all.admitted.held_samplers, &all.lost.evicted, &all.lost.abandoned, &all.lost.avoided,
                             &all.lost.stale, &all.drawn.redrawn})
        plausible = plausible && within(*word, max_sequence);
    return plausible;
}

std::int64_t Replay::first_implausible(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t slot = begin; slot < end; ++slot) {
        const RowHead &row = head(slot);
        if (tree_ && !(std::isfinite(tree_->priority(slot)) && tree_->priority(slot) >= 0))
            return slot;
        for (int attempt = 0;; ++attempt) {
            const std::int64_t word = see(row.state);
            const std::int64_t sequence = row_detail(word);
            if (row_state(word) == RowState::empty ? word != 0 : sequence <= 0)
                return slot;
            if (row_state(word) == RowState::empty || row_state(word) == RowState::writing)
                break;
            std::int64_t next = sequence, previous = 0;
            if (shape_.linked) {
                next = see(row.next);
                previous = see(row.previous);
            }
            const std::int64_t last = see(control_->reserved.last); // loaded after the numbers that it is compared with
            const bool counted = is_stored(slot) == (row_state(word) == RowState::complete);
            if (counted && slot_of(sequence) == slot && sequence <= last && previous >= 0 && previous <= last &&
                (next == -sequence || (next >= sequence && next <= last) || row_state(word) == RowState::tail))
                break;
            if (unchanged(row.state, word) || attempt == max_overtakings)
                return slot; // otherwise a writer overwrote it meanwhile: check again
        }
    }
    return -1;
}

} // namespace memlane
