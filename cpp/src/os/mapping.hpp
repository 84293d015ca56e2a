// A range of a file (memfd, tmpfs or disk) mapped into this process.
//
// Who may call: any thread of this process; `retire` and the destructor only while no other thread uses the range.
// The range stays mapped as long as the object lives. Python's arrays and memlane's handles each keep the object alive,
// so closing a segment never unmaps memory that a view still uses: the last owner unmaps it.
//
// Whoever may write to a file can truncate it. The kernel answers an access to a page that the file has lost with SIGBUS,
// which ends the process; only a memfd can be sealed against it. Under a TruncationGuard such an access reads zeros, and the
// mapping is marked as truncated.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include <signal.h>

#include "os/life.hpp"

namespace memlane {

class Mapping {
  public:
    // Throws std::system_error if mmap fails. `offset` need not be a multiple of the page size.
    Mapping(int fd, std::size_t offset, std::size_t bytes, bool writeable);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    std::byte *data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    bool writeable() const { return writeable_; }

    // The life token of this process on the file. Each mapping of a file has its own, so closing one leaves what another
    // holds alone.
    Life &life() { return life_; }

    // A closed mapping is still mapped; handles refuse to start new operations on it. Its life token is given up when no
    // MappingUse is left.
    bool closed() const { return closed_.load(std::memory_order_relaxed); }
    void close() {
        closed_.store(true, std::memory_order_relaxed);
        if (uses_ == 0)
            life_.close();
    }

    // Whether the file can be truncated while it is mapped.
    bool can_shrink() const { return can_shrink_; }
    // Whether an access under a TruncationGuard has found pages missing. They are private zeros since then.
    bool truncated() const { return truncated_.load(std::memory_order_relaxed); }
    // Reads the last byte. A file is truncated from its end: under a guard, this finds every missing page.
    void touch_end() const;

    // Closes the mapping and replaces the shared pages by private pages with every bit set: a stale view then reads NaN
    // in every floating-point type and -1 in every signed integer, and no other process sees what it writes.
    void retire();

  private:
    friend class MappingUse;
    friend class TruncationGuard;
    bool replace_lost_pages(const void *address);

    std::byte *base_ = nullptr; // page-aligned
    std::size_t mapped_bytes_ = 0; // a multiple of the page size
    std::byte *data_ = nullptr;
    std::size_t bytes_ = 0;
    bool writeable_ = false;
    std::atomic<bool> closed_{false};
    bool can_shrink_ = true;
    std::atomic<bool> truncated_{false};
    Life life_;
    int uses_ = 0; // objects of MappingUse
};

// While one lives, the process may hold something in the memory, such as a slot that a lease shows, and keeps its life token
// also after close(): otherwise another process would take it away. Creation, end and Mapping::close need a lock of the
// caller: Python's GIL. So only what outlives a call, or runs without the GIL, needs one.
class MappingUse {
  public:
    MappingUse() = default; // of no mapping
    explicit MappingUse(Mapping &mapping) : mapping_(&mapping) { ++mapping_->uses_; }
    ~MappingUse() { end(); }
    MappingUse(MappingUse &&other) noexcept : mapping_(std::exchange(other.mapping_, nullptr)) {}
    MappingUse &operator=(MappingUse &&other) noexcept {
        if (this != &other) {
            end();
            mapping_ = std::exchange(other.mapping_, nullptr);
        }
        return *this;
    }

    // The mapping; null if there is none.
    Mapping *mapping() const { return mapping_; }
    void end() {
        if (mapping_ == nullptr)
            return;
        if (--mapping_->uses_ == 0 && mapping_->closed()) [[unlikely]]
            mapping_->life_.close();
        mapping_ = nullptr;
    }

  private:
    Mapping *mapping_ = nullptr;
};

// While it lives, this thread may access pages of the mapping that its file has lost. The caller asks `truncated()` after
// its accesses and before it uses what they returned. Guards of several mappings may be nested. Every other SIGBUS goes to
// the handler that was installed before.
class TruncationGuard {
  public:
    explicit TruncationGuard(Mapping &mapping) {
        if (mapping.can_shrink()) [[unlikely]]
            enter(mapping);
    }
    ~TruncationGuard() {
        if (mapping_ != nullptr) [[unlikely]]
            leave();
    }
    TruncationGuard(const TruncationGuard &) = delete;
    TruncationGuard &operator=(const TruncationGuard &) = delete;

    // The innermost guard of this thread; null if there is none.
    static const TruncationGuard *innermost();

  private:
    void enter(Mapping &mapping);
    void leave();
    static void on_bus_error(int number, siginfo_t *info, void *context);

    const TruncationGuard *before_ = nullptr;
    Mapping *mapping_ = nullptr; // null: its file cannot be truncated
};

// While it lives, the guards of another thread, which waits for this one, are those of this thread too.
class GuardsOfCaller {
  public:
    // `innermost` is TruncationGuard::innermost() of that thread.
    explicit GuardsOfCaller(const TruncationGuard *innermost) {
        if (innermost != nullptr) [[unlikely]]
            enter(innermost);
    }
    ~GuardsOfCaller() {
        if (entered_) [[unlikely]]
            leave();
    }
    GuardsOfCaller(const GuardsOfCaller &) = delete;
    GuardsOfCaller &operator=(const GuardsOfCaller &) = delete;

  private:
    void enter(const TruncationGuard *innermost);
    void leave();

    const TruncationGuard *before_ = nullptr;
    bool entered_ = false;
};

// Allocates the holes among the first `bytes` bytes of a file, which stays as it is otherwise: a store into a hole of a full
// file system is a SIGBUS. Returns 0 or errno.
int fill_holes(int fd, std::size_t bytes);

} // namespace memlane
