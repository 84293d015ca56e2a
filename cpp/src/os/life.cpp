#include "os/life.hpp"

#include <cerrno>
#include <cstdio>
#include <mutex>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/process.hpp"

namespace memlane {

namespace {

// Two processes draw the same number once in 2^39 draws. So many in a row mean that a lock on the whole file is in the way:
// network file systems make one of flock().
constexpr int max_draws = 16;

[[noreturn]] void fail(int error, const char *what) { throw std::system_error(error, std::generic_category(), what); }

struct flock byte_of(std::int64_t process) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = process;
    lock.l_len = 1;
    return lock;
}

} // namespace

// The objects of this process that have opened their file. The mutex guards all changes of them, and is held across fork(),
// so that the child finds the list whole.
struct Lives {
    static inline std::mutex mutex;
    static inline Life *first = nullptr;

    static void add(Life &life) {
        life.next_ = first;
        if (first != nullptr)
            first->previous_ = &life;
        first = &life;
    }
    static void remove(Life &life) {
        (life.previous_ == nullptr ? first : life.previous_->next_) = life.next_;
        if (life.next_ != nullptr)
            life.next_->previous_ = life.previous_;
        life.previous_ = life.next_ = nullptr;
    }

    static void prepare() { mutex.lock(); }
    static void parent() { mutex.unlock(); }
    // Otherwise the parent would count as alive as long as this process lives.
    static void child() {
        while (first != nullptr) {
            Life &life = *first;
            remove(life);
            life.process_.store(0, std::memory_order_relaxed);
            ::close(life.fd_.exchange(-1, std::memory_order_relaxed));
        }
        mutex.unlock();
    }
};

namespace {

// Before any thread can hold the mutex: a fork beside the first use of a life would leave the child's copy locked for ever.
[[maybe_unused]] const int at_fork = pthread_atfork(Lives::prepare, Lives::parent, Lives::child);

} // namespace

Life::Life(int fd) : source_(fd) {
    struct stat status{};
    if (fstat(fd, &status) == 0) { // otherwise the first use fails
        device_ = status.st_dev;
        inode_ = status.st_ino;
    }
}

Life::~Life() { close(); }

void Life::close() {
    const std::lock_guard guard(Lives::mutex);
    closed_ = true;
    process_.store(0, std::memory_order_relaxed);
    if (const int fd = fd_.exchange(-1, std::memory_order_relaxed); fd >= 0) {
        Lives::remove(*this);
        ::close(fd);
    }
}

bool Life::is_file_of(int fd) const {
    struct stat status{};
    return inode_ != 0 && fstat(fd, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
}

// The caller holds the mutex.
int Life::open() {
    if (const int known = fd_.load(std::memory_order_relaxed); known >= 0)
        return known;
    char path[40];
    // Not /proc/self, which shows no descriptors when the first thread of the process has ended.
    std::snprintf(path, sizeof path, "/proc/thread-self/fd/%d", source_);
    const int flags = fcntl(source_, F_GETFL);
    // Before the file is opened: to open what another descriptor refers to may have effects.
    if (closed_ || flags < 0 || !is_file_of(source_))
        fail(EBADF, "the descriptor of the file was closed");
    const int own = ::open(path, (flags & O_ACCMODE) | O_CLOEXEC | O_NONBLOCK);
    if (own < 0)
        fail(errno, "cannot open the file again through /proc/thread-self/fd");
    if (!is_file_of(own)) {
        ::close(own);
        fail(EBADF, "the descriptor of the file was closed");
    }
    Lives::add(*this);
    fd_.store(own, std::memory_order_relaxed);
    return own;
}

std::int64_t Life::take() {
    const std::lock_guard guard(Lives::mutex);
    if (const std::int64_t known = process_.load(std::memory_order_relaxed))
        return known; // another thread was faster
    const int fd = open();
    for (int draw = 0; draw < max_draws;) {
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
            fail(errno, "cannot lock a byte of the file");
        ++draw;
    }
    fail(EAGAIN, "cannot lock a byte of the file, because another lock covers all of it");
}

bool Life::alive(std::int64_t process) {
    if (process <= 0)
        return false;
    if (process == process_if_taken()) // a lock is no obstacle to its own holder: the kernel would not report it
        return true;
    int fd = fd_.load(std::memory_order_relaxed);
    if (fd < 0) {
        try {
            const std::lock_guard guard(Lives::mutex);
            fd = open();
        } catch (const std::system_error &) {
            return true;
        }
    }
    struct flock lock = byte_of(process);
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Life::check() const {
    try {
        Life(source_).process();
    } catch (const std::system_error &error) {
        if (error.code().value() != EAGAIN) // a lock is in the way now: the file has locks
            throw;
    }
}

} // namespace memlane
