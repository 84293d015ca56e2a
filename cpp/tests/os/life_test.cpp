#include "os/life.hpp"

#include <cstddef>
#include <list>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/resource.h>

#include "os/process.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"

using namespace memlane;

namespace {

// A memfd, and the life tokens on it.
struct File {
    ~File() { close(fd); }
    const int fd = memfd_create("native-test", MFD_CLOEXEC);
    Life life{fd};
};

constexpr std::int64_t pid_of(std::int64_t process) { return process & ((1 << pid_bits) - 1); }

int open_descriptors() {
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;
    while (readdir(directory) != nullptr)
        ++count;
    closedir(directory);
    return count;
}

// The errno of the std::system_error that `call` throws; 0 if it throws none.
template <class Call> int error_of(Call call) {
    try {
        call();
    } catch (const std::system_error &error) {
        return error.code().value();
    }
    return 0;
}

// Makes every later request of this process for an open-file-description lock fail, as a file system without locks does.
bool forbid_locks(int error) {
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{sizeof program / sizeof *program, program};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

} // namespace

TEST("a process finds its own token alive, and no token on a byte that was never taken") {
    File file;
    const std::int64_t me = file.life.process();
    CHECK(me > 0);
    CHECK_EQ(pid_of(me), getpid());
    CHECK(me < std::int64_t{1} << 61);
    CHECK_EQ(file.life.process(), me);
    CHECK_EQ(file.life.process_if_taken(), me);
    CHECK(file.life.alive(me));
    CHECK(!file.life.alive(me + (1 << pid_bits)));
    for (const std::int64_t none : {std::int64_t{0}, std::int64_t{1}, std::int64_t{-5}, INT64_MIN, INT64_MAX})
        CHECK(!file.life.alive(none));
}

TEST("a process that holds nothing has no descriptor for its life, and one that does has one until the object is gone") {
    const int before = open_descriptors();
    {
        File file;
        CHECK_EQ(file.life.process_if_taken(), 0);
        CHECK_EQ(open_descriptors(), before + 1); // the memfd
        file.life.check();
        CHECK_EQ(open_descriptors(), before + 1);
        CHECK_EQ(file.life.process_if_taken(), 0);
        CHECK(!file.life.alive(12345));
        CHECK_EQ(file.life.process_if_taken(), 0);
        file.life.process();
        file.life.process();
        CHECK_EQ(open_descriptors(), before + 2);
    }
    CHECK_EQ(open_descriptors(), before);
}

TEST("two objects of one process have two tokens, and each dies alone") {
    File file;
    const std::int64_t first = file.life.process();
    std::int64_t word = 0;
    {
        Life second(file.fd);
        word = second.process();
        CHECK(word != first);
        CHECK(file.life.alive(word));
        CHECK(second.alive(first));
    }
    CHECK(!file.life.alive(word));
    CHECK(file.life.alive(first));
}

TEST("a closed object refuses to take a token and considers others alive") {
    File file;
    LiveProcess other([&] { return file.life.process(); });
    const std::int64_t me = file.life.process();
    Life observer(file.fd);
    file.life.close();
    file.life.close();
    CHECK(!observer.alive(me));
    CHECK(observer.alive(other.word()));
    CHECK_EQ(error_of([&] { file.life.process(); }), EBADF);
    CHECK(file.life.alive(other.word()));
}

TEST("a token outlives the descriptor that the file was opened through") {
    File file;
    Life other(file.fd);
    const std::int64_t me = other.process();
    close(file.fd);
    CHECK_EQ(other.process(), me);
    CHECK(!other.alive(me + (1 << pid_bits)));
}

TEST("a descriptor that was closed, or is that of another file now, is an error, and others count as alive") {
    int fd = memfd_create("native-test", MFD_CLOEXEC);
    Life life(fd);
    close(fd);
    CHECK_EQ(error_of([&] { life.process(); }), EBADF);
    CHECK(life.alive(12345));
    const int another = memfd_create("native-test", MFD_CLOEXEC); // the number of a closed descriptor is used again
    CHECK_EQ(another, fd);
    CHECK_EQ(error_of([&] { life.process(); }), EBADF);
    CHECK(life.alive(12345));
    close(another);
    CHECK_EQ(error_of([] { Life(-1).process(); }), EBADF);
}

TEST("a file that was opened for reading only has no token") {
    File file;
    char path[32];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", file.fd);
    const int read_only = open(path, O_RDONLY | O_CLOEXEC);
    Life life(read_only);
    CHECK_EQ(error_of([&] { life.process(); }), EBADF);
    CHECK(life.alive(file.life.process())); // but it can ask
    CHECK(!life.alive(12345));
    close(read_only);
}

TEST("on a file without locks, check and process fail with the error of the kernel") {
    for (const int error : {EINVAL, ENOLCK, EOPNOTSUPP}) {
        Child child([&] {
            File file;
            if (!forbid_locks(error))
                _exit(LiveProcess::no_permission);
            CHECK_EQ(error_of([&] { file.life.check(); }), error);
            CHECK_EQ(error_of([&] { file.life.process(); }), error);
        });
        const int code = child.join();
        CHECK(code == 0 || code == LiveProcess::no_permission);
    }
}

TEST("a lock on the whole file is an error of process, not an endless search, and check accepts it") {
    File file;
    const int other = open(("/proc/self/fd/" + std::to_string(file.fd)).c_str(), O_RDWR | O_CLOEXEC);
    struct flock all{};
    all.l_type = F_RDLCK;
    all.l_whence = SEEK_SET;
    CHECK_EQ(fcntl(other, F_OFD_SETLK, &all), 0);
    CHECK_EQ(error_of([&] { file.life.process(); }), EAGAIN);
    CHECK_EQ(error_of([&] { file.life.check(); }), 0);
    close(other);
    CHECK(file.life.process() > 0);
}

TEST("a child's token is alive while it runs or is stopped, and dead when it is killed, also as a zombie") {
    File file;
    LiveProcess other([&] { return file.life.process(); });
    CHECK(other.word() != 0);
    CHECK(file.life.alive(other.word()));
    other.child().kill(SIGSTOP);
    CHECK(file.life.alive(other.word()));
    other.child().kill(SIGKILL);
    CHECK(other.child().dies_within(5 * second));
    CHECK(!file.life.alive(other.word())); // not waited for yet
    CHECK_EQ(other.child().join(), -SIGKILL);
    CHECK(!file.life.alive(other.word()));
}

TEST("a forked child has no token and no descriptor of its parent's, and takes another") {
    File file;
    const std::int64_t me = file.life.process();
    const int descriptors = open_descriptors();
    Child child([&] {
        CHECK_EQ(file.life.process_if_taken(), 0);
        CHECK_EQ(open_descriptors(), descriptors - 1);
        CHECK(file.life.alive(me));
        CHECK(file.life.process() != me);
        CHECK(file.life.alive(me));
    });
    CHECK_EQ(child.join(), 0);
    CHECK(file.life.alive(me));
    CHECK_EQ(file.life.process(), me);
}

TEST("the token of a dead parent is dead although its child lives") {
    File file;
    Shared<Word> parent_word, grandchild;
    Child parent([&] {
        publish(*parent_word, file.life.process());
        if (fork() == 0) { // without Child: it must outlive its parent
            publish(*grandchild, file.life.process());
            for (;;)
                pause();
        }
        await([&] { return see(*grandchild) != 0; });
        CHECK(file.life.alive(see(*grandchild)));
        _exit(0);
    });
    parent.join();
    CHECK(!file.life.alive(see(*parent_word)));
    CHECK(file.life.alive(see(*grandchild)));
    ::kill(static_cast<pid_t>(pid_of(see(*grandchild))), SIGKILL);
    await([&] { return !file.life.alive(see(*grandchild)); });
}

TEST("a process in another pid namespace is alive until it is killed") {
    File file;
    LiveProcess other([&] { return file.life.process(); }, CLONE_NEWPID);
    if (other.refused())
        return;
    CHECK_EQ(pid_of(other.word()), 1); // its pid there, which is init's here
    CHECK(file.life.alive(other.word()));
    other.child().kill(SIGKILL); // its child dies with it
    await([&] { return !file.life.alive(other.word()); });
}

TEST("exec releases the token") {
    File file;
    Shared<Word> word;
    Child child([&] {
        publish(*word, file.life.process());
        execl("/bin/sleep", "sleep", "100", nullptr);
        _exit(1);
    });
    await([&] { return see(*word) != 0 && !file.life.alive(see(*word)); });
    CHECK(!child.dead());
}

TEST("the token of a process whose first thread has ended is alive") {
    File file;
    Shared<Word> word;
    Child child([&] {
        std::thread([&] {
            publish(*word, file.life.process());
            for (;;)
                pause();
        }).detach();
        syscall(SYS_exit, 0); // pthread_exit would unwind the stack, and destroy the file
    });
    await([&] { return see(*word) != 0 && state_letter(child.pid()) == 'Z'; });
    CHECK(file.life.alive(see(*word)));
}

TEST("threads that ask at the same time get one token") {
    File file;
    std::vector<std::thread> threads;
    std::atomic<std::int64_t> first{0}, others{0};
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            const std::int64_t word = file.life.process();
            std::int64_t none = 0;
            if (!first.compare_exchange_strong(none, word) && none != word)
                ++others;
        });
    for (std::thread &thread : threads)
        thread.join();
    CHECK_EQ(others.load(), 0);
}

TEST("forks beside threads that open and close files leave both sides working") {
    File file;
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop.load()) {
            Life life(file.fd);
            CHECK(file.life.alive(life.process()));
        }
    });
    for (int i = 0; i < 50; ++i) {
        Child child([&] { CHECK(file.life.alive(file.life.process())); });
        CHECK_EQ(child.join(), 0);
    }
    stop.store(true);
    busy.join();
}

TEST("a process without a free file descriptor gets no token and considers no live process dead") {
    File file;
    LiveProcess live([&] { return file.life.process(); });
    Child child([&] {
        const rlimit none{0, 0};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
        CHECK(file.life.alive(live.word()));
#if !defined(__SANITIZE_ADDRESS__) // it needs a file descriptor to handle an exception
        CHECK_EQ(error_of([&] { file.life.process(); }), EMFILE);
#endif
    });
    CHECK_EQ(child.join(), 0);
}

// Race: a process whose threads store as fast as they can is killed, while another process asks whether it is alive.
//   alive, and it stores              acceptable
//   dead, and no store after that     acceptable
//   dead, and then a store            FORBIDDEN    its slots could belong to another process by then
TEST("the token of a killed process is not dead before its last thread has stopped") {
    constexpr int threads = 4;
    struct Counters {
        Word word;
        struct alignas(64) {
            Word value;
        } counter[threads];
    };
    File file;
    int forbidden = 0;
    for (int i = 0; i < check::times(16); ++i) {
        Shared<Counters> counters;
        Child child([&] {
            std::list<std::thread> storing;
            for (auto &counter : counters->counter)
                storing.emplace_back([&counter] {
                    for (std::int64_t value = 1;; ++value)
                        counter.value.store(value, std::memory_order_relaxed);
                });
            publish(counters->word, file.life.process());
            for (;;)
                pause();
        });
        for (auto &counter : counters->counter)
            await([&] { return see(counter.value) != 0; });
        await([&] { return see(counters->word) != 0; });
        const std::int64_t word = see(counters->word);
        child.kill(SIGKILL);
        while (file.life.alive(word)) {
        }
        std::vector<std::int64_t> then;
        for (auto &counter : counters->counter)
            then.push_back(see(counter.value));
        child.join();
        for (int thread = 0; thread < threads; ++thread)
            forbidden += see(counters->counter[thread].value) != then[static_cast<std::size_t>(thread)];
    }
    CHECK_EQ(forbidden, 0);
}
