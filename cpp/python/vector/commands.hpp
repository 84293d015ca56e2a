// Commands: what the parent asks of a worker.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <sched.h>

#include "python/signal.hpp"
#include "python/waits.hpp"
#include "sync/words.hpp"

namespace memlane {

// The same numbers are in memlane.vector.step_segment.
enum class Order : std::int64_t { step, send, message, close };

// What a worker is asked to do: a word, and the signal `go`, which is advanced when the word has changed.
class Command {
  public:
    // As one word, a command cannot be seen half old and half new.
    struct Content {
        std::int64_t number; // the value of `go` that it belongs to
        std::int64_t cell;   // of the quorum, to arrive in
        Order order;
    };

    Command(nb::object go, std::shared_ptr<Mapping> mapping, std::size_t offset)
        : kept_(go), go_(nb::cast<Signal *>(go)), mapping_(std::move(mapping)),
          word_(reinterpret_cast<Word *>(checked_address(*mapping_, offset, sizeof(Word), alignof(Word), go_->label()))) {}

    // By the parent. Relaxed, for it is the signal that publishes the word (PAIR publish/see): it prevents that a worker
    // sees `go` advanced and the word of the command before.
    void give(std::int64_t cell, std::int64_t order) {
        const std::int64_t number = go_->value() + 1;
        word_->store(number << 8 | cell << 4 | order, std::memory_order_relaxed);
        go_->add(1);
    }

    // By the worker: waits until `go` is at `number`. What it finds then may belong to a later command.
    Content wait(std::int64_t number) {
        go_->wait(number, std::nullopt, nobody_);
        const std::int64_t word = word_->load(std::memory_order_relaxed); // PAIR publish/see, in `give`
        return {word >> 8, word >> 4 & 15, static_cast<Order>(word & 15)};
    }

    std::int64_t given() const { return go_->value(); }

  private:
    nb::object kept_; // keeps `go_` alive
    Signal *go_;
    nb::tuple nobody_;
    std::shared_ptr<Mapping> mapping_;
    Word *word_;
};

// The commands of all workers, given together.
class Commands {
  public:
    // `cores`: where each worker is kept, or -1.
    Commands(nb::list commands, std::vector<int> cores) : kept_(commands), cores_(std::move(cores)) {
        for (nb::handle command : commands)
            commands_.push_back(nb::cast<Command *>(command));
        if (cores_.size() != commands_.size())
            throw nb::value_error("expected a core for each command");
        all_.resize(commands_.size());
        std::iota(all_.begin(), all_.end(), 0);
    }

    // To some workers. Whoever is kept on this core comes last: it may take the core at once, and the others would begin
    // when it has done all its steps. 64 CartPoles in two workers took 5.1 us a step and environment without this order
    // and 4.3 with it (medians of 48 stretches of 0.4 s).
    void give(const std::vector<std::size_t> &workers, std::int64_t cell, std::int64_t order) {
        const int here = sched_getcpu();
        for (const bool last : {false, true})
            for (const std::size_t worker : workers)
                if ((cores_.at(worker) == here) == last)
                    commands_[worker]->give(cell, order);
    }
    void give_all(std::int64_t cell, std::int64_t order) { give(all_, cell, order); }

  private:
    nb::list kept_; // keeps what the pointers point to
    std::vector<Command *> commands_;
    std::vector<int> cores_;
    std::vector<std::size_t> all_;
};

} // namespace memlane
