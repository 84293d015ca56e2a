// Memory of a lane for a fuzz target: an access outside it ends the process with a report.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <sanitizer/asan_interface.h>

namespace memlane::fuzz {

// Zeroed memory between two pages that cannot be accessed. It begins on a cache line, as the fields of a segment do; the
// bytes between it and the two pages are poisoned for AddressSanitizer. Only pages that are touched take memory, so a
// lane may have slots of gigabytes.
class GuardedMemory {
  public:
    explicit GuardedMemory(std::size_t bytes) : bytes_(bytes) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t used = (bytes + page - 1) / page * page;
        void *mapped = mmap(nullptr, used + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED)
            give_up("mmap");
        pages_ = static_cast<std::byte *>(mapped) + page;
        if (mprotect(pages_, used, PROT_READ | PROT_WRITE) != 0)
            give_up("mprotect");
        pages_bytes_ = used;
        const std::size_t before = (used - bytes) / 64 * 64;
        data_ = pages_ + before;
        __asan_poison_memory_region(pages_, before);
        __asan_poison_memory_region(data_ + bytes, used - before - bytes);
    }
    GuardedMemory(const GuardedMemory &) = delete;
    GuardedMemory &operator=(const GuardedMemory &) = delete;

    std::byte *data() const { return data_; }

    void clear() {
        constexpr std::size_t cheap_to_set = 1 << 16;
        if (bytes_ <= cheap_to_set)
            std::memset(data_, 0, bytes_);
        else if (madvise(pages_, pages_bytes_, MADV_DONTNEED) != 0)
            give_up("madvise");
    }

    // Memory of this size for this purpose, zeroed. Kept for the whole process: to map it again for each input would take
    // most of the time.
    static std::byte *zeroed(const std::string &purpose, std::size_t bytes) {
        static std::map<std::pair<std::string, std::size_t>, std::unique_ptr<GuardedMemory>> all;
        auto &memory = all[{purpose, bytes}];
        if (!memory)
            memory = std::make_unique<GuardedMemory>(bytes);
        memory->clear();
        return memory->data();
    }

  private:
    [[noreturn]] void give_up(const char *call) const {
        std::fprintf(stderr, "%s of %zu bytes failed: %s\n", call, bytes_, std::strerror(errno));
        std::abort();
    }

    std::size_t bytes_;
    std::byte *pages_ = nullptr;
    std::size_t pages_bytes_ = 0;
    std::byte *data_ = nullptr;
};

} // namespace memlane::fuzz
