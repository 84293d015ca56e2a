"""Names: which are valid, and that segments of dead owners are removed while those of running ones stay."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memlane.core import (
    Peer,
    Segment,
    SegmentError,
    SegmentExists,
    SegmentMissing,
    fresh_name,
    leftovers,
    names,
    reclaim,
)
from memlane.core.header import Header
from memlane.core.lowlevel import PeerState
from tests.support.processes import (
    FIELDS,
    PATIENCE,
    ask,
    attach_and_exit,
    child,
    dead_peer,
    foreign_peer,
    leave_behind,
    output_of,
    receive,
    send_outcome,
    sleep_forever,
    total,
    wait_for,
    write_segment,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def hold(name: str, pipe: Any) -> None:
    """Create a segment and keep it until killed."""
    segment = Segment.create(FIELDS, name=name)
    send_outcome(pipe, lambda: segment.name)
    sleep_forever()


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "a/b", "/", "a\0b", "x" * 248, "ü" * 124, "\ud800", 5, b"bytes", None])
def test_a_name_that_no_file_can_have_is_an_error_that_says_what_one_can(name: Any) -> None:
    with pytest.raises(SegmentError, match="a segment's name must be a string of 1 to 247 bytes"):
        names.path_of(name)


@pytest.mark.parametrize("name", ["x", "x" * 247, "ü" * 123, "..", " ", "-", "名前", "line\nbreak"])
def test_any_other_name_will_do(shm_dir: Path, name: str) -> None:
    with Segment.create(FIELDS, name=name) as segment, Segment.attach(name) as again:
        assert (segment.name, again.name) == (name, name)
        assert files(shm_dir) == [f"memlane-{name}"]


def test_names_live_in_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMLANE_SHM_DIR", raising=False)
    with Segment.create(FIELDS, name=fresh_name("test")) as segment:
        assert segment.path == Path(f"/dev/shm/memlane-{segment.name}")


def test_a_fresh_name_carries_pid_and_start_time() -> None:
    me = Peer.current()
    assert fresh_name("ring").startswith(f"ring-{me.pid}-{me.start}-")


def test_fresh_names_differ() -> None:
    assert len({fresh_name() for _ in range(1000)}) == 1000


@pytest.mark.usefixtures("shm_dir")
def test_a_name_of_a_living_owner_is_taken_and_the_error_says_by_whom() -> None:
    with (
        Segment.create(FIELDS, name="mine"),
        pytest.raises(
            SegmentExists, match=f"memlane-mine already exists and belongs to pid {os.getpid()}, which is alive"
        ),
    ):
        Segment.create(FIELDS, name="mine")


def test_a_refused_name_leaves_the_living_segment_as_it_was(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="mine") as segment:
        segment["obs"][:] = 1
        with pytest.raises(SegmentExists):
            Segment.create({"other": ("f4", 9)}, name="mine")
        with Segment.attach("mine") as again:
            assert total(again) == 12
        assert files(shm_dir) == ["memlane-mine"]


def test_a_name_of_another_pid_namespace_is_taken_and_its_owner_does_not_count_as_dead(shm_dir: Path) -> None:
    path = write_segment(shm_dir / "memlane-theirs", foreign_peer(dead_peer()))
    with pytest.raises(SegmentExists, match=r"belongs to pid \d+ of another pid or time namespace"):
        Segment.create(FIELDS, name="theirs")
    assert path.exists()


@pytest.mark.usefixtures("shm_dir")
def test_a_name_of_a_dead_owner_is_free() -> None:
    leave_behind("reused")
    with Segment.create({"other": ("f4", 2)}, name="reused") as segment, Segment.attach("reused") as again:
        assert again.layout == segment.layout


def test_a_name_is_free_again_after_close(shm_dir: Path) -> None:
    for _ in range(3):
        Segment.create(FIELDS, name="again").close()
    assert files(shm_dir) == []


# ------------------------------------------------------------------------------------------------ the names of the dead


def test_the_segment_of_a_killed_owner_is_listed(shm_dir: Path) -> None:
    owner = leave_behind("corpse")
    (leftover,) = leftovers()
    assert (leftover.path, leftover.owner) == (shm_dir / "memlane-corpse", owner)
    assert leftover.nbytes == leftover.path.stat().st_size > 4096


def test_listing_removes_nothing(shm_dir: Path) -> None:
    leave_behind("corpse")
    list(leftovers())
    assert files(shm_dir) == ["memlane-corpse"]


def test_reclaim_removes_the_segment_of_a_killed_owner_and_reports_it(shm_dir: Path) -> None:
    owner = leave_behind("corpse")
    assert [leftover.owner for leftover in reclaim()] == [owner]
    assert files(shm_dir) == []


@pytest.mark.usefixtures("shm_dir")
def test_reclaim_finds_nothing_the_second_time() -> None:
    leave_behind("corpse")
    reclaim()
    assert reclaim() == []


def test_the_next_named_segment_removes_the_segment_of_a_killed_owner(shm_dir: Path) -> None:
    leave_behind("corpse")
    with Segment.create(FIELDS, name="next"):
        assert files(shm_dir) == ["memlane-next"]


def test_the_first_segment_of_a_fresh_process_removes_the_segment_of_a_killed_owner(shm_dir: Path) -> None:
    leave_behind("corpse")
    output_of("from memlane.core import Segment; Segment.create({'x': ('f4', 1)})")
    assert files(shm_dir) == []


@pytest.mark.usefixtures("shm_dir")
def test_a_process_that_maps_a_reclaimed_segment_keeps_its_memory() -> None:
    leave_behind("corpse")
    with Segment.attach("corpse") as segment:
        reclaim()
        assert total(segment) == 84


@pytest.mark.usefixtures("shm_dir")
def test_a_zombie_counts_as_dead() -> None:
    answers, pipe = mp.Pipe(duplex=False)
    with child(hold, "zombie", pipe) as process:
        receive(answers)
        os.kill(process.pid or 0, signal.SIGKILL)
        owner = Peer.of(process.pid or 0)
        assert wait_for(lambda: owner.state is PeerState.ZOMBIE)
        assert [leftover.owner for leftover in reclaim()] == [owner]


def test_an_owner_whose_pid_was_given_to_another_process_counts_as_dead(shm_dir: Path) -> None:
    me = Peer.current()
    write_segment(shm_dir / "memlane-recycled", Peer(me.pid, me.start + 1))
    assert [leftover.path.name for leftover in reclaim()] == ["memlane-recycled"]


def test_an_owner_with_the_right_start_time_is_alive(shm_dir: Path) -> None:
    write_segment(shm_dir / "memlane-mine", Peer.current())
    assert reclaim() == []
    assert files(shm_dir) == ["memlane-mine"]


def test_an_owner_in_another_pid_namespace_is_never_judged(shm_dir: Path) -> None:
    write_segment(shm_dir / "memlane-theirs", foreign_peer(dead_peer()))
    assert list(leftovers()) == []
    assert reclaim() == []
    assert files(shm_dir) == ["memlane-theirs"]


def test_the_segment_of_a_living_owner_in_another_process_stays(shm_dir: Path) -> None:
    answers, pipe = mp.Pipe(duplex=False)
    with child(hold, "living", pipe) as process:
        receive(answers)
        assert reclaim() == []
        assert files(shm_dir) == ["memlane-living"]
        process.kill()
    assert [leftover.path.name for leftover in reclaim()] == ["memlane-living"]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_that_attaches_and_exits_leaves_the_segment(shm_dir: Path, method: str) -> None:
    with Segment.create(FIELDS, name="shared"):
        assert ask(attach_in, str(shm_dir), "shared", method=method) == 0
        assert reclaim() == []
        assert files(shm_dir) == ["memlane-shared"]


def attach_in(folder: str, name: str) -> float:
    os.environ["MEMLANE_SHM_DIR"] = folder  # the fork server was started before the test chose its directory
    return attach_and_exit(name)


def test_a_program_that_attaches_and_exits_leaves_the_segment(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="shared"):
        output_of("from memlane.core import Segment; s = Segment.attach('shared'); s['obs'][:] = 1")
        assert files(shm_dir) == ["memlane-shared"]
        with Segment.attach("shared") as again:
            assert total(again) == 12


def test_a_program_that_attaches_and_is_killed_leaves_the_segment(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="shared"):
        with child(attach_and_be_killed, "shared"):
            pass
        assert reclaim() == []
        assert files(shm_dir) == ["memlane-shared"]


def attach_and_be_killed(name: str) -> None:
    segment = Segment.attach(name)
    os.kill(os.getpid(), signal.SIGKILL)
    segment.close()


def test_an_exit_of_an_attacher_prints_nothing_about_leaks(shm_dir: Path) -> None:
    """Python's own shared memory warns of leaks here, and its tracker would remove the segment."""
    with Segment.create(FIELDS, name="shared"):
        code = """
            import multiprocessing as mp
            from tests.support.processes import attach_and_exit
            if __name__ == "__main__":
                process = mp.get_context("spawn").Process(target=attach_and_exit, args=("shared",))
                process.start()
                process.join()
                print(process.exitcode)
        """
        assert output_of(code) == "0\n"
        assert files(shm_dir) == ["memlane-shared"]


@pytest.mark.parametrize(
    "content",
    [b"", b"not a segment", bytes(100_000), b"MEMLANE\0\2" + bytes(8000)],
    ids=["empty", "text", "zeros", "newer"],
)
def test_a_foreign_file_with_our_prefix_is_untouched(shm_dir: Path, content: bytes) -> None:
    (shm_dir / "memlane-foreign").write_bytes(content)
    with Segment.create(FIELDS, name="mine"):
        reclaim()
    assert (shm_dir / "memlane-foreign").read_bytes() == content


def test_a_dead_owners_segment_without_our_prefix_is_untouched(shm_dir: Path) -> None:
    write_segment(shm_dir / "replay.bin", dead_peer())
    assert reclaim() == []
    assert files(shm_dir) == ["replay.bin"]


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_no_file_but_has_our_prefix_is_untouched(shm_dir: Path, tmp_path_factory: Any, kind: str) -> None:
    path = shm_dir / "memlane-odd"
    target = write_segment(tmp_path_factory.mktemp("elsewhere") / "target", dead_peer())
    make: dict[str, Callable[[], object]] = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(target),
    }
    make[kind]()
    assert reclaim() == []
    assert files(shm_dir) == ["memlane-odd"]
    assert target.exists()


def test_reclaim_of_a_directory_that_is_missing_finds_nothing(tmp_path: Path) -> None:
    assert reclaim(tmp_path / "nowhere") == []


def test_reclaim_looks_into_the_directory_that_it_is_given(tmp_path: Path) -> None:
    write_segment(tmp_path / "memlane-corpse", dead_peer())
    assert len(reclaim(tmp_path)) == 1


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.usefixtures("shm_dir")
def test_a_reclaimer_that_comes_late_spares_the_name_of_the_living() -> None:
    """It saw the dead segment; since then another process has removed it and taken the name."""
    leave_behind("contested")
    (seen,) = leftovers()
    with Segment.create(FIELDS, name="contested") as segment:
        assert not names._remove(seen)
        assert os.path.samestat(os.fstat(segment._fd), os.stat(seen.path))


@pytest.mark.usefixtures("shm_dir")
def test_a_reclaimer_that_comes_late_at_no_instant_frees_the_name_of_the_living(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were the name free for an instant only, a third process could take it, and two would own it."""
    leave_behind("contested")
    (seen,) = leftovers()
    with Segment.create(FIELDS, name="contested"):
        for call in ("rename", "unlink"):
            monkeypatch.setattr(os, call, lambda *_, call=call: pytest.fail(f"os.{call} was called"))
        names._remove(seen)
        monkeypatch.undo()


def test_a_reclaimer_whose_turn_came_late_touches_only_what_it_has_locked(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, path, lock = dead_peer(), shm_dir / "memlane-contested", fcntl.flock
    write_segment(path, owner)
    (seen,) = leftovers()

    def lock_late(fd: int, operation: int) -> None:
        lock(fd, operation)
        if operation != fcntl.LOCK_UN:
            path.unlink()
            write_segment(path, owner)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert not names._remove(seen)
    assert path.exists()


@pytest.fixture
def locked(shm_dir: Path) -> Iterator[int]:
    """The segment of a dead owner that another process is about to remove. That one was stopped, so it never does."""
    fd = os.open(write_segment(shm_dir / "memlane-contested", dead_peer()), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


@pytest.mark.usefixtures("locked")
def test_a_reclaimer_that_was_stopped_does_not_keep_others_from_reclaiming_the_rest(shm_dir: Path) -> None:
    write_segment(shm_dir / "memlane-other", dead_peer())
    assert [leftover.path.name for leftover in reclaim()] == ["memlane-other"]


@pytest.mark.usefixtures("locked")
def test_a_reclaimer_that_was_stopped_does_not_keep_others_from_other_names(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="mine"):
        assert files(shm_dir) == ["memlane-contested", "memlane-mine"]


@pytest.mark.usefixtures("locked")
def test_the_name_that_a_stopped_process_is_about_to_free_is_taken() -> None:
    with pytest.raises(SegmentExists, match=r"memlane-contested already exists and belongs to pid \d+, which is dead"):
        Segment.create(FIELDS, name="contested")


def test_the_name_that_another_process_is_about_to_free_is_waited_for(locked: int) -> None:
    timer = threading.Timer(0.05, fcntl.flock, [locked, fcntl.LOCK_UN])
    timer.start()
    with Segment.create(FIELDS, name="contested") as segment:
        assert segment.path is not None
        assert os.path.samestat(os.fstat(segment._fd), os.stat(segment.path))
    timer.join()


def compete(folder: str, name: str, gun: Segment, pipe: Any) -> None:
    os.environ["MEMLANE_SHM_DIR"] = folder
    bell, finish = gun.signal("bell", 0), gun.signal("bell", 1)
    bell.wait(1, timeout=PATIENCE)
    try:
        segment = Segment.create(FIELDS, name=name)
    except SegmentExists as error:
        pipe.send(str(error))
    else:
        pipe.send("won")
        finish.wait(1, timeout=PATIENCE)
        assert segment.path is not None
        assert os.path.samestat(os.fstat(segment._fd), os.stat(segment.path))
        segment.close()


@pytest.mark.parametrize("corpse", [False, True], ids=["a free name", "the name of a dead owner"])
def test_of_many_that_create_one_name_at_once_exactly_one_wins(shm_dir: Path, corpse: bool) -> None:
    for _ in range(12):
        if corpse:
            leave_behind("prize")
        pipes = [mp.Pipe(duplex=False) for _ in range(5)]
        with Segment.create(FIELDS) as gun:
            context = mp.get_context("fork")
            arguments = [(str(shm_dir), "prize", gun, sender) for _, sender in pipes]
            processes = [context.Process(target=compete, args=args) for args in arguments]
            for process in processes:
                process.start()
            gun.signal("bell", 0).store(1)
            outcomes = [reader.recv() for reader, _ in pipes if reader.poll(PATIENCE)]
            gun.signal("bell", 1).store(1)
            for process in processes:
                process.join(PATIENCE)
        for ends in pipes:
            for end in ends:
                end.close()
        assert outcomes.count("won") == 1, outcomes
        assert all("which is alive" in outcome for outcome in outcomes if outcome != "won"), outcomes
        assert [process.exitcode for process in processes] == [0] * 5
        assert files(shm_dir) == []


def reclaim_until(folder: str, gun: Segment) -> int:
    count, bell = 0, gun.signal("bell")
    while bell.value == 0:
        count += len(reclaim(Path(folder)))
    return count


def test_reclaimers_that_run_all_the_time_never_take_the_name_of_the_living(shm_dir: Path) -> None:
    rounds, dead = 0, dead_peer()
    with Segment.create(FIELDS) as gun:
        context = mp.get_context("fork")
        processes = [context.Process(target=reclaim_until, args=(str(shm_dir), gun)) for _ in range(3)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 1.5
        try:
            while time.monotonic() < deadline:
                write_segment(shm_dir / "planted", dead)
                os.rename(shm_dir / "planted", shm_dir / "memlane-contested")  # whole from the first instant
                with Segment.create(FIELDS, name="contested") as segment:
                    for _ in range(20):
                        assert segment.path is not None
                        assert os.path.samestat(os.fstat(segment._fd), os.stat(segment.path))
                rounds += 1
        finally:
            gun.signal("bell").store(1)
            for process in processes:
                process.join(PATIENCE)
    assert rounds > 10
    assert [process.exitcode for process in processes] == [0, 0, 0]


# ---------------------------------------------------------------------------------- file systems without nameless files


@pytest.fixture
def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse_nameless(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_nameless)


@pytest.mark.usefixtures("without_nameless_files")
def test_a_segment_can_be_made_without_nameless_files(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="plain") as segment:
        segment["obs"][:] = 1
        assert files(shm_dir) == ["memlane-plain"]
        with Segment.attach("plain") as again:
            assert total(again) == 12


@pytest.mark.usefixtures("without_nameless_files")
def test_a_refused_name_leaves_no_hidden_file(shm_dir: Path) -> None:
    with Segment.create(FIELDS, name="plain"):
        with pytest.raises(SegmentExists):
            Segment.create(FIELDS, name="plain")
        assert files(shm_dir) == ["memlane-plain"]


@pytest.mark.usefixtures("without_nameless_files")
def test_a_segment_is_hidden_until_it_is_whole(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real_write = Header.write

    def look_and_write(header: Header, fd: int) -> None:
        seen.append(files(shm_dir))
        real_write(header, fd)

    monkeypatch.setattr(Header, "write", look_and_write)
    with Segment.create(FIELDS, name="plain"):
        ((hidden,),) = seen
        assert hidden.startswith(".memlane-unfinished-")


def die_before_the_name(name: str) -> None:
    os.link = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    Segment.create(FIELDS, name=name)


@pytest.mark.usefixtures("without_nameless_files")
def test_the_hidden_file_of_a_dead_owner_is_reclaimed(shm_dir: Path) -> None:
    with child(die_before_the_name, "plain"):
        pass
    (hidden,) = files(shm_dir)
    assert hidden.startswith(".memlane-unfinished-")
    assert [leftover.path.name for leftover in reclaim()] == [hidden]
    assert files(shm_dir) == []


@pytest.mark.usefixtures("without_nameless_files")
def test_the_hidden_file_of_a_living_owner_stays(shm_dir: Path) -> None:
    fd, hidden = names.open_unnamed(shm_dir)
    os.close(fd)
    assert hidden is not None
    assert reclaim() == []
    assert hidden.exists()


@pytest.mark.usefixtures("without_nameless_files")
def test_the_hidden_file_of_another_pid_namespace_stays(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = foreign_peer(dead_peer())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Peer, "current", lambda *_: dead)
        fd, hidden = names.open_unnamed(shm_dir)
    os.close(fd)
    assert hidden is not None
    assert reclaim() == []
    assert hidden.exists()


@pytest.mark.parametrize("name", ["", "1", "1-2-3", "a-b-c-d", "1-2-3-4-5", "-1-2-3-4"])
def test_a_foreign_file_with_the_hidden_prefix_stays(shm_dir: Path, name: str) -> None:
    (shm_dir / f".memlane-unfinished-{name}").touch()
    assert reclaim() == []


@pytest.mark.usefixtures("shm_dir")
def test_a_name_that_vanished_is_missing_to_those_who_come_later() -> None:
    leave_behind("corpse")
    reclaim()
    with pytest.raises(SegmentMissing):
        Segment.attach("corpse")
