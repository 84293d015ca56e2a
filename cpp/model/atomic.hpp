// The model checker's side of sync/words.hpp and sync/copy.hpp: with MEMLANE_MODEL, the sources of cpp/src are compiled
// with these atomics, fences and copies, and otherwise as they are. Every access becomes a step of the explored execution
// (explorer.hpp).
//
// An Atomic<T> has the size and the alignment of T and no state of its own: the explorer knows a word by its address, as
// the kernel knows a futex. So the structures of the lanes keep their layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

namespace memlane::model {

// The line of an access. The functions of words.hpp pass on the line of their caller.
using Where = std::source_location;

// A memory order together with the lines that it stands for. A mutant weakens one of them.
struct Order {
    Order(std::memory_order order, Where where = Where::current()) : order(order), where(where), helper(where) {}
    Order(std::memory_order order, Where where, Where helper) : order(order), where(where), helper(helper) {}

    std::memory_order order;
    Where where;  // the line that asks for the access
    Where helper; // the line of words.hpp, if it asks through one; otherwise the same
};

inline Order at(std::memory_order order, Where where, Where helper = Where::current()) { return {order, where, helper}; }

using Change = std::uint64_t (*)(std::uint64_t before, std::uint64_t operand);

std::uint64_t load(const void *word, std::size_t bytes, Order order);
void store(void *word, std::size_t bytes, std::uint64_t value, Order order);
// Returns the value before the change.
std::uint64_t change(void *word, std::size_t bytes, Change change, std::uint64_t operand, Order order);
// As compare_exchange_strong: on failure `expected` becomes the value that was found.
bool compare_exchange(void *word, std::size_t bytes, std::uint64_t &expected, std::uint64_t desired, Order order);
void fence(Order order);

// A copy that races by design: relaxed accesses, word by word, of the shared side.
void copy(std::byte *to, const std::byte *from, std::size_t bytes);

template <class T> class Atomic {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));

  public:
    static constexpr bool is_always_lock_free = true;

    Atomic() = default;
    constexpr Atomic(T value) : value_(value) {}
    Atomic(const Atomic &) = delete;
    Atomic &operator=(const Atomic &) = delete;

    T load(Order order) const { return from_bits(model::load(&value_, sizeof(T), order)); }
    void store(T value, Order order) { model::store(&value_, sizeof(T), to_bits(value), order); }
    T exchange(T value, Order order) {
        return from_bits(model::change(
            &value_, sizeof(T), [](std::uint64_t, std::uint64_t operand) { return operand; }, to_bits(value), order));
    }
    // Not spelled with a separate order of a failure: it is that of a success, without its release half.
    bool compare_exchange_strong(T &expected, T desired, Order order) {
        std::uint64_t bits = to_bits(expected);
        const bool changed = model::compare_exchange(&value_, sizeof(T), bits, to_bits(desired), order);
        expected = from_bits(bits);
        return changed;
    }
    // Never fails for no reason.
    bool compare_exchange_weak(T &expected, T desired, Order order) {
        return compare_exchange_strong(expected, desired, order);
    }
    bool compare_exchange_weak(T &expected, T desired, Order order, std::memory_order) {
        return compare_exchange_strong(expected, desired, order);
    }
    T fetch_add(T value, Order order) {
        return arithmetic([](std::uint64_t before, std::uint64_t operand) { return before + operand; }, value, order);
    }
    T fetch_sub(T value, Order order) {
        return arithmetic([](std::uint64_t before, std::uint64_t operand) { return before - operand; }, value, order);
    }
    T fetch_or(T value, Order order) {
        return arithmetic([](std::uint64_t before, std::uint64_t operand) { return before | operand; }, value, order);
    }
    T fetch_and(T value, Order order) {
        return arithmetic([](std::uint64_t before, std::uint64_t operand) { return before & operand; }, value, order);
    }

  private:
    static std::uint64_t to_bits(T value) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof value);
        return bits;
    }
    static T from_bits(std::uint64_t bits) {
        T value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    T arithmetic(Change change, T value, Order order) {
        static_assert(std::is_integral_v<T>);
        return from_bits(model::change(&value_, sizeof(T), change, to_bits(value), order));
    }

    T value_;
};

} // namespace memlane::model
