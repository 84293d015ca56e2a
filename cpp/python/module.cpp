// The Python module of the native core: small handle objects that keep their pointers. Only cpp/python uses Python's
// API.
//
// Every handle keeps its Mapping alive, so no call can touch unmapped memory, and raises SegmentClosed once the mapping
// is closed. The GIL is released around every wait and every large copy, but only after a check that the wait is not
// over already: such a wait costs 0.1 us instead of 0.3.

#include "python/module.hpp"

NB_MODULE(_native, m) {
    // A user's global variable that holds a view until the interpreter ends is not a reference leak of memlane.
    nanobind::set_leak_warnings(false);
    m.doc() = "memlane's native core. Private: use memlane.core.";

    bind_core(m);
    bind_lanes(m);
    bind_replay(m);
    bind_vector(m);
    bind_envs(m);
}
