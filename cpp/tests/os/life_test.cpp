#include "os/life.hpp"

#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>

#include "os/process.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"
#include "sync/words.hpp"

using namespace memlane;

namespace {

// A memfd, and a life token on it.
struct File {
    File() : fd(memfd_create("native-test", MFD_CLOEXEC)), life(std::make_unique<Life>(fd)) {}
    ~File() { close(fd); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    int fd;
    std::unique_ptr<Life> life;
};

// A child that takes its token on `file` and lives until it is killed.
class LiveProcess {
  public:
    explicit LiveProcess(File &file, int namespaces = 0)
        : child_([this, &file, namespaces] {
              if (namespaces != 0 && unshare(namespaces) != 0)
                  _exit(77);
              const auto live = [this, &file] {
                  publish(*word_, file.life->process());
                  for (;;)
                      pause();
              };
              if (namespaces == 0)
                  live();
              // A new pid namespace begins with the next child. Not a Child, which asks for the pid of its parent: that has
              // none there.
              if (const pid_t inside = fork(); inside != 0) {
                  waitpid(inside, nullptr, 0);
                  return;
              }
              prctl(PR_SET_PDEATHSIG, SIGKILL);
              live();
          }) {
        await([&] { return see(*word_) != 0 || child_.dead(); });
    }
    std::int64_t word() const { return see(*word_); }
    Child &child() { return child_; }

  private:
    Shared<Word> word_;
    Child child_;
};

} // namespace

TEST("a process finds its own token alive, and no token on a byte that was never taken") {
    File file;
    const std::int64_t me = file.life->process();
    CHECK(me > 0);
    CHECK_EQ(me & ((1 << pid_bits) - 1), getpid());
    CHECK(me < std::int64_t{1} << 61);
    CHECK_EQ(file.life->process(), me);
    CHECK(file.life->alive(me));
    CHECK(!file.life->alive(me + (1 << pid_bits)));
    CHECK(!file.life->alive(0));
    CHECK(!file.life->alive(-5));
}

TEST("two objects of one process have two tokens, and each dies alone") {
    File file;
    const std::int64_t first = file.life->process();
    {
        Life second(file.fd);
        CHECK(second.process() != first);
        CHECK(file.life->alive(second.process()));
        CHECK(second.alive(first));
        const std::int64_t word = second.process();
        second.close();
        CHECK(!file.life->alive(word));
    }
    CHECK(file.life->alive(first));
}

TEST("a closed object refuses to take a token and considers others alive") {
    File file;
    file.life->close();
    bool refused = false;
    try {
        file.life->process();
    } catch (const std::system_error &) {
        refused = true;
    }
    CHECK(refused);
    CHECK(file.life->alive(12345));
}

TEST("a child's token is alive while it runs or is stopped, and dead when it is killed, also as a zombie") {
    File file;
    LiveProcess other(file);
    CHECK(other.word() != 0);
    CHECK(file.life->alive(other.word()));
    other.child().kill(SIGSTOP);
    CHECK(file.life->alive(other.word()));
    other.child().kill(SIGKILL);
    CHECK(other.child().dies_within(5 * second));
    CHECK(!file.life->alive(other.word())); // not waited for yet
    CHECK_EQ(other.child().join(), -SIGKILL);
    CHECK(!file.life->alive(other.word()));
}

TEST("the token of a dead parent is dead although its child lives") {
    File file;
    Shared<Word> parent_word, grandchild;
    Child parent([&] {
        publish(*parent_word, file.life->process());
        if (fork() == 0) { // without Child: it must outlive its parent
            publish(*grandchild, file.life->process());
            for (;;)
                pause();
        }
        await([&] { return see(*grandchild) != 0; });
        CHECK(file.life->alive(see(*grandchild)));
        _exit(0);
    });
    parent.join();
    CHECK(!file.life->alive(see(*parent_word)));
    CHECK(file.life->alive(see(*grandchild)));
    ::kill(static_cast<pid_t>(see(*grandchild) & ((1 << pid_bits) - 1)), SIGKILL);
    await([&] { return !file.life->alive(see(*grandchild)); });
}

TEST("a process in another pid namespace is alive until it is killed") {
    File file;
    LiveProcess other(file, CLONE_NEWPID);
    if (other.word() == 0) {
        CHECK_EQ(other.child().join(), 77); // no permission to make a namespace
        return;
    }
    CHECK_EQ(other.word() & ((1 << pid_bits) - 1), 1); // its pid there, which is init's here
    CHECK(file.life->alive(other.word()));
    other.child().kill(SIGKILL); // its child dies with it
    await([&] { return !file.life->alive(other.word()); });
}

TEST("exec releases the token") {
    File file;
    Shared<Word> word;
    Child child([&] {
        publish(*word, file.life->process());
        execl("/bin/sleep", "sleep", "100", nullptr);
        _exit(1);
    });
    await([&] { return see(*word) != 0 && !file.life->alive(see(*word)); });
    CHECK(!child.dead());
}

TEST("the token of a process whose first thread has ended is alive") {
    File file;
    Shared<Word> word;
    Child child([&] {
        std::thread([&] {
            publish(*word, file.life->process());
            for (;;)
                pause();
        }).detach();
        syscall(SYS_exit, 0); // pthread_exit would unwind the stack, and destroy the file
    });
    await([&] { return see(*word) != 0; });
    usleep(20'000);
    CHECK(file.life->alive(see(*word)));
}

TEST("threads that ask at the same time get one token") {
    File file;
    std::vector<std::thread> threads;
    std::atomic<std::int64_t> first{0}, others{0};
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            const std::int64_t word = file.life->process();
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
            CHECK(file.life->alive(life.process()));
        }
    });
    for (int i = 0; i < 50; ++i) {
        Child child([&] { CHECK(file.life->alive(file.life->process())); });
        CHECK_EQ(child.join(), 0);
    }
    stop.store(true);
    busy.join();
}

TEST("a child without free descriptors still has a token") {
    File file;
    const std::int64_t me = file.life->process();
    Child child([&] {
        rlimit none{0, 0};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
        CHECK(file.life->process() != me); // the file was opened again by fork()
        CHECK(file.life->alive(me));
    });
    CHECK_EQ(child.join(), 0);
}
