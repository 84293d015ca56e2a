"""What `memlane.ipc` offers: the names and signatures of the reference, no heavy imports, examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import memlane
from memlane import ipc
from tests.support.processes import output_of

PACKAGE = Path(memlane.__file__).parent
FILES = sorted((PACKAGE / "ipc").glob("*.py"))

# The reference's documentation, as far as the lanes go: each call that it describes.
REFERENCE = """
class SharedWeightSync:
    def __init__(self, param_shapes, *, create=True, shm_name=None, lock=None): ...
    @property
    def name(self): ...
    @property
    def version(self): ...
    @classmethod
    def from_state_dict(cls, state_dict, **kwargs): ...
    def write_weights(self, state_dict): ...
    def read_weights_into(self, state_dict): ...
    def cleanup(self): ...
    def close(self): ...

class RolloutRingBuffer:
    def __init__(self, num_envs, num_steps, obs_dim, action_dim, *, critic_dim=0, num_slots=4, create=True,
                 shm_name_prefix=None): ...
    @property
    def name(self): ...
    @property
    def slot_shapes(self): ...
    def attach_sync_primitives(self, write_ptr, read_ptr): ...
    @property
    def write_slot(self): ...
    @property
    def write_buffer(self): ...
    def signal_write_done(self): ...
    def available(self): ...
    def wait_for_data(self, timeout=60.0): ...
    @property
    def read_slot(self): ...
    def read_numpy_views(self): ...
    def copy_read_slot_to_torch(self, destination): ...
    def read_torch(self, device): ...
    def advance_read(self): ...
    def cleanup(self): ...
    def close(self): ...

class AsyncRunner:
    def __init__(self, env_name, env_cfg_overrides, rl_cfg, *, device=None, collector_device=None,
                 sim_backend='mujoco', num_envs=4096): ...
    def learn(self, max_iterations, save_interval=50, log_dir='logs'): ...
    def close(self): ...

class SharedObsNormStats:
    def __init__(self, ctx): ...
    def put(self, stats): ...
    def get(self): ...

class ReplayBuffer:
    def __init__(self, capacity, obs_dim, action_dim, device, defer_gpu=False, critic_dim=0,
                 packed_cpu_storage=False): ...
    def add(self, obs, actions, rewards, next_obs, dones, truncated, terminal_mask=None, terminal_next_obs=None,
            critic=None, next_critic=None, terminal_next_critic=None): ...
    def sample(self, batch_size): ...
"""
MODULES = {
    "AsyncRunner": "async_runner",
    "ReplayBuffer": "replay_buffer",
    "SharedWeightSync": "weight_sync",
    "RolloutRingBuffer": "rollout_ring_buffer",
    "SharedObsNormStats": "shared_obs_stats",
}


def documented() -> dict[str, ast.FunctionDef]:
    return {
        f"{owner.name}.{method.name}": method
        for owner in ast.parse(REFERENCE).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }


def decorator_of(method: ast.FunctionDef) -> str:
    return ast.unparse(method.decorator_list[0]) if method.decorator_list else ""


CALLS = {name: method for name, method in documented().items() if decorator_of(method) != "property"}
PROPERTIES = [name for name, method in documented().items() if decorator_of(method) == "property"]


def attribute(name: str) -> Any:
    owner, method = name.split(".")
    return inspect.getattr_static(getattr(ipc, owner), method)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_documented_property_is_one(name: str) -> None:
    assert isinstance(attribute(name), property)


@pytest.mark.parametrize("name", CALLS)
def test_a_documented_call_is_accepted_with_the_documented_defaults(name: str) -> None:
    expected = CALLS[name]
    found = attribute(name)
    if decorator_of(expected) == "classmethod":
        assert isinstance(found, classmethod)
        found = found.__func__
    parameters = dict(inspect.signature(found).parameters)
    positional = [argument.arg for argument in expected.args.args]
    assert list(parameters)[: len(positional)] == positional
    for argument, default in zip(reversed(expected.args.args), reversed(expected.args.defaults), strict=False):
        assert parameters[argument.arg].default == ast.literal_eval(default)
    for argument, default in zip(expected.args.kwonlyargs, expected.args.kw_defaults, strict=True):
        assert default is not None
        assert parameters[argument.arg].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[argument.arg].default == ast.literal_eval(default)
    if expected.args.kwarg is not None:
        assert parameters[expected.args.kwarg.arg].kind is inspect.Parameter.VAR_KEYWORD
    named = {argument.arg for argument in (*expected.args.args, *expected.args.kwonlyargs)}
    more = [parameter for key, parameter in parameters.items() if key not in named and key != "kwargs"]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in more), "a caller would have to know it"


def test_the_whole_documented_protocol_runs_as_it_is_written() -> None:
    ring = ipc.RolloutRingBuffer(
        2, 3, 4, 1, critic_dim=5, num_slots=2, create=True, shm_name_prefix=memlane.core.fresh_name("r")
    )
    other = ipc.RolloutRingBuffer(
        num_envs=2, num_steps=3, obs_dim=4, action_dim=1, critic_dim=5, num_slots=2, create=False,
        shm_name_prefix=ring.name["obs"],
    )  # fmt: skip
    other.attach_sync_primitives(write_ptr=ring._write_ptr, read_ptr=ring._read_ptr)
    for name, shape in other.slot_shapes.items():
        other.write_buffer[name][:] = np.ones(shape)
    assert isinstance(other.write_slot, int)
    other.signal_write_done()
    assert ring.wait_for_data(timeout=5.0)
    assert (ring.available(), isinstance(ring.read_slot, int)) == (1, True)
    assert all((view == 1).all() for view in ring.read_numpy_views().values())
    ring.advance_read()
    other.close()
    ring.cleanup()

    state = {"w": np.ones(3, np.float32)}
    sync = ipc.SharedWeightSync({"w": (3,)}, create=True, shm_name=None, lock=None)
    reader = ipc.SharedWeightSync({"w": (3,)}, create=False, shm_name=sync.name, lock=sync._lock)
    sync.write_weights(state_dict=state)
    assert (reader.read_weights_into(state_dict=state), reader.version) == (1, 1)
    reader.close()
    sync.cleanup()
    ipc.SharedWeightSync.from_state_dict(state_dict=state, shm_name=None).cleanup()


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_a_class_lives_in_the_module_of_the_reference(name: str, module: str) -> None:
    assert getattr(importlib.import_module(f"memlane.ipc.{module}"), name) is getattr(ipc, name)


@pytest.mark.parametrize("module", ["collector_error", "memory_budget", "replay_pipelines", "shared_buffer"])
def test_a_module_of_the_reference_is_there(module: str) -> None:
    assert importlib.import_module(f"memlane.ipc.{module}").__doc__


@pytest.mark.parametrize(
    "call",
    [
        lambda: ipc.RolloutRingBuffer(2, 3, 4, 1, slots=3),
        lambda: ipc.SharedWeightSync({"w": (3,)}, name="x"),
        lambda: ipc.Ring({"x": ("int64", 1)}, slots=3),
        lambda: ipc.Weights({"x": ("int64", 1)}, copies=3),
    ],
)
def test_unknown_keywords_are_errors(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call()


# --------------------------------------------------------------------------------------------------------------- names


def test_every_name_that_is_promised_can_be_imported() -> None:
    assert [name for name in ipc.__all__ if not hasattr(ipc, name)] == []


def test_every_public_name_is_promised() -> None:
    public = {name for name, value in vars(ipc).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(ipc.__all__)


def test_the_promised_names_are_sorted_and_each_is_there_once() -> None:
    classes = [name for name in ipc.__all__ if name[0].isupper()]
    others = [name for name in ipc.__all__ if not name[0].isupper()]
    assert ipc.__all__ == sorted(set(classes)) + sorted(set(others))


def test_every_promised_name_and_public_method_says_what_it_is() -> None:
    silent = [name for name in ipc.__all__ if not inspect.getdoc(getattr(ipc, name))]
    assert silent == []


# ------------------------------------------------------------------------------------------------------------- imports


def test_importing_the_lanes_does_not_even_try_to_import_heavy_packages() -> None:
    """A look at sys.modules alone would miss an import that failed and was caught."""
    output = output_of(
        """
        import sys
        tried = set()
        class Recorder:
            def find_spec(self, name, path=None, target=None):
                tried.add(name.partition(".")[0])
        sys.meta_path.insert(0, Recorder())
        import memlane.ipc
        heavy = {"torch", "ray", "gymnasium", "jax", "pandas", "scipy"}
        print(sorted(heavy & (tried | set(sys.modules))), "numpy" in tried)
        """
    )
    assert output == "[] True\n"


# ------------------------------------------------------------------------------------------------------------ examples


def module_of(file: Path) -> ModuleType:
    return importlib.import_module(f"memlane.ipc.{file.stem}" if file.stem != "__init__" else "memlane.ipc")


@pytest.mark.parametrize("file", [file for file in FILES if ">>>" in file.read_text()], ids=lambda file: file.stem)
def test_the_examples_in_the_text_run(file: Path) -> None:
    result = doctest.testmod(module_of(file))
    assert result.attempted > 0
    assert result.failed == 0
