#include "os/scheduling.hpp"

#include <thread>

#include <sched.h>

#include "support/check.hpp"

using namespace memlane;

TEST("a thread may ask for short time slices without a privilege, and its policy stays") {
    std::thread([] { // a thread of its own: the request outlives the test
        const bool granted = request_time_slice(500'000);
        CHECK_EQ(sched_getscheduler(0), SCHED_OTHER);
        CHECK_EQ(request_time_slice(500'000), granted);
    })
        .join();
}

TEST("a thread with another scheduling policy than the usual one keeps its own") {
    std::thread([] {
        const sched_param none{};
        CHECK_EQ(sched_setscheduler(0, SCHED_IDLE, &none), 0);
        CHECK(!request_time_slice(500'000));
        CHECK_EQ(sched_getscheduler(0), SCHED_IDLE);
    }).join();
}
