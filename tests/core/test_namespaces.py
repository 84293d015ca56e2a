"""Named segments and peers between processes of different pid and time namespaces, as containers have them."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest

from memlane.core import MemlaneError, Peer, Segment, SegmentExists, die_with, leftovers, reclaim
from memlane.core.header import write_owner_life
from memlane.core.lowlevel import PeerState
from tests.support.namespaces import PID, TIME, inside, output_inside
from tests.support.processes import FIELDS, dead_peer, foreign_peer, wait_for

both = pytest.mark.parametrize("namespace", [PID, TIME], ids=["pid", "time"])

CREATE = """
    import sys
    from memlane.core import Segment
    segment = Segment.create({"count": ("int64", 8)}, name=sys.argv[1])
    print("created", flush=True)
    sys.stdin.readline()
    segment.close()
"""


@both
def test_the_name_of_an_owner_in_another_namespace_stays_while_it_lives(
    shm_dir: Path, namespace: tuple[str, ...]
) -> None:
    with inside(namespace, CREATE, "theirs") as owner:
        assert owner.says() == "created"
        assert list(leftovers()) == reclaim() == []
        with Segment.attach("theirs") as segment:
            assert (segment.owner.state, segment.owner.alive) == (PeerState.UNKNOWN, True)
        owner.tell()
        owner.ends_well()
    assert list(shm_dir.iterdir()) == []


@both
def test_the_name_of_an_owner_that_was_killed_in_another_namespace_is_reclaimed(
    shm_dir: Path, namespace: tuple[str, ...]
) -> None:
    with inside(namespace, CREATE, "theirs") as owner:
        assert owner.says() == "created"
        owner.kill()
        assert wait_for(lambda: [leftover.path.name for leftover in leftovers()] == ["memlane-theirs"])
        with Segment.create(FIELDS, name="theirs"):  # the name is free again
            assert len(list(shm_dir.iterdir())) == 1


@both
def test_the_name_of_an_owner_without_a_life_token_in_another_namespace_stays(
    shm_dir: Path, namespace: tuple[str, ...]
) -> None:
    with inside(namespace, CREATE, "theirs") as owner:
        assert owner.says() == "created"
        (file,) = shm_dir.iterdir()
        with file.open("r+b") as header:
            write_owner_life(header.fileno(), 0)  # as on a file system without locks
        owner.kill()
        assert list(leftovers()) == []
        with pytest.raises(SegmentExists, match=f"another name; if that container is gone, remove {file}$"):
            Segment.create(FIELDS, name="theirs")


@both
def test_a_process_in_another_namespace_does_not_reclaim_the_names_of_this_one(
    shm_dir: Path, namespace: tuple[str, ...]
) -> None:
    with Segment.create(FIELDS, name="mine"):
        found = output_inside(namespace, "from memlane.core import reclaim; print(reclaim())")
        assert (found, len(list(shm_dir.iterdir()))) == ("[]", 1)


@pytest.mark.usefixtures("shm_dir")
def test_the_life_of_a_segment_shows_a_process_of_another_pid_namespace_until_it_is_killed() -> None:
    hold = """
        import sys
        from memlane.core import Segment
        segment = Segment.attach("shared")
        print(segment.life.process(), flush=True)
        print(segment.life.alive(int(sys.stdin.readline())), flush=True)
        sys.stdin.readline()
    """
    with Segment.create(FIELDS, name="shared") as segment, inside(PID, hold) as process:
        other = int(process.says())
        process.tell(str(segment.life.process()))
        assert process.says() == "True"
        assert segment.life.alive(other)
        process.kill()
        assert wait_for(lambda: not segment.life.alive(other))


@both
def test_a_wait_refuses_to_watch_a_process_that_it_cannot_see(tmp_path: Path, namespace: tuple[str, ...]) -> None:
    watch = """
        import pickle, sys
        from memlane.core import SIGNAL, MemlaneError, Segment
        with open(sys.argv[1], "rb") as file:
            peer = pickle.load(file)
        print(peer, peer.alive)
        with Segment.create({"bell": (SIGNAL, ())}) as segment:
            try:
                segment.signal("bell").wait(1, peers=[peer])
            except MemlaneError as error:
                print(type(error).__name__, error)
    """
    file = tmp_path / "peer"
    file.write_bytes(pickle.dumps(Peer.current("learner")))
    shown, error = output_inside(namespace, watch, file).split("\n")
    pid = Peer.current().pid
    assert shown == f"Peer(learner, pid {pid}, unknown) True"
    assert error.startswith(f"MemlaneError cannot watch learner (pid {pid}): expected a process of this pid")


def test_a_peer_of_another_namespace_is_unknown_whatever_its_pid_is_here() -> None:
    for peer in (Peer.current("learner"), dead_peer("learner")):
        other = foreign_peer(peer)
        assert other != peer
        assert (other.state, other.alive) == (PeerState.UNKNOWN, True)
        assert pickle.loads(pickle.dumps(other)) == other
        assert other.describe_death() == f"learner (pid {peer.pid}) is in another pid or time namespace"
        for watch in (other.fileno, other.wait, partial(die_with, other)):
            with pytest.raises(MemlaneError, match=r"^cannot watch learner \(pid \d+\): .* run both in one pid"):
                watch()


def test_a_segment_that_was_sent_from_another_pid_namespace_is_refused_with_a_remedy(tmp_path: Path) -> None:
    receive = """
        import pickle, sys
        from memlane.core import SegmentError
        try:
            with open(sys.argv[1], "rb") as file:
                pickle.load(file)
        except SegmentError as error:
            print(error)
    """
    file = tmp_path / "segment"
    with Segment.create(FIELDS) as segment:
        file.write_bytes(pickle.dumps(segment))
        answer = output_inside(PID, receive, file)
    assert answer.startswith(f"cannot open the segment that pid {Peer.current().pid} sent: ")
    assert answer.endswith("create the segment with a name, and attach to it here")
