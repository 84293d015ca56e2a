"""info_spec and shared_assets: what travels, or is already there, in shared memory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from memlane.vector import AsyncVectorEnv, shared_assets
from tests.support.vector_envs import Counter, Speaker, difference, ours, reference

pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("ignore:.*ERROR"),  # how Gymnasium logs the error of a worker
]

SPEC: Any = {"x": ("float64", ()), "force": ("float32", (2,)), "lives": ("int64", ())}


def _say(action: int, steps: int) -> dict[str, Any]:
    """Declared and undeclared infos, each only for some actions."""
    said: dict[str, Any] = {"x": steps / 2, "force": np.float32([action, steps]), "lives": steps, "name": str(action)}
    return {key: value for bit, (key, value) in enumerate(said.items()) if action >> bit & 1}


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2], ids=lambda mode: mode.name)
def test_declared_infos_are_what_they_are_without_a_declaration(mode: AutoresetMode) -> None:
    fns = [partial(Speaker, _say, 7)] * 5
    with reference(fns, autoreset_mode=mode) as expected, ours(fns, autoreset_mode=mode, info_spec=SPEC) as envs:
        expected.reset()
        envs.reset()
        draw = np.random.default_rng(3)
        for number in range(60):
            actions = draw.integers(0, 16, 5)
            found = difference(expected.step(actions)[4], envs.step(actions)[4])
            assert found is None, f"step {number}: {found}"


def test_declared_infos_need_no_message() -> None:
    with ours([partial(Speaker, _say)] * 4, info_spec=SPEC) as envs:
        envs.reset()
        before = [handle.messages_read for handle in envs._workers.handles]
        assert envs.step([7] * 4)[4]["lives"].tolist() == [1] * 4
        assert [handle.messages_read for handle in envs._workers.handles] == before


def test_a_declared_info_that_is_absent_is_gone_from_the_next_step() -> None:
    with ours([partial(Speaker, _say)] * 2, info_spec=SPEC) as envs:
        envs.reset()
        envs.step([1, 1])
        infos = envs.step([0, 1])[4]
        assert infos["x"].tolist() == [0.0, 1.0]
        assert infos["_x"].tolist() == [False, True]
        assert envs.step([0, 0])[4] == {}


def test_a_declared_info_is_gone_after_a_reset() -> None:
    with ours([partial(Speaker, _say)] * 2, info_spec=SPEC) as envs:
        envs.reset()
        envs.step([1, 1])
        assert envs.reset()[1] == {}


def test_a_masked_reset_has_no_declared_infos_of_those_that_it_leaves_alone() -> None:
    with ours([partial(Speaker, _say)] * 2, info_spec=SPEC) as envs:
        envs.reset()
        envs.step([1, 1])
        assert envs.reset(options={"reset_mask": np.array([True, False])})[1] == {}


def test_declared_infos_come_with_recv() -> None:
    with ours([partial(Speaker, _say)] * 4, info_spec=SPEC) as envs:
        envs.reset()
        envs.send([1, 9], [1, 3])
        *_, infos, ids = envs.recv(2)
        assert ids.tolist() == [1, 3]
        assert infos["x"].tolist() == [0.5, 0.5]
        assert infos["name"].tolist() == [None, "9"]


def test_declared_infos_are_the_callers_own() -> None:
    with ours([partial(Speaker, _say)] * 2, info_spec=SPEC) as envs:
        envs.reset()
        infos = envs.step([1, 1])[4]
        envs.step([1, 1])
        assert infos["x"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", [1.75, "many", np.zeros(3), 2**70], ids=["fraction", "text", "shape", "size"])
def test_an_info_that_does_not_fit_its_declaration_is_an_error(value: Any) -> None:
    with ours([partial(Speaker, lambda action, steps: {"lives": value})] * 2, info_spec=SPEC) as envs:  # noqa: ARG005
        envs.reset()
        with pytest.raises((ValueError, TypeError, OverflowError)):
            envs.step([0, 0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bool"])
@pytest.mark.parametrize(
    "value",
    [1, True, 1.0, np.int64(1), np.int8(1), np.float64(1), np.float32(1), np.bool_(True), np.array(1.0), np.array(1)],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_a_one_of_any_kind_is_a_one_of_the_declared_dtype(dtype: str, value: Any) -> None:
    with ours([partial(Speaker, lambda action, steps: {"one": value})], info_spec={"one": (dtype, ())}) as envs:  # noqa: ARG005
        envs.reset()
        one = envs.step([0])[4]["one"]
        assert (one.dtype, one.tolist()) == (np.dtype(dtype), [1])


@pytest.mark.parametrize("value", [1e39, np.float64(-1e39)])
def test_a_declared_float32_that_would_become_infinite_is_an_error(value: float) -> None:
    with ours([partial(Speaker, lambda action, steps: {"x": value})], info_spec={"x": ("float32", ())}) as envs:  # noqa: ARG005
        envs.reset()
        with pytest.raises(ValueError, match=r"info x.*float32"):
            envs.step([0])


def test_declared_infos_that_are_not_finite_are_kept() -> None:
    said = {"down": -np.inf, "none": np.nan}
    spec: Any = {"down": ("float32", ()), "none": ("float64", ())}
    with ours([partial(Speaker, lambda action, steps: said)], info_spec=spec) as envs:  # noqa: ARG005
        envs.reset()
        infos = envs.step([0])[4]
        assert infos["down"].tolist() == [-np.inf]
        assert np.isnan(infos["none"]).tolist() == [True]


class Keeper(Counter):
    """Has one dict for all its infos."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, Any] = {"x": 1.0, "name": "me"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], self.said

    def keys(self) -> list[str]:
        return list(self.said)


def test_an_environments_own_dict_is_left_as_it_is() -> None:
    with ours([Keeper] * 2, info_spec=SPEC) as envs:
        envs.reset()
        envs.step([0, 0])
        assert envs.call("keys") == (["x", "name"],) * 2


def test_a_declaration_of_objects_is_an_error() -> None:
    with pytest.raises(ValueError):
        AsyncVectorEnv([Counter] * 2, info_spec={"x": ("object", ())})


# --------------------------------------------------------------------------------------------------------------- assets


class Reader(Counter):
    """Looks at the assets while it is made, and later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = float(shared_assets()["map"][0, 0])

    def total(self) -> float:
        return float(shared_assets()["map"].sum())

    def writeable(self) -> bool:
        return bool(shared_assets()["map"].flags.writeable)

    def force(self) -> None:
        shared_assets()["map"].flags.writeable = True
        shared_assets()["map"][...] = 0


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_read_the_assets_that_they_were_given(context: str) -> None:
    asset = np.arange(12.0).reshape(3, 4)[:, ::2] + 1  # not contiguous
    with ours([Reader] * 4, shared_assets={"map": asset}, context=context) as envs:
        assert envs.get_attr("first") == (1.0,) * 4
        assert envs.call("total") == (float(asset.sum()),) * 4


def test_assets_are_read_only_in_workers() -> None:
    with ours([Reader] * 2, shared_assets={"map": np.ones((2, 2))}) as envs:
        assert envs.call("writeable") == (False, False)


def test_assets_cannot_be_made_writeable_in_workers() -> None:
    with ours([Reader] * 2, shared_assets={"map": np.ones((2, 2))}) as envs, pytest.raises(ValueError):
        envs.call("force")


def test_assets_end_with_the_environments() -> None:
    def segments() -> set[tuple[str, str]]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return {(link, os.readlink(link)) for link in links if os.path.islink(link)}

    before = segments()
    with ours([Reader] * 2, shared_assets={"map": np.ones((2, 2))}) as envs:
        envs.reset()
    assert not [one for one in segments() - before if one[1].startswith("/memfd:memlane")]


def test_without_assets_there_are_none() -> None:
    assert shared_assets() == {}
