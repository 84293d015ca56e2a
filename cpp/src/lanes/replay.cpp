#include "lanes/replay.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "os/clock.hpp"
#include "sync/copy.hpp"
#include "os/process.hpp"

namespace memlane {

namespace {

// Unless it is that high already. Relaxed: the number stands for itself.
template <class T> void raise_to(std::atomic<T> &highest, T value) {
    for (T known = highest.load(std::memory_order_relaxed); known < value;)
        if (highest.compare_exchange_weak(known, value, std::memory_order_relaxed))
            return;
}

} // namespace

Replay::Replay(std::byte *control, std::byte *rows, std::byte *tree, Shape shape)
    : control_(reinterpret_cast<ReplayControl *>(control)), rows_(rows), shape_(std::move(shape)) {
    if (tree != nullptr)
        tree_.emplace(tree, shape_.capacity);
}

std::int64_t Replay::size() const {
    const std::int64_t evicted = control_->lost.evicted.load(std::memory_order_relaxed);
    return std::clamp<std::int64_t>(see(control_->added.value) - evicted, 0, shape_.capacity);
}

// -------------------------------------------------------------------------------------------------------------- writers

// The slots that one call of `add` takes, and what it found in them.
struct Replay::Claims {
    Replay &replay;
    std::int64_t process = this_process();
    std::int64_t next, end; // numbers that are reserved
    std::int64_t evicted = 0, abandoned = 0, avoided = 0;
    std::vector<std::int64_t> touched; // leaves of the tree

    Claims(Replay &of, std::int64_t rows) : replay(of) {
        end = of.control_->reserved.last.fetch_add(rows, std::memory_order_relaxed) + rows + 1;
        next = end - rows;
    }

    // A number whose slot this process holds now, or 0 when once round everything is held by others.
    std::int64_t claim() {
        const std::int64_t mine = row_word(RowState::writing, process);
        for (std::int64_t tries = 0; tries <= replay.capacity(); ++tries) {
            const std::int64_t sequence =
                next < end ? next++ : replay.control_->reserved.last.fetch_add(1, std::memory_order_relaxed) + 1;
            // A number of the round before, of one who was stopped since he reserved it: newer rows lie there.
            if (sequence <= replay.control_->reserved.last.load(std::memory_order_relaxed) - replay.capacity()) {
                ++avoided;
                --tries; // says nothing about who holds the slot
                continue;
            }
            Word &state = replay.head(replay.slot_of(sequence)).state;
            const std::int64_t word = see(state);
            if (row_state(word) != RowState::writing && row_detail(word) > sequence) { // overtaken just now
                ++avoided;
                continue;
            }
            const bool held = row_state(word) == RowState::writing;
            // PAIR claim/unchanged: stores into the row come after this exchange; a sampler that copied some of them finds
            // `writing`, or what came of it, when it looks at the state again.
            if ((held && process_alive(row_detail(word))) || !publish_if(state, word, mine)) {
                ++avoided;
                continue;
            }
            abandoned += held;
            evicted += row_state(word) == RowState::complete;
            if (replay.tree_) {
                replay.tree_->renew(replay.slot_of(sequence), replay.generation_of(sequence), 0);
                touched.push_back(replay.slot_of(sequence));
            }
            return sequence;
        }
        return 0;
    }

    // From here on the row can be drawn. By generation: it may be another's row already.
    void drawable(std::int64_t sequence) {
        if (!replay.tree_)
            return;
        const std::int64_t slot = replay.slot_of(sequence);
        if (replay.tree_->set(slot, replay.generation_of(sequence), replay.control_->priority.highest.load(std::memory_order_relaxed)))
            touched.push_back(slot);
    }

    void account(std::int64_t added) {
        if (replay.tree_)
            replay.tree_->refresh(touched);
        const auto count = [](Word &counter, std::int64_t amount) {
            if (amount > 0)
                counter.fetch_add(amount, std::memory_order_relaxed);
        };
        count(replay.control_->lost.evicted, evicted);
        count(replay.control_->lost.abandoned, abandoned);
        count(replay.control_->lost.avoided, avoided);
        signal_add(replay.control_->added, added);
    }
};

void Replay::write(std::int64_t slot, std::span<const Field> from, std::int64_t row) const {
    std::byte *to = payload(slot);
    for (std::size_t k = 0; k < from.size(); ++k)
        copy_bytes(to + shape_.fields[k].offset, from[k].data + static_cast<std::size_t>(row) * from[k].stride_bytes,
                   shape_.fields[k].bytes);
}

std::int64_t Replay::add(const Addition &addition) {
    const auto skipped = [&](std::int64_t i) { return !addition.skip.empty() && addition.skip[static_cast<std::size_t>(i)]; };
    const auto with_final = [&](std::int64_t i) {
        return !addition.has_final.empty() && addition.has_final[static_cast<std::size_t>(i)];
    };
    const auto flag = [&](std::size_t field, std::int64_t i) {
        return addition.fields[field].data[static_cast<std::size_t>(i) * addition.fields[field].stride_bytes] != std::byte{0};
    };
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < addition.count; ++i)
        rows += skipped(i) ? 0 : 1 + with_final(i);
    if (rows == 0)
        return 0;
    const bool linked = shape_.linked;
    Claims claims(*this, rows);
    if (tree_)
        claims.touched.reserve(static_cast<std::size_t>(2 * rows + addition.count));

    std::int64_t added = 0;
    for (std::int64_t i = 0; i < addition.count; ++i) {
        if (skipped(i))
            continue;
        const std::int64_t sequence = claims.claim();
        if (sequence == 0)
            break;
        const std::int64_t slot = slot_of(sequence);
        RowHead &row = head(slot);
        std::int64_t *newest = linked ? &addition.newest[addition.streams[static_cast<std::size_t>(i)]] : nullptr;
        const bool ended = linked && (flag(shape_.transition.terminated, i) || flag(shape_.transition.truncated, i));

        // What follows the row: nothing yet, or its tail (which is complete before the row itself can be seen), or nothing
        // ever.
        std::int64_t next = linked && !ended ? -sequence : sequence;
        if (with_final(i)) {
            const std::int64_t tail = claims.claim();
            if (tail == 0) {
                publish(row.state, row_word(RowState::empty)); // given back as it never was
                break;
            }
            RowHead &last = head(slot_of(tail));
            for (std::size_t k = 0; k < addition.finals.size(); ++k) {
                const FieldPlace &place = shape_.fields[addition.final_fields[k]];
                copy_bytes(payload(slot_of(tail)) + place.offset,
                           addition.finals[k].data + static_cast<std::size_t>(i) * addition.finals[k].stride_bytes, place.bytes);
            }
            last.previous.store(sequence, std::memory_order_relaxed);
            last.version.store(addition.version, std::memory_order_relaxed);
            last.next.store(-tail, std::memory_order_relaxed);
            publish(last.state, row_word(RowState::tail, tail)); // PAIR publish/see, partner: Sampler
            next = tail;
        }
        write(slot, addition.fields, i);
        const std::int64_t before = linked ? *newest : 0;
        if (linked) {
            row.previous.store(before, std::memory_order_relaxed);
            row.version.store(addition.version, std::memory_order_relaxed);
            row.next.store(next, std::memory_order_relaxed);
            // Cut, until the row is linked: who resumes after a death in between begins anew.
            std::atomic_ref<std::int64_t>(*newest).store(0, std::memory_order_relaxed);
        }
        // PAIR publish/see, partner: Sampler. All of the row stands before its state says so.
        publish(row.state, row_word(RowState::complete, sequence));
        ++added;
        if (next > 0)
            claims.drawable(sequence);
        // The link comes after the row that it leads to, and only into the row that it was made for. PAIR publish/see.
        if (before > 0 && publish_if(head(slot_of(before)).next, -before, sequence))
            claims.drawable(before);
        if (linked)
            std::atomic_ref<std::int64_t>(*newest).store(ended ? 0 : sequence, std::memory_order_release);
    }
    claims.account(added);
    return added;
}

// ----------------------------------------------------------------------------------------------------------- priorities

std::int64_t Replay::set_priorities(std::span<const std::int64_t> sequences, std::span<const float> priorities) {
    std::vector<std::int64_t> touched;
    touched.reserve(sequences.size());
    float highest = 0;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        const std::int64_t slot = slot_of(sequences[i]);
        if (!tree_->change(slot, generation_of(sequences[i]), priorities[i]))
            continue;
        touched.push_back(slot);
        highest = std::max(highest, priorities[i]);
    }
    tree_->refresh(touched);
    raise_to(control_->priority.highest, highest);
    const auto stale = static_cast<std::int64_t>(sequences.size() - touched.size());
    if (stale > 0)
        control_->lost.stale.fetch_add(stale, std::memory_order_relaxed);
    return static_cast<std::int64_t>(touched.size());
}

// -------------------------------------------------------------------------------------------------------------- limiter

// Samples that are due: those that the transitions let in have earned, less those that were let out. It is kept within
// `slack` of what it was when the first sample was due. PAIR none: each account is one word that only grows, and a look at the
// other one that is out of date only holds back somebody whom the next signal lets go.
bool Replay::admit_inserts(std::int64_t count) {
    const Limit &limit = shape_.limit;
    if (!(limit.ratio > 0))
        return true;
    Word &inserts = control_->admitted.inserts;
    for (std::int64_t known = see(inserts);;) {
        const auto after = static_cast<double>(known + count);
        const double due = after * limit.ratio - static_cast<double>(see(control_->admitted.samples));
        // Until there is enough to sample from, nobody is held: the samplers are, so there would be nobody to let go.
        if (see(control_->added.value) >= limit.least && due > static_cast<double>(limit.least) * limit.ratio + limit.slack)
            return false;
        if (inserts.compare_exchange_weak(known, known + count, std::memory_order_acq_rel, std::memory_order_acquire)) {
            if (known >= limit.least)
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
        if (see(control_->added.value) < limit.least)
            return false;
        const auto after = static_cast<double>(known + count);
        const double due = static_cast<double>(see(control_->admitted.inserts)) * limit.ratio - after;
        if (due < static_cast<double>(limit.least) * limit.ratio - limit.slack)
            return false;
        if (samples.compare_exchange_weak(known, known + count, std::memory_order_acq_rel, std::memory_order_acquire)) {
            raise_to(control_->admitted.largest_sample, count);
            return true;
        }
    }
}

WaitResult Replay::wait_for_leave(Side side, std::int64_t count, std::int64_t deadline_ns, std::span<const int> pidfds,
                                  Spin &spin) {
    SignalCell &signal = side == Side::writers ? control_->sampled : control_->added; // the other side's deeds
    // The signal is read before the attempt: what changes after it ends the wait at once.
    const std::int64_t seen = see(signal.value);
    if (admit(side, count))
        return {WaitEnd::reached, 0};
    WaitResult result = signal_wait(signal, seen + 1, deadline_ns, pidfds, spin);
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

double Replay::slack_needed(std::int64_t insert, std::int64_t sample) const {
    insert = std::max(insert, control_->admitted.largest_insert.load(std::memory_order_relaxed));
    sample = std::max(sample, control_->admitted.largest_sample.load(std::memory_order_relaxed));
    return (static_cast<double>(insert) * shape_.limit.ratio + static_cast<double>(sample)) / 2;
}

// --------------------------------------------------------------------------------------------------------------- saving

std::int64_t Replay::save_into(Replay &copy) {
    std::int64_t changed = 0;
    const std::int64_t process = this_process();
    const auto numbers_given_out = [&] { publish(copy.control_->reserved.last, see(control_->reserved.last)); };
    for (std::int64_t slot = 0; slot < shape_.capacity; ++slot) {
        RowHead &row = head(slot);
        RowHead &saved = copy.head(slot);
        const std::int64_t word = see(row.state);
        const bool there = row_state(word) == RowState::complete || row_state(word) == RowState::tail;
        const std::int64_t next = shape_.linked ? see(row.next) : 0;
        if (!there) {
            // What was here before is overwritten, and what comes is not there yet.
            if (see(saved.state) != row_word(RowState::empty)) {
                publish(saved.state, row_word(RowState::empty));
                ++changed;
            }
        } else if (see(saved.state) != word) {
            // In the order of a writer: whoever is killed in here leaves a file without this row, not with half of it.
            publish(saved.state, row_word(RowState::writing, process));
            std::atomic_thread_fence(std::memory_order_release); // PAIR claim/unchanged, as in publish_if
            copy_bytes(reinterpret_cast<std::byte *>(&saved) + sizeof(Word), reinterpret_cast<std::byte *>(&row) + sizeof(Word),
                       shape_.stride_bytes - sizeof(Word));
            if (shape_.linked)
                saved.next.store(next, std::memory_order_relaxed);
            numbers_given_out(); // before the row, so that the file never holds a number that was not given out
            publish(saved.state, unchanged(row.state, word) ? word : row_word(RowState::empty));
            ++changed;
        } else if (shape_.linked && saved.next.load(std::memory_order_relaxed) != next && unchanged(row.state, word)) {
            numbers_given_out();
            saved.next.store(next, std::memory_order_relaxed);
            ++changed;
        }
        if (tree_) {
            const SumTree::Leaf leaf = tree_->at(slot);
            const std::int64_t now = see(saved.state);
            const std::uint32_t generation = generation_of(row_detail(now));
            const bool own = row_state(now) == RowState::complete && leaf.generation == generation;
            copy.tree_->renew(slot, generation, own ? leaf.priority : 0);
        }
    }
    if (copy.tree_)
        copy.tree_->refresh_all();
    const auto carry = [](Word &to, const Word &from) { to.store(see(from), std::memory_order_relaxed); };
    carry(copy.control_->reserved.last, control_->reserved.last);
    carry(copy.control_->added.value, control_->added.value);
    carry(copy.control_->sampled.value, control_->sampled.value);
    carry(copy.control_->admitted.inserts, control_->admitted.inserts);
    carry(copy.control_->admitted.samples, control_->admitted.samples);
    carry(copy.control_->admitted.held_writers, control_->admitted.held_writers);
    carry(copy.control_->admitted.held_samplers, control_->admitted.held_samplers);
    carry(copy.control_->lost.evicted, control_->lost.evicted);
    carry(copy.control_->lost.abandoned, control_->lost.abandoned);
    carry(copy.control_->lost.avoided, control_->lost.avoided);
    carry(copy.control_->lost.stale, control_->lost.stale);
    carry(copy.control_->drawn.redrawn, control_->drawn.redrawn);
    copy.control_->priority.highest.store(control_->priority.highest.load(std::memory_order_relaxed), std::memory_order_relaxed);
    return changed;
}

bool Replay::counters_plausible() const {
    const std::int64_t added = see(control_->added.value), last = see(control_->reserved.last); // in this order: others add
    const float highest = control_->priority.highest.load(std::memory_order_relaxed);
    const auto within = [](const Word &word, std::int64_t most) { return see(word) >= 0 && see(word) <= most; };
    const ReplayControl &all = *control_;
    bool plausible = within(all.reserved.last, most_numbers) && added >= 0 && added <= last && std::isfinite(highest) && highest >= 0;
    for (const Word *word : {&all.sampled.value, &all.admitted.inserts, &all.admitted.samples, &all.admitted.held_writers,
                             &all.admitted.held_samplers, &all.lost.evicted, &all.lost.abandoned, &all.lost.avoided,
                             &all.lost.stale, &all.drawn.redrawn})
        plausible = plausible && within(*word, most_numbers);
    return plausible;
}

std::int64_t Replay::first_implausible() const {
    for (std::int64_t slot = 0; slot < shape_.capacity; ++slot) {
        const RowHead &row = head(slot);
        if (tree_ && !(std::isfinite(tree_->priority(slot)) && tree_->priority(slot) >= 0))
            return slot;
        for (;;) {
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
            const std::int64_t last = see(control_->reserved.last); // after what it is compared with
            if (slot_of(sequence) == slot && sequence <= last && previous >= 0 && previous <= last &&
                (next == -sequence || (next >= sequence && next <= last) || row_state(word) == RowState::tail))
                break;
            if (unchanged(row.state, word)) // else it was overwritten meanwhile
                return slot;
        }
    }
    return -1;
}

} // namespace memlane
