#include "os/mapping.hpp"

#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace memlane {

namespace {

[[noreturn]] void throw_errno(const char *call) { throw std::system_error(errno, std::generic_category(), call); }

} // namespace

Mapping::Mapping(int fd, std::size_t offset, std::size_t bytes, bool writeable)
    : bytes_(bytes), writeable_(writeable), life_(fd) {
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
    const int seals = fcntl(fd, F_GET_SEALS); // fails for all but memfds
    can_shrink_ = seals < 0 || (seals & F_SEAL_SHRINK) == 0;
}

Mapping::~Mapping() {
    if (base_ != nullptr)
        munmap(base_, mapped_bytes_);
}

void Mapping::touch_end() const {
    if (bytes_ > 0)
        static_cast<void>(*static_cast<volatile const std::byte *>(data_ + bytes_ - 1));
}

// Called by a signal handler: mmap is a plain system call.
bool Mapping::replace_lost_pages(const void *address) {
    const auto *at = static_cast<const std::byte *>(address);
    if (at < base_ || at >= base_ + mapped_bytes_)
        return false;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    // All pages from here on: the file has lost them too.
    std::byte *begin = base_ + static_cast<std::size_t>(at - base_) / page * page;
    if (mmap(begin, static_cast<std::size_t>(base_ + mapped_bytes_ - begin), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return false;
    truncated_.store(true, std::memory_order_relaxed);
    return true;
}

namespace {

thread_local const TruncationGuard *innermost_guard = nullptr; // of this thread
struct sigaction handler_before;

} // namespace

void TruncationGuard::on_bus_error(int number, siginfo_t *info, void *context) {
    const int error = errno;
    for (const TruncationGuard *guard = innermost_guard; guard != nullptr; guard = guard->before_) {
        // A handler that was installed later may pass the signal on with raise(). When it returns, the access is made
        // again, and faults again: then this handler is the first.
        const bool raised_here = info->si_code <= 0 && info->si_pid == getpid();
        if (raised_here || (info->si_code > 0 && guard->mapping_->replace_lost_pages(info->si_addr))) {
            errno = error;
            return;
        }
    }
    if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
        handler_before.sa_sigaction(number, info, context);
    } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
        handler_before.sa_handler(number);
    } else {
        sigaction(SIGBUS, &handler_before, nullptr);
        raise(SIGBUS); // pending until this handler returns
    }
    errno = error;
}

void TruncationGuard::enter(Mapping &mapping) {
    // The first guard of the process installs the handler.
    static const bool installed = [] {
        struct sigaction action{};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        return sigaction(SIGBUS, &action, &handler_before) == 0;
    }();
    static_cast<void>(installed);
    before_ = innermost_guard;
    mapping_ = &mapping;
    innermost_guard = this;
    // The handler runs on this thread: only the compiler could move an access out of the guard.
    std::atomic_signal_fence(std::memory_order_seq_cst);
}

void TruncationGuard::leave() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    innermost_guard = before_;
}

const TruncationGuard *TruncationGuard::innermost() { return innermost_guard; }

void GuardsOfCaller::enter(const TruncationGuard *innermost) {
    before_ = innermost_guard;
    innermost_guard = innermost;
    entered_ = true;
    std::atomic_signal_fence(std::memory_order_seq_cst);
}

void GuardsOfCaller::leave() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    innermost_guard = before_;
}

int fill_holes(int fd, std::size_t bytes) { return fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno; }

void Mapping::retire() {
    // MAP_FIXED replaces the pages atomically: the range is never unmapped, so a concurrent stale read cannot fault.
    void *base = mmap(base_, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (base == MAP_FAILED)
        throw_errno("mmap");
    std::memset(base_, 0xFF, mapped_bytes_);
    close();
}

} // namespace memlane
