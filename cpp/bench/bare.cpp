// Measures the physical limit of the machine, which benchmarks print beside memlane's own figures. Uses no code of
// memlane. Every mode prints one line of JSON: nanoseconds per operation, as the median over blocks and for each block.
//
//   bare pingpong_spin N                           round trip of 64 bytes each way between two processes, both awake
//   bare pingpong_futex N                          the same, each side sleeping in the kernel until its turn
//   bare wake N                                    from the wake-up call to the first instruction of an idle sleeper
//   bare gather ROWS ROW_BYTES BATCH REPEATS [THREADS]   memcpy of random rows of a packed table, with prefetch
//   bare memcpy BYTES REPEATS                      one memcpy

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int blocks = 10;
constexpr std::size_t payload_bytes = 64;

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "bare: %s: %s\n", what, std::strerror(errno));
    std::exit(1);
}

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void print(const std::string &name, const std::string &settings, const std::vector<double> &block_ns) {
    std::printf("{\"name\": \"%s\", %s, \"ns_per_operation\": %.1f, \"blocks_ns\": [", name.c_str(), settings.c_str(),
                median(block_ns));
    for (std::size_t i = 0; i < block_ns.size(); ++i)
        std::printf("%s%.1f", i == 0 ? "" : ", ", block_ns[i]);
    std::printf("]}\n");
}

template <class T> T *shared() {
    void *memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    return new (memory) T{};
}

template <class Body> pid_t start_child(Body body) {
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0)
        fail("fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            body();
        _exit(0);
    }
    return pid;
}

void join(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) {
        std::fprintf(stderr, "bare: the child failed\n");
        std::exit(1);
    }
}

void futex_wait(std::atomic<std::uint32_t> &word, std::uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAIT, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// ------------------------------------------------------------------------------------------------------- ping-pong

struct Side {
    alignas(64) std::atomic<std::uint32_t> turn;
    alignas(64) unsigned char payload[payload_bytes];
};

struct Table {
    Side ping, pong;
};

struct Spinning {
    static void await(std::atomic<std::uint32_t> &turn, std::uint32_t until) {
        while (turn.load(std::memory_order_acquire) != until)
            pause_core();
    }
    static void advance(std::atomic<std::uint32_t> &turn, std::uint32_t to) { turn.store(to, std::memory_order_release); }
};

struct Sleeping {
    static void await(std::atomic<std::uint32_t> &turn, std::uint32_t until) {
        for (std::uint32_t seen; (seen = turn.load(std::memory_order_acquire)) != until;)
            futex_wait(turn, seen);
    }
    static void advance(std::atomic<std::uint32_t> &turn, std::uint32_t to) {
        turn.store(to, std::memory_order_seq_cst);
        futex_wake(turn);
    }
};

template <class Wait> void pingpong(const std::string &name, std::uint32_t trips) {
    auto *table = shared<Table>();
    const std::uint32_t per_block = std::max<std::uint32_t>(1, trips / blocks);
    const std::uint32_t warmup = per_block;
    const std::uint32_t total = warmup + per_block * blocks;
    const pid_t child = start_child([&] {
        unsigned char mine[payload_bytes];
        for (std::uint32_t trip = 1; trip <= total; ++trip) {
            Wait::await(table->ping.turn, trip);
            std::memcpy(mine, table->ping.payload, payload_bytes);
            std::memcpy(table->pong.payload, mine, payload_bytes);
            Wait::advance(table->pong.turn, trip);
        }
    });
    unsigned char out[payload_bytes], back[payload_bytes];
    std::vector<double> block_ns;
    std::int64_t begin = now_ns();
    for (std::uint32_t trip = 1; trip <= total; ++trip) {
        std::memset(out, static_cast<int>(trip), payload_bytes);
        std::memcpy(table->ping.payload, out, payload_bytes);
        Wait::advance(table->ping.turn, trip);
        Wait::await(table->pong.turn, trip);
        std::memcpy(back, table->pong.payload, payload_bytes);
        if (std::memcmp(out, back, payload_bytes) != 0) {
            std::fprintf(stderr, "bare: the payload of round trip %u came back changed\n", trip);
            std::exit(1);
        }
        if (trip % per_block == 0) {
            const std::int64_t now = now_ns();
            if (trip > warmup)
                block_ns.push_back(static_cast<double>(now - begin) / per_block);
            begin = now;
        }
    }
    join(child);
    print(name,
          "\"operation\": \"round trip\", \"payload_bytes\": 64, \"operations_per_block\": " + std::to_string(per_block),
          block_ns);
}

// ------------------------------------------------------------------------------------------------------------ wake

struct Sleeper {
    alignas(64) std::atomic<std::uint32_t> signalled; // wake-ups sent
    alignas(64) std::atomic<std::uint32_t> awake;     // wake-ups answered
    std::atomic<std::int64_t> awake_at_ns;
};

void wake(std::uint32_t wakes) {
    constexpr std::int64_t rest_ns = 200'000; // long enough for the sleeper to be asleep and its core idle
    auto *sleeper = shared<Sleeper>();
    const std::uint32_t per_block = std::max<std::uint32_t>(1, wakes / blocks);
    const std::uint32_t total = per_block * blocks;
    const pid_t child = start_child([&] {
        for (std::uint32_t round = 1; round <= total; ++round) {
            while (sleeper->signalled.load(std::memory_order_acquire) < round)
                futex_wait(sleeper->signalled, round - 1);
            sleeper->awake_at_ns.store(now_ns(), std::memory_order_relaxed);
            sleeper->awake.store(round, std::memory_order_release);
        }
    });
    std::vector<double> block_ns, latencies;
    for (std::uint32_t round = 1; round <= total; ++round) {
        // Spins: a waker that had slept itself would be measured on a cold core.
        for (const std::int64_t until = now_ns() + rest_ns; now_ns() < until;)
            pause_core();
        const std::int64_t signalled_at_ns = now_ns();
        sleeper->signalled.store(round, std::memory_order_seq_cst);
        futex_wake(sleeper->signalled);
        while (sleeper->awake.load(std::memory_order_acquire) < round)
            pause_core();
        latencies.push_back(static_cast<double>(sleeper->awake_at_ns.load(std::memory_order_relaxed) - signalled_at_ns));
        if (round % per_block == 0) {
            block_ns.push_back(median(latencies)); // one preemption would dominate a mean
            latencies.clear();
        }
    }
    join(child);
    print("wake", "\"operation\": \"one way\", \"operations_per_block\": " + std::to_string(per_block), block_ns);
}

// ---------------------------------------------------------------------------------------------------- gather, memcpy

// Memory whose pages are all touched, so that the first block does not measure page faults.
std::vector<unsigned char> memory(std::size_t bytes) {
    std::vector<unsigned char> touched(bytes);
    for (std::size_t i = 0; i < bytes; i += 64)
        touched[i] = static_cast<unsigned char>(i / 64);
    return touched;
}

// Keeps the compiler from dropping copies whose result is not read.
void use(const void *data) { asm volatile("" : : "r"(data) : "memory"); }

void gather_range(const unsigned char *table, std::size_t row_bytes, const std::uint32_t *rows, unsigned char *out,
                  std::size_t begin, std::size_t end) {
    constexpr std::size_t ahead = 16;
    for (std::size_t i = begin; i < end; ++i) {
        if (i + ahead < end) {
            const unsigned char *next = table + rows[i + ahead] * row_bytes;
            for (std::size_t at = 0; at < row_bytes && at < 512; at += 64)
                __builtin_prefetch(next + at, 0, 2);
        }
        std::memcpy(out + i * row_bytes, table + rows[i] * row_bytes, row_bytes);
    }
}

void gather(std::size_t rows, std::size_t row_bytes, std::size_t batch, std::size_t repeats, std::size_t threads) {
    const std::vector<unsigned char> table = memory(rows * row_bytes);
    std::vector<unsigned char> out = memory(batch * row_bytes);
    // Indices are drawn before the clock starts and differ for each repeat: the limit is the memory, not the cache.
    const std::size_t batches = std::max<std::size_t>(1, repeats / blocks);
    std::vector<std::uint32_t> drawn(batch * batches);
    std::mt19937_64 engine(1);
    for (auto &row : drawn)
        row = static_cast<std::uint32_t>(engine() % rows);

    // The threads never sleep within a block: they spin at a barrier before and after each gather.
    std::atomic<std::size_t> begun = 0, ended = 0;
    std::atomic<bool> over = false;
    const auto part = [&](std::size_t member, std::size_t round) {
        gather_range(table.data(), row_bytes, drawn.data() + round % batches * batch, out.data(), batch * member / threads,
                     batch * (member + 1) / threads);
    };
    std::vector<std::thread> helpers;
    for (std::size_t member = 1; member < threads; ++member)
        helpers.emplace_back([&, member] {
            for (std::size_t round = 0;; ++round) {
                while (begun.load(std::memory_order_acquire) <= round)
                    pause_core();
                if (over)
                    return;
                part(member, round);
                ended.fetch_add(1, std::memory_order_acq_rel);
            }
        });
    std::vector<double> block_ns;
    std::size_t round = 0;
    for (int block = -1; block < blocks; ++block) { // block -1 is the warm-up
        const std::int64_t begin = now_ns();
        for (std::size_t i = 0; i < batches; ++i, ++round) {
            begun.store(round + 1, std::memory_order_release);
            part(0, round);
            while (ended.load(std::memory_order_acquire) < (round + 1) * (threads - 1))
                pause_core();
            use(out.data());
        }
        if (block >= 0)
            block_ns.push_back(static_cast<double>(now_ns() - begin) / static_cast<double>(batches));
    }
    over = true;
    begun.store(round + 1, std::memory_order_release);
    for (auto &helper : helpers)
        helper.join();
    print("gather",
          "\"operation\": \"batch\", \"rows\": " + std::to_string(rows) + ", \"row_bytes\": " + std::to_string(row_bytes) +
              ", \"batch\": " + std::to_string(batch) + ", \"threads\": " + std::to_string(threads) +
              ", \"operations_per_block\": " + std::to_string(batches),
          block_ns);
}

void copy(std::size_t bytes, std::size_t repeats) {
    const std::vector<unsigned char> from = memory(bytes);
    std::vector<unsigned char> to = memory(bytes);
    const std::size_t per_block = std::max<std::size_t>(1, repeats / blocks);
    std::vector<double> block_ns;
    for (int block = -1; block < blocks; ++block) {
        const std::int64_t begin = now_ns();
        for (std::size_t i = 0; i < per_block; ++i) {
            use(from.data());
            std::memcpy(to.data(), from.data(), bytes);
            use(to.data());
        }
        if (block >= 0)
            block_ns.push_back(static_cast<double>(now_ns() - begin) / static_cast<double>(per_block));
    }
    print("memcpy",
          "\"operation\": \"copy\", \"bytes\": " + std::to_string(bytes) +
              ", \"operations_per_block\": " + std::to_string(per_block),
          block_ns);
}

// -------------------------------------------------------------------------------------------------------- arguments

[[noreturn]] void usage() {
    std::fprintf(stderr, "usage: bare pingpong_spin N | pingpong_futex N | wake N | memcpy BYTES REPEATS |\n"
                         "       gather ROWS ROW_BYTES BATCH REPEATS [THREADS]\n"
                         "All arguments are integers above 0; ROWS and N must be below 2**32.\n");
    std::exit(2);
}

std::size_t number(const char *text, std::size_t max = SIZE_MAX) {
    char *end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value == 0 || value > max)
        usage();
    return value;
}

} // namespace

int main(int argc, char **argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    constexpr std::size_t max_trips = UINT32_MAX / 2; // with the warm-up, the count must fit into a futex word
    if (mode == "pingpong_spin" && argc == 3)
        pingpong<Spinning>(mode, static_cast<std::uint32_t>(number(argv[2], max_trips)));
    else if (mode == "pingpong_futex" && argc == 3)
        pingpong<Sleeping>(mode, static_cast<std::uint32_t>(number(argv[2], max_trips)));
    else if (mode == "wake" && argc == 3)
        wake(static_cast<std::uint32_t>(number(argv[2], max_trips)));
    else if (mode == "gather" && (argc == 6 || argc == 7))
        gather(number(argv[2], UINT32_MAX), number(argv[3]), number(argv[4]), number(argv[5]),
               argc == 7 ? number(argv[6], 1024) : 1);
    else if (mode == "memcpy" && argc == 4)
        copy(number(argv[2]), number(argv[3]));
    else
        usage();
}
