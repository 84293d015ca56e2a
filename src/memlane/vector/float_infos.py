"""Infos in shared memory that nobody has declared: those that consist of floats only, as MuJoCo's environments return
them in every step.

A worker whose infos all have the same keys writes their values here, and, when it has changed, their *form*: the keys,
their types and the environments. All other infos travel in messages. 8 HalfCheetahs in two workers take 176 us
per step with messages and 145 without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlane._native import PROGRESS_FLOAT_FORMS, PROGRESS_FLOAT_INFOS
from memlane.core import SegmentError
from memlane.core.layout import FieldSpec
from memlane.core.suggestions import excerpt
from memlane.vector.infos import InfoColumn, PackedInfos

_TYPES = "pdf"
"""The types of floats, as ``infos.pack_floats`` returns them."""
_MAX_KEYS = 16
"""Keys that there is room for; infos with more of them travel in messages."""
_FORM_BYTES = 1024
"""Bytes for the form of a worker's infos, as JSON that ends with a NUL. Not pickled: any process that maps the memory
can overwrite it, and a pickle is code."""


class FloatForm(NamedTuple):
    """Keys, types and environments of the floats that a worker writes, as ``infos.pack_floats`` returns them."""

    keys: tuple[str, ...]
    types: str
    first_env: int
    num_envs: int


class FloatInfos:
    """The infos of floats of all environments. Each worker writes its own columns, before it arrives."""

    def __init__(self, values: NDArray[np.float64], forms: NDArray[np.uint8], progress: NDArray[np.int64]) -> None:
        self._values = values
        self._form_bytes = forms
        self._progress = progress
        self._forms: dict[int, tuple[int, FloatForm]] = {}
        """The last form of each worker, with its number. A worker has only its own here."""
        self._last_forms: tuple[FloatForm, ...] = ()
        """The forms that ``packed`` was last called with."""
        self._last_packed: list[tuple[PackedInfos, str]] = []
        """The infos in ``_last_forms`` with their types: views of the shared memory, which show each step's values."""

    @staticmethod
    def fields(num_envs: int, num_workers: int) -> dict[str, FieldSpec]:
        """The fields of the segment."""
        return {
            "float_infos": ("float64", (_MAX_KEYS, num_envs)),
            "float_forms": ("uint8", (num_workers, _FORM_BYTES)),
        }

    def write(self, worker: int, keys: tuple[str, ...], types: str, first_env: int, floats: bytes) -> bool:
        """Write the infos of a worker; False, and nothing is written, if there is no room for them."""
        if len(keys) > _MAX_KEYS:
            return False
        values = np.frombuffer(floats).reshape(len(keys), -1)
        form = FloatForm(keys, types, first_env, values.shape[1])
        number, last = self._forms.get(worker, (0, None))
        if form != last:
            content = json.dumps(form).encode() + b"\0"
            if len(content) > _FORM_BYTES:
                return False
            self._form_bytes[worker, : len(content)] = np.frombuffer(content, np.uint8)
            self._forms[worker] = number + 1, form
            self._progress[worker, PROGRESS_FLOAT_FORMS] = number + 1
        self._values[: len(keys), first_env : first_env + form.num_envs] = values
        self._progress[worker, PROGRESS_FLOAT_INFOS] += 1
        return True

    def form(self, worker: int) -> FloatForm:
        """The form of what a worker has written last."""
        number = int(self._progress[worker, PROGRESS_FLOAT_FORMS])
        known = self._forms.get(worker)
        if known is None or known[0] != number:
            known = self._forms[worker] = number, self._read_form(worker)
        return known[1]

    def _read_form(self, worker: int) -> FloatForm:
        text = self._form_bytes[worker].tobytes().partition(b"\0")[0]
        try:
            keys, types, first_env, num_envs = json.loads(text)
            form = FloatForm(tuple(keys), types, first_env, num_envs)
            valid = (
                [type(part) for part in (keys, types, first_env, num_envs)] == [list, str, int, int]
                and all(isinstance(key, str) for key in form.keys)
                and len(set(form.keys)) == len(form.keys) == len(types) <= _MAX_KEYS
                and set(types) <= set(_TYPES)
                and 0 <= first_env <= first_env + num_envs <= self._values.shape[1]
            )
        except (ValueError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise SegmentError(
                f"the infos of worker {worker} are damaged: expected keys, types and environments of floats, found "
                f"{excerpt(text)}; a process has overwritten the shared memory"
            )
        return form

    def forget(self, worker: int) -> None:
        """Forget the form of a worker whose process was replaced: the new process counts its forms from 1."""
        self._forms.pop(worker, None)

    def packed(self, forms: Mapping[int, FloatForm]) -> list[PackedInfos]:
        """The infos that workers have written in these forms. They show the shared memory: ``merge`` copies them."""
        current = tuple(forms[worker] for worker in sorted(forms))
        if current != self._last_forms:
            packed = [(self._columns(form), form.types) for form in _joined(current)]
            self._last_forms, self._last_packed = current, packed
        return [_with_float32(columns, types) if "f" in types else columns for columns, types in self._last_packed]

    def _columns(self, form: FloatForm) -> PackedInfos:
        envs = range(form.first_env, form.first_env + form.num_envs)
        rows = self._values[:, envs.start : envs.stop]
        return {
            key: InfoColumn(envs, "numbers", rows[index], kind == "p")
            for index, (key, kind) in enumerate(zip(form.keys, form.types, strict=True))
        }


def _joined(forms: tuple[FloatForm, ...]) -> list[FloatForm]:
    """The same forms, with one for all workers that have the same keys and types and consecutive environments."""
    joined: list[FloatForm] = []
    for form in forms:
        last = joined[-1] if joined else None
        if last and last[:2] == form[:2] and last.first_env + last.num_envs == form.first_env:
            joined[-1] = last._replace(num_envs=last.num_envs + form.num_envs)
        else:
            joined.append(form)
    return joined


def _with_float32(columns: PackedInfos, types: str) -> PackedInfos:
    """The same columns, with values of float32 where that is their type."""
    return {
        key: InfoColumn(column.envs, "numbers", column.values.astype("f4")) if kind == "f" else column
        for (key, column), kind in zip(columns.items(), types, strict=True)
    }
