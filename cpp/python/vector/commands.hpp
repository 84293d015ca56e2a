// Commands and progress words: how the parent and a worker talk through shared memory. Both are defined here alone; Python
// reads the numbers from the native module (COMMAND_* and PROGRESS_*).
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

// What the parent can ask of a worker.
enum class Command : std::int64_t {
    step,    // step all environments
    send,    // step those environments whose requested_step is ahead of their completed_step
    message, // read a message from the channel and execute it
    close,   // close the environments and exit
};

// A worker's words about itself, by index. The parent reads them, also after the worker's death.
namespace progress {
enum : std::size_t {
    current_env,       // index within the worker of the environment that the current command has reached
    steps,             // environment steps since the worker started
    messages_sent,     // messages that the worker has sent to the parent
    commands_finished, // commands that the worker has finished
    busy_ns,           // time that the worker has spent on commands, without its waits for them
    float_infos,       // commands whose infos the worker has written as floats
    float_forms,       // number of the form of those floats, counted from 1
};
}

// One worker's command: a word, and the signal `go` that is advanced after the word has changed. The parent writes, the
// worker waits.
class CommandWord {
  public:
    // Packed into one word, so that a worker never sees half of an old and half of a new command.
    struct Content {
        std::int64_t number; // the value of `go` that it belongs to
        std::int64_t cell;   // the cell of the quorum to arrive in
        Command command;
    };

    CommandWord(nb::object go, std::shared_ptr<Mapping> mapping, std::size_t offset)
        : go_owner_(go), go_(nb::cast<Signal *>(go)), mapping_(std::move(mapping)),
          word_(reinterpret_cast<Word *>(checked_address(*mapping_, offset, sizeof(Word), alignof(Word), go_->label()))) {}

    // Called by the parent. Relaxed, because the signal publishes the word. PAIR publish/see, partner: `wait`: otherwise a
    // worker could see `go` advanced and the word of the command before.
    void issue(std::int64_t cell, std::int64_t command) {
        const std::int64_t number = go_->value() + 1;
        word_->store(number << 8 | cell << 4 | command, std::memory_order_relaxed);
        go_->add(1);
    }

    // Called by the worker: waits until `go` is at `number`. The content may belong to a later command.
    Content wait(std::int64_t number) {
        go_->wait_seconds(number, std::nullopt, no_peers_);
        const std::int64_t word = word_->load(std::memory_order_relaxed); // PAIR publish/see, partner: `issue`
        return {word >> 8, word >> 4 & 15, static_cast<Command>(word & 15)};
    }

    std::int64_t issued() const { return go_->value(); }

  private:
    nb::object go_owner_; // keeps `go_` alive
    Signal *go_;
    nb::tuple no_peers_;
    std::shared_ptr<Mapping> mapping_;
    Word *word_;
};

// The command words of all workers, written in one call. For the parent.
class CommandWords {
  public:
    // `cores`: the core that each worker is pinned to, or -1.
    CommandWords(nb::list words, std::vector<int> cores) : owner_(words), cores_(std::move(cores)) {
        for (nb::handle word : words)
            words_.push_back(nb::cast<CommandWord *>(word));
        if (cores_.size() != words_.size())
            throw nb::value_error("expected one core for each command word");
        all_.resize(words_.size());
        std::iota(all_.begin(), all_.end(), 0);
    }

    // A worker that is pinned to this core comes last: it may take the core at once, and the others would begin only after it
    // has made all its steps. 64 CartPoles in two workers took 5.1 us per step and environment without this order and 4.3
    // with it (medians of 48 stretches of 0.4 s).
    void issue(const std::vector<std::size_t> &workers, std::int64_t cell, std::int64_t command) {
        const int this_core = sched_getcpu();
        for (const bool last : {false, true})
            for (const std::size_t worker : workers)
                if ((cores_.at(worker) == this_core) == last)
                    words_[worker]->issue(cell, command);
    }
    // True after every power of two of commands, from the 512th on: the time to look at how the workers are placed.
    bool issue_all(std::int64_t cell, std::int64_t command) {
        issue(all_, cell, command);
        ++issued_;
        return issued_ >= 512 && (issued_ & (issued_ - 1)) == 0;
    }

  private:
    nb::list owner_; // keeps the pointers alive
    std::vector<CommandWord *> words_;
    std::vector<int> cores_;
    std::vector<std::size_t> all_;
    std::uint64_t issued_ = 0;
};

} // namespace memlane
