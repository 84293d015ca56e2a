"""SharedWeightSync: the documented interface, and every kind of state dict bit for bit."""

from __future__ import annotations

import copy
import multiprocessing as mp
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memlane.core import Layout, SegmentClosed, SegmentError, SegmentMissing, WaitTimeout, fresh_name
from memlane.ipc import SharedWeightSync, layout_of
from tests.support import lanes as lane_support
from tests.support.processes import METHODS, PATIENCE, ask, output_of

SHAPES = {"w": (2, 3), "b": (3,)}


@pytest.fixture
def sync() -> Iterator[SharedWeightSync]:
    with SharedWeightSync(SHAPES) as sync:
        yield sync


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def state(value: float) -> dict[str, Any]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def value_of(arrays: dict[str, Any]) -> float:
    (value,) = {float(number) for array in arrays.values() for number in array.ravel()}
    return value


# -------------------------------------------------------------------------------------------------------- the interface


def test_a_new_object_has_version_0_and_each_write_adds_1(sync: SharedWeightSync) -> None:
    versions = [sync.version]
    for value in range(3):
        sync.write_weights(state(value))
        versions.append(sync.version)
    assert versions == [0, 1, 2, 3]


def test_write_weights_returns_nothing_and_read_weights_into_the_version(sync: SharedWeightSync) -> None:
    assert sync.write_weights(state(1)) is None  # type: ignore[func-returns-value]
    assert sync.read_weights_into(state(0)) == 1


def test_what_is_written_is_read(sync: SharedWeightSync) -> None:
    out = state(0)
    sync.write_weights(state(5))
    sync.read_weights_into(out)
    assert value_of(out) == 5


def test_nothing_is_read_before_the_first_write(sync: SharedWeightSync) -> None:
    out = state(7)
    assert (sync.read_weights_into(out), value_of(out)) == (0, 7)


def test_reading_what_was_read_before_copies_nothing(sync: SharedWeightSync) -> None:
    out = state(0)
    sync.write_weights(state(5))
    sync.read_weights_into(out)
    for array in out.values():
        array[:] = 44
    assert (sync.read_weights_into(out), value_of(out)) == (1, 44)


def test_shapes_alone_mean_float32() -> None:
    with SharedWeightSync({"a": [2, 3], "b": ()}) as sync:
        assert sync.weights.layout == Layout({"a": ("float32", (2, 3)), "b": ("float32", ())})


def test_from_state_dict_takes_names_shapes_and_dtypes_and_writes_the_values_as_version_1() -> None:
    given = {"w": np.ones((2, 3)), "n": np.array(4)}
    with SharedWeightSync.from_state_dict(given) as sync:
        assert sync.weights.layout == layout_of(given)
        assert sync.version == 1
        out = {"w": np.zeros((2, 3)), "n": np.array(0)}
        assert sync.read_weights_into(out) == 1
        assert (out["w"].tolist(), int(out["n"])) == ([[1, 1, 1], [1, 1, 1]], 4)


def test_from_state_dict_that_attaches_writes_nothing() -> None:
    with (
        SharedWeightSync.from_state_dict(state(3)) as sync,
        SharedWeightSync.from_state_dict(state(9), create=False, shm_name=sync.name) as other,
    ):
        out = state(0)
        assert (other.read_weights_into(out), value_of(out)) == (1, 3)


def test_from_state_dict_hands_its_keywords_on() -> None:
    name = fresh_name("weights")
    with (
        SharedWeightSync.from_state_dict(state(0), shm_name=name, lock=None, create=True) as sync,
        SharedWeightSync.from_state_dict(state(0), shm_name=name, create=False) as other,
    ):
        sync.write_weights(state(3))
        assert (sync.name, other.name, other.version) == (name, name, 2)


def test_wait_for_ends_with_the_version_or_the_timeout(sync: SharedWeightSync) -> None:
    with pytest.raises(WaitTimeout, match="version 1"):
        sync.wait_for(1, timeout=0.01)
    sync.write_weights(state(1))
    assert sync.wait_for(1, timeout=PATIENCE) == 1


def test_creating_needs_shapes() -> None:
    with pytest.raises(ValueError, match="param_shapes is needed to create shared weights"):
        SharedWeightSync()


def test_attaching_needs_a_name() -> None:
    with pytest.raises(ValueError, match="create=False needs shm_name"):
        SharedWeightSync(SHAPES, create=False)


# ----------------------------------------------------------------------------------------------------------- travelling


@pytest.mark.parametrize("method", METHODS)
def test_the_object_goes_into_a_child_as_an_argument(sync: SharedWeightSync, method: str) -> None:
    sync.write_weights(state(5))
    shapes = {name: ("float32", shape) for name, shape in SHAPES.items()}
    version, arrays = ask(lane_support.read_sync, sync, shapes, method=method)
    assert (version, value_of(arrays)) == (1, 5)


@pytest.mark.parametrize("method", METHODS)
def test_the_lock_of_the_object_can_be_handed_to_a_child(method: str) -> None:
    with SharedWeightSync({"w": (3,)}) as sync:
        assert ask(lane_support.write_with_lock, sync.name, sync._lock, 6.0, method=method) == 1
        out = {"w": np.zeros(3, np.float32)}
        assert (sync.read_weights_into(out), out["w"].tolist()) == (1, [6, 6, 6])


def test_a_lock_that_is_given_is_kept_and_never_taken() -> None:
    lock = mp.get_context("fork").Lock()
    with SharedWeightSync(SHAPES, lock=lock) as sync:
        assert sync._lock is lock
        with lock:
            sync.write_weights(state(2))
            assert sync.read_weights_into(state(0)) == 1


def test_the_lock_that_is_not_needed_can_be_used_like_one(sync: SharedWeightSync) -> None:
    with sync._lock, sync._lock:
        assert sync._lock.acquire()
        assert sync._lock.acquire(block=False)
        assert sync._lock.acquire(timeout=1)
        sync._lock.release()


@pytest.mark.parametrize("shapes", [(), ({},), (None,), (SHAPES,)], ids=["no shapes", "empty", "None", "shapes"])
def test_attaching_by_name_works_with_and_without_shapes(sync: SharedWeightSync, shapes: tuple[Any, ...]) -> None:
    sync.write_weights(state(5))
    with SharedWeightSync(*shapes, create=False, shm_name=sync.name) as other:
        out = state(0)
        assert (other.read_weights_into(out), value_of(out)) == (1, 5)


def test_an_attached_object_that_has_no_lock_never_reads_torn_weights() -> None:
    """The reference's attachers did. Here a reader that was given nothing but the name is as good as any."""
    given = {"a": np.ones(20_000, np.float32), "b": np.ones(20_000, np.float32)}
    with (
        SharedWeightSync.from_state_dict(given) as sync,
        SharedWeightSync(create=False, shm_name=sync.name) as other,
    ):
        stop = threading.Event()

        def publish() -> None:
            value = 1
            while not stop.is_set():
                value += 1
                given["a"][:] = given["b"][:] = value
                sync.write_weights(given)

        thread = threading.Thread(target=publish)
        thread.start()
        other.wait_for(2, PATIENCE)
        out = {name: np.zeros_like(array) for name, array in given.items()}
        torn = 0
        for _ in range(500):
            version = other.read_weights_into(out)
            torn += bool((out["a"] != version).any() or (out["b"] != version).any())
        stop.set()
        thread.join()
        assert torn == 0


def test_attaching_with_other_shapes_says_the_difference(sync: SharedWeightSync) -> None:
    with pytest.raises(SegmentError, match=re.escape("expected field w: float32[3, 2], found w: float32[2, 3]")):
        SharedWeightSync({"w": (3, 2), "b": (3,)}, create=False, shm_name=sync.name)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"w": (2, 3)}, "expected no field 'b'"),
        ({"w": (2, 3), "b": (3,), "c": ()}, "expected a field 'c'"),
        ({"b": (3,), "w": (3, 2)}, "expected field w: int64[3, 2], found w: int64[2, 3]"),
    ],
)
def test_shapes_that_do_not_agree_are_refused_in_any_order_and_dtype(shapes: dict[str, Any], words: str) -> None:
    given = {"w": np.zeros((2, 3), np.int64), "b": np.zeros(3)}
    with SharedWeightSync.from_state_dict(given) as sync, pytest.raises(SegmentError, match=re.escape(words)):
        SharedWeightSync(shapes, create=False, shm_name=sync.name)


def test_plain_shapes_say_nothing_of_dtypes_and_order() -> None:
    given = {"w": np.full((2, 3), 7, np.int64), "b": np.full(3, 7.0)}
    with (
        SharedWeightSync.from_state_dict(given) as sync,
        SharedWeightSync({"b": [3], "w": (2, 3)}, create=False, shm_name=sync.name) as other,
    ):
        out = {name: np.zeros_like(array) for name, array in given.items()}
        assert (other.read_weights_into(out), value_of(out)) == (1, 7)


def test_a_layout_must_agree_in_all(sync: SharedWeightSync) -> None:
    swapped = Layout({"b": ("float32", (3,)), "w": ("float32", (2, 3))})
    with pytest.raises(SegmentError, match="expected the fields in the order"):
        SharedWeightSync(swapped, create=False, shm_name=sync.name)


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"b": (3,), "w": 3}, "param_shapes['w'] must be a shape such as (2, 3), found 3"),
        ([("w", (3,))], "param_shapes must be a dict of names to shapes, or a Layout, found [('w', (3,))]"),
    ],
)
def test_what_is_no_shape_is_refused_by_name(create: bool, shapes: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        SharedWeightSync(shapes, create=create, shm_name=fresh_name("weights"))


def test_attaching_with_other_dtypes_says_the_difference(sync: SharedWeightSync) -> None:
    given = state(0) | {"b": np.zeros(3, np.int64)}
    with pytest.raises(SegmentError, match=re.escape("expected field b: int64[3], found b: float32[3]")):
        SharedWeightSync.from_state_dict(given, create=False, shm_name=sync.name)


def test_attaching_to_nothing_is_an_error() -> None:
    with pytest.raises(SegmentMissing):
        SharedWeightSync(create=False, shm_name=fresh_name("nothing"))


def test_numpy_state_dicts_need_no_torch() -> None:
    output = output_of(
        """
        import sys
        import numpy as np
        from memlane.ipc import SharedWeightSync
        given = {"w": np.arange(6.0), "n": np.array(3), "flag": np.array([True]), "none": np.zeros((0, 4), np.float16)}
        with SharedWeightSync.from_state_dict(given) as sync:
            out = {name: np.zeros_like(array) for name, array in given.items()}
            with SharedWeightSync(create=False, shm_name=sync.name) as other:
                print(other.read_weights_into(out), out["w"].sum(), out["n"], out["flag"], "torch" in sys.modules)
        """
    )
    assert output == "1 15.0 3 [ True] False\n"


# ----------------------------------------------------------------------------------------------------- torch, any dtype


def bits(torch: Any, tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


DTYPES = ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
          "float8_e4m3fn"]  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_dtype_and_shape_arrive_bit_for_bit(torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch.empty((), dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    given = {"x": raw.view(kind).reshape(shape)}
    with SharedWeightSync.from_state_dict(given) as sync:
        out = {"x": torch.zeros(shape, dtype=kind)}
        assert sync.read_weights_into(out) == 1
    assert bits(torch, out["x"]) == bits(torch, given["x"])
    assert out["x"].shape == given["x"].shape


@pytest.mark.parametrize("value", [2**53 + 1, -(2**62) - 1])
def test_integers_are_not_squeezed_through_floats(torch: Any, value: int) -> None:
    given = {"num_batches_tracked": torch.tensor(value)}
    with SharedWeightSync.from_state_dict(given) as sync:
        sync.write_weights(given)
        out = {"num_batches_tracked": torch.tensor(0)}
        sync.read_weights_into(out)
    assert out["num_batches_tracked"].item() == value


def test_doubles_are_not_squeezed_through_floats(torch: Any) -> None:
    given = {"x": torch.tensor([1 / 3], dtype=torch.float64)}
    with SharedWeightSync.from_state_dict(given) as sync:
        sync.write_weights(given)
        out = {"x": torch.zeros(1, dtype=torch.float64)}
        sync.read_weights_into(out)
    assert out["x"].item() == 1 / 3


def test_bfloat16_is_not_taken_for_an_integer_of_its_size(torch: Any) -> None:
    with SharedWeightSync.from_state_dict({"x": torch.zeros(3, dtype=torch.bfloat16)}) as sync:
        for wrong in (torch.uint16, torch.float16, torch.int16):
            with pytest.raises(TypeError, match=r"\['x'\] must have dtype \[\('bfloat16', '<u2'\)\], found"):
                sync.write_weights({"x": torch.zeros(3, dtype=wrong)})


def test_torch_and_numpy_meet_where_both_have_the_dtype(torch: Any) -> None:
    with SharedWeightSync.from_state_dict({"x": torch.zeros(2, 2)}) as sync:
        sync.write_weights({"x": np.full((2, 2), 3, np.float32)})
        out = {"x": torch.zeros(2, 2)}
        sync.read_weights_into(out)
        assert (out["x"] == 3).all()


def test_tensors_that_are_not_contiguous_are_written_and_read(torch: Any) -> None:
    given, out = torch.arange(12.0).reshape(3, 4).t(), torch.zeros(3, 4).t()
    with SharedWeightSync.from_state_dict({"x": given}) as sync:
        for turn in range(2):
            given.mul_(turn + 1)
            sync.write_weights({"x": given})
            sync.read_weights_into({"x": out})
            assert torch.equal(out, given)
    assert not out.is_contiguous()


def test_a_tensor_whose_memory_moved_is_found_again(torch: Any) -> None:
    given, out = {"x": torch.zeros(4)}, {"x": torch.zeros(4)}
    with SharedWeightSync.from_state_dict(given) as sync:
        sync.write_weights(given)
        sync.read_weights_into(out)
        given["x"].data, out["x"].data = torch.full((4,), 5.0), torch.full((4,), -1.0)
        sync.write_weights(given)
        sync.read_weights_into(out)
    assert out["x"].tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda _: {}, KeyError, "missing ['x'], unknown []"),
        (lambda torch: {"x": torch.zeros(3), "y": torch.zeros(1)}, KeyError, "unknown ['y']"),
        (lambda torch: {"x": torch.zeros(4)}, ValueError, "['x'] must have shape [3], found [4]"),
        (lambda torch: {"x": torch.zeros(3).half()}, TypeError, "['x'] must have dtype float32, found float16"),
        (lambda torch: {"x": torch.zeros(3).bfloat16()}, TypeError, "must have dtype float32, found [('bfloat16'"),
        (lambda _: {"x": [0.0, 0.0, 0.0]}, TypeError, "'x' must be a numpy array or a torch tensor, found list"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "bfloat16", "list"],
)  # fmt: skip
def test_names_shapes_and_dtypes_are_checked_on_both_sides(
    torch: Any, wrong: Callable[[Any], dict[str, Any]], error: type[Exception], words: str
) -> None:
    with SharedWeightSync.from_state_dict({"x": torch.zeros(3)}) as sync:
        with pytest.raises(error, match=re.escape(words)):
            sync.write_weights(wrong(torch))
        with pytest.raises(error, match=re.escape(words)):
            sync.read_weights_into(wrong(torch))
        assert sync.version == 1


# ------------------------------------------------------------------------------------------------------- torch, modules


def policy(torch: Any) -> Any:
    """With buffers of two dtypes (BatchNorm), a parameter in half precision, and two tied layers."""
    nn = torch.nn
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[3].weight = module[2].weight
    module.register_parameter("log_std", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    return module


def test_a_module_with_buffers_and_tied_parameters_arrives_whole(torch: Any) -> None:
    learner, collector = policy(torch), policy(torch)
    learner(torch.randn(16, 4))  # moves the statistics of the BatchNorm
    with SharedWeightSync.from_state_dict(learner.state_dict()) as sync:
        assert sync.read_weights_into(collector.state_dict()) == 1
    found, expected = collector.state_dict(), learner.state_dict()
    assert found["1.num_batches_tracked"] == 1
    assert all(bits(torch, found[name]) == bits(torch, tensor) for name, tensor in expected.items())
    assert collector[3].weight is collector[2].weight


def test_a_module_follows_a_learner_over_many_versions(torch: Any) -> None:
    learner, collector = policy(torch).eval(), policy(torch).eval()
    batch = torch.randn(5, 4)
    kept = collector.state_dict()
    with SharedWeightSync.from_state_dict(learner.state_dict()) as sync, torch.no_grad():
        for version in range(2, 7):
            for parameter in learner.parameters():
                parameter.add_(0.1)
            sync.write_weights(learner.state_dict())
            # Both ways are in use: a state dict that is kept, and one that is made anew each time.
            assert sync.read_weights_into(kept if version % 2 else collector.state_dict()) == version
            assert torch.equal(collector(batch), learner(batch))


def test_parameters_that_require_gradients_can_be_written_and_read(torch: Any) -> None:
    given, out = torch.nn.Parameter(torch.full((3,), 2.0)), torch.nn.Parameter(torch.zeros(3))
    with SharedWeightSync.from_state_dict({"x": given}) as sync:
        sync.write_weights({"x": given})
        sync.read_weights_into({"x": out})
    assert out.requires_grad
    assert out.is_leaf
    (out**3).sum().backward()
    assert out.grad.tolist() == [12, 12, 12]


def test_parameters_that_are_not_contiguous_and_require_gradients_can_be_read(torch: Any) -> None:
    given = torch.arange(6.0).reshape(2, 3).t()
    out = torch.nn.Parameter(torch.zeros(2, 3).t())
    with SharedWeightSync.from_state_dict({"x": given}) as sync:
        sync.write_weights({"x": given})
        sync.read_weights_into({"x": out})
    assert torch.equal(out, given)
    (out * 2).sum().backward()
    assert (out.grad == 2).all()


def test_a_module_can_be_trained_after_it_was_read_into(torch: Any) -> None:
    learner, collector = policy(torch).float(), policy(torch).float()
    optimizer = torch.optim.SGD(collector.parameters(), lr=0.1)
    with SharedWeightSync.from_state_dict(learner.state_dict()) as sync:
        sync.write_weights(learner.state_dict())
        sync.read_weights_into(dict(collector.state_dict(keep_vars=True)))
        before = copy.deepcopy(collector.state_dict())
        collector(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(collector[0].weight, before["0.weight"])


# --------------------------------------------------------------------------------------------------------------- ending


def test_close_leaves_the_name_to_the_owner_and_cleanup_takes_it(sync: SharedWeightSync) -> None:
    SharedWeightSync(create=False, shm_name=sync.name).close()
    SharedWeightSync(create=False, shm_name=sync.name).cleanup()
    with pytest.raises(SegmentMissing):
        SharedWeightSync(create=False, shm_name=sync.name)
    sync.write_weights(state(1))
    assert sync.version == 1


USES: dict[str, Callable[[SharedWeightSync], object]] = {
    "write_weights": lambda sync: sync.write_weights(state(1)),
    "read_weights_into": lambda sync: sync.read_weights_into(state(1)),
    "version": lambda sync: sync.version,
    "wait_for": lambda sync: sync.wait_for(1, timeout=0),
}


@pytest.mark.parametrize("end", [SharedWeightSync.close, SharedWeightSync.cleanup], ids=["close", "cleanup"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_the_end_is_an_error(
    use: Callable[[SharedWeightSync], object], end: Callable[[SharedWeightSync], None]
) -> None:
    sync = SharedWeightSync(SHAPES)
    sync.write_weights(state(1))
    end(sync)
    end(sync)
    with pytest.raises(SegmentClosed):
        use(sync)


def test_no_use_after_cleanup_crashes_the_process() -> None:
    output = output_of(
        """
        from memlane.ipc import SharedWeightSync
        from tests.ipc.test_weight_sync import SHAPES, USES, state
        sync, mine = SharedWeightSync(SHAPES), state(1)
        sync.write_weights(mine)
        sync.read_weights_into(mine)
        sync.cleanup()
        for use in [*USES.values(), lambda sync: sync.write_weights(mine), lambda sync: sync.read_weights_into(mine)]:
            try:
                use(sync)
            except Exception as error:
                print(type(error).__name__)
        """,
    )
    assert output.split() == ["SegmentClosed"] * (len(USES) + 2)
