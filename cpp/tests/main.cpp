// Runs the tests whose name contains the first argument, or all of them.

#include "support/check.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/clock.hpp"

// A sanitizer's report must fail the test in which it occurred, also in a child process of the test. By default,
// ThreadSanitizer delays the exit of every process with threads by a second.
extern "C" const char *__tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=20"; }
extern "C" const char *__ubsan_default_options() { return "halt_on_error=1:print_stacktrace=1"; }

namespace check {

std::atomic<int> failures{0};

std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

void fail(const char *file, int line, const std::string &what) {
    constexpr int max_shown = 10; // a broken loop fails a million times for one reason
    if (++failures <= max_shown)
        std::fprintf(stderr, "    %s:%d: %s\n", file, line, what.c_str());
}

} // namespace check

namespace {

constexpr int max_seconds = 60; // a test that takes longer hangs

int run_body(const check::Test &test) {
    try {
        test.body();
    } catch (const std::exception &error) {
        check::fail(test.sentence, 0, std::string("threw ") + error.what());
    }
    return check::failures > 0 ? 1 : 0;
}

// Runs a test in a child process. Returns "" if it passed, else how its process ended.
std::string run(const check::Test &test) {
    std::fflush(nullptr);
    const pid_t runner = getpid();
    const pid_t pid = fork();
    if (pid < 0)
        return std::string("fork: ") + std::strerror(errno);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != runner)
            _exit(1);
        std::exit(run_body(test)); // not _exit: the leak check runs at exit
    }
    pollfd ended{static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), POLLIN, 0};
    const bool hangs = poll(&ended, 1, max_seconds * 1000) == 0;
    if (hangs)
        kill(pid, SIGKILL);
    close(ended.fd);
    int status = 0;
    waitpid(pid, &status, 0);
    if (hangs)
        return "still ran after " + std::to_string(max_seconds) + " s";
    if (WIFSIGNALED(status))
        return std::string("killed by ") + strsignal(WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? "" : "exit code " + std::to_string(WEXITSTATUS(status));
}

} // namespace

int main(int argc, char **argv) {
    int passed = 0, failed = 0;
    for (const check::Test &test : check::tests()) {
        if (argc > 1 && std::strstr(test.sentence, argv[1]) == nullptr)
            continue;
        const std::int64_t begin = memlane::now_ns();
        const std::string failure = run(test);
        ++(failure.empty() ? passed : failed);
        std::printf("%s %s (%.2f s)%s%s\n", failure.empty() ? "ok  " : "FAIL", test.sentence,
                    static_cast<double>(memlane::now_ns() - begin) / 1e9, failure.empty() ? "" : ": ", failure.c_str());
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    // A filter that matches nothing is a mistyped filter, not a success.
    return failed > 0 || passed == 0 ? 1 : 0;
}
