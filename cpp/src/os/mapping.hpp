// A range of a file (memfd, tmpfs or disk) mapped into this process.
//
// Who may call: any thread of this process; `retire` and the destructor only while no other thread uses the range.
// The range stays mapped as long as the object lives. Python's arrays and memlane's handles each keep the object alive,
// so closing a segment never unmaps memory that a view still uses: the last owner unmaps it.
#pragma once

#include <atomic>
#include <cstddef>

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

    // A closed mapping is still mapped; handles refuse to start new operations on it.
    bool closed() const { return closed_.load(std::memory_order_relaxed); }
    void close() { closed_.store(true, std::memory_order_relaxed); }

    // Closes the mapping and replaces the shared pages by private pages with every bit set: a stale view then reads NaN
    // in every floating-point type and -1 in every signed integer, and no other process sees what it writes.
    void retire();

  private:
    std::byte *base_ = nullptr; // page-aligned
    std::size_t mapped_bytes_ = 0; // a multiple of the page size
    std::byte *data_ = nullptr;
    std::size_t bytes_ = 0;
    bool writeable_ = false;
    std::atomic<bool> closed_{false};
};

} // namespace memlane
