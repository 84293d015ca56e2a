"""Segment: create, attach, pickle and close, and that no order of these can crash."""

from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing as mp
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane.core import (
    Layout,
    Lease,
    Peer,
    Segment,
    SegmentClosed,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    fresh_name,
)
from tests.support.processes import (
    FIELDS,
    METHODS,
    ask,
    child,
    inheritable_descriptors_of,
    output_of,
    receive,
    receive_and_total,
    send_outcome,
    sleep_forever,
    total,
    total_after,
    total_in_grandchild,
    write_row,
    write_segment,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
KINDS = ["anonymous", "named", "file"]
Make = Callable[..., Segment]


@pytest.fixture
def make(shm_dir: Path) -> Iterator[Make]:
    """Makes a segment of a kind and closes it at the end."""
    with ExitStack() as stack:

        def make(kind: str = "anonymous", fields: Any = FIELDS) -> Segment:
            place: dict[str, Any] = {"anonymous": {}, "named": {"name": "test"}, "file": {"file": shm_dir / "file"}}[
                kind
            ]
            return stack.enter_context(Segment.create(fields, **place))

        yield make


def attach_to(segment: Segment, **options: Any) -> Segment:
    """A second mapping of the same memory, as another process would get it."""
    if segment.kind == "anonymous":
        again: Segment = pickle.loads(pickle.dumps(segment))
        return again
    return Segment.attach(segment.name, file=segment.path if segment.kind == "file" else None, **options)


# -------------------------------------------------------------------------------------------------------- being created


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_segment_is_zeroed(make: Make, kind: str) -> None:
    assert not any(view.tobytes().strip(b"\0") for view in make(kind).views().values())


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_user_may_open_it(make: Make, kind: str) -> None:
    assert stat.S_IMODE(os.fstat(make(kind)._fd).st_mode) == 0o600


@pytest.mark.parametrize("kind", KINDS)
def test_all_memory_is_reserved_at_creation(make: Make, kind: str) -> None:
    segment = make(kind, {"x": ("u1", 4 * 2**20)})
    assert os.fstat(segment._fd).st_blocks * 512 >= segment.nbytes > 4 * 2**20


@pytest.mark.parametrize("size", [0, 2**13, 2**30])
def test_an_anonymous_segment_can_be_neither_cut_nor_stretched(make: Make, size: int) -> None:
    segment = make()
    with pytest.raises(PermissionError):
        os.ftruncate(segment._fd, size)


def test_the_seal_of_an_anonymous_segment_cannot_be_lifted_or_changed(make: Make) -> None:
    segment = make()
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_descriptor_is_not_inherited_by_programs_that_are_started(make: Make, kind: str) -> None:
    assert not os.get_inheritable(make(kind)._fd)


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_knows_its_kind_owner_layout_and_size(make: Make, kind: str) -> None:
    segment = make(kind)
    assert (segment.kind, segment.owner, segment.layout) == (kind, Peer.current(), Layout(FIELDS))
    assert segment.nbytes == mmap.PAGESIZE + segment.layout.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_without_fields_can_be_made(make: Make, kind: str) -> None:
    with attach_to(make(kind, {})) as again:
        assert again.views() == {}


def test_a_layout_and_a_dict_of_fields_make_the_same_segment(make: Make) -> None:
    assert make(fields=Layout(FIELDS)).layout == make(fields=FIELDS).layout


def test_a_name_and_a_file_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="expected a name or a file, not both; found name='x' and file="):
        Segment.create(FIELDS, name="x", file=tmp_path / "x")


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(SegmentExists, match="precious already exists and is not a segment; choose another name"):
        Segment.create(FIELDS, file=path)
    assert path.read_text() == "data"


def test_a_directory_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SegmentMissing, match=r"directory .*/nowhere does not exist"):
        Segment.create(FIELDS, file=tmp_path / "nowhere" / "file")


def test_a_file_name_that_the_system_refuses_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="File name too long"):
        Segment.create(FIELDS, file=tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_permission_is_an_error_that_says_why(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SegmentError, match=f"cannot create a file in {tmp_path}: Permission denied"):
        Segment.create(FIELDS, file=tmp_path / "x")


# ------------------------------------------------------------------------------------------------------- being attached


@pytest.mark.parametrize("kind", KINDS)
def test_two_mappings_show_the_same_memory(make: Make, kind: str) -> None:
    segment = make(kind)
    with attach_to(segment) as again:
        segment["obs"][1, 2] = 5
        again["count"][3] = 6
        assert (again["obs"][1, 2], segment["count"][3]) == (5, 6)


def test_a_file_outlives_all_processes(shm_dir: Path) -> None:
    path = shm_dir / "file"
    with Segment.create(FIELDS, file=path) as segment:
        segment["obs"][:] = 3
    with Segment.attach(file=path) as segment:
        assert total(segment) == 36
        assert segment.owner_closed


def test_attach_needs_a_name_or_a_file() -> None:
    with pytest.raises(SegmentError, match="expected either a name or a file; found name=None and file=None"):
        Segment.attach()


def test_attach_takes_no_name_and_file_at_once() -> None:
    with pytest.raises(SegmentError, match="expected either a name or a file; found name='x' and file='y'"):
        Segment.attach("x", file="y")


@pytest.mark.usefixtures("shm_dir")
def test_a_name_that_does_not_exist_is_missing() -> None:
    with pytest.raises(SegmentMissing, match=r"there is no segment at .*memlane-nothing"):
        Segment.attach("nothing")


@pytest.mark.usefixtures("shm_dir")
def test_a_misspelt_name_is_answered_with_the_nearest_name() -> None:
    with Segment.create(FIELDS, name="rollouts"), pytest.raises(SegmentMissing, match=r"; did you mean 'rollouts'\?$"):
        Segment.attach("rollout")


def test_a_misspelt_field_is_answered_with_the_nearest_field(make: Make) -> None:
    with pytest.raises(KeyError, match=r"the fields are \['obs', 'count', 'bell'\]; did you mean 'obs'\?"):
        make()["obss"]


def test_the_expected_layout_attaches(make: Make) -> None:
    with attach_to(make("named"), layout=FIELDS) as again:
        assert again.layout == Layout(FIELDS)


def test_another_layout_than_expected_is_an_error_that_names_the_field(make: Make) -> None:
    segment = make("named")
    with pytest.raises(SegmentError, match=r"expected field count: int64\[9\], found count: int64\[8\]"):
        attach_to(segment, layout={**FIELDS, "count": ("int64", 9)})


def test_a_missing_field_is_an_error_that_names_it(make: Make) -> None:
    segment = make("named")
    with pytest.raises(SegmentError, match=r"expected a field 'reward', found only .*'obs', 'count', 'bell'"):
        attach_to(segment, layout={**FIELDS, "reward": ("f4", 1)})


def test_a_failed_attach_leaves_no_descriptor_open(make: Make) -> None:
    segment = make("named")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SegmentError):
        attach_to(segment, layout={"x": ("f4", 1)})
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("writeable", [True, False])
def test_a_directory_is_no_segment(tmp_path: Path, writeable: bool) -> None:
    with pytest.raises(SegmentError, match=r"irectory|expected a regular file, found mode d"):
        Segment.attach(file=tmp_path, writeable=writeable)


@pytest.mark.parametrize("writeable", [True, False])
def test_a_pipe_is_no_segment_and_does_not_block(tmp_path: Path, writeable: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SegmentError, match="expected a regular file, found mode prw"):
        Segment.attach(file=tmp_path / "pipe", writeable=writeable)


def test_a_device_is_no_segment() -> None:
    with pytest.raises(SegmentError, match="expected a regular file, found mode crw"):
        Segment.attach(file="/dev/zero")


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    write_segment(tmp_path / "target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(SegmentError, match="expected a file, found a symbolic link"):
        Segment.attach(file=tmp_path / "link")


# --------------------------------------------------------------------------------------------------------- reading only


@pytest.fixture
def readonly(make: Make) -> Iterator[Segment]:
    with attach_to(make("named"), writeable=False) as segment:
        yield segment


def test_arrays_of_a_read_only_segment_cannot_be_written(readonly: Segment) -> None:
    assert not any(view.flags.writeable for view in readonly.views().values())
    with pytest.raises(ValueError, match="read-only"):
        readonly["obs"][0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        readonly["obs"].flags.writeable = True


@pytest.mark.parametrize("method", ["store", "add", "compare_and_swap", "wait"])
def test_a_signal_of_a_read_only_segment_cannot_be_changed(readonly: Segment, method: str) -> None:
    bell = readonly.signal("bell")
    arguments = {"store": (1,), "add": (1,), "compare_and_swap": (0, 1), "wait": (1,)}[method]
    with pytest.raises(SegmentError, match="read-only; attach it with writeable=True"):
        getattr(bell, method)(*arguments)
    assert bell.value == 0


@pytest.mark.parametrize("method", ["store", "add", "add_each", "compare_and_swap"])
def test_words_of_a_read_only_segment_cannot_be_changed(readonly: Segment, method: str) -> None:
    words = readonly.words("count")
    some = np.array([0])
    arguments = {"store": (0, 1), "add": (0, 1), "add_each": (some, 1), "compare_and_swap": (0, 0, 1)}[method]
    with pytest.raises(SegmentError, match="read-only; attach it with writeable=True"):
        getattr(words, method)(*arguments)
    assert words.load(0) == 0


@pytest.mark.parametrize("debug", [True, False])
def test_a_writeable_lease_of_a_read_only_segment_is_refused(readonly: Segment, debug: bool) -> None:
    with pytest.raises(SegmentError, match="attached read-only"):
        Lease(readonly, writeable=True, debug=debug)


def test_a_read_only_segment_sees_what_others_write(make: Make) -> None:
    segment = make("named")
    with attach_to(segment, writeable=False) as readonly:
        segment["obs"][:] = 2
        segment.signal("bell").store(3)
        assert (total(readonly), readonly.signal("bell").wait(3)) == (24, 3)


def test_a_read_only_segment_stays_read_only_on_its_way_to_another_process(readonly: Segment) -> None:
    with pytest.raises(ValueError, match="read-only"):
        ask(write_row, readonly, 0, 1.0, method="forkserver")


# --------------------------------------------------------------------------------------------------------------- fields


def test_asking_for_a_field_twice_gives_the_same_array(make: Make) -> None:
    segment = make()
    assert segment["obs"] is segment["obs"]


def test_an_unknown_field_is_a_key_error_that_lists_the_fields(make: Make) -> None:
    with pytest.raises(KeyError, match=r"no field 'action'; the fields are \['obs', 'count', 'bell'\]"):
        make()["action"]


@pytest.mark.parametrize("index", [-1, 2, 10**30])
def test_a_signal_that_does_not_exist_is_an_index_error(make: Make, index: int) -> None:
    with pytest.raises(IndexError, match=f"signal {index} of field 'bell' does not exist; it has 2 signals"):
        make().signal("bell", index)


def test_a_signal_needs_a_field_of_signals(make: Make) -> None:
    with pytest.raises(SegmentError, match=r"field 'count' of .* must have dtype SIGNAL, found int64"):
        make().signal("count")


@pytest.mark.parametrize("dtype", ["uint64", ">i8", "int32", "float64"])
def test_words_need_a_field_of_native_int64(make: Make, dtype: str) -> None:
    with pytest.raises(SegmentError, match=r"field 'x' of .* must have dtype int64"):
        make(fields={"x": (dtype, 3)}).words("x")


def test_words_are_added_to_one_by_one_and_only_where_they_are(make: Make) -> None:
    segment = make(fields={"x": ("int64", 4)})
    words = segment.words("x")
    words.add_each(np.array([1, 3, 1]), 5)
    assert segment["x"].tolist() == [0, 10, 0, 5]
    with pytest.raises(IndexError, match="no word 4"):
        words.add_each(np.array([0, 4]), 1)
    assert segment["x"].tolist() == [0, 10, 0, 5]


def test_words_of_a_column_are_summed(make: Make) -> None:
    segment = make(fields={"x": ("int64", (3, 4))})
    segment["x"][...] = np.arange(12).reshape(3, 4)
    words = segment.words("x")
    assert [words.sum(column, 4) for column in range(4)] == [12, 15, 18, 21]
    assert words.sum(12, 1) == 0
    with pytest.raises(IndexError, match="no word -1"):
        words.sum(-1, 4)
    with pytest.raises(ValueError, match="stride must be 1 or more"):
        words.sum(0, 0)


def test_words_of_a_table_count_flat(make: Make) -> None:
    segment = make(fields={"x": ("int64", (2, 3))})
    words = segment.words("x")
    words.store(4, 9)
    assert (len(words), segment["x"].tolist()) == (6, [[0, 0, 0], [0, 9, 0]])


def test_signals_of_an_array_do_not_touch_each_other(make: Make) -> None:
    segment = make()
    segment.signal("bell", 1).store(5)
    assert segment["bell"]["value"].tolist() == [0, 5]


@pytest.mark.parametrize(("offset", "nbytes"), [(-64, 64), (0, 10**6), (10**6, 0), (64, 2**64)])
def test_a_window_outside_the_fields_is_an_error_that_says_where(make: Make, offset: int, nbytes: int) -> None:
    segment = make()
    with pytest.raises(
        SegmentError, match=f"bytes {offset} to {offset + nbytes} are outside the {segment.layout.nbytes}"
    ):
        segment.window(offset, nbytes, writeable=True)


# -------------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_segment_travels_as_an_argument_of_a_process(make: Make, kind: str, method: str) -> None:
    segment = make(kind)
    with child(write_row, segment, 2, 4.0, method=method):
        pass
    assert segment["obs"].sum(axis=1).tolist() == [0, 0, 12, 0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_has_the_memory_though_its_parent_closed_right_after_start(make: Make, kind: str, method: str) -> None:
    segment, gun = make(kind), make("anonymous")
    segment["obs"][:] = 1
    answers, pipe = mp.Pipe(duplex=False)
    with child(send_outcome, pipe, total_after, segment, gun, method=method):
        segment.close()
        gun.signal("bell").store(1)
        assert receive(answers) == 12


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("route", ["Pipe", "Queue", "SimpleQueue"])
def test_a_segment_travels_through(make: Make, route: str, method: str) -> None:
    segment = make()
    segment["obs"][:] = 1
    context: Any = mp.get_context(method)
    answers, pipe = mp.Pipe(duplex=False)
    source, sink = context.Pipe(duplex=False) if route == "Pipe" else [getattr(context, route)()] * 2
    with child(send_outcome, pipe, receive_and_total, source, method=method):
        (sink.send if route == "Pipe" else sink.put)(segment)
        assert receive(answers) == 12
    for end in {source, sink}:
        end.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_child_can_pass_a_segment_on_to_its_own_child(make: Make, method: str) -> None:
    segment = make()
    segment["obs"][:] = 2
    assert ask(total_in_grandchild, segment, method, method=method) == 24


@pytest.mark.parametrize("method", METHODS)
def test_a_child_does_not_hand_its_segments_to_the_programs_that_it_starts(make: Make, method: str) -> None:
    assert ask(inheritable_descriptors_of, make(), method=method) == 0


def test_one_message_can_be_read_by_many(make: Make) -> None:
    segment = make()
    message = pickle.dumps(segment)
    segment["obs"][:] = 1
    for _ in range(2):
        with pickle.loads(message) as again:
            assert total(again) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_keeps_its_identity_on_its_way(make: Make, kind: str) -> None:
    segment = make(kind)
    with pickle.loads(pickle.dumps(segment)) as again:
        assert (again.kind, again.name, again.path) == (segment.kind, segment.name, segment.path)
        assert (again.layout, again.owner, again.writeable) == (segment.layout, segment.owner, True)


def test_the_copy_that_a_fork_makes_may_be_closed_without_harm_to_the_original(make: Make) -> None:
    segment = make("named")
    with child(segment.close):
        pass
    assert segment.path is not None
    assert segment.path.exists()
    assert not segment.owner_closed


# ------------------------------------------------------------------------------------------------ being lost on the way


def test_a_message_from_a_sender_that_closed_is_an_error_that_says_so(make: Make) -> None:
    segment = make()
    message = pickle.dumps(segment)
    segment.close()
    with pytest.raises(SegmentMissing, match=f"that pid {os.getpid()} sent: the sender has closed it; keep it open"):
        pickle.loads(message)


def test_a_message_from_a_sender_that_opened_something_else_since_is_an_error_that_says_so(make: Make) -> None:
    segment = make()
    message, number = pickle.dumps(segment), segment._fd
    segment.close()
    other = os.open("/dev/null", os.O_RDWR)
    os.dup2(other, number)
    try:
        with pytest.raises(SegmentMissing, match="the sender has closed it and reused its descriptor"):
            pickle.loads(message)
    finally:
        os.close(number)
        if other != number:
            os.close(other)


def test_a_message_from_a_dead_sender_is_an_error_that_says_so() -> None:
    message = ask(pickled_by_child)
    with pytest.raises(SegmentMissing, match=r"pid \d+ sent: sender \(pid \d+\) died; keep it open in the sender"):
        pickle.loads(message)


def test_a_message_from_a_killed_child_says_what_killed_it() -> None:
    answers, pipe = mp.Pipe(duplex=False)
    with child(send_and_stay, pipe) as process:
        message = receive(answers)
        process.kill()
        Peer.of(process.pid or 0).wait(10)
        with pytest.raises(SegmentMissing, match="was killed by SIGKILL"):
            pickle.loads(message)


def pickled_by_child() -> bytes:
    segment = Segment.create(FIELDS)
    return pickle.dumps(segment)


def send_and_stay(pipe: Any) -> None:
    segment = Segment.create(FIELDS)
    send_outcome(pipe, pickle.dumps, segment)
    sleep_forever()


# --------------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("kind", KINDS)
def test_closing_again_is_harmless(make: Make, kind: str) -> None:
    segment = make(kind)
    segment.close()
    segment.close()
    assert segment.closed


@pytest.mark.parametrize("kind", KINDS)
def test_unlinking_again_is_harmless_and_so_is_closing_after_it(make: Make, kind: str) -> None:
    segment = make(kind)
    segment.unlink()
    segment.unlink()
    segment.close()
    assert segment.path is None or not segment.path.exists()


def test_a_file_can_be_unlinked_after_the_segment_was_closed(make: Make) -> None:
    segment = make("file")
    segment.close()
    assert segment.path is not None
    assert segment.path.exists()
    segment.unlink()
    assert not segment.path.exists()


@pytest.mark.parametrize("kind", ["named", "file"])
def test_a_process_that_maps_a_segment_keeps_it_when_its_name_goes(make: Make, kind: str) -> None:
    segment = make(kind)
    with attach_to(segment) as again:
        again.unlink()
        segment["obs"][:] = 1
        assert total(again) == 12
    with pytest.raises(SegmentMissing):
        attach_to(segment)


@pytest.mark.parametrize("kind", ["named", "file"])
def test_unlink_spares_a_successor_under_the_same_name(make: Make, kind: str) -> None:
    first = make(kind)
    first.unlink()
    second = make(kind)
    first.unlink()
    first.close()
    assert second.path is not None
    assert second.path.exists()


def test_the_end_of_a_with_block_closes(make: Make) -> None:
    with make() as segment:
        assert not segment.closed
    assert segment.closed


def test_a_closed_segment_cannot_be_entered(make: Make) -> None:
    segment = make()
    segment.close()
    with pytest.raises(SegmentClosed), segment:
        pass


def test_the_owner_that_closes_takes_its_name_away(make: Make) -> None:
    segment = make("named")
    segment.close()
    assert segment.path is not None
    assert not segment.path.exists()


def test_an_attacher_that_closes_leaves_the_name(make: Make) -> None:
    segment = make("named")
    attach_to(segment).close()
    assert segment.path is not None
    assert segment.path.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_survives_its_creator_while_another_process_maps_it(make: Make, kind: str) -> None:
    segment = make(kind)
    segment["obs"][:] = 1
    with attach_to(segment) as again:
        segment.close()
        again["count"][0] = 8
        assert (total(again), again["count"][0], again.owner_closed) == (12, 8, True)


def test_the_last_attacher_can_pass_the_memory_of_a_closed_creator_on(make: Make) -> None:
    segment = make()
    segment["obs"][:] = 1
    with attach_to(segment) as again:
        segment.close()
        assert ask(total, again, method="forkserver") == 12


def test_a_segment_without_references_closes_itself(shm_dir: Path) -> None:
    segment = Segment.create(FIELDS, name="dropped")
    descriptor = segment._fd
    del segment
    gc.collect()
    assert not (shm_dir / "memlane-dropped").exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_normal_end_of_a_program_takes_its_names_away(shm_dir: Path) -> None:
    code = "from memlane.core import Segment; s = Segment.create({'x': ('f4', 3)}, name='mine'); print(s.path.exists())"
    assert output_of(code) == "True\n"
    assert list(shm_dir.iterdir()) == []


USES: dict[str, Callable[[Segment], object]] = {
    "a view": lambda segment: segment["obs"],
    "all views": lambda segment: segment.views(),
    "a signal": lambda segment: segment.signal("bell"),
    "words": lambda segment: segment.words("count"),
    "a lease": lambda segment: Lease(segment, debug=False),
    "a debug lease": lambda segment: Lease(segment, debug=True),
    "a window": lambda segment: segment.window(0, 64, writeable=True),
    "an alias": lambda segment: segment.alias(0, 64, writeable=True),
    "pickling": pickle.dumps,
    "entering": lambda segment: segment.__enter__(),
    "owner_closed": lambda segment: segment.owner_closed,
}


@pytest.mark.parametrize("use", USES)
def test_what_is_asked_of_a_closed_segment_is_an_error(make: Make, use: str) -> None:
    segment = make()
    segment.views()  # what was handed out before is not handed out again
    segment.close()
    with pytest.raises(SegmentClosed, match="anonymous segment was used after close"):
        USES[use](segment)


HANDLE_USES: dict[str, tuple[Callable[[Segment], Any], Callable[[Any], object]]] = {
    "Signal.value": (lambda segment: segment.signal("bell"), lambda bell: bell.value),
    "Signal.store": (lambda segment: segment.signal("bell"), lambda bell: bell.store(1)),
    "Signal.add": (lambda segment: segment.signal("bell"), lambda bell: bell.add(1)),
    "Signal.compare_and_swap": (lambda segment: segment.signal("bell"), lambda bell: bell.compare_and_swap(0, 1)),
    "Signal.wait, met": (lambda segment: segment.signal("bell"), lambda bell: bell.wait(0)),
    "Signal.wait": (lambda segment: segment.signal("bell"), lambda bell: bell.wait(1)),
    "Words.load": (lambda segment: segment.words("count"), lambda words: words.load(0)),
    "Words.store": (lambda segment: segment.words("count"), lambda words: words.store(0, 1)),
    "Words.add": (lambda segment: segment.words("count"), lambda words: words.add(0, 1)),
    "Words.compare_and_swap": (lambda segment: segment.words("count"), lambda words: words.compare_and_swap(0, 0, 1)),
    "Words.unchanged": (lambda segment: segment.words("count"), lambda words: words.unchanged(0, 0)),
    "Words.changed": (lambda segment: segment.words("count"), lambda words: words.changed(np.arange(3), np.arange(3))),
    "Words.load_into": (
        lambda segment: segment.words("count"),
        lambda words: words.load_into(np.arange(3), np.arange(3)),
    ),
    "Lease": (lambda segment: Lease(segment, debug=False), lambda lease: lease["obs"]),
    "debug Lease": (lambda segment: Lease(segment, debug=True), lambda lease: lease["obs"]),
}


@pytest.mark.parametrize("use", HANDLE_USES)
def test_a_handle_made_before_close_is_an_error_after_it(make: Make, use: str) -> None:
    segment = make()
    take, call = HANDLE_USES[use]
    handle = take(segment)
    segment.close()
    with pytest.raises(SegmentClosed, match="used after its segment was closed"):
        call(handle)


def test_arrays_taken_before_close_stay_readable_and_writeable(make: Make) -> None:
    segment = make()
    view = segment["obs"]
    view[:] = 1
    with attach_to(segment) as again:
        segment.close()
        view[0] = 2
        assert total(again) == 15


def test_no_order_of_close_and_use_crashes_a_process() -> None:
    """Random orders of everything that can be done to a few segments, their handles and their arrays."""
    code = """
        import gc, os, pickle, random, sys
        import numpy as np
        from memlane.core import Lease, Segment, SegmentError
        from tests.support.processes import FIELDS
        random.seed(int(sys.argv[1]))
        held, refused = [Segment.create(FIELDS) for _ in range(3)], 0

        def use(thing):
            match thing:
                case Segment():
                    choices = [
                        lambda: thing["obs"], lambda: thing.signal("bell"), lambda: thing.words("count"), thing.close,
                        lambda: Lease(thing, debug=random.random() < 0.5), lambda: pickle.loads(pickle.dumps(thing)),
                    ]
                    return random.choice(choices)()
                case Lease():
                    if random.random() < 0.3:
                        thing.release()
                    else:
                        return thing["obs"]
                case np.ndarray():
                    thing += 1
                    return memoryview(thing)
                case memoryview():
                    return float(thing[0, 0])
                case float():
                    return Segment.create(FIELDS)
                case _:
                    thing.add(1) if hasattr(thing, "wait") else thing.add(0, 1)

        import warnings
        warnings.simplefilter("ignore")
        for _ in range(3000):
            try:
                held.append(use(random.choice(held)))
            except (SegmentError, ReferenceError):
                refused += 1
            held = [thing for thing in held if thing is not None]
            while len(held) > 40:
                held.pop(random.randrange(len(held)))
            if not held:
                held.append(Segment.create(FIELDS))
        print("refused", refused > 0)
    """
    assert output_of(code, int.from_bytes(os.urandom(4))) == "refused True\n"


def test_an_array_outlives_its_closed_segment_up_to_the_end_of_the_program() -> None:
    code = """
        from memlane.core import Segment
        from tests.support.processes import FIELDS
        segment = Segment.create(FIELDS)
        view, bell = segment["obs"], segment.signal("bell")
        view[:] = 1
        segment.close()
        del segment
        print(view.sum())
    """
    assert output_of(code) == "12.0\n"


# ---------------------------------------------------------------------------------------------------------------- facts


def test_its_text_says_what_it_is(make: Make) -> None:
    segment = make("named")
    assert repr(segment).startswith("<named segment /")
    assert "obs: float32[4, 3]" in repr(segment)
    segment.close()
    assert repr(segment).endswith("closed>")


def test_only_a_named_segment_has_a_name(make: Make) -> None:
    assert [make(kind).name for kind in KINDS] == [None, "test", None]


@pytest.mark.usefixtures("shm_dir")
def test_a_fresh_name_is_one_that_a_segment_can_have() -> None:
    with (
        Segment.create(FIELDS, name=fresh_name("ring")) as first,
        Segment.create(FIELDS, name=fresh_name("ring")) as second,
    ):
        assert first.name != second.name
