// The Python handle of a quorum: a count that several processes advance and one waits for.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "python/waits.hpp"
#include "sync/quorum.hpp"

namespace memlane {

class Quorum {
  public:
    Quorum(std::shared_ptr<Mapping> mapping, std::size_t offset, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), spin_(default_spin_limit_ns()),
          cell_(reinterpret_cast<QuorumCell *>(
              checked_address(*mapping_, offset, sizeof(QuorumCell), alignof(QuorumCell), label_))) {}

    std::int64_t spin_limit_ns() const { return spin_.limit_ns(); }
    void set_spin_limit_ns(std::int64_t limit_ns) { spin_ = checked_spin(limit_ns); }

    std::int64_t arrived() const {
        require_open(*mapping_, label_);
        return see(cell_->arrived.value);
    }
    std::int64_t arrive(std::int64_t count) {
        require_open(*mapping_, label_);
        return quorum_arrive(*cell_, count);
    }
    std::int64_t wait(std::int64_t until, nb::handle timeout_argument, nb::handle peers) {
        const std::optional<double> timeout = seconds_of(timeout_argument);
        const std::int64_t value = arrived();
        if (value >= until)
            return value;
        return wait_in_slices(
            *mapping_, label_, timeout, peers, spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return quorum_wait(*cell_, until, deadline_ns, pidfds, spin);
            },
            [&] { return label_ + ", " + std::to_string(until - see(cell_->arrived.value)) + " of which had not arrived"; });
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    Spin spin_;
    QuorumCell *cell_;
};

} // namespace memlane
