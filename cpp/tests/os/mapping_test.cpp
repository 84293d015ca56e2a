#include "os/mapping.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include "support/check.hpp"
#include "support/processes.hpp"

using namespace memlane;

namespace {

const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

// A memfd filled with bytes that differ from their neighbours and from page to page.
class File {
  public:
    explicit File(std::size_t bytes) : fd(memfd_create("native-test", MFD_CLOEXEC)) {
        std::vector<std::byte> content(bytes);
        for (std::size_t i = 0; i < bytes; ++i)
            content[i] = at(i);
        CHECK_EQ(pwrite(fd, content.data(), bytes, 0), bytes);
    }
    ~File() { close(); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    static std::byte at(std::size_t offset) { return static_cast<std::byte>(offset % 251); }

    std::vector<std::byte> read(std::size_t offset, std::size_t bytes) const {
        std::vector<std::byte> content(bytes);
        CHECK_EQ(pread(fd, content.data(), bytes, static_cast<off_t>(offset)), bytes);
        return content;
    }
    void close() {
        if (fd >= 0)
            ::close(fd);
        fd = -1;
    }

    int fd;
};

// The bytes of the mapping; read through volatile because other mappings change the memory.
std::vector<std::byte> shown(const Mapping &mapping) {
    std::vector<std::byte> content(mapping.bytes());
    for (std::size_t i = 0; i < content.size(); ++i)
        content[i] = static_cast<volatile std::byte *>(mapping.data())[i];
    return content;
}

int error_of(int fd, std::size_t offset, std::size_t bytes, bool writeable) {
    try {
        Mapping mapping(fd, offset, bytes, writeable);
        return 0;
    } catch (const std::system_error &error) {
        return error.code().value();
    }
}

// The result of a child that writes one byte at `address`: minus the signal that killed it.
int death_by_writing(std::byte *address) {
    return Child([address] {
               signal(SIGSEGV, SIG_DFL); // a sanitizer's handler would turn the signal into an exit code
               *static_cast<volatile std::byte *>(address) = std::byte{1};
           })
        .join();
}

} // namespace

TEST("a closed mapping keeps its life token until its last use has ended") {
    File file(page);
    Mapping mapping(file.fd, 0, page, true), other(file.fd, 0, page, true);
    const std::int64_t me = mapping.life().process();
    {
        const MappingUse first(mapping);
        {
            const MappingUse second(mapping);
            mapping.close();
        }
        CHECK(other.life().alive(me));
    }
    CHECK(!other.life().alive(me));
    CHECK_THROWS(std::system_error, mapping.life().process());
    other.life().process();
    other.close();
    CHECK_EQ(other.life().process_if_taken(), 0);
}

TEST("a mapping at any offset shows exactly its bytes of the file") {
    const File file(5 * page);
    Rng rng(3);
    for (int i = 0; i < 300; ++i) {
        const auto offset = static_cast<std::size_t>(rng.between(0, static_cast<std::int64_t>(4 * page)));
        const auto bytes = static_cast<std::size_t>(rng.between(0, static_cast<std::int64_t>(5 * page - offset)));
        const Mapping mapping(file.fd, offset, bytes, i % 2 == 0);
        CHECK_EQ(mapping.bytes(), bytes);
        CHECK(shown(mapping) == file.read(offset, bytes));
    }
}

TEST("a mapping of no bytes can be made, retired and dropped") {
    const File file(page);
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1}, page - 1, page}) {
        Mapping mapping(file.fd, offset, 0, true);
        CHECK_EQ(mapping.bytes(), 0u);
        mapping.retire();
    }
}

TEST("what is written through one mapping is seen through another and in the file") {
    const File file(3 * page);
    const Mapping one(file.fd, page - 5, 20, true), other(file.fd, page - 9, 40, false);
    std::memset(one.data(), 0xCD, one.bytes());
    auto expected = std::vector<std::byte>(40);
    for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] = i >= 4 && i < 24 ? std::byte{0xCD} : File::at(page - 9 + i);
    CHECK(shown(other) == expected);
    CHECK(file.read(page - 9, 40) == expected);
}

TEST("another process sees what is written through a mapping") {
    const File file(page);
    const Mapping mapping(file.fd, 100, 8, true);
    Child child([&] { std::memset(Mapping(file.fd, 100, 8, true).data(), 0x5A, 8); });
    CHECK_EQ(child.join(), 0);
    CHECK(shown(mapping) == std::vector<std::byte>(8, std::byte{0x5A}));
}

TEST("a read-only mapping says so and cannot be written") {
    const File file(page);
    const Mapping mapping(file.fd, 10, 100, false);
    CHECK_EQ(mapping.writeable(), false);
    CHECK_EQ(death_by_writing(mapping.data()), -SIGSEGV);
}

TEST("a writeable mapping says so and can be written") {
    const File file(page);
    const Mapping mapping(file.fd, 10, 100, true);
    CHECK_EQ(mapping.writeable(), true);
    CHECK_EQ(death_by_writing(mapping.data()), 0);
}

TEST("a descriptor that was opened for reading cannot be mapped writeable") {
    const File file(page);
    const std::string path = "/proc/self/fd/" + std::to_string(file.fd);
    const int reading = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK_EQ(error_of(reading, 0, page, true), EACCES);
    CHECK_EQ(error_of(reading, 0, page, false), 0);
    close(reading);
}

TEST("a descriptor that is not open is an error with its number") { CHECK_EQ(error_of(-1, 0, page, true), EBADF); }

TEST("a mapping of more bytes than there are addresses is an error") {
    const File file(page);
    for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX - page + 2, SIZE_MAX / 2 + 1})
        CHECK_EQ(error_of(file.fd, 0, bytes, true), EOVERFLOW);
    CHECK_EQ(error_of(file.fd, SIZE_MAX - 5, 1, true), EOVERFLOW);
}

TEST("a mapping outlives the descriptor that it was made from") {
    File file(2 * page);
    const Mapping mapping(file.fd, page - 1, 2, true);
    file.close();
    CHECK_EQ(static_cast<int>(mapping.data()[0]), static_cast<int>(File::at(page - 1)));
    mapping.data()[1] = std::byte{1};
    CHECK_EQ(static_cast<int>(mapping.data()[1]), 1);
}

TEST("closing a mapping marks it as closed and unmaps nothing") {
    const File file(page);
    Mapping mapping(file.fd, 0, page, true);
    CHECK_EQ(mapping.closed(), false);
    mapping.close();
    CHECK_EQ(mapping.closed(), true);
    CHECK(shown(mapping) == file.read(0, page));
}

TEST("the end of a mapping unmaps all its pages and no others") {
    const File file(4 * page);
    auto mapping = std::make_unique<Mapping>(file.fd, page + 7, 2 * page, true); // touches three pages
    std::byte *const first = mapping->data() - 7;
    unsigned char resident[3];
    CHECK_EQ(mincore(first, 3 * page, resident), 0);
    mapping.reset();
    for (std::size_t i = 0; i < 3; ++i)
        CHECK_EQ(mincore(first + i * page, page, resident), -1);
}

TEST("a retired mapping reads NaN as a floating-point number and -1 as an integer everywhere") {
    const File file(4 * page);
    for (const bool writeable : {true, false}) {
        Mapping mapping(file.fd, page - 8, 2 * page + 16, writeable);
        mapping.retire();
        CHECK(shown(mapping) == std::vector<std::byte>(mapping.bytes(), std::byte{0xFF}));
        double number;
        std::memcpy(&number, mapping.data(), sizeof number);
        CHECK(std::isnan(number));
        float small;
        std::memcpy(&small, mapping.data(), sizeof small);
        CHECK(std::isnan(small));
        std::int64_t integer;
        std::memcpy(&integer, mapping.data(), sizeof integer);
        CHECK_EQ(integer, -1);
    }
}

TEST("a retired mapping is closed") {
    const File file(page);
    Mapping mapping(file.fd, 0, page, true);
    mapping.retire();
    CHECK_EQ(mapping.closed(), true);
}

TEST("retiring one mapping changes neither the file nor another mapping of the same page") {
    const File file(2 * page);
    const Mapping other(file.fd, 0, 2 * page, true);
    Mapping mapping(file.fd, 100, 50, true);
    mapping.retire();
    CHECK(shown(other) == file.read(0, 2 * page));
    for (std::size_t i = 0; i < 2 * page; ++i)
        CHECK_EQ(static_cast<int>(other.data()[i]), static_cast<int>(File::at(i)));
}

TEST("what is written through a retired mapping is not seen by others") {
    const File file(page);
    const Mapping other(file.fd, 0, page, true);
    Mapping mapping(file.fd, 0, page, true);
    mapping.retire();
    std::memset(mapping.data(), 0x11, mapping.bytes());
    CHECK_EQ(static_cast<int>(other.data()[0]), static_cast<int>(File::at(0)));
    CHECK_EQ(static_cast<int>(other.data()[page - 1]), static_cast<int>(File::at(page - 1)));
}

TEST("what others write does not show through a retired mapping") {
    const File file(page);
    const Mapping other(file.fd, 0, page, true);
    Mapping mapping(file.fd, 0, page, true);
    mapping.retire();
    std::memset(other.data(), 0x22, other.bytes());
    CHECK(shown(mapping) == std::vector<std::byte>(page, std::byte{0xFF}));
}

// Race: one thread holds a stale view and reads while another retires the mapping. The reading is done by the kernel,
// so that an unmapped page shows as EFAULT instead of a crash.
//   any byte  acceptable   old, new or poison: the lease is over
//   EFAULT    FORBIDDEN    for a moment nothing was mapped there
TEST("a stale read during a retirement never finds an unmapped page") {
    const File file(page), sink(page);
    constexpr int rounds = check::times(6'000);
    std::atomic<std::byte *> stale = nullptr;
    std::atomic<bool> retired = false;
    SpinBarrier<2> begin, end; // the mapping may be destroyed only when the reader has finished
    int holes = 0;
    std::thread reader([&] {
        for (int round = 0; round < rounds; ++round) {
            begin.arrive_and_wait();
            while (!retired)
                holes += syscall(SYS_pwrite64, sink.fd, stale.load(), 1, 0) != 1;
            end.arrive_and_wait();
        }
    });
    Rng rng(31);
    for (int round = 0; round < rounds; ++round) {
        Mapping mapping(file.fd, 0, page, true);
        stale = mapping.data();
        retired = false;
        begin.arrive_and_wait();
        busy_wait(rng.between(0, 2'000));
        mapping.retire();
        retired = true;
        end.arrive_and_wait();
    }
    reader.join();
    CHECK_EQ(holes, 0);
}

// ----------------------------------------------------------------------------------------------------- truncated files

TEST("under a guard the pages that a file has lost read as zeros, the others as before, and the mapping is marked") {
    File file(4 * page);
    Mapping mapping(file.fd, 0, 4 * page, true);
    CHECK(mapping.can_shrink());
    CHECK_EQ(ftruncate(file.fd, static_cast<off_t>(2 * page)), 0);
    {
        const TruncationGuard guard(mapping);
        CHECK_EQ(mapping.data()[page], File::at(page));
        CHECK(!mapping.truncated());
        CHECK_EQ(mapping.data()[3 * page], std::byte{0});
        CHECK(mapping.truncated());
        mapping.data()[2 * page] = std::byte{7};
    }
    CHECK_EQ(mapping.data()[page], File::at(page));
}

TEST("the last byte of a mapping tells whether its file was truncated") {
    File file(4 * page);
    Mapping mapping(file.fd, 0, 4 * page, false);
    const TruncationGuard guard(mapping);
    mapping.touch_end();
    CHECK(!mapping.truncated());
    CHECK_EQ(ftruncate(file.fd, static_cast<off_t>(3 * page)), 0);
    mapping.touch_end();
    CHECK(mapping.truncated());
}

TEST("an inner guard of another mapping leaves the outer one in force") {
    File file(2 * page), another(2 * page);
    Mapping outer(file.fd, 0, 2 * page, true), inner(another.fd, 0, 2 * page, true);
    CHECK_EQ(ftruncate(file.fd, 0), 0);
    CHECK_EQ(ftruncate(another.fd, 0), 0);
    const TruncationGuard guard(outer);
    {
        const TruncationGuard nested(inner);
        outer.touch_end();
        CHECK(outer.truncated());
        CHECK(!inner.truncated());
        inner.touch_end();
        CHECK(inner.truncated());
    }
    CHECK(TruncationGuard::innermost() == &guard);
}

TEST("a sealed memfd cannot shrink") {
    const int fd = memfd_create("native-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(page)), 0);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    CHECK(!Mapping(fd, 0, page, true).can_shrink());
    close(fd);
}

TEST("an access without a guard, or to another mapping than the guarded one, ends the process by SIGBUS as before") {
    for (const bool guarded : {false, true}) {
        Child child([&] {
            signal(SIGBUS, SIG_DFL); // sanitizers have a handler
            File file(2 * page), other(page);
            Mapping mapping(file.fd, 0, 2 * page, true), whole(other.fd, 0, page, true);
            CHECK_EQ(ftruncate(file.fd, 0), 0);
            {
                const TruncationGuard guard(mapping); // the handler is installed
            }
            std::optional<TruncationGuard> guard;
            if (guarded)
                guard.emplace(whole);
            *static_cast<volatile std::byte *>(mapping.data()) = std::byte{1};
        });
        CHECK_EQ(child.join(), -SIGBUS);
    }
}

TEST("the handler of SIGBUS that was installed before gets what no guard expects") {
    Child child([&] {
        struct sigaction action{};
        action.sa_sigaction = [](int, siginfo_t *info, void *) { _exit(info->si_code == BUS_ADRERR ? 42 : 1); };
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGBUS, &action, nullptr);
        File file(page);
        Mapping mapping(file.fd, 0, page, true);
        CHECK_EQ(ftruncate(file.fd, 0), 0);
        {
            const TruncationGuard guard(mapping);
        }
        *static_cast<volatile std::byte *>(mapping.data()) = std::byte{1};
    });
    CHECK_EQ(child.join(), 42);
}

TEST("holes of a file are allocated and its content stays") {
    const int fd = memfd_create("native-test", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(16 * page)), 0);
    CHECK_EQ(pwrite(fd, "x", 1, static_cast<off_t>(5 * page)), 1);
    CHECK_EQ(fill_holes(fd, 16 * page), 0);
    struct stat status;
    CHECK_EQ(fstat(fd, &status), 0);
    CHECK(static_cast<std::size_t>(status.st_blocks) * 512 >= 16 * page);
    char found = 0;
    CHECK_EQ(pread(fd, &found, 1, static_cast<off_t>(5 * page)), 1);
    CHECK(found == 'x');
    close(fd);
}
