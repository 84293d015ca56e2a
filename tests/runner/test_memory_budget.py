"""MemoryBudget: the bytes of every lane before it is made, against what there is, in words that name the culprit."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

from memlane.core import BudgetError, Layout
from memlane.core.memory import FreeMemory
from memlane.ipc import (
    BudgetWarning,
    MemoryBudget,
    Ring,
    RolloutRingBuffer,
    SharedObsNormStats,
    SharedWeightSync,
    Stats,
    Weights,
    layout_of,
    rollout_layout,
)
from memlane.runner import memory_budget
from tests.support.processes import output_of, script

MIB = 2**20


def budget_of(*items: tuple[str, int, str], **thresholds: float) -> MemoryBudget:
    budget = MemoryBudget(**thresholds)
    for name, nbytes, lower in items:
        budget.add(name, nbytes, lower=lower)
    return budget


# ---------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("overflow", ["drop_oldest", "block"])
def test_a_ring_takes_exactly_what_was_promised(overflow: str) -> None:
    layout, budget = Layout({"obs": ("float32", (64, 33))}), MemoryBudget()
    budget.add("ring", Ring.segment_layout(layout, 5, overflow))  # type: ignore[arg-type]
    with Ring(layout, num_slots=5, overflow=overflow) as ring:  # type: ignore[arg-type]
        assert budget.nbytes == ring.nbytes


def test_a_rollout_ring_takes_exactly_what_was_promised() -> None:
    budget = MemoryBudget()
    budget.add("rollouts", Ring.segment_layout(rollout_layout(64, 24, 48, 12, 60), 4), named=True)
    with RolloutRingBuffer(64, 24, 48, 12, critic_dim=60, num_slots=4) as buffer:
        assert budget.nbytes == buffer.ring.nbytes


def test_weights_take_exactly_what_was_promised() -> None:
    given, budget = {"w": np.zeros((100, 100), np.float32), "n": np.array(3)}, MemoryBudget()
    budget.add("weights", Weights.segment_layout(layout_of(given)), named=True)
    with SharedWeightSync.from_state_dict(given) as sync:
        assert budget.nbytes == sync.weights.nbytes


def test_statistics_take_exactly_what_was_promised() -> None:
    budget = MemoryBudget()
    budget.add("counts", Stats.segment_layout((48,), 16))
    with Stats((48,), places=16) as stats:
        assert budget.nbytes == stats.nbytes


def test_observation_statistics_take_exactly_what_was_promised() -> None:
    budget = MemoryBudget()
    budget.add("normaliser", SharedObsNormStats.segment_layout(5000))
    with SharedObsNormStats(capacity_bytes=5000) as stats:
        assert budget.nbytes == stats._weights.nbytes


def test_a_number_of_bytes_may_come_from_numpy() -> None:
    budget = budget_of(("replay", np.int64(10**12), ""))
    assert budget.nbytes == 10**12


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of bytes of replay must be 0 or more, found -1"):
        MemoryBudget().add("replay", -1)


def test_the_sum_is_printed_with_its_parts() -> None:
    budget = budget_of(("rollouts", 18 * MIB, ""), ("weights", 512, ""))
    assert str(budget) == "memory needed: 18.0 MiB\n  rollouts  18.0 MiB\n  weights   512 bytes"


# ----------------------------------------------------------------------------------------------------------- thresholds


def test_what_fits_is_accepted_in_silence() -> None:
    budget_of(("rollouts", 59, ""), warn_at=0.6, refuse_at=0.9).check(FreeMemory(100, "the box"))


def test_what_fits_barely_is_a_warning() -> None:
    with pytest.warns(BudgetWarning, match="more than 60% of the 100 bytes that the box has free"):
        budget_of(("rollouts", 61, "")).check(FreeMemory(100, "the box"))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match="more than 90% of the 100 bytes that the box has free"):
        budget_of(("rollouts", 91, "")).check(FreeMemory(100, "the box"))


def test_the_thresholds_can_be_chosen() -> None:
    budget = budget_of(("rollouts", 30, ""), warn_at=0.1, refuse_at=0.2)
    with pytest.raises(BudgetError, match="more than 20%"):
        budget.check(FreeMemory(100, "the box"))


@pytest.mark.parametrize(("warn_at", "refuse_at"), [(0, 0.5), (0.9, 0.5), (0.5, 1.1)])
def test_thresholds_that_make_no_sense_are_refused(warn_at: float, refuse_at: float) -> None:
    with pytest.raises(ValueError, match=f"expected 0 < warn_at <= refuse_at <= 1, found warn_at={warn_at}"):
        MemoryBudget(warn_at=warn_at, refuse_at=refuse_at)


@pytest.mark.parametrize("nbytes", [70, 95], ids=["warning", "refusal"])
def test_the_message_names_the_largest_consumer_and_the_number_to_lower(nbytes: int) -> None:
    budget = budget_of(("weights", nbytes // 10, "hidden=64"), ("rollouts", nbytes - nbytes // 10, "num_envs=4096"))
    words = re.escape(f"the largest is rollouts with {nbytes - nbytes // 10} bytes: lower num_envs=4096")
    if nbytes > 90:
        with pytest.raises(BudgetError, match=words):
            budget.check(FreeMemory(100, "the box"))
    else:
        with pytest.warns(BudgetWarning, match=words):
            budget.check(FreeMemory(100, "the box"))


def test_a_consumer_without_a_setting_is_named_itself() -> None:
    with pytest.raises(BudgetError, match="make replay smaller"):
        budget_of(("replay", 100, "")).check(FreeMemory(100, "the box"))


def test_the_tightest_of_several_limits_counts() -> None:
    with pytest.raises(BudgetError, match="that the jar has free"):
        budget_of(("rollouts", 50, "")).check(
            FreeMemory(100, "the box"), FreeMemory(50, "the jar"), FreeMemory(90, "the bag")
        )


def test_nothing_fits_where_nothing_is_free() -> None:
    with pytest.raises(BudgetError, match="0 bytes that the box has free"):
        budget_of(("rollouts", 1, "")).check(FreeMemory(0, "the box"))


def test_nothing_at_all_always_fits() -> None:
    MemoryBudget().check(FreeMemory(0, "the box"))


# ------------------------------------------------------------------------------------------------- what the machine has


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, FreeMemory | None]:
    """What the machine, the control group and the file system of the names are said to have free."""
    free: dict[str, FreeMemory | None] = {
        "machine": FreeMemory(1000, "the machine"),
        "group": None,
        "names": FreeMemory(1000, "the names"),
    }
    monkeypatch.setattr(memory_budget, "machine_memory", lambda: free["machine"])
    monkeypatch.setattr(memory_budget, "cgroup_memory", lambda: free["group"])
    monkeypatch.setenv("MEMLANE_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(memory_budget, "directory_space", lambda path: free["names"] if path == tmp_path else None)
    return free


def test_without_a_limit_given_the_machine_counts(rooms: dict[str, FreeMemory | None]) -> None:
    rooms["machine"] = FreeMemory(100, "the machine")
    with pytest.raises(BudgetError, match="the machine has free"):
        budget_of(("rollouts", 99, "")).check()


def test_without_a_limit_given_the_control_group_counts(rooms: dict[str, FreeMemory | None]) -> None:
    rooms["group"] = FreeMemory(100, "the control group")
    with pytest.raises(BudgetError, match="the control group has free"):
        budget_of(("rollouts", 99, "")).check()


def test_named_lanes_must_fit_into_the_file_system_of_the_names(rooms: dict[str, FreeMemory | None]) -> None:
    rooms["names"] = FreeMemory(100, "the file system of /dev/shm")
    budget = MemoryBudget()
    budget.add("replay", 500, lower="capacity=500")
    budget.add("rollouts", 60, lower="num_slots=4", named=True)
    budget.add("weights", 39, named=True)
    words = (
        "the lanes need 99 bytes .* of the 100 bytes that the file system of /dev/shm has free; the largest is rollouts"
    )
    with pytest.raises(BudgetError, match=words):
        budget.check()


def test_anonymous_lanes_need_no_room_in_the_file_system_of_the_names(rooms: dict[str, FreeMemory | None]) -> None:
    """Docker gives /dev/shm 64 MB; a segment without a name is not bound by that."""
    rooms["names"] = FreeMemory(0, "the file system of /dev/shm")
    budget_of(("rollouts", 500, "")).check()


def test_a_real_machine_refuses_what_it_cannot_have() -> None:
    budget = budget_of(("replay", 2**60, "capacity=1_000_000_000"))
    with pytest.raises(BudgetError, match=r"the lanes need 1024\.0 PiB .*: lower capacity=1_000_000_000"):
        budget.check()


def test_a_real_machine_accepts_a_few_bytes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget_of(("weights", 100, "")).check()


def test_the_warning_is_shown_by_default() -> None:
    code = """
    from memlane.core.memory import FreeMemory
    from memlane.ipc import MemoryBudget
    budget = MemoryBudget()
    budget.add("rollouts", 70, lower="num_envs=4096")
    budget.check(FreeMemory(100, "the box"))
    """
    assert "lower num_envs=4096" in errors_of(code)


def errors_of(code: str) -> str:
    """What a program with Python's own filters for warnings writes to stderr."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_the_check_needs_no_torch() -> None:
    output = output_of(
        """
        import sys
        from memlane.ipc import MemoryBudget
        budget = MemoryBudget()
        budget.add("weights", 10)
        budget.check()
        print("torch" in sys.modules)
        """
    )
    assert output == "False\n"


def test_nothing_is_allocated_by_adding_and_checking() -> None:
    with script(
        """
        import resource
        from memlane.core import BudgetError, Layout
        from memlane.ipc import MemoryBudget, Ring
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        budget = MemoryBudget()
        budget.add("rollouts", Ring.segment_layout(Layout({"obs": ("float32", (4096, 1000, 1000))}), 8))
        try:
            budget.check()
        except BudgetError:
            pass
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 10_000)
        """
    ) as process:
        assert process.communicate() == ("True\n", "")
