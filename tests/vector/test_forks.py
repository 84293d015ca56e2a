"""Forked children of a process with a vector environment leave its workers and environments alone."""

from __future__ import annotations

import pytest

from tests.support.forks import every_end, every_fork, output_of_forking, refusals

ENVS = """
    from memlane.vector import AsyncVectorEnv
    from tests.support.vector_envs import Counter
    it = AsyncVectorEnv([Counter] * 3, {arguments})
    it.reset()
    it.step([1, 2, 3])
    pids = list(it._workers.pids)
"""
GO_ON = """
    observations, rewards, *_ = it.step([4, 5, 6])
    print(observations.tolist(), rewards.tolist(), it._workers.pids == pids)
    it.close()
"""
WENT_ON = "[2, 2, 2] [4.0, 5.0, 6.0] True\n"
every_worker = pytest.mark.parametrize(
    "arguments",
    ["num_workers=2", "num_workers=2, context='fork'", "num_workers=2, daemon=False", "num_workers=0"],
    ids=["forkserver", "fork", "not daemonic", "no workers"],
)


@every_end
@every_fork
@every_worker
def test_a_vector_env_goes_on_when_a_forked_child_ends(arguments: str, fork: str, ending: str) -> None:
    assert output_of_forking(fork, ENVS.format(arguments=arguments), ending, GO_ON) == WENT_ON


def test_a_step_that_is_pending_is_finished_when_a_forked_child_ends() -> None:
    before = ENVS.format(arguments="num_workers=2") + "    it.step_async([4, 5, 6])\n"
    after = GO_ON.replace("it.step([4, 5, 6])", "it.step_wait()")
    assert output_of_forking("os.fork", before, "close", after) == WENT_ON


@every_worker
def test_a_forked_child_cannot_use_the_vector_env_of_its_parent(arguments: str) -> None:
    calls = refusals(
        "it.reset()", "it.step([1, 2, 3])", "it.step_async([1, 2, 3])", "it.step_wait()", "it.call('steps')",
        "it.send([1, 2, 3])", "it.recv()", "it.set_attr('steps', 7)", "it.render()", "it.apply(id)",
    )  # fmt: skip
    output = output_of_forking("os.fork", ENVS.format(arguments=arguments), calls, GO_ON)
    assert output == "all refused\n" + WENT_ON


@every_fork
@pytest.mark.parametrize("context", ["forkserver", "fork", "spawn"])
def test_a_forked_child_may_have_a_vector_env_of_its_own(context: str, fork: str) -> None:
    """Also if its parent has a fork server, which is not the child's."""
    own = f"""
        mp.current_process()._config["daemon"] = False  # daemonic processes may not have children
        it = AsyncVectorEnv([Counter] * 2, num_workers=2, context="{context}")
        it.reset()
        print(it.step([7, 8])[1].tolist(), flush=True)
        it.close()
    """
    assert output_of_forking(fork, ENVS.format(arguments="num_workers=2"), own, GO_ON) == f"[7.0, 8.0]\n{WENT_ON}"
