// The functions by which each file of bindings adds its classes to the module `memlane._native`.
#pragma once

#include <nanobind/nanobind.h>

void bind_core(nanobind::module_ &m);
void bind_lanes(nanobind::module_ &m);
void bind_replay(nanobind::module_ &m);
void bind_vector(nanobind::module_ &m);
void bind_envs(nanobind::module_ &m);
