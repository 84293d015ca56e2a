"""SAC and DQN: what collectors put into the replay, how the learner updates, and that they learn."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.ipc import Replay
from memlane.train.algorithms import algorithm_for, dqn, sac
from memlane.train.algorithms.off_policy import OffPolicy, OffPolicyWorker, row_fields, slot_fields
from memlane.train.networks import NetworkConfig
from memlane.train.presets import preset_for
from memlane.train.run import Metrics
from tests.support.training import QuietRun, Script, mean_return, mean_score

SEEN, PUSH, PRESS = Box(-1, 1, (3,), np.float32), Box(-2, 2, (1,), np.float32), Discrete(2)
SMALL = NetworkConfig(hidden=(8,))


# --------------------------------------------------------------------------------------------------------------- losses


def batch_of(rows: int, actions: Any, **changes: Any) -> dict[str, torch.Tensor]:
    batch = {
        "obs.": torch.randn(rows, 3),
        "next_obs.": torch.randn(rows, 3),
        "action": actions,
        "reward": torch.randn(rows),
        "discount": torch.where(torch.rand(rows) < 0.3, torch.zeros(rows), torch.full((rows,), 0.9)),
    }
    (name,) = sac.Actor(SEEN, PUSH, sac.SACConfig(network=SMALL)).encoder.leaves
    return {key if key[-1] != "." else key + name: value for key, value in batch.items()} | changes


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=20)
def test_the_targets_of_dqn_are_those_of_the_papers(seed: int, double: bool, dueling: bool) -> None:
    torch.manual_seed(seed)
    learner = dqn.DQNLearner(SEEN, PRESS, dqn.DQNConfig(double=double, dueling=dueling, network=SMALL))
    for parameter in learner.target.parameters():
        parameter += torch.randn_like(parameter) * 0.1  # so that the two networks disagree
    batch = batch_of(16, torch.randint(2, (16,)))
    (after,) = [value for name, value in batch.items() if name.startswith("next_obs.")]
    (name,) = learner.policy.encoder.leaves
    found = learner.compute_targets(batch, {name: after})
    for row in range(16):
        here = {name: after[row : row + 1]}
        mine, theirs = learner.policy(here)[0].tolist(), learner.target(here)[0].tolist()
        chosen = max(range(2), key=(mine if double else theirs).__getitem__)
        expected = float(batch["reward"][row]) + float(batch["discount"][row]) * theirs[chosen]
        assert float(found[row]) == pytest.approx(expected, abs=1e-5)


def test_a_dueling_network_says_what_a_situation_is_worth_on_average() -> None:
    network = dqn.QNetwork(SEEN, PRESS, dqn.DQNConfig(dueling=True, network=SMALL))
    (name,) = network.encoder.leaves
    seen = {name: torch.randn(5, 3)}
    assert network.value is not None
    assert torch.allclose(network(seen).mean(-1), network.value(network.encoder(seen)).squeeze(-1), atol=1e-6)


def test_rows_are_weighted_in_the_loss() -> None:
    """A row that weighs nothing changes nothing."""
    results = []
    for reward in (0.0, 100.0):
        torch.manual_seed(0)
        learner = dqn.DQNLearner(SEEN, PRESS, dqn.DQNConfig(network=SMALL))
        batch = batch_of(2, torch.tensor([0, 1]), weight=torch.tensor([1.0, 0.0]))
        batch["reward"] = torch.tensor([1.0, reward])
        learner.update(batch, 0.0)
        results.append(learner.tensors())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_the_density_of_a_squashed_action_is_that_of_its_definition(numbers: list[float], seed: int) -> None:
    actor = sac.Actor(SEEN, Box(-1, 1, (len(numbers),), np.float32), sac.SACConfig(network=SMALL))
    (name,) = actor.encoder.leaves
    seen = {name: torch.tensor([[*numbers, 0.0, 0.0, 0.0][:3]])}
    torch.manual_seed(seed)
    actions, log_probs = actor(seen)
    mean, log_std = (one[0].tolist() for one in actor.mean_and_log_std(seen))
    expected = 0.0
    for action, middle, width in zip(actions[0].tolist(), mean, log_std, strict=True):
        if abs(action) > 0.999:
            return  # too close to the bound to be turned back
        raw = math.atanh(action)
        expected += -0.5 * ((raw - middle) / math.exp(width)) ** 2 - width - 0.5 * math.log(2 * math.pi)
        expected -= math.log(1 - action**2)
    assert float(log_probs[0].detach()) == pytest.approx(expected, abs=1e-2)


def test_the_targets_of_sac_are_those_of_the_paper() -> None:
    torch.manual_seed(1)
    learner = sac.SACLearner(SEEN, PUSH, sac.SACConfig(network=SMALL, temperature=0.3))
    batch = batch_of(12, torch.rand(12, 1) * 2 - 1)
    now, after = sac.split_observations(batch)
    torch.manual_seed(2)
    with torch.no_grad():
        actions, log_probs = learner.policy(after)
    both = learner.targets(after, actions)
    expected = [
        float(batch["reward"][i]) + float(batch["discount"][i]) * (float(both[:, i].min()) - 0.3 * float(log_probs[i]))
        for i in range(12)
    ]
    values = learner.critics(now, batch["action"]).detach()
    torch.manual_seed(2)
    errors, _ = learner.update(batch, 0.0)
    assert np.allclose(errors.numpy(), (values - torch.tensor(expected)).abs().mean(0).numpy(), atol=1e-5)


def test_the_temperature_rises_while_the_policy_is_surer_than_it_should_be() -> None:
    config = sac.SACConfig(network=SMALL, target_entropy=50.0)
    learner = sac.SACLearner(SEEN, PUSH, config)
    before = learner.temperature.value
    for _ in range(5):
        learner.update(batch_of(8, torch.rand(8, 1)), 0.0)
    assert learner.temperature.value > before


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
@settings(deadline=None, max_examples=30)
def test_the_temperature_goes_where_torchs_adam_would_take_it(excesses: list[float]) -> None:
    mine, log = sac.Temperature(0.0, 1e-2), torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log], lr=1e-2)
    for excess in excesses:
        mine.update(excess)
        log.grad = torch.tensor(-excess, dtype=torch.float64)
        adam.step()
    assert mine.log == pytest.approx(float(log.detach()), abs=1e-9)


@pytest.mark.parametrize(("every", "share"), [(0, 0.25), (1, 1.0)])
def test_the_target_follows_by_its_share(every: int, share: float) -> None:
    config = dqn.DQNConfig(network=SMALL, tau=0.25, target_update_interval=every)
    learner = dqn.DQNLearner(SEEN, PRESS, config)
    before = [one.clone() for one in learner.target.parameters()]
    learner.update(batch_of(8, torch.randint(2, (8,))), 0.0)
    for old, target, source in zip(before, learner.target.parameters(), learner.policy.parameters(), strict=True):
        assert torch.allclose(target, old.lerp(source.detach(), share))


def test_an_action_reaches_both_bounds_of_the_environment() -> None:
    actor = sac.Actor(SEEN, Box(np.array([-1, 0]), np.array([3, 10]), dtype=np.float64), sac.SACConfig(network=SMALL))
    assert actor.to_env(torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])).tolist() == [[-1, 0], [3, 10], [1, 5]]


@pytest.mark.parametrize(("algo", "space"), [("sac", PRESS), ("dqn", PUSH)])
def test_actions_that_an_algorithm_does_not_know_are_refused_by_name(algo: str, space: Any) -> None:
    kind = algorithm_for(algo)
    with pytest.raises(TypeError, match=f"{algo.upper()} needs"):
        kind.make_policy(SEEN, space, kind.Config())


# ----------------------------------------------------------------------------------------------------------- collecting


class Slot(dict[str, Any]):
    pass


def collect_through(*episodes: tuple[int, str], steps: int) -> tuple[Replay, Slot]:
    """The replay and the slot after ``steps`` steps of scripted episodes."""
    env = SyncVectorEnv([partial(Script, *episodes)], autoreset_mode=AutoresetMode.NEXT_STEP)
    row = row_fields(env.single_observation_space, ("int64", ()))
    replay = Replay(row, 100, streams=1, observations=[name for name in row if name.startswith("obs.")])
    actor = dqn.QNetwork(env.single_observation_space, env.single_action_space, dqn.DQNConfig(network=SMALL))
    slot = Slot({name: np.zeros(shape, dtype) for name, (dtype, shape) in slot_fields(steps, 1).items()})
    worker = OffPolicyWorker(env, actor, replay.writer(), lambda: False)
    worker.version = 7
    worker.reset(0)
    worker.collect_into(slot, steps)
    env.close()
    return replay, slot


def drawn(replay: Replay) -> dict[tuple[float, float], Any]:
    """The transitions that can be drawn, by episode and step."""
    batch = replay.sampler(seed=0, gamma=0.5, extras=["version"]).sample(500)
    (name,) = [name for name in batch if name.startswith("obs.")]
    return {
        tuple(seen): (tuple(after), float(reward), float(discount), int(version))
        for seen, after, reward, discount, version in zip(
            batch[name].tolist(), batch[f"next_{name}"].tolist(), batch["reward"], batch["discount"], batch["version"],
            strict=True,
        )
    }  # fmt: skip


def test_truncation_is_continued_and_termination_is_not() -> None:
    replay, slot = collect_through((2, "truncated"), (2, "terminated"), (9, "truncated"), steps=9)
    with replay:
        found = drawn(replay)
    assert found[0.0, 1.0] == ((0, 2), 2, 0.5, 7)
    assert found[1.0, 1.0] == ((1, 2), 2, 0.0, 7)
    assert slot["episode_returns"][~np.isnan(slot["episode_returns"])].tolist() == [3, 3]
    assert slot["episode_lengths"][~np.isnan(slot["episode_returns"])].tolist() == [2, 2]


def test_the_step_that_only_resets_is_no_transition() -> None:
    replay, slot = collect_through((2, "terminated"), (9, "truncated"), steps=6)
    with replay:
        # two steps, one that resets, three steps, of which the last waits for what comes after it
        assert (int(slot["transitions"]), replay.added) == (5, 5)
        assert sorted(drawn(replay)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -------------------------------------------------------------------------------------------------------------- running


def runner_of(algo: str, env: str, folder: Path, seed: int = 0, **changes: Any) -> OffPolicy:
    preset = preset_for(env, algo)
    kind: Any = algorithm_for(algo)
    num_envs = changes.pop("num_envs", preset.num_envs)
    runner: OffPolicy = kind(
        env, None, {**preset.config, "seed": seed, **changes}, sim_backend="native", num_envs=num_envs
    )
    runner.run = QuietRun(folder)
    return runner


def solve(runner: OffPolicy, env: str, algo: str, every: int) -> float:
    """Train until the policy reaches its preset's target without exploration, evaluated after each ``every`` steps;
    return its last evaluation."""
    preset = preset_for(env, algo)
    assert preset.target is not None
    reached, looked = -math.inf, 0

    def stop(metrics: Metrics) -> str | None:
        nonlocal reached, looked
        if metrics.env_steps - looked >= every:
            looked = metrics.env_steps
            reached = mean_return(runner.learner.policy, env)
        return "over" if reached >= preset.target or metrics.env_steps >= preset.max_steps else None  # type: ignore[operator]

    runner.should_stop = stop
    runner.progress = lambda metrics: metrics.env_steps / preset.max_steps
    with runner:
        runner.learn(1 << 40)
    return reached


SEEDS = [0, pytest.param(1, marks=pytest.mark.soak)]
"""The second one takes as long as the first: half a minute or more."""


@pytest.mark.parametrize("seed", SEEDS)
def test_sac_swings_up_a_pendulum(tmp_path: Path, seed: int) -> None:
    runner = runner_of("sac", "Pendulum-v1", tmp_path, seed)
    assert solve(runner, "Pendulum-v1", "sac", every=1000) >= -200


@pytest.mark.parametrize("seed", SEEDS)
def test_dqn_solves_cart_pole(tmp_path: Path, seed: int) -> None:
    runner = runner_of("dqn", "CartPole-v1", tmp_path, seed)
    assert solve(runner, "CartPole-v1", "dqn", every=1000) >= 475


def test_dqn_solves_cart_pole_although_one_of_two_collectors_is_killed_again_and_again(tmp_path: Path) -> None:
    runner = runner_of("dqn", "CartPole-v1", tmp_path, 3, collectors=2, max_restarts=100)
    assert runner.run is not None
    killed: list[int] = []
    counters: dict[str, int] = {}
    last = time.monotonic()

    def kill(metrics: Metrics) -> None:  # noqa: ARG001
        nonlocal last
        assert runner.replay is not None
        counters.update(runner.replay.counters())
        if time.monotonic() - last > 1 and runner.collectors is not None and runner.collectors.pids:
            pid = next(iter(runner.collectors.pids.values()))
            with contextlib.suppress(ProcessLookupError):  # killed before, and its replacement is not started yet
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            last = time.monotonic()

    runner.run.listeners.append(kill)
    assert solve(runner, "CartPole-v1", "dqn", every=1000) >= 475
    assert killed
    # The replay may have transitions whose rollout a killed collector did not commit. None is counted twice.
    assert runner.env_steps <= counters["added"] <= runner.env_steps + len(killed) * 2 * 8 * 4 + 2 * 2 * 8 * 4


def test_dqn_learns_from_pixels_that_the_replay_keeps_as_bytes(tmp_path: Path) -> None:
    runner = runner_of(
        "dqn", "Bricks-v0", tmp_path, num_envs=4, buffer_size=500, learning_starts=100, samples_per_insert=2.0
    )
    losses: list[float] = []
    kept: dict[str, str] = {}
    assert runner.run is not None

    def look(metrics: Metrics) -> None:
        assert runner.replay is not None
        losses.append(metrics.learning["loss"])
        kept.update({name: str(field.dtype) for name, field in runner.replay.layout.fields.items()})

    runner.run.listeners.append(look)
    with runner:
        runner.learn(20)
    assert {dtype for name, dtype in kept.items() if name.startswith("obs.")} == {"uint8"}
    assert math.isfinite(losses[-1])


@pytest.mark.soak  # a minute and a half
def test_dqn_plays_better_than_chance_from_pixels(tmp_path: Path) -> None:
    runner = runner_of("dqn", "Bricks-v0", tmp_path)
    runner.should_stop = lambda metrics: "over" if metrics.env_steps >= 60_000 else None
    runner.progress = lambda metrics: metrics.env_steps / preset_for("Bricks-v0", "dqn").max_steps
    with runner:
        runner.learn(1 << 40)
    policy = runner.learner.policy
    (name,) = policy.encoder.leaves
    draw = np.random.default_rng(1)
    chance = mean_score("Bricks-v0", lambda observations: draw.integers(0, 3, len(observations)))

    def act(observations: Any) -> Any:
        return policy.to_env(policy.act({name: torch.from_numpy(observations)}, deterministic=True)[0])

    assert mean_score("Bricks-v0", act) > 1.5 * chance


def ratio_after(runner: OffPolicy, updates: int) -> float:
    """The samples per insert in the metrics of the last update."""
    assert runner.run is not None
    with runner:
        runner.learn(updates)
    return runner.run.latest.learning["samples_per_insert"]


def test_the_ratio_of_samples_to_inserts_is_held_and_reported(tmp_path: Path) -> None:
    runner = runner_of("dqn", "CartPole-v1", tmp_path, samples_per_insert=3.5, batch_size=32, learning_starts=100)
    assert ratio_after(runner, 150) == pytest.approx(3.5, rel=0.05)


def test_transitions_whose_rollouts_never_came_do_not_hold_the_training_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limiter counts them like any other; here they are half of all rows."""
    collect_into = OffPolicyWorker.collect_into

    def forgetful(self: OffPolicyWorker, slot: Any, num_steps: int) -> tuple[int, int]:
        times = collect_into(self, slot, num_steps)
        slot["transitions"][...] //= 2
        return times

    monkeypatch.setattr(OffPolicyWorker, "collect_into", forgetful)
    few = {"samples_per_insert": 2.0, "batch_size": 32, "learning_starts": 64, "in_process": True,
           "rollout_timeout": 20.0}  # fmt: skip
    runner = runner_of("dqn", "CartPole-v1", tmp_path, **few)
    assert ratio_after(runner, 80) == pytest.approx(2.0, rel=0.1)


def test_a_new_training_does_not_go_on_with_the_replay_of_an_old_one(tmp_path: Path) -> None:
    deterministic("dqn", "CartPole-v1", tmp_path / "mine", 12)
    deterministic("dqn", "CartPole-v1", tmp_path / "theirs", 12, seed=5)
    (tmp_path / "mine" / "checkpoint.pt").unlink()
    deterministic("dqn", "CartPole-v1", tmp_path / "mine", 12, seed=5)
    with saved_replay(tmp_path / "mine") as mine, saved_replay(tmp_path / "theirs") as theirs:
        one, two = (replay.sampler(seed=0).sample(64) for replay in (mine, theirs))
        assert all(np.array_equal(one[name], two[name]) for name in one)


def test_network_settings_of_appo_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"network\.lstm is a setting of appo only, found 16"):
        runner_of("dqn", "CartPole-v1", tmp_path, network={"lstm": 16})


DETERMINISTIC: dict[str, Any] = {
    "deterministic": True, "learning_starts": 40, "batch_size": 16, "samples_per_insert": 4.0, "num_steps": 8,
    "buffer_size": 300, "network": {"hidden": (8,)},
}  # fmt: skip


def saved_replay(folder: Path) -> Replay:
    """The replay of the checkpoint."""
    return Replay.load(folder / torch.load(folder / "checkpoint.pt", weights_only=True)["replay"])


def deterministic(algo: str, env: str, folder: Path, iterations: int, seed: int = 0, **changes: Any) -> OffPolicy:
    runner = runner_of(algo, env, folder, seed, **{**DETERMINISTIC, **changes})
    assert runner.run is not None
    runner.progress = lambda metrics: metrics.env_steps / 1000  # of what is over, whenever it is to stop
    if (folder / "checkpoint.pt").exists():
        runner.restore(runner.run.load())
    with runner:
        runner.learn(iterations, save_interval=6)
    runner.run.close()
    return runner


CASES = [("sac", "Pendulum-v1", {}), ("dqn", "CartPole-v1", {"n_step": 3, "priority_alpha": 0.6})]


@pytest.mark.parametrize(("algo", "env", "changes"), CASES, ids=["sac", "dqn by priority"])
def test_the_same_seed_gives_the_same_weights(tmp_path: Path, algo: str, env: str, changes: dict[str, Any]) -> None:
    one, two = (deterministic(algo, env, tmp_path / name, 12, **changes).learner.tensors() for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("algo", "env", "changes"), CASES, ids=["sac", "dqn by priority"])
@pytest.mark.parametrize("updates", [4, 12, 15], ids=["before a checkpoint", "at one", "between two"])
def test_a_resumed_run_is_as_if_it_had_never_stopped(
    tmp_path: Path, algo: str, env: str, changes: dict[str, Any], updates: int
) -> None:
    whole = deterministic(algo, env, tmp_path / "whole", 18, **changes)
    deterministic(algo, env, tmp_path / "parts", updates, **changes)
    resumed = deterministic(algo, env, tmp_path / "parts", 18, **changes)
    one, two = whole.learner.tensors(), resumed.learner.tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (whole.iteration, whole.env_steps) == (resumed.iteration, resumed.env_steps)
    ages = [runner.run.latest.learning["sample_age"] for runner in (whole, resumed) if runner.run is not None]
    assert ages[0] == ages[1] > 0


def test_a_deterministic_run_of_several_collectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has one collector"):
        deterministic("dqn", "CartPole-v1", tmp_path, 1, collectors=2)
