#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "copy.hpp"
#include "pool.hpp"

namespace memlane {

namespace {

// How many rows ahead the next ones are asked for; the rows that they are linked to are found half way.
constexpr std::int64_t rows_ahead = 16;
constexpr std::size_t cache_line_bytes = 64;
constexpr std::size_t lines_ahead = 8; // of each row; the hardware sees by then where a longer one goes on
constexpr std::size_t bytes_worth_a_thread = 64 * 1024;
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

Sampler::Sampler(Replay &replay, Wish wish, Dice &dice)
    : replay_(replay), wish_(std::move(wish)), dice_(dice),
      linked_(wish_.steps > 0 || std::any_of(wish_.takes.begin(), wish_.takes.end(), [](const Take &take) {
                  return take.after || take.stack > 1;
              })) {}

// ---------------------------------------------------------------------------------------------------------------- a row

// Whether the row is there; if so, it is one of those that must not have changed in the end.
bool Sampler::look(std::int64_t sequence, bool tails, Chain &chain) const {
    const Word &state = replay_.head(replay_.slot_of(sequence)).state;
    const std::int64_t word = see(state); // PAIR publish/see, partner: Replay::add
    if (word != row_word(RowState::complete, sequence) && !(tails && word == row_word(RowState::tail, sequence)))
        return false;
    chain.push_back({&state, word});
    return true;
}

bool Sampler::flag(std::int64_t sequence, std::size_t field) const {
    return load<std::uint8_t>(replay_.payload(replay_.slot_of(sequence)) + replay_.shape().fields[field].offset) != 0;
}

bool Sampler::stack(const Take &take, std::int64_t sequence, std::byte *to, Chain &chain) const {
    for (int place = take.stack - 1; place >= 0; --place) {
        std::byte *frame = to + static_cast<std::size_t>(place) * take.bytes;
        copy_bytes(frame, replay_.payload(replay_.slot_of(sequence)) + take.from, take.bytes);
        if (place == 0)
            break;
        const std::int64_t before = replay_.head(replay_.slot_of(sequence)).previous.load(std::memory_order_relaxed);
        if (before <= 0) { // the episode begins here
            for (; place > 0; --place, frame -= take.bytes)
                std::memcpy(frame - take.bytes, frame, take.bytes);
            break;
        }
        if (!look(before, false, chain))
            return false;
        sequence = before;
    }
    return true;
}

bool Sampler::copy(std::int64_t sequence, std::byte *out, Chain &chain) const {
    chain.clear();
    if (!look(sequence, false, chain))
        return false;
    const Transition &transition = replay_.shape().transition;
    std::int64_t after = sequence;
    if (wish_.steps > 0) {
        double sum = 0, discount = 1;
        bool terminated = false, truncated = false;
        int horizon = 0;
        for (std::int64_t at = sequence;;) {
            const std::int64_t next = see(replay_.head(replay_.slot_of(at)).next); // PAIR publish/see, partner: Replay::add
            if (next <= 0) { // what this row led to is not known yet: the steps end before it
                if (horizon == 0)
                    return false;
                after = at;
                break;
            }
            const std::byte *reward = replay_.payload(replay_.slot_of(at)) + replay_.shape().fields[transition.reward].offset;
            sum += discount * (transition.reward_is_double ? load<double>(reward) : static_cast<double>(load<float>(reward)));
            discount *= wish_.gamma;
            ++horizon;
            terminated = flag(at, transition.terminated);
            truncated = flag(at, transition.truncated);
            const bool last = terminated || truncated || horizon == wish_.steps;
            if (next != at && !look(next, last, chain))
                return false;
            after = next;
            if (last)
                break;
            at = next;
        }
        // Written before what they were read from is known to be whole; if it is not, nobody looks at this row of the batch.
        for (const Take &take : wish_.takes) {
            if (take.stack > 1) {
                if (!stack(take, take.after ? after : sequence, out + take.to, chain))
                    return false;
            } else {
                copy_bytes(out + take.to, replay_.payload(replay_.slot_of(take.after ? after : sequence)) + take.from, take.bytes);
            }
        }
        if (transition.reward_is_double)
            store(out, wish_.reward, sum);
        else
            store(out, wish_.reward, static_cast<float>(sum));
        store(out, wish_.terminated, terminated);
        store(out, wish_.truncated, truncated);
        store(out, wish_.discount, terminated ? 0.0F : static_cast<float>(discount));
        store(out, wish_.horizon, horizon);
    } else {
        for (const Take &take : wish_.takes) {
            if (take.stack > 1) {
                if (!stack(take, sequence, out + take.to, chain))
                    return false;
            } else {
                copy_bytes(out + take.to, replay_.payload(replay_.slot_of(sequence)) + take.from, take.bytes);
            }
        }
    }
    store(out, wish_.key, sequence);
    store(out, wish_.version, replay_.head(replay_.slot_of(sequence)).version.load(std::memory_order_relaxed));
    store(out, wish_.valid, true);
    return std::all_of(chain.begin(), chain.end(), [](const Seen &seen) { return unchanged(*seen.state, seen.word); });
}

// The row that follows in the same episode, 0 if there is none, -1 if the row itself is gone.
std::int64_t Sampler::follower(std::int64_t sequence) const {
    const RowHead &row = replay_.head(replay_.slot_of(sequence));
    const Transition &transition = replay_.shape().transition;
    const std::int64_t next = see(row.next);
    const bool ended = flag(sequence, transition.terminated) || flag(sequence, transition.truncated);
    if (!unchanged(row.state, row_word(RowState::complete, sequence)))
        return -1;
    return ended || next <= 0 ? 0 : next;
}

bool Sampler::copy_run(std::int64_t sequence, std::byte *out, Chain &chain) const {
    if (wish_.length == 1)
        return copy(sequence, out, chain);
    for (int i = 0; i < wish_.length; ++i, out += wish_.row_bytes) {
        if (sequence == 0 || !copy(sequence, out, chain)) {
            if (i == 0)
                return false;
            std::memset(out, 0, wish_.row_bytes * static_cast<std::size_t>(wish_.length - i));
            return true;
        }
        if (i + 1 < wish_.length && (sequence = follower(sequence)) < 0)
            return false;
    }
    return true;
}

void Sampler::prefetch(std::int64_t sequence) const {
    const auto *row = reinterpret_cast<const std::byte *>(&replay_.head(replay_.slot_of(sequence)));
    const std::size_t reach = std::min(replay_.shape().stride_bytes, lines_ahead * cache_line_bytes);
    for (std::size_t at = 0; at < reach; at += cache_line_bytes)
        __builtin_prefetch(row + at, 0, 2);
}

void Sampler::prefetch_follower(std::int64_t sequence) const {
    const std::int64_t next = replay_.head(replay_.slot_of(sequence)).next.load(std::memory_order_relaxed);
    if (next > 0)
        prefetch(next);
}

// --------------------------------------------------------------------------------------------------------------- drawing

std::int64_t Sampler::draw_alike() {
    const std::int64_t last = see(replay_.control().reserved.last);
    return last <= 0 ? 0 : last - static_cast<std::int64_t>(dice_.below(static_cast<std::uint64_t>(std::min(last, replay_.capacity()))));
}

void Sampler::draw_by_priority(std::span<const double> at, double total, std::size_t begin) {
    std::span<std::int64_t> leaves(leaves_.data() + begin, at.size());
    replay_.tree().find(at, leaves);
    for (std::size_t i = 0; i < at.size(); ++i) {
        sequences_[begin + i] = 0;
        if (leaves[i] < 0 || leaves[i] >= replay_.capacity())
            continue;
        const std::int64_t word = see(replay_.head(leaves[i]).state);
        if (row_state(word) != RowState::complete)
            continue;
        sequences_[begin + i] = row_detail(word);
        shares_[begin + i] = static_cast<double>(replay_.tree().priority(leaves[i])) / total;
    }
}

bool Sampler::sample(std::int64_t count, std::byte *out, double beta, int threads) {
    const auto rows = static_cast<std::size_t>(count);
    const bool weighted = replay_.prioritised();
    sequences_.resize(rows);
    good_.resize(rows);
    double total = 0;
    if (weighted) {
        at_.resize(rows);
        shares_.resize(rows);
        leaves_.resize(rows);
        total = replay_.tree().total();
        if (!(total > 0))
            return false;
        for (std::size_t i = 0; i < rows; ++i) // one from each of as many equal parts: less noise than from the whole
            at_[i] = (static_cast<double>(i) + dice_.unit()) / static_cast<double>(rows) * total;
        draw_by_priority(at_, total, 0);
    } else {
        for (std::int64_t &sequence : sequences_)
            sequence = draw_alike();
    }

    const std::size_t run_bytes = wish_.row_bytes * static_cast<std::size_t>(wish_.length);
    const auto useful = static_cast<int>(std::min<std::size_t>(rows * run_bytes / bytes_worth_a_thread, 1024));
    run_in_parts(rows, std::min(threads, useful), [&](std::size_t begin, std::size_t end) {
        Chain chain;
        chain.reserve(64);
        const auto ahead = static_cast<std::size_t>(rows_ahead);
        for (std::size_t i = begin; i < std::min(begin + ahead, end); ++i)
            if (sequences_[i] > 0)
                prefetch(sequences_[i]);
        for (std::size_t i = begin; i < end; ++i) {
            if (i + ahead < end && sequences_[i + ahead] > 0)
                prefetch(sequences_[i + ahead]);
            if (linked_ && i + ahead / 2 < end && sequences_[i + ahead / 2] > 0)
                prefetch_follower(sequences_[i + ahead / 2]);
            good_[i] = sequences_[i] > 0 && copy_run(sequences_[i], out + i * run_bytes, chain);
        }
    });

    std::int64_t redrawn = 0;
    Chain chain;
    for (std::size_t i = 0; i < rows; ++i) {
        for (int attempt = 0; !good_[i] && attempt < tries; ++attempt, ++redrawn) {
            if (weighted) {
                total = replay_.tree().total();
                const double at = dice_.unit() * total;
                draw_by_priority({&at, 1}, total, i);
            } else {
                sequences_[i] = draw_alike();
            }
            good_[i] = sequences_[i] > 0 && copy_run(sequences_[i], out + i * run_bytes, chain);
        }
        if (good_[i])
            continue;
        if (weighted) // the nodes may be out of date for good where a writer died, and all that is left lies below them
            replay_.tree().refresh_all();
        const std::int64_t last = see(replay_.control().reserved.last);
        const std::int64_t window = std::min(last, replay_.capacity());
        const auto first = window > 0 ? static_cast<std::int64_t>(dice_.below(static_cast<std::uint64_t>(window))) : 0;
        for (std::int64_t step = 0; step < window && !good_[i]; ++step) {
            sequences_[i] = last - (first + step) % window;
            const std::int64_t slot = replay_.slot_of(sequences_[i]);
            if (weighted && !(replay_.tree().priority(slot) > 0))
                continue;
            good_[i] = copy_run(sequences_[i], out + i * run_bytes, chain);
            if (weighted)
                shares_[i] = static_cast<double>(replay_.tree().priority(slot)) / replay_.tree().total();
        }
        if (!good_[i])
            return false;
    }
    if (redrawn > 0)
        replay_.control().drawn.redrawn.fetch_add(redrawn, std::memory_order_relaxed);
    if (weighted)
        weigh(count, out, beta);
    return true;
}

void Sampler::weigh(std::int64_t count, std::byte *out, double beta) const {
    if (wish_.weight < 0)
        return;
    const double least = *std::min_element(shares_.begin(), shares_.begin() + count);
    for (std::int64_t i = 0; i < count; ++i) {
        const auto weight = static_cast<float>(std::pow(shares_[static_cast<std::size_t>(i)] / least, -beta));
        for (int step = 0; step < wish_.length; ++step)
            store(out + static_cast<std::size_t>(i * wish_.length + step) * wish_.row_bytes, wish_.weight, weight);
    }
}

} // namespace memlane
