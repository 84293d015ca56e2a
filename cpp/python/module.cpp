// The Python module of the native core: small handle objects that keep their pointers. Only cpp/python uses Python's
// API.
//
// Every handle keeps its Mapping alive, so no call can touch unmapped memory, and raises SegmentClosed once the mapping
// is closed. The GIL is released around every wait and every large copy, but only after a check that the wait is not
// over already: such a wait costs 0.1 us instead of 0.3.

#include "python/module.hpp"

#if defined(MEMLANE_FAULTS)
#include "sync/faults.hpp"
#endif

NB_MODULE(_native, m) {
    // A user's global variable that holds a view until the interpreter ends is not a reference leak of memlane.
    nanobind::set_leak_warnings(false);
    m.doc() = "memlane's native core. Private: use memlane.core.";

    bind_core(m);
    bind_lanes(m);
    bind_replay(m);
    bind_vector(m);
    bind_envs(m);

#if defined(MEMLANE_FAULTS)
    // Not in the stub: only tests of this build use them.
    m.def(
        "arm_fault",
        [](const char *plan) {
            if (!memlane::faults::arm_as(plan))
                throw nanobind::value_error("a plan must be die:N, stop:N or yield:N, or one of these with :EVERY");
        },
        nanobind::arg("plan"), "Let this process die, stop or yield at its N-th fault point from now on.");
    m.def("fault_points", &memlane::faults::passed, "Number of fault points that this process has passed since then.");
#endif
}
