#include "os/mapping.hpp"

#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

namespace memlane {

namespace {

[[noreturn]] void throw_errno(const char *call) { throw std::system_error(errno, std::generic_category(), call); }

} // namespace

Mapping::Mapping(int fd, std::size_t offset, std::size_t bytes, bool writeable) : bytes_(bytes), writeable_(writeable) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t lead = offset % page;
    constexpr auto max_bytes = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max());
    if (offset > max_bytes || bytes > max_bytes - 2 * page)
        throw std::system_error(EOVERFLOW, std::generic_category(), "mmap");
    mapped_bytes_ = (lead + bytes + page - 1) / page * page;
    if (mapped_bytes_ == 0)
        mapped_bytes_ = page;
    const int protection = writeable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *base = mmap(nullptr, mapped_bytes_, protection, MAP_SHARED, fd, static_cast<off_t>(offset - lead));
    if (base == MAP_FAILED)
        throw_errno("mmap");
    base_ = static_cast<std::byte *>(base);
    data_ = base_ + lead;
}

Mapping::~Mapping() {
    if (base_ != nullptr)
        munmap(base_, mapped_bytes_);
}

void Mapping::retire() {
    // MAP_FIXED replaces the pages atomically: the range is never unmapped, so a concurrent stale read cannot fault.
    void *base = mmap(base_, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (base == MAP_FAILED)
        throw_errno("mmap");
    std::memset(base_, 0xFF, mapped_bytes_);
    close();
}

} // namespace memlane
