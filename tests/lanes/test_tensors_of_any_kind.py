"""Arrays and tensors of any dtype, shape and memory: what is put, published or added is what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.core import Layout
from memlane.lanes import Replay, Ring, Weights
from memlane.lanes.tensors import bytes_of, layout_of
from tests.support import strategies

FUZZ = settings(deadline=None, max_examples=40)

WITHOUT_ZERO_SIZE = strategies.dtypes.filter(lambda dtype: dtype.itemsize > 0)


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    return draw(st.text(min_size=1, max_size=4)), draw(WITHOUT_ZERO_SIZE), draw(strategies.shapes)


# --------------------------------------------------------------------------------------------------------------- numpy


@FUZZ
@given(st.data())
def test_arrays_in_any_memory_pass_through_a_ring_bit_for_bit(data: st.DataObject) -> None:
    name, dtype, shape = data.draw(fields())
    with Ring({name: (dtype, shape)}) as ring:
        writer, reader = ring.writer(), ring.reader()
        field = ring.layout[name]
        for _ in range(3):  # the handles remember the memory of the arrays before
            given_array = data.draw(strategies.contents(field.dtype, field.shape))
            writer.put({name: strategies.in_memory(given_array, data.draw(strategies.any_memory))})
            out = strategies.in_memory(np.zeros(field.shape, field.dtype), data.draw(strategies.memory))
            reader.get({name: out}, timeout=0)
            assert out.tobytes() == given_array.tobytes()


@FUZZ
@given(st.data())
def test_arrays_in_any_memory_are_published_and_read_bit_for_bit(data: st.DataObject) -> None:
    name, dtype, shape = data.draw(fields())
    with Weights({name: (dtype, shape)}) as weights:
        field = weights.layout[name]
        out = strategies.in_memory(np.zeros(field.shape, field.dtype), data.draw(strategies.memory))
        for _ in range(3):
            given_array = data.draw(strategies.contents(field.dtype, field.shape))
            weights.publish({name: strategies.in_memory(given_array, data.draw(strategies.any_memory))})
            weights.read({name: out})
            assert out.tobytes() == given_array.tobytes()


@FUZZ
@given(st.data())
def test_rows_in_any_memory_are_added_to_a_replay_bit_for_bit(data: st.DataObject) -> None:
    name, (_, dtype, shape) = "x", data.draw(fields())
    count = data.draw(st.integers(1, 4))
    with Replay({name: (dtype, shape)}, capacity=8) as replay:
        field = replay.layout[name]
        rows = data.draw(strategies.contents(field.dtype, (count, *field.shape)))
        kinds = st.sampled_from(sorted({*strategies.MEMORY, "read-only"}))
        assert replay.add({name: strategies.in_memory(rows, data.draw(kinds))}) == count
        batch = replay.sampler(seed=1, extras=["key"]).sample(16)
        for at in range(16):
            assert batch[name][at].tobytes() == rows[batch["key"][at] - 1].tobytes()


@pytest.mark.parametrize("kind", sorted(strategies.MEMORY))
@pytest.mark.parametrize("given_dtype", ["<f8", ">f8", ">f4"])
def test_floats_in_any_memory_are_converted_to_those_of_the_row(kind: str, given_dtype: str) -> None:
    rows = np.arange(6, dtype=given_dtype).reshape(2, 3) / 4
    with Replay({"x": ("<f4", 3)}, capacity=2) as replay:
        replay.add({"x": strategies.in_memory(rows, kind)})
        batch = replay.sampler(seed=1, extras=["key"]).sample(8)
        assert (batch["x"] == rows[batch["key"] - 1]).all()


@pytest.mark.parametrize("kind", ["stepped", "with negative strides", "unaligned"])
def test_reading_into_pieces_of_an_array_changes_nothing_between_them(kind: str) -> None:
    out = strategies.in_memory(np.zeros((3, 2)), kind)
    around = out
    while isinstance(around.base, np.ndarray):
        around = around.base
    before = around.nbytes - out.nbytes
    with Weights({"x": ("f8", (3, 2))}) as weights:
        weights.publish({"x": np.ones((3, 2))})
        weights.read({"x": out})
    assert (int(np.count_nonzero(around)), around.nbytes - out.nbytes) == (6, before)


# Regression: the slot was taken, and lost when numpy could not copy into the record.
def test_a_record_is_not_read_into_and_the_slot_stays() -> None:
    record = np.zeros((), "V5")[()]
    with Ring({"x": ("V5", ())}) as ring:
        ring.writer().put({"x": record})
        with pytest.raises(ValueError, match=r"out\['x'\] is read-only"):
            ring.reader().get({"x": record}, timeout=0)
        assert ring.unread == 1


@pytest.mark.parametrize("call", ["get", "read"])
def test_an_array_whose_elements_share_memory_is_not_read_into(call: str) -> None:
    shared = np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))
    with Ring({"x": ("f8", 3)}) as ring, Weights({"x": ("f8", 3)}) as weights:
        ring.writer().put({"x": np.arange(3.0)})
        weights.publish({"x": np.arange(3.0)})
        with pytest.raises(ValueError, match=r"out\['x'\] has elements that share memory"):
            ring.reader().get({"x": shared}, timeout=0) if call == "get" else weights.read({"x": shared})
        assert ring.unread == 1


# --------------------------------------------------------------------------------------------------------------- torch

torch: Any = pytest.importorskip("torch")

TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def stepped(tensor: Any) -> Any:
    wide = torch.zeros([2 * extent + 1 for extent in tensor.shape], dtype=tensor.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def transposed(tensor: Any) -> Any:
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def with_offset(tensor: Any) -> Any:
    return torch.cat([torch.zeros(3, dtype=tensor.dtype), tensor.reshape(-1)])[3:].reshape(tensor.shape)


TORCH_MEMORY: dict[str, Any] = {
    "contiguous": lambda tensor: tensor.clone(),
    "stepped": stepped,
    "transposed": transposed,
    "with an offset": with_offset,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point()),
    "a conjugate": lambda tensor: tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor.clone(),
    "of a graph": lambda tensor: (
        tensor.clone().requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
    ),
}


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(strategies.shapes)
    return draw(tensors_like(dtype, shape))


@st.composite
def tensors_like(draw: st.DrawFn, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor of random bytes."""
    nbytes = dtype.itemsize * int(np.prod(shape))
    random = draw(st.randoms(use_true_random=False))
    data = bytes(random.choices(range(2), k=nbytes)) if dtype is torch.bool else random.randbytes(nbytes)
    return torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:nbytes].clone().view(dtype).reshape(shape)


torch_memory = st.sampled_from(sorted(TORCH_MEMORY))


@FUZZ
@given(st.data())
def test_tensors_in_any_memory_pass_through_ring_and_weights_bit_for_bit(data: st.DataObject) -> None:
    first = data.draw(tensors())
    layout = layout_of({"x": first})
    with Ring(layout) as ring, Weights(layout) as weights:
        writer, reader = ring.writer(), ring.reader()
        for _ in range(3):
            tensor = data.draw(tensors_like(first.dtype, tuple(first.shape)))
            sent = {"x": TORCH_MEMORY[data.draw(torch_memory)](tensor)}
            writer.put(sent)
            weights.publish(sent)
            for read in (lambda out: reader.get(out, timeout=0), weights.read):
                out = {"x": TORCH_MEMORY[data.draw(torch_memory)](torch.zeros_like(tensor))}
                read(out)
                assert bytes_of(out["x"]).tobytes() == bytes_of(tensor).tobytes()


@FUZZ
@given(st.data())
def test_tensors_in_any_memory_are_added_to_a_replay_bit_for_bit(data: st.DataObject) -> None:
    dtype, shape = data.draw(st.sampled_from(TORCH_DTYPES)), data.draw(strategies.shapes)
    rows = data.draw(tensors_like(dtype, (data.draw(st.integers(1, 4)), *shape)))
    with Replay(layout_of({"x": rows[0]}), capacity=8) as replay:
        assert replay.add({"x": TORCH_MEMORY[data.draw(torch_memory)](rows)}) == len(rows)
        expected = bytes_of(rows).reshape(len(rows), -1)
        batch = replay.sampler(seed=1, extras=["key"]).sample(16)
        for at in range(16):
            assert batch["x"][at].tobytes() == expected[batch["key"][at] - 1].tobytes()


def test_a_negative_view_is_added_to_a_replay_as_what_it_stands_for() -> None:
    imaginary = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert imaginary.is_neg()
    with Replay({"x": ("float32", ())}, capacity=2) as replay:
        replay.add({"x": imaginary})
        assert set(replay.sampler(seed=1, extras=["key"]).sample(32)["x"].tolist()) == {-2.0, -4.0}


def test_an_expanded_tensor_is_put_and_published_but_not_read_into() -> None:
    expanded = torch.tensor([7.0]).expand(3)
    with Ring({"x": ("f4", 3)}) as ring, Weights({"x": ("f4", 3)}) as weights:
        ring.writer().put({"x": expanded})
        weights.publish({"x": expanded})
        for read in (lambda out: ring.reader().get(out, timeout=0), weights.read):
            with pytest.raises(ValueError, match=r"out\['x'\] has elements that share memory"):
                read({"x": expanded})
        assert (ring.unread, weights.read()[1]["x"].tolist()) == (1, [7.0] * 3)


REFUSED: dict[str, Any] = {
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "compressed": lambda: torch.ones(2, 3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_whose_bytes_are_not_its_elements_is_refused_by_every_call(kind: str) -> None:
    tensor = REFUSED[kind]()
    layout = Layout({"x": ("float32", (2, 3))})
    with Ring(layout) as ring, Weights(layout) as weights, Replay({"x": ("float32", 3)}, capacity=4) as replay:
        ring.writer().put({"x": np.zeros((2, 3), np.float32)})
        weights.publish({"x": np.zeros((2, 3), np.float32)})
        for use, role in (
            (lambda: ring.writer().put({"x": tensor}), "'x'"),
            (lambda: weights.publish({"x": tensor}), "'x'"),
            (lambda: ring.reader().get({"x": tensor}, timeout=0), "'x'"),
            (lambda: weights.read({"x": tensor}), "'x'"),
            (lambda: replay.add({"x": tensor}), "'x'"),
        ):
            with pytest.raises(TypeError, match=role):
                use()
        assert (ring.unread, weights.version, len(replay)) == (1, 1, 0)
