#include "os/process.hpp"

#include <list>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>

#include "support/check.hpp"
#include "support/processes.hpp"
#include "sync/words.hpp"

using namespace memlane;

TEST("a process identity is its pid and its start time in one number above zero") {
    const std::int64_t word = this_process();
    CHECK(word > 0);
    CHECK_EQ(word & ((1 << pid_bits) - 1), getpid());
    CHECK(word >> pid_bits > 0);
    CHECK_EQ(this_process(), word);
}

TEST("a process finds itself and its parent alive") {
    const std::int64_t parent = this_process();
    CHECK(process_alive(parent));
    Child child([&] {
        CHECK(process_alive(this_process()));
        CHECK(process_alive(parent));
    });
    CHECK_EQ(child.join(), 0);
}

TEST("a forked child is another process") {
    const std::int64_t parent = this_process();
    Child child([&] {
        CHECK(this_process() != parent);
        CHECK_EQ(this_process() & ((1 << pid_bits) - 1), getpid());
    });
    CHECK_EQ(child.join(), 0);
}

TEST("the identity of a process is right when its name looks like a line of /proc/PID/stat") {
    const std::int64_t word = this_process();
    for (const char *name : {"a b) Z 1 1 (c", ")", "((", ") X", ""}) {
        prctl(PR_SET_NAME, name);
        CHECK_EQ(this_process(), word);
        CHECK(process_alive(word));
    }
}

TEST("a stopped process is alive") {
    LiveProcess live(this_process);
    live.child().kill(SIGSTOP);
    await([&] { return state_letter(live.child().pid()) == 'T'; });
    CHECK(process_alive(live.word()));
}

TEST("a zombie is dead") {
    LiveProcess live(this_process);
    live.child().kill(SIGKILL);
    CHECK(live.child().dies_within(30 * second));
    CHECK(state_letter(live.child().pid()) == 'Z');
    CHECK(!process_alive(live.word()));
}

TEST("a process that was waited for is dead") {
    LiveProcess live(this_process);
    live.child().kill(SIGKILL);
    live.child().join();
    CHECK(!process_alive(live.word()));
}

TEST("a process whose pid was reused is dead") {
    LiveProcess live(this_process);
    const std::int64_t tick = std::int64_t{1} << pid_bits;
    CHECK(process_alive(live.word()));
    CHECK(!process_alive(live.word() - tick));
    CHECK(!process_alive(live.word() + tick));
}

TEST("a process has one of four states") {
    const std::int64_t me = this_process(), pid = me & ((1 << pid_bits) - 1), start = me >> pid_bits;
    CHECK(process_state(pid, start) == ProcessState::alive);
    CHECK(process_state(pid, start - 1) == ProcessState::recycled);
    Child child([] {});
    CHECK(child.dies_within(30 * second));
    const std::int64_t other = process_of(child.pid());
    CHECK(process_state(child.pid(), other >> pid_bits) == ProcessState::zombie);
    child.join();
    CHECK(process_state(child.pid(), other >> pid_bits) == ProcessState::dead);
    CHECK_EQ(process_of(child.pid()), 0);
    CHECK_EQ(process_of(getpid()), me);
}

TEST("identities that no process can have are dead") {
    CHECK(!process_alive(0));
    CHECK(!process_alive(std::int64_t{1} << pid_bits)); // a start time and pid 0
    CHECK(!process_alive((std::int64_t{1} << pid_bits) - 1)); // the largest pid, which the kernel does not assign
}

TEST("a process without a free file descriptor considers no live process dead") {
    LiveProcess live(this_process);
    LiveProcess killed(this_process);
    killed.child().kill(SIGKILL);
    killed.child().join();
    const std::int64_t me = this_process();
    rlimit usual{};
    getrlimit(RLIMIT_NOFILE, &usual);
    const rlimit none{0, usual.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    CHECK_EQ(open("/dev/null", O_RDONLY), -1);
    CHECK(process_alive(live.word()));
    CHECK(process_alive(me));
    CHECK(!process_alive(killed.word())); // no process has its pid: kill() shows that without a descriptor
#if !defined(__SANITIZE_ADDRESS__) // it needs a file descriptor to handle an exception
    // With an identity without start time, all other processes would consider this one dead.
    Child([] { CHECK_THROWS(std::system_error, this_process()); }).join();
#endif
    setrlimit(RLIMIT_NOFILE, &usual);
}

TEST("a process whose first thread has ended is alive until its last thread has ended") {
    Shared<Word> word, go_on;
    Child child([&] {
        publish(*word, this_process());
        std::thread([&] {
            while (see(*go_on) == 0)
                usleep(100);
            _exit(0);
        }).detach();
        syscall(SYS_exit, 0); // this thread alone; pthread_exit would unwind into the test's own frames
    });
    await([&] { return state_letter(child.pid()) == 'Z'; });
    CHECK(process_alive(see(*word)));
    publish(*go_on, 1);
    CHECK(child.dies_within(30 * second));
    CHECK(!process_alive(see(*word)));
}

// Race: a process whose threads store as fast as they can is killed, while another process checks whether it is alive.
//   alive, and it stores              acceptable
//   dead, and no store after that     acceptable
//   dead, and then a store            FORBIDDEN    its slots could belong to another process by then
TEST("a killed process is not dead before its last thread has stopped") {
    constexpr int threads = 4;
    struct Counters {
        Word word;
        struct alignas(64) {
            Word value;
        } counter[threads];
    };
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
            publish(counters->word, this_process());
            for (;;)
                pause();
        });
        for (auto &counter : counters->counter)
            await([&] { return see(counter.value) != 0; });
        await([&] { return see(counters->word) != 0; });
        const std::int64_t word = see(counters->word);
        child.kill(SIGKILL);
        while (process_alive(word)) {
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
