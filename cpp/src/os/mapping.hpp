// A range of a file (memfd, tmpfs or disk) mapped into this process.
//
// Who may call: anybody in this process; `retire` and the destructor only when no other thread touches the range.
// The range stays mapped as long as the object lives. Python's arrays and memlane's handles each keep the object alive,
// so closing a segment can never pull memory from under a view: the last holder unmaps it.
#pragma once

#include <atomic>
#include <cstddef>

namespace memlane {

class Mapping {
  public:
    // Throws std::system_error when the kernel refuses. `offset` need not be a multiple of the page size.
    Mapping(int fd, std::size_t offset, std::size_t bytes, bool writeable);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    std::byte *data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    bool writeable() const { return writeable_; }

    // Closed is a statement of the owner ("nobody shall start anything new here"), not an unmapping.
    bool closed() const { return closed_.load(std::memory_order_relaxed); }
    void close() { closed_.store(true, std::memory_order_relaxed); }

    // Puts private pages with every bit set in the place of the shared ones: a stale view then reads NaN in every
    // floating-point type and -1 in every signed integer, and what it writes reaches nobody.
    void retire();

  private:
    std::byte *base_ = nullptr; // page-aligned
    std::size_t span_ = 0;      // whole pages
    std::byte *data_ = nullptr;
    std::size_t bytes_ = 0;
    bool writeable_ = false;
    std::atomic<bool> closed_{false};
};

} // namespace memlane
