// The Python handle of a signal: an atomic counter that one side advances and others wait for.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "python/waits.hpp"

namespace memlane {

class Signal {
  public:
    Signal(std::shared_ptr<Mapping> mapping, std::size_t offset, std::string label)
        : mapping_(std::move(mapping)), label_(std::move(label)), spin_(default_spin_limit_ns()) {
        cell_ = reinterpret_cast<SignalCell *>(
            checked_address(*mapping_, offset, sizeof(SignalCell), alignof(SignalCell), label_));
    }

    const std::string &label() const { return label_; }
    Mapping &mapping() const { return *mapping_; }
    std::int64_t spin_limit_ns() const { return spin_.limit_ns(); }
    void set_spin_limit_ns(std::int64_t limit_ns) { spin_ = checked_spin(limit_ns); }

    std::int64_t value() const {
        require_open(*mapping_, label_);
        return see(cell_->value);
    }
    void store(std::int64_t value) {
        require_open_and_writeable();
        signal_store(*cell_, value);
    }
    std::int64_t add(std::int64_t amount) {
        require_open_and_writeable();
        return signal_add(*cell_, amount);
    }
    bool compare_and_swap(std::int64_t expected, std::int64_t value) {
        require_open_and_writeable();
        return signal_compare_and_swap(*cell_, expected, value);
    }

    std::int64_t wait(std::int64_t until, nb::handle timeout, nb::handle peers) {
        return wait_seconds(until, seconds_of(timeout), peers);
    }
    std::int64_t wait_seconds(std::int64_t until, std::optional<double> timeout, nb::handle peers) {
        require_open(*mapping_, label_);
        const std::int64_t value = see(cell_->value);
        return value >= until ? value : wait_for_change(until, timeout, peers);
    }

  private:
    void require_open_and_writeable() const {
        require_open(*mapping_, label_);
        require_writeable(*mapping_, label_);
    }

    // Needs a writeable mapping: a sleeper sets bit 0 of the signal's gate.
    std::int64_t wait_for_change(std::int64_t until, std::optional<double> timeout, nb::handle peers) {
        require_open_and_writeable();
        return wait_in_slices(
            *mapping_, label_, timeout, peers, spin_,
            [&](std::int64_t deadline_ns, std::span<const int> pidfds, Spin &spin) {
                return signal_wait(*cell_, until, deadline_ns, pidfds, spin);
            },
            [&] {
                return label_ + " to reach " + std::to_string(until) + "; it is at " + std::to_string(see(cell_->value));
            });
    }

    std::shared_ptr<Mapping> mapping_;
    std::string label_;
    SignalCell *cell_;
    Spin spin_;
};

} // namespace memlane
