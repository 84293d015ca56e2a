#include "os/life.hpp"

#include <cerrno>
#include <cstdio>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include "os/process.hpp"

namespace memlane {

namespace {

[[noreturn]] void fail(int error, const char *what) { throw std::system_error(error, std::generic_category(), what); }

struct flock byte_of(std::int64_t process) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = process;
    lock.l_len = 1;
    return lock;
}

// A new open file description of the file of `fd`; -1 with errno set. Read-only if the file may not be written.
int open_again(int fd) {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return -1;
    return open(path, (flags & O_ACCMODE) | O_CLOEXEC | O_NONBLOCK);
}

} // namespace

// All objects of this process. The mutex is held across fork(), so that the child finds the list whole.
struct Lives {
    static inline std::mutex mutex;
    static inline Life *first = nullptr;

    static void add(Life &life) {
        [[maybe_unused]] static const int at_fork = pthread_atfork(prepare, parent, child);
        const std::lock_guard guard(mutex);
        life.next_ = first;
        if (first != nullptr)
            first->previous_ = &life;
        first = &life;
    }
    static void remove(Life &life) {
        const std::lock_guard guard(mutex);
        (life.previous_ == nullptr ? first : life.previous_->next_) = life.next_;
        if (life.next_ != nullptr)
            life.next_->previous_ = life.previous_;
    }

    static void prepare() {
        mutex.lock();
        for (Life *life = first; life != nullptr; life = life->next_)
            life->mutex_.lock();
    }
    static void parent() {
        for (Life *life = first; life != nullptr; life = life->next_)
            life->mutex_.unlock();
        mutex.unlock();
    }
    static void child() {
        for (Life *life = first; life != nullptr; life = life->next_)
            life->reopen();
        parent();
    }
};

Life::Life(int fd) {
    const int own = open_again(fd);
    if (own < 0)
        fail(errno, "cannot open the file again through /proc/self/fd");
    fd_.store(own, std::memory_order_relaxed);
    Lives::add(*this);
}

Life::~Life() {
    Lives::remove(*this);
    close();
}

void Life::close() {
    const std::lock_guard guard(mutex_);
    process_.store(0, std::memory_order_relaxed);
    if (const int fd = fd_.exchange(-1, std::memory_order_relaxed); fd >= 0)
        ::close(fd);
}

// In the child of a fork: a description of its own, without a lock. The number of the descriptor stays, so that the
// child has as many as before also if the limit is reached.
void Life::reopen() {
    process_.store(0, std::memory_order_relaxed);
    const int inherited = fd_.load(std::memory_order_relaxed);
    if (inherited < 0)
        return;
    const int own = open_again(inherited);
    if (own >= 0 && dup3(own, inherited, O_CLOEXEC) == inherited) {
        ::close(own);
        return;
    }
    if (own >= 0)
        ::close(own);
    ::close(inherited); // otherwise the parent would count as alive as long as this process lives
    fd_.store(-1, std::memory_order_relaxed);
}

std::int64_t Life::take() {
    const std::lock_guard guard(mutex_);
    if (const std::int64_t known = process_.load(std::memory_order_relaxed))
        return known;
    const int fd = fd_.load(std::memory_order_relaxed);
    if (fd < 0)
        fail(EBADF, "this process has no descriptor of the file for its life token");
    for (;;) {
        std::uint64_t random = 0;
        if (getrandom(&random, sizeof random, 0) != sizeof random)
            fail(errno, "getrandom");
        const auto drawn = static_cast<std::int64_t>(random >> 25); // 39 bits: with the pid, 61
        if (drawn == 0)
            continue;
        const std::int64_t process = drawn << pid_bits | getpid();
        struct flock lock = byte_of(process);
        if (fcntl(fd, F_OFD_SETLK, &lock) == 0) {
            process_.store(process, std::memory_order_relaxed);
            return process;
        }
        if (errno != EAGAIN && errno != EACCES && errno != EINTR) // these: another process has drawn the same number
            fail(errno, "cannot lock a byte of the file as the life token of this process");
    }
}

bool Life::alive(std::int64_t process) const {
    if (process == process_.load(std::memory_order_relaxed))
        return process != 0;
    if (process <= 0)
        return false;
    const std::lock_guard guard(mutex_);
    const int fd = fd_.load(std::memory_order_relaxed);
    struct flock lock = byte_of(process);
    if (fd < 0 || fcntl(fd, F_OFD_GETLK, &lock) != 0)
        return true;
    return lock.l_type != F_UNLCK;
}

} // namespace memlane
