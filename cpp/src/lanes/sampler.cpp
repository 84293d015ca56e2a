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

// Rows that a drawn one is linked to are asked for one by one on the way: a row must have come before it tells which
// one is next. Three steps took 1.6 ms for 4096 rows when only the first was asked for.
constexpr std::size_t rows_between = 8;
constexpr std::size_t most_stages = 8;
// Draws before every row is looked at in turn. Where nine of ten rows cannot be drawn, a thousand draws all fail once in
// 10^45 times.
constexpr int tries = 1000;

template <class T> T load(const std::byte *from) {
    T value;
    copy_bytes(reinterpret_cast<std::byte *>(&value), from, sizeof value);
    return value;
}

template <class T> void store(std::byte *row, std::int64_t place, T value) {
    if (place >= 0)
        std::memcpy(row + place, &value, sizeof value);
}

} // namespace

Sampler::Sampler(Replay &replay, SampleSpec wish, Rng &dice)
    : replay_(replay), wish_(std::move(wish)), dice_(dice),
      linked_(wish_.steps > 0 || std::any_of(wish_.takes.begin(), wish_.takes.end(), [](const FieldCopy &take) {
                  return take.after || take.stack > 1;
              })),
      plain_(!linked_ && wish_.takes.size() == 1 && wish_.length == 1 && wish_.version < 0) {}

// ---------------------------------------------------------------------------------------------------------------- a row

// A row by its number, with what a division of the number gives once.
Sampler::Row Sampler::row(std::int64_t sequence) const {
    const std::int64_t slot = replay_.slot_of(sequence);
    return {sequence, &replay_.head(slot), replay_.payload(slot)};
}

// The row that was drawn. Not there (any more): one that no copy is made of.
Sampler::Row Sampler::drawn(std::size_t i) const {
    const std::int64_t slot = slots_[i];
    Row row{sequences_[i], &replay_.head(slot), replay_.payload(slot)};
    if (row.sequence == 0) {
        const std::int64_t word = see(row.head->state);
        row.sequence = row_state(word) == RowState::complete ? row_detail(word) : -1;
    }
    return row;
}

// Whether the row is there; if so, it is one of those that must not have changed in the end.
bool Sampler::look(const Row &row, bool tails, Chain &chain) const {
    const std::int64_t word = see(row.head->state); // PAIR publish/see, partner: Replay::add
    if (word != row_word(RowState::complete, row.sequence) && !(tails && word == row_word(RowState::tail, row.sequence)))
        return false;
    chain.push_back({&row.head->state, word});
    return true;
}

bool Sampler::flag(const Row &row, std::size_t field) const {
    return load<std::uint8_t>(row.payload + replay_.shape().fields[field].offset) != 0;
}

bool Sampler::take(const FieldCopy &take, Row row, std::byte *to, Chain &chain) const {
    for (int place = take.stack - 1;; --place) {
        std::byte *frame = to + static_cast<std::size_t>(place) * take.bytes;
        copy_bytes(frame, row.payload + take.from, take.bytes);
        if (place == 0)
            return true;
        const std::int64_t before = row.head->previous.load(std::memory_order_relaxed);
        if (before <= 0) { // the episode begins here
            for (; place > 0; --place, frame -= take.bytes)
                std::memcpy(frame - take.bytes, frame, take.bytes);
            return true;
        }
        row = this->row(before);
        if (!look(row, false, chain))
            return false;
    }
}

// The rows that n steps lead over are looked at; what they make is written. False if there is not one step.
bool Sampler::walk(const Row &first, Row &after, std::byte *out, Chain &chain) const {
    const Transition &transition = replay_.shape().transition;
    const std::size_t reward_at = replay_.shape().fields[transition.reward].offset;
    double sum = 0, discount = 1;
    bool terminated = false, truncated = false;
    int horizon = 0;
    for (Row at = first;;) {
        const std::int64_t next = see(at.head->next); // PAIR publish/see, partner: Replay::add
        if (next <= 0) { // what this row led to is not known yet: the steps end before it
            after = at;
            if (horizon == 0)
                return false;
            break;
        }
        const std::byte *reward = at.payload + reward_at;
        sum += discount * (transition.reward_is_double ? load<double>(reward) : static_cast<double>(load<float>(reward)));
        discount *= wish_.gamma;
        ++horizon;
        terminated = flag(at, transition.terminated);
        truncated = flag(at, transition.truncated);
        const bool last = terminated || truncated || horizon == wish_.steps;
        after = next == at.sequence ? at : row(next);
        if (next != at.sequence && !look(after, last, chain))
            return false;
        if (last)
            break;
        if (next == at.sequence) // only an end leads to itself: the row was overwritten just now
            return false;
        at = after;
    }
    if (transition.reward_is_double)
        store(out, wish_.reward, sum);
    else
        store(out, wish_.reward, static_cast<float>(sum));
    store(out, wish_.terminated, terminated);
    store(out, wish_.truncated, truncated);
    store(out, wish_.discount, terminated ? 0.0F : static_cast<float>(discount));
    store(out, wish_.horizon, horizon);
    return true;
}

bool Sampler::copy(const Row &here, std::byte *out, Chain &chain) const {
    chain.clear();
    if (!look(here, false, chain))
        return false;
    // The row first: what the steps make of some of its fields is written over them.
    for (const FieldCopy &one : wish_.takes)
        if (!one.after && !take(one, here, out + one.to, chain))
            return false;
    if (wish_.steps > 0) {
        Row after = here;
        if (!walk(here, after, out, chain))
            return false;
        for (const FieldCopy &one : wish_.takes)
            if (one.after && !take(one, after, out + one.to, chain))
                return false;
    }
    store(out, wish_.key, here.sequence);
    if (wish_.version >= 0)
        store(out, wish_.version, here.head->version.load(std::memory_order_relaxed));
    store(out, wish_.valid, true);
    // All of it is in `out` by now. If a row of the chain changed meanwhile, nobody looks at this row of the batch.
    return std::all_of(chain.begin(), chain.end(), [](const Seen &seen) { return unchanged(*seen.state, seen.word); });
}

// The row that follows in the same episode, 0 if there is none, -1 if the row itself is gone.
std::int64_t Sampler::follower(const Row &here) const {
    const Transition &transition = replay_.shape().transition;
    const std::int64_t next = see(here.head->next);
    const bool ended = flag(here, transition.terminated) || flag(here, transition.truncated);
    if (!unchanged(here.head->state, row_word(RowState::complete, here.sequence)))
        return -1;
    return ended || next <= 0 ? 0 : next;
}

bool Sampler::copy_run(const Row &first, std::byte *out, Chain &chain) const {
    if (first.sequence < 0)
        return false;
    Row at = first;
    for (int i = 0; i < wish_.length; ++i, out += wish_.row_bytes) {
        if (at.sequence == 0 || !copy(at, out, chain)) {
            if (i == 0)
                return false;
            std::memset(out, 0, wish_.row_bytes * static_cast<std::size_t>(wish_.length - i));
            return true;
        }
        if (i + 1 == wish_.length)
            break;
        const std::int64_t next = follower(at);
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

// Asks for the row after the one in `slot`, and goes there; a guess, which nobody depends on.
void Sampler::prefetch_follower(std::int64_t &slot) const {
    const std::int64_t next = replay_.head(slot).next.load(std::memory_order_relaxed);
    if (next > 0)
        prefetch(slot = replay_.slot_of(next));
}

// The way that nothing may slow down: rows as they are, one piece each. Everything is in local variables: for all that
// the compiler knows, a store of bytes changes any member, so each was loaded anew for every row: 180 -> 124 us per
// 4096 rows. Without the line that a row may end in: to ask for it, too, gained nothing.
void Sampler::copy_plain(std::size_t begin, std::size_t end, std::byte *out) {
    const std::int64_t *const slots = slots_.data();
    const std::int64_t *const sequences = sequences_.data();
    std::uint8_t *const good = good_.data();
    const std::size_t stride = replay_.shape().stride_bytes, row_bytes = wish_.row_bytes;
    const auto *const rows = reinterpret_cast<const std::byte *>(&replay_.head(0));
    const FieldCopy take = wish_.takes.front();
    const std::size_t from = static_cast<std::size_t>(replay_.payload(0) - rows) + take.from;
    const std::int64_t key = wish_.key;
    for (std::size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < end)
            prefetch_lines<false>(rows + static_cast<std::size_t>(slots[i + rows_ahead]) * stride, stride);
        const std::byte *row = rows + static_cast<std::size_t>(slots[i]) * stride;
        const Word &state = reinterpret_cast<const RowHead *>(row)->state;
        const std::int64_t word = see(state); // PAIR publish/see, partner: Replay::add
        bool whole = row_state(word) == RowState::complete && (sequences[i] == 0 || sequences[i] == row_detail(word));
        if (whole) {
            std::byte *to = out + i * row_bytes;
            copy_bytes(to + take.to, row + from, take.bytes);
            store(to, key, row_detail(word));
            whole = unchanged(state, word);
        }
        good[i] = whole;
    }
}

// --------------------------------------------------------------------------------------------------------------- drawing

// A slot, and whatever row is there when it is copied: a row is not hidden by one that is on its way to the same slot.
inline void Sampler::draw_alike(std::size_t i, std::int64_t last) {
    const std::int64_t first = last < replay_.capacity() ? 1 : 0; // number 1 is in slot 1, and slot 0 waits for the round's end
    const std::int64_t used = std::clamp<std::int64_t>(last, 1, replay_.capacity());
    slots_[i] = std::min(first + static_cast<std::int64_t>(dice_.below(static_cast<std::uint64_t>(used))), replay_.capacity() - 1);
    sequences_[i] = 0;
}

void Sampler::draw_by_priority(std::span<const double> at, double total, std::size_t begin) {
    std::span<std::int64_t> leaves(slots_.data() + begin, at.size());
    replay_.tree().find(at, leaves);
    for (std::size_t i = 0; i < at.size(); ++i) {
        sequences_[begin + i] = -1;
        if (leaves[i] < 0) {
            leaves[i] = 0;
            continue;
        }
        // Slot and generation make the number. The row itself is not looked at here: it is far away, and not asked for yet.
        const SumTree::Leaf leaf = replay_.tree().at(leaves[i]);
        if (!(leaf.priority > 0)) // overwritten since `find` looked; the new row is not worth anything yet
            continue;
        sequences_[begin + i] = static_cast<std::int64_t>(leaf.generation) * replay_.capacity() + leaves[i];
        shares_[begin + i] = static_cast<double>(leaf.priority) / total;
    }
}

bool Sampler::sample(std::int64_t count, std::byte *out, double beta, int threads) {
    const auto rows = static_cast<std::size_t>(count);
    const bool weighted = replay_.prioritised();
    const std::size_t stages = linked_ ? std::min(static_cast<std::size_t>(wish_.steps + wish_.length - 1), most_stages) : 0;
    slots_.resize(rows);
    sequences_.resize(rows);
    good_.resize(rows);
    walking_.resize(stages > 0 ? rows : 0);
    double total = 0;
    if (weighted) {
        at_.resize(rows);
        shares_.resize(rows);
        total = replay_.tree().total();
        if (!(total > 0)) { // or the nodes are out of date: whoever changed the leaves died before he refreshed them
            replay_.tree().refresh_all();
            total = replay_.tree().total();
        }
        if (!(total > 0))
            return false;
        for (std::size_t i = 0; i < rows; ++i) // one from each of as many equal parts: less noise than from the whole
            at_[i] = (static_cast<double>(i) + dice_.unit()) / static_cast<double>(rows) * total;
        draw_by_priority(at_, total, 0);
    }
    const std::size_t run_bytes = wish_.row_bytes * static_cast<std::size_t>(wish_.length);
    threads = threads_for(rows * run_bytes, threads);
    const std::int64_t last = see(replay_.control().reserved.last);
    for (std::size_t i = 0; i < rows && !weighted; ++i)
        draw_alike(i, last);

    run_in_parts(rows, threads, [&](std::size_t begin, std::size_t end) {
        if (plain_)
            return copy_plain(begin, end, out);
        Chain chain;
        const std::size_t ahead = rows_ahead + stages * rows_between;
        const auto ask = [&](std::size_t i) { // for row i, and for those further back whatever is next
            if (i < end) {
                prefetch(slots_[i]);
                if (stages > 0)
                    walking_[i] = slots_[i];
            }
            for (std::size_t stage = 1; stage <= stages && i >= begin + stage * rows_between; ++stage)
                if (const std::size_t late = i - stage * rows_between; late < end)
                    prefetch_follower(walking_[late]);
        };
        for (std::size_t i = begin; i < std::min(begin + ahead, end); ++i)
            ask(i);
        for (std::size_t i = begin; i < end; ++i) {
            ask(i + ahead);
            good_[i] = copy_run(drawn(i), out + i * run_bytes, chain);
        }
    });

    std::int64_t redrawn = 0;
    Chain chain;
    for (std::size_t i = 0; i < rows; ++i) {
        for (int attempt = 0; !good_[i] && attempt < tries; ++attempt) {
            if (weighted) {
                total = replay_.tree().total();
                if (!(total > 0)) // for a moment, while the only rows with a priority are overwritten
                    continue;
                const double at = dice_.unit() * total;
                draw_by_priority({&at, 1}, total, i);
            } else {
                draw_alike(i, see(replay_.control().reserved.last));
            }
            good_[i] = copy_run(drawn(i), out + i * run_bytes, chain);
            ++redrawn;
        }
        if (!good_[i] && !look_everywhere(i, out + i * run_bytes, chain))
            return false;
    }
    if (redrawn > 0)
        replay_.control().drawn.redrawn.fetch_add(redrawn, std::memory_order_relaxed);
    if (weighted)
        weigh(count, out, beta);
    return true;
}

// The first row from a random place on that can be drawn: there are so few that dice do not find them.
bool Sampler::look_everywhere(std::size_t i, std::byte *out, Chain &chain) {
    const bool weighted = replay_.prioritised();
    if (weighted) // the nodes may be out of date for good where a writer died, and all that is left lies below them
        replay_.tree().refresh_all();
    const auto capacity = static_cast<std::uint64_t>(replay_.capacity());
    const std::uint64_t first = dice_.below(capacity);
    for (std::uint64_t step = 0; step < capacity; ++step) {
        slots_[i] = static_cast<std::int64_t>((first + step) % capacity);
        sequences_[i] = 0;
        const float priority = weighted ? replay_.tree().priority(slots_[i]) : 1;
        if (!(priority > 0) || !copy_run(drawn(i), out, chain))
            continue;
        if (weighted)
            // A share of what there was when it was drawn; that may be gone by now, and with it the total.
            shares_[i] = priority / std::max(replay_.tree().total(), static_cast<double>(priority));
        return true;
    }
    return false;
}

void Sampler::weigh(std::int64_t count, std::byte *out, double beta) const {
    if (wish_.weight < 0)
        return;
    const double least = *std::min_element(shares_.begin(), shares_.begin() + count);
    for (std::int64_t i = 0; i < count; ++i) {
        const auto weight = static_cast<float>(std::pow(shares_[static_cast<std::size_t>(i)] / least, -beta));
        for (int step = 0; step < wish_.length; ++step) {
            std::byte *row = out + static_cast<std::size_t>(i * wish_.length + step) * wish_.row_bytes;
            if (wish_.valid < 0 || row[wish_.valid] != std::byte{0})
                store(row, wish_.weight, weight);
        }
    }
}

} // namespace memlane
