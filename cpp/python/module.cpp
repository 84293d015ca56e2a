// The Python face of the native core: small handles that keep their pointers. Only the binding files know Python.
//
// Every handle keeps its Mapping alive, so no call can touch unmapped memory, and refuses to work once the mapping is
// closed. The GIL is released around every wait and every bulk copy, but only after a look showed that there is
// something to wait for: a wait that is over already costs 0.1 us instead of 0.3.

#include "python/module.hpp"

NB_MODULE(_native, m) {
    // A user's global that still holds a view when the interpreter ends is no reference leak of ours.
    nanobind::set_leak_warnings(false);
    m.doc() = "memlane's native core. Private: use memlane.core.";

    bind_core(m);
    bind_lanes(m);
    bind_replay(m);
    bind_vector(m);
    bind_envs(m);
}
