#include "sync/signal.hpp"

#include <array>
#include <cerrno>
#include <list>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "os/clock.hpp"
#include "support/check.hpp"
#include "support/processes.hpp"
#include "support/syscalls.hpp"

using namespace memlane;

namespace {

// Waits as callers do: again after each pause.
WaitResult wait_to_the_end(SignalCell &cell, std::int64_t until, std::int64_t deadline_ns = forever_ns,
                           std::span<const int> pidfds = {}, std::int64_t spin_ns = 0) {
    Spin spin(spin_ns);
    for (;;) {
        const WaitResult result = signal_wait(cell, until, deadline_ns, pidfds, spin);
        if (result.end != WaitEnd::paused)
            return result;
    }
}

bool waiter_may_sleep(const SignalCell &cell) { return (cell.gate.load() & 1u) != 0; }

} // namespace

// ------------------------------------------------------------------------------------------------------ one process

TEST("store, add and compare-and-swap change the value, and add returns the new one") {
    SignalCell cell{};
    signal_store(cell, 5);
    CHECK_EQ(see(cell.value), 5);
    CHECK_EQ(signal_add(cell, -7), -2);
    CHECK_EQ(see(cell.value), -2);
    CHECK_EQ(signal_compare_and_swap(cell, -2, 40), true);
    CHECK_EQ(see(cell.value), 40);
}

TEST("a compare-and-swap that expects another value changes nothing and wakes no waiter") {
    SignalCell cell{};
    cell.gate = 1;
    CHECK_EQ(signal_compare_and_swap(cell, 1, 2), false);
    CHECK_EQ(see(cell.value), 0);
    CHECK_EQ(syscalls::wakes.load(), 0);
}

TEST("a wait for a value that is already there returns it without a system call") {
    SignalCell cell{};
    cell.value = 9;
    Spin spin(0);
    const WaitResult result = signal_wait(cell, 7, forever_ns, {}, spin);
    CHECK(result.end == WaitEnd::reached);
    CHECK_EQ(result.value, 9);
    CHECK_EQ(syscalls::waits.load(), 0);
    CHECK_EQ(cell.gate.load(), 0u);
}

TEST("a signal without sleepers makes no system call") {
    SignalCell cell{};
    signal_store(cell, 1);
    signal_add(cell, 1);
    signal_compare_and_swap(cell, 2, 3);
    signal_wake(cell);
    CHECK_EQ(syscalls::wakes.load(), 0);
}

TEST("a wait ends at its deadline and not before") {
    SignalCell cell{};
    for (const std::int64_t timeout : {0 * ms, 1 * ms, 30 * ms, 250 * ms}) {
        const std::int64_t begin = now_ns();
        const WaitResult result = wait_to_the_end(cell, 1, begin + timeout);
        const std::int64_t took = now_ns() - begin;
        CHECK(result.end == WaitEnd::timed_out);
        CHECK(took >= timeout);
        CHECK(took < timeout + second);
    }
}

TEST("a deadline within a slice does not wait for the slice's end") {
    SignalCell cell{};
    std::int64_t fastest = forever_ns; // the best of several: the machine may be busy
    for (int i = 0; i < 5; ++i) {
        const std::int64_t begin = now_ns();
        wait_to_the_end(cell, 1, begin + 10 * ms);
        fastest = std::min(fastest, now_ns() - begin);
    }
    CHECK(fastest < slice_ns);
}

TEST("a wait without a deadline pauses when its slice ends so that the caller can check other conditions") {
    SignalCell cell{};
    Spin spin(0);
    const std::int64_t begin = now_ns();
    CHECK(signal_wait(cell, 1, forever_ns, {}, spin).end == WaitEnd::paused);
    CHECK(now_ns() - begin >= slice_ns);
    CHECK_EQ(syscalls::last_wait, ETIMEDOUT);
}

TEST("a sleep that the kernel refuses is an error and not a wait that spins for ever") {
    for (const int error : {EFAULT, ENOSYS, EPERM, EINVAL}) {
        SignalCell cell{};
        Spin spin(0);
        syscalls::wait_error = error;
        CHECK_THROWS(std::system_error, signal_wait(cell, 1, forever_ns, {}, spin));
    }
    for (const int pause : {EAGAIN, EINTR, ETIMEDOUT}) {
        SignalCell cell{};
        Spin spin(0);
        syscalls::wait_error = pause;
        CHECK_EQ(signal_wait(cell, 1, forever_ns, {}, spin).end, WaitEnd::paused);
    }
}

TEST("a signal handler that runs on the sleeping thread ends its sleep with a pause") {
    struct sigaction action{};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART; // the flag under which other system calls would continue
    sigaction(SIGUSR1, &action, nullptr);
    SignalCell cell{};
    std::atomic<bool> over = false;
    std::thread sleeper([&] {
        Spin spin(0);
        // Slices that end by timeout do not count; the repeated signals interrupt one soon.
        for (int i = 0; i < 20 && syscalls::last_wait != EINTR; ++i)
            CHECK(signal_wait(cell, 1, forever_ns, {}, spin).end == WaitEnd::paused);
        CHECK_EQ(syscalls::last_wait, EINTR);
        over = true;
    });
    while (!over) {
        pthread_kill(sleeper.native_handle(), SIGUSR1);
        usleep(1000);
    }
    sleeper.join();
}

TEST("a change of the word without a signal ends the wait before its slice ends if signal_wake follows") {
    SignalCell cell{};
    std::thread sleeper([&] {
        CHECK(wait_to_the_end(cell, 1).end == WaitEnd::reached);
        CHECK(syscalls::last_wait != ETIMEDOUT);
    });
    await([&] { return waiter_may_sleep(cell); });
    cell.value.store(1, std::memory_order_relaxed);
    signal_wake(cell);
    sleeper.join();
}

TEST("a signal between the waiter's last check and its sleep ends the wait") {
    for (int how = 0; how < 4; ++how) {
        SignalCell cell{};
        syscalls::before_wait = [&] {
            switch (how) {
            case 0:
                return signal_store(cell, 1);
            case 1:
                return static_cast<void>(signal_add(cell, 1));
            case 2:
                return static_cast<void>(signal_compare_and_swap(cell, 0, 1));
            default:
                cell.value = 1;
                signal_wake(cell);
            }
        };
        CHECK(wait_to_the_end(cell, 1).end == WaitEnd::reached);
        CHECK_EQ(syscalls::last_wait, EAGAIN); // the gate had changed: the kernel refused the sleep
    }
}

TEST("a sleeper that marks the gate again does not hide a wake-up from another that is about to sleep") {
    SignalCell cell{};
    syscalls::before_wait = [&] {
        signal_store(cell, 1);
        // The other sleeper waits for a higher value. If wake-ups were not counted, the gate would be unchanged now.
        cell.gate.fetch_or(1u);
    };
    CHECK(wait_to_the_end(cell, 1).end == WaitEnd::reached);
    CHECK_EQ(syscalls::last_wait, EAGAIN);
}

TEST("one signal wakes every sleeper") {
    constexpr int sleepers = 8;
    SignalCell cell{};
    std::atomic<int> asleep = 0;
    syscalls::before_wait = [&] { ++asleep; };
    std::vector<std::thread> threads;
    for (int i = 0; i < sleepers; ++i)
        threads.emplace_back([&] {
            CHECK(wait_to_the_end(cell, 1).end == WaitEnd::reached);
            CHECK(syscalls::last_wait != ETIMEDOUT);
        });
    await([&] { return asleep >= sleepers; });
    signal_store(cell, 1);
    for (auto &thread : threads)
        thread.join();
    CHECK_EQ(syscalls::wakes.load(), 1);
}

TEST("a wake-up for a value that is too low does not end the wait") {
    SignalCell cell{};
    std::thread sleeper([&] { CHECK_EQ(wait_to_the_end(cell, 3).value, 3); });
    for (int value = 1; value <= 3; ++value) {
        await([&] { return waiter_may_sleep(cell); });
        signal_store(cell, value);
    }
    sleeper.join();
}

// --------------------------------------------------------------------------------------------------------- spinning

TEST("a spin with limit zero returns false at once") {
    SignalCell cell{};
    cell.value = 1;
    Spin spin(0);
    CHECK_EQ(spin.until(cell, 1, forever_ns), false);
}

TEST("a spin in vain ends and returns false") {
    SignalCell cell{};
    Spin spin(50'000);
    for (int i = 0; i < 20; ++i)
        CHECK_EQ(spin.until(cell, 1, forever_ns), false);
}

TEST("a change during the spin ends the wait without a system call") {
    SignalCell cell{};
    std::thread changer([&] {
        usleep(20'000);
        signal_store(cell, 1);
    });
    Spin spin(20 * second); // longer than any stall of a busy machine
    // A long yield makes the spin end on purpose; it is then started again.
    while (!spin.until(cell, 1, forever_ns))
        spin = Spin(20 * second);
    CHECK_EQ(syscalls::waits.load(), 0);
    changer.join();
}

TEST("a process bound to one core of several still spins by default: its peer may have another core") {
    const bool several = sysconf(_SC_NPROCESSORS_ONLN) > 1;
    CHECK_EQ(default_spin_limit_ns() > 0, several);
    cpu_set_t allowed, one;
    sched_getaffinity(0, sizeof allowed, &allowed);
    CPU_ZERO(&one);
    for (std::size_t core = 0; CPU_COUNT(&one) == 0; ++core)
        if (CPU_ISSET(core, &allowed))
            CPU_SET(core, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ(default_spin_limit_ns() > 0, several);
    CHECK_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0);
}

// The number of waits in vain, of 2000, that yielded, where every yield takes `yield_ns`.
int waits_that_yield(std::int64_t yield_ns) {
    int yields = 0;
    syscalls::instead_of_yield = [&] {
        ++yields;
        for (const std::int64_t begin = now_ns(); now_ns() - begin < yield_ns;)
            ;
    };
    SignalCell cell{};
    Spin spin(200'000);
    int yielding = 0;
    for (int wait = 0; wait < 2000; ++wait) {
        const int before = yields;
        CHECK(!spin.until(cell, 1, forever_ns));
        yielding += yields > before;
    }
    syscalls::instead_of_yield = nullptr;
    return yielding;
}

// The bounds leave room for waits that another process interrupts, which then yield as well.

TEST("waits on a core that an unrelated thread keeps for long soon stop spinning") {
    CHECK(waits_that_yield(2'000'000) < 40); // 6: the first wait, and the probes 32, 96, 224, 480 and 992
}

TEST("waits on a core that another thread takes briefly probe at a constant rate") {
    CHECK(waits_that_yield(20'000) > 60); // 126: the first wait, and one probe in 16 waits
}

// ----------------------------------------------------------------------------------------------------------- deaths

TEST("a wait ends within a second of the death of one of the watched processes and identifies it") {
    Shared<SignalCell> cell;
    Child first([] { pause(); }), second_child([] { pause(); });
    const std::array pidfds{first.pidfd(), second_child.pidfd()};
    syscalls::before_wait = [&] { second_child.kill(SIGKILL); };
    const std::int64_t begin = now_ns();
    const WaitResult result = wait_to_the_end(*cell, 1, forever_ns, pidfds);
    CHECK(result.end == WaitEnd::peer_died);
    CHECK_EQ(result.peer, 1);
    CHECK(now_ns() - begin < second);
}

TEST("a wait that watches a process which was dead and waited for before ends at once") {
    Shared<SignalCell> cell;
    Child child([] {});
    child.join();
    const int pidfd = child.pidfd();
    Spin spin(0);
    CHECK(signal_wait(*cell, 1, forever_ns, {&pidfd, 1}, spin).end == WaitEnd::peer_died);
    CHECK_EQ(syscalls::waits.load(), 0);
}

TEST("the death of a watched process does not hide a value that was reached") {
    Shared<SignalCell> cell;
    Child child([&] { signal_store(*cell, 1); });
    child.join();
    const int pidfd = child.pidfd();
    CHECK(wait_to_the_end(*cell, 1, forever_ns, {&pidfd, 1}).end == WaitEnd::reached);
}

TEST("a signal between the waiter's check of the value and of its peers takes precedence over the death") {
    Shared<SignalCell> cell;
    Shared<Word> go;
    Child child([&] {
        while (see(*go) == 0)
            sched_yield();
        cell->value = 1; // without a wake-up: the process dies first
    });
    syscalls::before_poll = [&, first = true]() mutable {
        if (!std::exchange(first, false))
            return; // dies_within polls too
        publish(*go, 1);
        CHECK(child.dies_within(30 * second));
    };
    const int pidfd = child.pidfd();
    CHECK(wait_to_the_end(*cell, 1, forever_ns, {&pidfd, 1}).end == WaitEnd::reached);
}

// Race: a process signals and dies at once; another waits for the value and watches the process.
//   reached    acceptable   the value was stored before the death
//   peer_died  FORBIDDEN    the last value of a dead process was lost
TEST("a signal right before its process's death is never reported as the death") {
    int forbidden = 0;
    for (int i = 0; i < check::times(400); ++i) {
        Shared<SignalCell> cell;
        Child child([&] {
            signal_store(*cell, 1);
            raise(SIGKILL);
        });
        const int pidfd = child.pidfd();
        const std::int64_t spin_ns = i % 2 == 0 ? 0 : default_spin_limit_ns();
        forbidden += wait_to_the_end(*cell, 1, forever_ns, {&pidfd, 1}, spin_ns).end != WaitEnd::reached;
    }
    CHECK_EQ(forbidden, 0);
}

TEST("a waker killed between its change and its wake-up delays the waiter by a slice at most") {
    Shared<SignalCell> cell;
    Child waker([&] {
        syscalls::before_wake = [] { raise(SIGKILL); };
        while (!waiter_may_sleep(*cell))
            usleep(100);
        signal_store(*cell, 1);
    });
    const std::int64_t begin = now_ns();
    CHECK(wait_to_the_end(*cell, 1).end == WaitEnd::reached);
    CHECK(now_ns() - begin < second);
    CHECK_EQ(waker.join(), -SIGKILL);
}

TEST("a waker killed right after its change is seen by the waiter within a slice") {
    Shared<SignalCell> cell;
    syscalls::before_wait = [&] {
        // The change alone: as if the process had died before it loaded the gate.
        Child([&] { cell->value = 1; }).join();
    };
    const std::int64_t begin = now_ns();
    CHECK(wait_to_the_end(*cell, 1).end == WaitEnd::reached);
    CHECK_EQ(syscalls::waits.load(), 1);
    CHECK(now_ns() - begin < second);
}

TEST("after a waker was killed before its wake-up the next signal wakes the waiter") {
    Shared<SignalCell> cell;
    cell->gate = 1;
    Child killed([&] {
        syscalls::before_wake = [] { raise(SIGKILL); };
        signal_store(*cell, 1);
    });
    CHECK_EQ(killed.join(), -SIGKILL);
    Child waker([&] {
        while (!waiter_may_sleep(*cell))
            usleep(100);
        signal_store(*cell, 2);
    });
    CHECK(wait_to_the_end(*cell, 2).end == WaitEnd::reached);
    CHECK(syscalls::last_wait != ETIMEDOUT);
}

TEST("the mark of a killed sleeper costs the next signal one needless system call and nothing more") {
    Shared<SignalCell> cell;
    Shared<Word> asleep;
    Child sleeper([&] {
        syscalls::before_wait = [&] { publish(*asleep, 1); };
        wait_to_the_end(*cell, 1);
    });
    await([&] { return see(*asleep) == 1; });
    sleeper.kill(SIGKILL);
    CHECK_EQ(sleeper.join(), -SIGKILL);
    CHECK(waiter_may_sleep(*cell));
    signal_add(*cell, 1);
    CHECK_EQ(syscalls::wakes.load(), 1);
    signal_add(*cell, 1);
    CHECK_EQ(syscalls::wakes.load(), 1);
}

TEST("a sleeper that joins after another was killed is woken by the next signal") {
    Shared<SignalCell> cell;
    cell->gate = 1; // as a killed sleeper leaves it
    Shared<Word> asleep;
    Child sleeper([&] {
        syscalls::before_wait = [&] { publish(*asleep, 1); };
        CHECK(wait_to_the_end(*cell, 1).end == WaitEnd::reached);
        CHECK(syscalls::last_wait != ETIMEDOUT);
    });
    await([&] { return see(*asleep) == 1; });
    signal_store(*cell, 1);
    CHECK_EQ(sleeper.join(), 0);
}

// ------------------------------------------------------------------------------------------------------------ races

namespace {

// Race: one side changes the value and wakes; the other marks the gate and loads the value, as a sleeper does just
// before it sleeps.
//   sleeper sees the new value                  acceptable   it does not sleep
//   sleeper sees the old value, gate increased  acceptable   it is woken, or the kernel refuses the sleep
//   sleeper sees the old value, gate unchanged  FORBIDDEN    the lost wake-up
struct Crossing {
    SignalCell cell;
    alignas(64) SpinBarrier<2> begin;
    alignas(64) SpinBarrier<2> end;
    alignas(64) std::atomic<bool> over;

    // Varies which side comes first. If both share a core, the other can overtake only during a yield.
    void random_delay(Rng &rng) {
        if (rng.between(0, 31) == 0)
            sched_yield();
        for (std::int64_t i = rng.between(0, 400); i > 0; --i)
            cell.gate.load(std::memory_order_relaxed);
    }

    void waker() {
        Rng rng(1);
        for (int round = 1;; ++round) {
            begin.arrive_and_wait();
            if (over)
                return;
            random_delay(rng);
            switch (round % 4) {
            case 0:
                signal_store(cell, round);
                break;
            case 1:
                signal_add(cell, 1);
                break;
            case 2:
                signal_compare_and_swap(cell, round - 1, round);
                break;
            default:
                cell.value.store(round, std::memory_order_relaxed);
                signal_wake(cell);
            }
            end.arrive_and_wait();
        }
    }

    void sleeper() {
        constexpr int enough = check::times(100'000),
                      max_rounds = 10 * enough; // more than enough only while an outcome is missing
        Rng rng(2);
        int saw = 0, woken = 0, lost = 0;
        for (int round = 1; round <= enough || (round <= max_rounds && (saw == 0 || woken == 0)); ++round) {
            begin.arrive_and_wait();
            random_delay(rng);
            const std::uint32_t gate = cell.gate.fetch_or(1u) | 1u;
            const std::int64_t value = cell.value.load();
            end.arrive_and_wait();
            ++(value == round ? saw : cell.gate.load() != gate ? woken : lost);
        }
        over = true;
        begin.arrive_and_wait();
        CHECK_EQ(lost, 0);
        CHECK(saw > 0);
        CHECK(woken > 0);
    }
};

} // namespace

TEST("a change and a sleep that cross in two threads never miss each other") {
    Crossing crossing{};
    std::thread waker([&] { crossing.waker(); });
    crossing.sleeper();
    waker.join();
}

TEST("a change and a sleep that cross in two processes never miss each other") {
    Shared<Crossing> crossing;
    Child waker([&] { crossing->waker(); });
    crossing->sleeper();
    CHECK_EQ(waker.join(), 0);
}

namespace {

// Race: in each round every waker signals once, every waiter waits for all of them and then acknowledges, and the
// wakers wait for all acknowledgements. There are no further signals that could repair a lost wake-up: it shows as a
// sleep that lasts to the end of its slice although the signal was complete half a slice before.
//   woken, or refused to sleep     acceptable
//   slice over, signal incomplete  acceptable   the signalling process was late, not the wake-up
//   slice over, signal complete    FORBIDDEN    the lost wake-up
struct RepeatedWaits {
    struct Bell {
        SignalCell cell;
        alignas(64) Word complete; // the value of the last signal of a round, once its call had returned
        Word complete_at_ns;
    };
    static constexpr int wakers = 2;
    static constexpr int waiters = 3;
    Bell go;
    Bell done;
    alignas(64) std::atomic<int> lost;

    bool broken() const { return lost > 10; } // each costs a slice; ten are enough

    void ring(Bell &bell, int per_round) {
        const std::int64_t value = signal_add(bell.cell, 1);
        if (value % per_round == 0) {
            bell.complete_at_ns.store(now_ns(), std::memory_order_relaxed);
            publish(bell.complete, value);
        }
    }

    void await_bell(Bell &bell, std::int64_t until, Spin &spin) {
        WaitEnd end = WaitEnd::paused;
        while (end == WaitEnd::paused && !broken()) {
            syscalls::last_wait = syscalls::never_slept;
            end = signal_wait(bell.cell, until, forever_ns, {}, spin).end;
            if (syscalls::last_wait == ETIMEDOUT && see(bell.complete) >= until &&
                now_ns() - bell.complete_at_ns.load(std::memory_order_relaxed) > slice_ns / 2)
                ++lost;
        }
    }

    void run(int member, int rounds) {
        const bool waits = member < waiters;
        Rng rng(static_cast<std::uint64_t>(member));
        Spin spin(member % 2 == 0 ? 0 : 3'000);
        for (int round = 1; round <= rounds && !broken(); ++round) {
            if (waits)
                await_bell(go, static_cast<std::int64_t>(round) * wakers, spin);
            else
                await_bell(done, static_cast<std::int64_t>(round - 1) * waiters, spin);
            busy_wait(rng.between(0, 3'000));
            waits ? ring(done, waiters) : ring(go, wakers);
        }
    }
};

constexpr int rounds = check::times(8'000);

} // namespace

TEST("no wake-up is lost between many waiters and wakers in threads") {
    RepeatedWaits race{};
    std::vector<std::thread> threads;
    for (int member = 0; member < RepeatedWaits::waiters + RepeatedWaits::wakers; ++member)
        threads.emplace_back([&race, member] { race.run(member, rounds); });
    for (auto &thread : threads)
        thread.join();
    CHECK_EQ(race.lost.load(), 0);
    CHECK_EQ(see(race.done.cell.value), static_cast<std::int64_t>(rounds) * RepeatedWaits::waiters);
}

TEST("no wake-up is lost between many waiters and wakers in processes") {
    Shared<RepeatedWaits> race;
    std::list<Child> children;
    for (int member = 0; member < RepeatedWaits::waiters + RepeatedWaits::wakers; ++member)
        children.emplace_back([&race, member] { race->run(member, rounds); });
    for (auto &child : children)
        CHECK_EQ(child.join(), 0);
    CHECK_EQ(race->lost.load(), 0);
    CHECK_EQ(see(race->done.cell.value), static_cast<std::int64_t>(rounds) * RepeatedWaits::waiters);
}

// Race: processes take numbers from one signal with compare-and-swap while others add to it.
//   the sum of all numbers taken  acceptable
//   anything else                 FORBIDDEN    two took the same number, or one was lost
TEST("adds and compare-and-swaps of many processes on one signal count exactly") {
    constexpr int each = check::times(40'000);
    constexpr int processes = 4;
    Shared<SignalCell> cell;
    std::list<Child> children;
    for (int member = 0; member < processes; ++member)
        children.emplace_back([&cell, member] {
            for (int i = 0; i < each; ++i) {
                if (member % 2 == 0) {
                    signal_add(*cell, 1);
                    continue;
                }
                for (std::int64_t seen = see(cell->value); !signal_compare_and_swap(*cell, seen, seen + 1);)
                    seen = see(cell->value);
            }
        });
    for (auto &child : children)
        CHECK_EQ(child.join(), 0);
    CHECK_EQ(see(cell->value), each * processes);
}

// Race: the payload is written before the signal and read after the wait, in plain memory.
//   the payload of the round  acceptable
//   an older payload          FORBIDDEN (and a data race to ThreadSanitizer)
TEST("what was written before a signal is visible after the wait") {
    constexpr int handovers = check::times(20'000);
    struct Lane {
        SignalCell there, back;
        std::array<std::int64_t, 32> payload;
    };
    Lane lane{};
    std::thread writer([&] {
        for (int round = 1; round <= handovers; ++round) {
            lane.payload.fill(round);
            round % 2 == 0 ? signal_store(lane.there, round) : static_cast<void>(signal_add(lane.there, 1));
            wait_to_the_end(lane.back, round, forever_ns, {}, 5'000);
        }
    });
    int old = 0;
    for (int round = 1; round <= handovers; ++round) {
        wait_to_the_end(lane.there, round, forever_ns, {}, 5'000);
        for (const std::int64_t number : lane.payload)
            old += number != round;
        signal_compare_and_swap(lane.back, round - 1, round);
    }
    writer.join();
    CHECK_EQ(old, 0);
}
