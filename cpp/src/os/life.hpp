// A life token: shows to every process that uses a file that this process is alive and uses it too.
//
// Who may call: any thread. A forked child has the object too, without its token, and takes one of its own when it first
// needs one.
//
// The token is an open-file-description lock on one byte of the file, far behind its end. The offset of the byte is the
// identity of the process on this file: 39 random bits, then its pid (22 bits), which is only for people. The kernel
// releases the lock when the process dies, calls exec or closes the object, and any process that has the file open can
// ask whether the byte is locked. So the answer is right across pid, user and time namespaces (containers that share
// /dev/shm), where /proc shows other processes or none; and a byte that was released is never locked again.
// Reading /proc/PID/stat instead takes 6 us, asking for the lock 0.5.
//
// The lock is released when the last copy of its descriptor is closed, after the last thread of the process has ended: a
// process that counts as dead stores nothing any more. fork() copies the descriptor, so the child closes its copy before
// fork() returns. A child that is made by clone() or _Fork() alone keeps it, and with it the token of its parent.
//
// The file is opened, and the token taken, by the first call that needs it: a process that holds nothing has no
// descriptor for it.
#pragma once

#include <atomic>
#include <cstdint>

#include <sys/types.h>

namespace memlane {

class Life {
  public:
    // `fd` is a descriptor of the file. The file is opened again through it: it must be open then.
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

    // The same without taking a token; 0 if this process has none.
    std::int64_t process_if_taken() const { return process_.load(std::memory_order_relaxed); }

    // Whether the process with this identity is alive and uses the file. True if that cannot be found out: what a living
    // process holds must never be reclaimed.
    bool alive(std::int64_t process);

    // Throws std::system_error if the file has no locks or cannot be opened. Leaves nothing open.
    void check() const;

    // Gives the token up: from now on this process counts as dead here, and process() throws. Called again, it has no effect.
    // Not while another thread uses the object: the descriptor could be that of another file by then.
    void close();

  private:
    friend struct Lives; // the objects of this process that have opened their file
    std::int64_t take();
    int open();
    bool is_file_of(int fd) const;

    const int source_; // the descriptor that the file is opened through
    dev_t device_ = 0; // with the inode: the file, in case the number of the descriptor is reused
    ino_t inode_ = 0;
    std::atomic<int> fd_{-1}; // set once, and reset in a forked child
    bool closed_ = false;
    std::atomic<std::int64_t> process_{0};
    Life *previous_ = nullptr, *next_ = nullptr; // in the list of Lives
};

} // namespace memlane
