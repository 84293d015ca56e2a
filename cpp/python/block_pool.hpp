// A pool of memory for batches: each block returns to its pool when nothing refers to it any more.
//
// A Block exports its memory through Python's buffer protocol, so every array and tensor over it keeps the Block alive,
// directly or through other arrays. Its destructor returns the memory; nobody counts references.
//
// Who may call: any thread. A block may outlive the pool and end in another thread.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <nanobind/nanobind.h>

namespace memlane {

class BlockPool {
  public:
    struct Free {
        void operator()(std::byte *memory) const { std::free(memory); }
    };
    struct Memory {
        std::unique_ptr<std::byte, Free> data;
        std::size_t bytes = 0;
    };

    // Memory of exactly so many bytes, uninitialised.
    Memory take(std::size_t bytes) {
        {
            const std::lock_guard lock(mutex_);
            for (auto at = free_.begin(); at != free_.end(); ++at)
                if (at->bytes == bytes) {
                    Memory memory = std::move(*at);
                    free_.erase(at);
                    return memory;
                }
        }
        // Huge pages for large blocks, as numpy does: fewer page faults at the first use.
        const std::size_t alignment = bytes >= huge_from ? huge_page : 64;
        const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        auto *data = bytes <= rounded ? static_cast<std::byte *>(std::aligned_alloc(alignment, rounded)) : nullptr;
        if (data == nullptr)
            throw std::bad_alloc();
        if (bytes >= huge_from)
            madvise(data, rounded, MADV_HUGEPAGE);
        return {std::unique_ptr<std::byte, Free>(data), bytes};
    }
    // Keeps the memory for the next `take`; the memory that was given back first is freed if there is too much.
    void give_back(Memory memory) {
        Memory oldest; // freed without the lock
        const std::lock_guard lock(mutex_);
        if (free_.size() >= max_free) {
            oldest = std::move(free_.front());
            free_.erase(free_.begin());
        }
        free_.push_back(std::move(memory));
    }

  private:
    static constexpr std::size_t max_free = 4;
    static constexpr std::size_t huge_page = std::size_t{2} << 20, huge_from = std::size_t{4} << 20;

    std::mutex mutex_;
    std::vector<Memory> free_; // the one that was given back first is at the front
};

// The owner of the memory of one batch.
class Block {
  public:
    Block(std::shared_ptr<BlockPool> pool, std::size_t bytes) : pool_(std::move(pool)), memory_(pool_->take(bytes)) {}
    ~Block() { pool_->give_back(std::move(memory_)); }
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;

    static int get_buffer(PyObject *self, Py_buffer *view, int flags) {
        const Memory &memory = nanobind::inst_ptr<Block>(self)->memory_;
        return PyBuffer_FillInfo(view, self, memory.data.get(), static_cast<Py_ssize_t>(memory.bytes), 0, flags);
    }

  private:
    using Memory = BlockPool::Memory;
    std::shared_ptr<BlockPool> pool_;
    Memory memory_;
};

inline PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(&Block::get_buffer)}, {0, nullptr}};

inline void bind_block_pool(nanobind::module_ &m) {
    nanobind::class_<BlockPool>(m, "BlockPool", "Memory that is used again by later batches.").def(nanobind::init<>());
    nanobind::class_<Block>(
        m, "Block", nanobind::type_slots(block_slots),
        "Uninitialised memory of a batch, as a buffer. It returns to its pool when nothing refers to it.")
        .def(nanobind::init<std::shared_ptr<BlockPool>, std::size_t>(), nanobind::arg("pool"), nanobind::arg("nbytes"));
}

} // namespace memlane
