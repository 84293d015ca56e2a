"""The cached addresses of the tensors of the last call, and when they must be looked up again."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlane.ipc import ReplayBuffer, Ring, Weights
from memlane.lanes import Replay, Stats
from memlane.lanes.tensors import TensorParts, layout_of

LAYOUT = {"a": ("float32", 3), "b": ("int64", ())}


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring(LAYOUT, num_slots=4) as ring:
        yield ring


def arrays(value: float = 0) -> dict[str, Any]:
    return {"a": np.full(3, value, np.float32), "b": np.full((), value, np.int64)}


def read(ring: Ring) -> tuple[list[float], int]:
    out = arrays()
    ring.reader().get(out, timeout=1)
    return out["a"].tolist(), int(out["b"])


def parts_of(tensors: dict[str, Any], *, writeable: bool = False) -> TensorParts:
    return TensorParts(layout_of(tensors), tensors, "tensors", writeable=writeable)


def test_new_arrays_of_the_same_kind_are_put_in_place_of_the_old(ring: Ring) -> None:
    writer = ring.writer()
    for value in range(3):
        writer.put(arrays(value))
    assert [read(ring) for _ in range(3)] == [([value] * 3, value) for value in range(3)]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"a": np.zeros(4, np.float32)}, ValueError),
        ({"a": np.zeros((1, 3), np.float32)}, ValueError),
        ({"a": np.zeros(3, np.float64)}, TypeError),
        ({"a": np.zeros(3, np.int32)}, TypeError),
        ({"a": [0.0, 0.0, 0.0]}, TypeError),
        ({"c": np.zeros(3, np.float32)}, KeyError),
    ],
    ids=str,
)
def test_an_array_of_another_kind_is_an_error_after_good_ones_too(
    ring: Ring, changed: dict[str, Any], error: type[Exception]
) -> None:
    writer = ring.writer()
    writer.put(arrays(1))
    with pytest.raises(error):
        writer.put({**arrays(2), **changed})
    writer.put(arrays(3))
    assert [read(ring)[1] for _ in range(2)] == [1, 3]


def test_an_array_that_is_not_in_one_piece_goes_through_a_copy_every_time(ring: Ring) -> None:
    wide = np.zeros((3, 2), np.float32)
    writer = ring.writer()
    for value in range(3):
        wide[:] = value
        writer.put({"a": wide[:, 0], "b": np.array(value)})
        assert read(ring) == ([value] * 3, value)


def test_an_array_in_pieces_takes_the_place_of_one_that_was_whole(ring: Ring) -> None:
    writer = ring.writer()
    writer.put(arrays(1))
    writer.put({"a": np.arange(6, dtype=np.float32)[::2], "b": np.array(2)})
    assert [read(ring) for _ in range(2)] == [([1, 1, 1], 1), ([0, 2, 4], 2)]


def test_names_in_another_order_reach_the_same_fields(ring: Ring) -> None:
    writer = ring.writer()
    writer.put(arrays(1))
    writer.put(dict(reversed(arrays(2).items())))
    assert [read(ring) for _ in range(2)] == [([1] * 3, 1), ([2] * 3, 2)]


@pytest.mark.parametrize("kind", [OrderedDict, UserDict])
def test_any_mapping_will_do(ring: Ring, kind: type[Any]) -> None:
    writer, reader, out = ring.writer(), ring.reader(), kind(arrays())
    for value in (1, 2):
        writer.put(kind(arrays(value)))
        reader.get(out, timeout=1)
        assert out["a"].tolist() == [value] * 3


def test_a_read_only_array_cannot_take_the_place_of_one_to_read_into(ring: Ring) -> None:
    writer, reader, out = ring.writer(), ring.reader(), arrays()
    writer.put(arrays(1))
    reader.get(out)
    out["a"] = np.zeros(3, np.float32)
    out["a"].flags.writeable = False
    writer.put(arrays(2))
    with pytest.raises(ValueError, match="read-only"):
        reader.get(out)
    assert ring.unread == 1


def test_dates_can_be_put_although_they_have_no_buffer() -> None:
    with Ring({"when": ("M8[s]", 2)}) as ring:
        writer, out = ring.writer(), {"when": np.zeros(2, "M8[s]")}
        for year in ("2001", "2002"):
            writer.put({"when": np.array([year, year], "M8[s]")})
            ring.reader().get(out)
            assert out["when"][1] == np.datetime64(year)


def test_what_was_read_into_one_dict_is_read_again_into_another() -> None:
    with Weights(LAYOUT) as weights:
        weights.publish(arrays(5))
        for _ in range(2):
            out = arrays()
            assert weights.read(out)[0] == 1
            assert out["a"].tolist() == [5] * 3


class Kind(np.ndarray[Any, Any]):
    """A class of its own, as np.memmap is."""


def test_an_array_of_a_subclass_arrives_every_time() -> None:
    with Ring({"x": ("float32", 3)}) as ring:
        writer, reader = ring.writer(), ring.reader()
        out = {"x": np.zeros(3, np.float32).view(Kind)}
        for number in range(3):
            writer.put({"x": np.full(3, number, np.float32).view(Kind)})
            reader.get(out, timeout=0)
            assert out["x"].tolist() == [number] * 3


# --------------------------------------------------------------------------------------------------------------- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_a_modules_new_state_dicts_fit_in_place_of_each_other(torch: Any) -> None:
    module = torch.nn.Linear(3, 2)
    parts = parts_of(module.state_dict())
    assert parts.fits(module.state_dict())


def test_a_tensor_whose_storage_was_exchanged_is_not_the_same_but_fits(torch: Any) -> None:
    tensors = {"a": torch.zeros(3)}
    parts = parts_of(tensors)
    assert parts.same(tensors)
    tensors["a"].data = torch.ones(3)
    assert not parts.same(tensors)
    assert parts.fits(tensors)
    assert parts.same(tensors)


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.zeros(4),
        lambda torch: torch.zeros(3, dtype=torch.float64),
        lambda torch: torch.zeros(6)[::2],
        lambda torch: torch.nn.Parameter(torch.zeros(3)),
        lambda torch: torch.zeros(3, device="meta"),
        lambda torch: torch.zeros(3).to_sparse(),
        lambda _: np.zeros(3, np.float32),
    ],
)
def test_a_tensor_of_another_kind_does_not_fit(torch: Any, make: Any) -> None:
    assert not parts_of({"a": torch.zeros(3)}).fits({"a": make(torch)})


@pytest.mark.parametrize("first", [True, False])
def test_a_conjugate_is_published_as_what_it_stands_for(torch: Any, first: bool) -> None:
    plain = torch.tensor([1 + 2j])
    with Weights(layout_of({"z": plain})) as weights:
        if not first:
            weights.publish({"z": plain})
        weights.publish({"z": plain.conj()})
        _, out = weights.read()
        assert out["z"].tolist() == [1 - 2j]


def test_a_negative_is_published_as_what_it_stands_for(torch: Any) -> None:
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert imaginary.is_neg()
    with Weights(layout_of({"x": imaginary})) as weights:
        weights.publish({"x": torch.zeros(1)})
        weights.publish({"x": imaginary})
        _, out = weights.read()
        assert out["x"].tolist() == [-2]


CHANGES_IN_PLACE = {
    "a smaller storage": lambda torch, tensor: setattr(tensor, "data", torch.zeros(1)),
    "a part of its own storage": lambda _, tensor: setattr(tensor, "data", tensor.data[:1]),
    "another dtype": lambda torch, tensor: setattr(tensor, "data", tensor.data.to(torch.float64)),
    "another dtype over its own storage": lambda torch, tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "another order": lambda _, tensor: tensor.t_(),
    "another size": lambda _, tensor: tensor.resize_(1, 2),
    "another shape": lambda _, tensor: tensor.resize_(4),
}


class Older:
    """A mixin: what torch was before it had an exchange table."""

    __dlpack_c_exchange_api__ = None


@pytest.mark.parametrize("older", [False, True], ids=["with an exchange table", "without one"])
@pytest.mark.parametrize("change", CHANGES_IN_PLACE)
def test_a_tensor_that_became_another_one_in_place_is_neither_the_same_nor_fits(
    torch: Any, change: str, older: bool
) -> None:
    tensor = torch.zeros(2, 2)
    if older:
        tensor = tensor.as_subclass(type("OlderTensor", (Older, torch.Tensor), {}))
    parts = parts_of({"a": tensor})
    assert parts.same({"a": tensor})
    CHANGES_IN_PLACE[change](torch, tensor)
    assert not parts.same({"a": tensor})
    assert not parts.fits({"a": tensor})


def test_a_tensor_in_pieces_that_became_another_one_in_place_is_neither_the_same_nor_fits(torch: Any) -> None:
    tensor = torch.zeros(2, 4)[:, ::2]
    parts = parts_of({"a": tensor})
    assert parts.same({"a": tensor})
    tensor.data = torch.zeros(1)  # which would be spread over the whole
    assert not parts.same({"a": tensor})
    assert not parts.fits({"a": tensor})


def test_a_module_that_became_double_is_an_error_and_not_published_as_something_else(torch: Any) -> None:
    net = torch.nn.Linear(2, 2, bias=False)
    parameters = dict(net.named_parameters())
    with Weights(layout_of(net.state_dict())) as weights:
        weights.publish(parameters)
        net.double()
        with pytest.raises(TypeError, match=r"'weight'\] must have dtype float32, found float64"):
            weights.publish(parameters)
        assert weights.version == 1


def test_nothing_is_written_beyond_a_tensor_that_shrank(torch: Any) -> None:
    out = {"w": torch.zeros(64)}
    with Weights(layout_of(out)) as weights:
        weights.publish({"w": torch.ones(64)})
        weights.read(out)
        neighbourhood = torch.zeros(64)
        out["w"].data = neighbourhood[:8]
        weights.publish({"w": torch.full((64,), 7.0)})
        with pytest.raises(ValueError, match=r"must have shape \[64\], found \[8\]"):
            weights.read(out)
        assert not neighbourhood.any()


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_an_array_that_got_another_shape_in_place_is_neither_the_same_nor_fits(shape: tuple[int, ...]) -> None:
    array = np.zeros((2, 2))
    parts = parts_of({"a": array})
    assert parts.same({"a": array})
    array.shape = shape
    assert not parts.same({"a": array})
    assert not parts.fits({"a": array})


def test_an_array_that_moved_while_it_grew_does_not_fit() -> None:
    array = np.zeros(4)
    parts = parts_of({"a": array})
    array.resize(1 << 16, refcheck=False)
    assert not parts.same({"a": array})
    assert not parts.fits({"a": array})


def test_an_array_that_became_read_only_is_not_read_into() -> None:
    out = {"a": np.zeros(4)}
    with Weights(layout_of(out)) as weights:
        weights.publish(out)
        weights.read(out)
        out["a"].flags.writeable = False
        weights.publish({"a": np.ones(4)})
        with pytest.raises(ValueError, match="is read-only"):
            weights.read(out)


def test_complex_tensors_arrive_every_time(torch: Any) -> None:
    given, out = {"z": torch.zeros(2, dtype=torch.complex64)}, {"z": torch.zeros(2, dtype=torch.complex64)}
    with Ring(layout_of(given)) as ring:
        writer, reader = ring.writer(), ring.reader()
        for number in range(3):
            given["z"].fill_(complex(number, 1))
            writer.put(given)
            reader.get(out, timeout=0)
            assert out["z"].tolist() == [complex(number, 1)] * 2


def test_what_was_read_is_read_again_into_a_tensor_in_pieces_that_got_other_memory(torch: Any) -> None:
    out = {"x": torch.zeros(2, 4)[:, ::2]}
    with Weights(layout_of(out)) as weights:
        weights.publish({"x": torch.ones(2, 2)})
        weights.read(out)
        out["x"].data = torch.zeros(2, 4)[:, ::2]
        weights.read(out)
        assert bool(out["x"].all())


def resized(torch: Any, nbytes: int) -> Any:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(1000)


WITHOUT_MEMORY = {
    "a storage of no bytes": (lambda torch: resized(torch, 0), "its storage has 0"),
    "a storage that is too small": (lambda torch: resized(torch, 400), "its storage has 400"),
    "a piece of a storage of no bytes": (lambda torch: with_storage(torch.ones(2000)[::2], 0), "its storage has 0"),
    "the end of a storage that shrank": (lambda torch: with_storage(torch.ones(2000)[1000:], 4000), "needs 8000 bytes"),
    "a fake tensor": (fake, "must have data, found a FakeTensor"),
    "a meta tensor": (lambda torch: torch.ones(1000, device="meta"), "on the device 'meta'"),
    "a sparse tensor": (lambda torch: torch.ones(1000).to_sparse(), "must be dense, found a tensor of layout"),
    "a tensor of zeros without memory": (lambda torch: torch._efficientzerotensor(1000), "must have data of its own"),
}


def with_storage(tensor: Any, nbytes: int) -> Any:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize("earlier", [False, True], ids=["at first", "after good ones"])
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_is_neither_copied_nor_written_to(torch: Any, kind: str, earlier: bool) -> None:
    make, text = WITHOUT_MEMORY[kind]
    with Weights({"w": ("float32", 1000)}) as weights, Ring({"w": ("float32", 1000)}) as ring:
        writer, reader = ring.writer(), ring.reader()
        weights.publish({"w": torch.ones(1000)})
        writer.put({"w": torch.ones(1000)})
        if earlier:
            weights.read({"w": torch.zeros(1000)})
            writer.put({"w": torch.ones(1000)})
            reader.get({"w": torch.zeros(1000)})
        for use in (
            lambda: weights.publish({"w": make(torch)}),
            lambda: weights.read({"w": make(torch)}),
            lambda: writer.put({"w": make(torch)}),
            lambda: reader.get({"w": make(torch)}, timeout=0),
        ):
            with pytest.raises((TypeError, ValueError), match=re.escape(text)):
                use()
        assert (weights.version, ring.unread) == (1, 1)


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("debug", ["", "1"], ids=["", "debug mode"])
def test_a_tensor_without_memory_is_not_stored_in_a_field_of_a_lease(
    torch: Any, kind: str, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLANE_DEBUG", debug)
    make, text = WITHOUT_MEMORY[kind]
    with Ring({"w": ("float32", 1000)}) as ring, ring.writer().claim() as slot:
        slot["w"] = torch.ones(1000)
        with pytest.raises((TypeError, ValueError), match="the value of field 'w' .*" + re.escape(text)):
            slot["w"] = make(torch)
        assert slot["w"].tolist() == [1] * 1000


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_collector_of_statistics_refuses_a_tensor_without_memory(torch: Any, kind: str) -> None:
    make, text = WITHOUT_MEMORY[kind]
    with Stats(1000) as stats:
        collector = stats.collector()
        collector.add(torch.ones(1000))
        with pytest.raises((TypeError, ValueError), match="vectors .*" + re.escape(text)):
            collector.add(make(torch))
        assert stats.merged().count == 1


ADDED_TO_A_BUFFER = {
    "obs": (1000, 1),
    "actions": (1000, 1),
    "rewards": (1000,),
    "next_obs": (1000, 1),
    "dones": (1000,),
    "truncated": (1000,),
    "terminal_mask": (1000,),
    "terminal_next_obs": (1000, 1),
    "critic": (1000, 1),
    "next_critic": (1000, 1),
    "terminal_next_critic": (1000, 1),
}


@pytest.mark.parametrize("name", ADDED_TO_A_BUFFER)
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_replay_buffer_refuses_a_tensor_without_memory(torch: Any, kind: str, name: str) -> None:
    make, text = WITHOUT_MEMORY[kind]
    rows = {name: torch.ones(shape) for name, shape in ADDED_TO_A_BUFFER.items()}
    buffer = ReplayBuffer(2000, 1, 1, "cpu", critic_dim=1)
    with contextlib.closing(buffer):
        buffer.add(**rows)
        with pytest.raises((TypeError, ValueError), match=f"{name} .*" + re.escape(text)):
            buffer.add(**{**rows, name: make(torch)})
        assert int(buffer.size[0]) == 1000


@pytest.mark.parametrize(
    "make", [lambda torch: torch.ones(1000), lambda torch: torch.ones(2000)[::2]], ids=["whole", "pieces"]
)
def test_a_parameter_whose_storage_is_freed_between_two_calls_is_refused_until_it_is_back(
    torch: Any, make: Any
) -> None:
    given, out = {"w": make(torch)}, {"w": make(torch)}
    with Weights({"w": ("float32", 1000)}) as weights:
        weights.publish(given)
        weights.read(out)
        for tensors, call in ((given, weights.publish), (out, weights.read)):
            storage = tensors["w"].untyped_storage()
            length = storage.nbytes()
            for smaller in (0, length // 2):
                storage.resize_(smaller)
                with pytest.raises(ValueError, match=f"its storage has {smaller}: it was resized, as FSDP does"):
                    call(tensors)
            storage.resize_(length)
            tensors["w"].fill_(2)
            call(tensors)
        assert weights.read()[1]["w"].tolist() == [2] * 1000


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", ["quantised", "nested", "sparse"])
def test_a_tensor_whose_bytes_are_not_its_elements_has_no_layout(torch: Any, kind: str) -> None:
    tensor = {
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "sparse": lambda: torch.ones(3, 3).to_sparse_csr(),
    }[kind]()
    with pytest.raises(TypeError, match=f"'w' must .*{kind}"):
        layout_of({"w": tensor})


def test_the_layout_of_a_model_without_memory_is_that_of_the_model(torch: Any) -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
    assert layout_of(module.state_dict()) == layout_of(torch.nn.Linear(3, 2).state_dict())


def test_a_replay_refuses_a_tensor_without_memory(torch: Any) -> None:
    with Replay({"x": ("float32", 4)}, capacity=2000) as replay:
        replay.add({"x": torch.ones(1000, 4)})
        rows = with_storage(torch.ones(1000, 4), 0)
        with pytest.raises(ValueError, match=r"rows\['x'\] needs 16000 bytes"):
            replay.add({"x": rows})
        assert len(replay) == 1000
