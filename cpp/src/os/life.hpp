// A life token: shows to every process that uses a file that this process is alive and uses it too.
//
// Who may call: any thread of any process that has the file open; the object belongs to one process.
//
// The token is an open-file-description lock on one byte of the file, far behind its end. The offset of the byte is the
// identity of the process on this file: 39 random bits, then its pid (22 bits), which is only for people. The kernel
// releases the lock when the process dies, calls exec or closes the object, and any process that has the file open can
// ask whether the byte is locked. So the answer is right across pid, user and time namespaces (containers that share
// /dev/shm), where /proc shows other processes or none; and a byte that was released is never locked again.
// Reading /proc/PID/stat instead takes 6 us, asking for the lock 0.5.
//
// A fork copies the descriptor, and the lock would live as long as the child. So the child opens the file anew before
// fork() returns, gives its copy up, and takes a token of its own when it first needs one.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace memlane {

class Life {
  public:
    // Opens the file of `fd` again. Throws std::system_error.
    explicit Life(int fd);
    ~Life();
    Life(const Life &) = delete;
    Life &operator=(const Life &) = delete;

    // The identity of this process on this file. Takes the token if this process has none; throws std::system_error if
    // that fails, for example on a file system without locks.
    std::int64_t process() {
        const std::int64_t known = process_.load(std::memory_order_relaxed);
        return known != 0 ? known : take();
    }

    // Whether the process with this identity is alive and uses the file. True if that cannot be found out: what a living
    // process holds must never be reclaimed.
    bool alive(std::int64_t process) const;

    // Gives the token up: from now on this process counts as dead here. Called again, it has no effect.
    void close();

  private:
    friend struct Lives; // the objects of this process, for fork()
    std::int64_t take();
    void reopen();

    mutable std::mutex mutex_; // guards everything but the fast path of process()
    std::atomic<int> fd_{-1};
    std::atomic<std::int64_t> process_{0};
    Life *previous_ = nullptr, *next_ = nullptr; // in the list of Lives
};

} // namespace memlane
