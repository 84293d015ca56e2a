// A small test harness: a test has a sentence as its name, and a body.
//
// Each test runs in its own forked process, so a crash, a hang or a sanitizer's report fails that test and no other,
// and every test begins with one thread (which forking under ThreadSanitizer needs). A test continues after a failed
// CHECK.
#pragma once

#include <atomic>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Test {
    const char *sentence;
    void (*body)();
};

std::vector<Test> &tests();

// The number of failed checks in this process.
extern std::atomic<int> failures;

void fail(const char *file, int line, const std::string &what);

struct Registered {
    Registered(const char *sentence, void (*body)()) { tests().push_back({sentence, body}); }
};

// Sanitizers make everything slower; races are repeated as often as fits into the same minute.
#if defined(__SANITIZE_THREAD__)
inline constexpr int slowdown = 8;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int slowdown = 3;
#else
inline constexpr int slowdown = 1;
#endif
constexpr int times(int iterations) { return iterations / slowdown; }

template <class T> std::string shown(const T &value) {
    if constexpr (std::is_enum_v<T>) {
        return std::to_string(static_cast<long long>(value));
    } else {
        std::ostringstream text;
        text << std::boolalpha << value;
        return text.str();
    }
}

template <class A, class B> bool equal(const A &a, const B &b) {
    constexpr bool numbers = std::is_integral_v<A> && std::is_integral_v<B>;
    if constexpr (numbers && !std::is_same_v<A, bool> && !std::is_same_v<B, bool>)
        return std::cmp_equal(a, b);
    else
        return a == b;
}

template <class A, class B>
void equals(const A &found, const B &expected, const char *text, const char *file, int line) {
    if (!equal(found, expected))
        fail(file, line, std::string(text) + ": found " + shown(found) + ", expected " + shown(expected));
}

} // namespace check

#define CHECK_JOIN_(a, b) a##b
#define CHECK_NAME_(a, b) CHECK_JOIN_(a, b)

#define TEST(sentence)                                                                                                      \
    static void CHECK_NAME_(test_at_line_, __LINE__)();                                                                     \
    static const check::Registered CHECK_NAME_(registered_at_line_, __LINE__){sentence,                                     \
                                                                              CHECK_NAME_(test_at_line_, __LINE__)};        \
    static void CHECK_NAME_(test_at_line_, __LINE__)()

#define CHECK(...)                                                                                                          \
    do {                                                                                                                    \
        if (!(__VA_ARGS__))                                                                                                 \
            check::fail(__FILE__, __LINE__, #__VA_ARGS__ " does not hold");                                                 \
    } while (false)

#define CHECK_EQ(found, expected) check::equals((found), (expected), #found, __FILE__, __LINE__)

#define CHECK_THROWS(error, ...)                                                                                            \
    do {                                                                                                                    \
        bool thrown_ = false;                                                                                               \
        try {                                                                                                               \
            __VA_ARGS__;                                                                                                    \
        } catch (const error &) {                                                                                           \
            thrown_ = true;                                                                                                 \
        }                                                                                                                   \
        if (!thrown_)                                                                                                       \
            check::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw " #error);                                         \
    } while (false)
