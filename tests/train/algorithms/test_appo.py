"""APPO: what collectors write, how the learner updates, and that it learns although collectors are killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane.core import Layout
from memlane.runner.collector_error import CollectorError
from memlane.runner.protocols import CollectorLost
from memlane.spaces.paths import escape_key
from memlane.train.algorithms.appo import (
    APPO,
    APPOConfig,
    APPOLearner,
    APPOWorker,
    RolloutBatch,
    ppo_losses,
    slot_fields,
    stack_rollouts,
)
from memlane.train.networks import ActorCritic, NetworkConfig
from memlane.train.run import Metrics, Run
from tests.support.processes import within
from tests.support.training import (
    Cliff,
    QuietRun,
    Script,
    mean_return,
    mean_score,
    moment_of,
    preset_runner,
    updates_of,
)

PROMISE = 2.0
"""Seconds from an exception in a collector to the same in the learner."""
SMALL: dict[str, Any] = {"num_steps": 8, "update_epochs": 2, "minibatch_size": 16, "network": {"hidden": (8,)}}

# -------------------------------------------------------------------------------------------------------------- losses


@given(
    st.lists(
        st.tuples(*[st.floats(-2, 2, allow_nan=False)] * 6),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.05, 0.5),
)
@settings(deadline=None)
def test_the_losses_are_those_of_the_paper(rows: list[tuple[float, ...]], clip: float) -> None:
    policy_loss = value_loss = entropies = kl = 0.0
    for log_prob, old, advantage, value, target, entropy in rows:
        ratio = math.exp(log_prob - old)
        policy_loss -= min(ratio * advantage, max(min(ratio, 1 + clip), 1 - clip) * advantage) / len(rows)
        value_loss += (value - target) ** 2 / len(rows)
        entropies += entropy / len(rows)
        kl += (ratio - 1 - (log_prob - old)) / len(rows)
    found = ppo_losses(*torch.tensor(rows, dtype=torch.float64).T, clip_coef=clip)
    assert float(found["policy_loss"]) == pytest.approx(policy_loss, abs=1e-9)
    assert float(found["value_loss"]) == pytest.approx(value_loss, abs=1e-9)
    assert float(found["entropy"]) == pytest.approx(entropies, abs=1e-9)
    assert float(found["kl"]) == pytest.approx(kl, abs=1e-9)


def test_the_share_of_clipped_rows_is_a_metric() -> None:
    old = torch.zeros(4)
    logs = torch.tensor([0.5, -0.5, 0.1, 0.0])
    found = ppo_losses(logs, old, torch.ones(4), torch.zeros(4), torch.zeros(4), torch.zeros(4), clip_coef=0.2)
    assert float(found["clipped"]) == 0.5


def test_a_row_beyond_the_clip_in_its_favour_moves_the_policy_no_further() -> None:
    logs = torch.tensor([1.0, -1.0], requires_grad=True)
    zeros = torch.zeros(2)
    ppo_losses(logs, zeros, torch.tensor([1.0, -1.0]), zeros, zeros, zeros, clip_coef=0.2)["policy_loss"].backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------------------ rollouts


def slot_for(policy: ActorCritic, space: Any, steps: int, envs: int) -> dict[str, Any]:
    lstm = policy.lstm.hidden_size if policy.lstm is not None else 0
    fields = Layout(slot_fields(space, policy, steps, envs, lstm))
    return {field.name: np.full(field.shape, 77, field.dtype) for field in fields}


def vector_env(*scripts: list[tuple[int, str]]) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Script, *script) for script in scripts], autoreset_mode=AutoresetMode.NEXT_STEP)


def worker_of(env: Any, lstm: int = 0) -> APPOWorker:
    torch.manual_seed(0)
    network = NetworkConfig(hidden=(4,), lstm=lstm)
    worker = APPOWorker(env, ActorCritic(env.single_observation_space, env.single_action_space, network))
    worker.reset(3)
    return worker


def filled(worker: APPOWorker, steps: int) -> dict[str, Any]:
    slot = slot_for(worker.policy, worker.env.single_observation_space, steps, worker.num_envs)
    worker.collect_into(slot, steps)  # type: ignore[arg-type]
    return slot


TWO = (
    [(2, "terminated"), (3, "truncated"), (99, "terminated")],
    [(3, "truncated"), (1, "terminated"), (99, "truncated")],
)


def test_a_rollout_is_what_gymnasium_says_of_next_step() -> None:
    """Written out by hand: the step after the end of an episode resets the environment."""
    slot = filled(worker_of(vector_env(*TWO)), 7)
    (name,) = (name for name in slot if name.startswith("obs."))
    assert slot[name][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [1, 3], [2, 0]]
    assert slot[name][:, 1].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert slot["rewards"].T.tolist() == [[1, 2, 0, 1, 2, 3, 0], [1, 2, 3, 0, 1, 0, 1]]


def test_steps_that_end_an_episode_say_how() -> None:
    slot = filled(worker_of(vector_env(*TWO)), 7)
    assert np.argwhere(slot["terminated"]).tolist() == [[1, 0], [4, 1]]
    assert np.argwhere(slot["truncated"]).tolist() == [[2, 1], [5, 0]]


def test_a_step_in_which_an_environment_is_reset_is_not_valid() -> None:
    slot = filled(worker_of(vector_env(*TWO)), 7)
    assert np.argwhere(~slot["valid"]).tolist() == [[2, 0], [3, 1], [5, 1], [6, 0]]


def test_a_rollout_says_where_episodes_start() -> None:
    slot = filled(worker_of(vector_env(*TWO)), 7)
    assert np.argwhere(slot["episode_starts"]).tolist() == [[0, 0], [0, 1], [3, 0], [4, 1], [6, 1], [7, 0]]


def test_returns_and_lengths_are_of_whole_episodes() -> None:
    slot = filled(worker_of(vector_env(*TWO)), 7)
    done = ~np.isnan(slot["episode_returns"])
    assert np.argwhere(done).tolist() == [[1, 0], [2, 1], [4, 1], [5, 0]]
    assert slot["episode_returns"][done].tolist() == [3, 6, 1, 6]
    assert slot["episode_lengths"][done].tolist() == [2, 3, 1, 3]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_episodes_go_on_from_rollout_to_rollout(cut: int) -> None:
    whole = filled(worker_of(vector_env(*TWO)), 6)
    worker = worker_of(vector_env(*TWO))
    one, two = filled(worker, cut), filled(worker, 6 - cut)
    for name in ("valid", "rewards", "terminated", "truncated", "episode_returns", "actions", "log_probs"):
        np.testing.assert_array_equal(np.concatenate([one[name], two[name]]), whole[name], err_msg=name)
    for name in (*(name for name in whole if name.startswith("obs.")), "episode_starts"):
        np.testing.assert_array_equal(one[name][-1], two[name][0], err_msg=name)
        np.testing.assert_array_equal(np.concatenate([one[name][:-1], two[name]]), whole[name], err_msg=name)


def test_the_probabilities_in_a_rollout_are_those_of_its_actions() -> None:
    worker = worker_of(vector_env(*TWO))
    slot = filled(worker, 7)
    (name,) = worker.names
    given_by = worker.policy.actor(worker.policy.encoder({name: torch.from_numpy(slot[f"obs.{name}"][:-1])}))
    expected = worker.policy.distribution.log_prob(given_by, torch.from_numpy(slot["actions"]))
    torch.testing.assert_close(torch.from_numpy(slot["log_probs"]), expected.detach())


def test_the_memory_in_a_rollout_is_that_of_its_first_step() -> None:
    """The learner computes from it the log-probabilities that the collector had, over two rollouts."""
    worker = worker_of(vector_env(*TWO), lstm=5)
    for slot in (filled(worker, 3), filled(worker, 3)):
        batch = stack_rollouts([slot], "cpu")  # type: ignore[list-item]
        features = worker.policy.sequence(batch.observations, batch.episode_starts, batch.state)
        found = worker.policy.distribution.log_prob(worker.policy.actor(features[:-1]), batch.actions)
        torch.testing.assert_close(found.detach(), batch.log_probs)


class Named(gymnasium.Env[Any, Any]):
    """Observations in a dict."""

    action_space = Discrete(2)

    def __init__(self, key: str) -> None:
        self.observation_space = Dict({key: Box(-1, 1, (2,), np.float32), "deep": Dict({"n": Discrete(3)})})
        self._key = key

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return {self._key: np.array([0.25, 0.5], np.float32), "deep": {"n": 2}}, {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        return {self._key: np.array([0.5, 1], np.float32), "deep": {"n": 1}}, 0.0, False, False, {}


@pytest.mark.parametrize("key", ["plain", "with.dot", "type"])
def test_observations_in_dicts_are_found_by_their_names(key: str) -> None:
    slot = filled(worker_of(SyncVectorEnv([partial(Named, key)] * 2)), 1)
    assert slot[f"obs.{escape_key(key)}"][:, 0].tolist() == [[0.25, 0.5], [0.5, 1]]
    assert slot["obs.deep.n"][:, 1].tolist() == [2, 1]


# ------------------------------------------------------------------------------------------------------------ learning


class LastOne(gymnasium.Env[Any, Any]):
    """Truncated after every step. Only the final observation is not 0."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        return np.ones(1, np.float32), 1.0, False, True, {}


class Tenfold(torch.nn.Module):
    """A value function that is ten times the observation."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 10 * features


def learner_of(env: Any, **config: Any) -> APPOLearner:
    torch.manual_seed(0)
    network = config.pop("network", NetworkConfig(hidden=(8,), normalize_observations=False))
    return APPOLearner(env.single_observation_space, env.single_action_space, APPOConfig(network=network, **config))


def batch_from(learner: APPOLearner, env: Any, steps: int, rollouts: int = 1) -> RolloutBatch:
    worker = APPOWorker(env, learner.policy)
    worker.reset(1)
    return stack_rollouts([filled(worker, steps) for _ in range(rollouts)], "cpu")  # type: ignore[misc]


@pytest.mark.parametrize("lag", [0, 1], ids=["gae", "v-trace"])
def test_truncation_is_continued_with_the_value_of_the_final_observation(lag: int) -> None:
    env = SyncVectorEnv([LastOne] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    learner = learner_of(env, gamma=0.5, gae_lambda=0.9)
    learner.policy.critic = Tenfold()  # type: ignore[assignment]
    batch = batch_from(learner, env, 7)
    _, targets, _ = learner.compute_advantages(batch, lag)
    assert set(targets[batch.valid].tolist()) == {1.0 + 0.5 * 10.0}


@pytest.mark.parametrize("minibatch_size", [1, 5, 16, 1000])
def test_minibatches_have_every_valid_row_once(minibatch_size: int) -> None:
    env = vector_env(*TWO)
    learner = learner_of(env, minibatch_size=minibatch_size)
    batch = batch_from(learner, env, 7)
    found = torch.cat(learner._minibatches(batch))
    assert sorted(found.tolist()) == batch.valid.flatten().nonzero().flatten().tolist()


def test_minibatches_of_a_network_with_memory_have_every_environment_once() -> None:
    env = vector_env(*TWO, *TWO, *TWO)
    learner = learner_of(env, minibatch_size=10, network=NetworkConfig(hidden=(8,), lstm=4))
    batches = learner._minibatches(batch_from(learner, env, 5))
    assert sorted(torch.cat(batches).tolist()) == list(range(6))
    assert {len(one) for one in batches} == {2}


def test_rollouts_stand_side_by_side_in_a_batch() -> None:
    env = vector_env(*TWO)
    learner = learner_of(env)
    worker = APPOWorker(env, learner.policy)
    worker.reset(1)
    slots = [filled(worker, 3), filled(worker, 3)]
    batch = stack_rollouts(slots, "cpu")  # type: ignore[arg-type]
    assert batch.rewards.shape == (3, 4)
    assert torch.equal(batch.rewards[:, 2:], torch.from_numpy(slots[1]["rewards"]))


def test_a_batch_is_a_copy_of_its_rollouts() -> None:
    env = vector_env(*TWO)
    learner = learner_of(env)
    worker = APPOWorker(env, learner.policy)
    worker.reset(1)
    slot = filled(worker, 3)
    batch = stack_rollouts([slot], "cpu")  # type: ignore[list-item]
    before = batch.rewards.clone()
    slot["rewards"][...] = -1
    assert torch.equal(batch.rewards, before)


def test_the_content_of_invalid_rows_changes_no_update() -> None:
    weights = []
    for noise in (0.0, 1000.0):
        env = vector_env(*TWO)
        learner = learner_of(env, minibatch_size=1000, update_epochs=2)
        batch = batch_from(learner, env, 7)
        batch.rewards[~batch.valid] = noise
        batch.log_probs[~batch.valid] = -noise / 100
        torch.manual_seed(1)
        learner.update(batch, lag=1, progress=0.0)
        weights.append(learner.tensors())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.parametrize("rows", [0, 1])
def test_an_update_with_hardly_a_valid_row_breaks_nothing(rows: int) -> None:
    env = vector_env(*TWO)
    learner = learner_of(env)
    batch = batch_from(learner, env, 7)
    batch.valid[...] = False
    batch.valid[0, :rows] = True
    learner.update(batch, lag=0, progress=0.0)
    assert all(tensor.isfinite().all() for tensor in learner.tensors().values())


def test_the_normaliser_learns_from_valid_rows_alone() -> None:
    env = vector_env(*TWO)
    learner = learner_of(env, network=NetworkConfig(hidden=(8,)))
    batch = batch_from(learner, env, 7)
    learner.update(batch, lag=0, progress=0.0)
    assert learner.policy.encoder.normalizer is not None
    (values,) = batch.observations.values()
    torch.testing.assert_close(
        learner.policy.encoder.normalizer.mean, values[:-1][batch.valid].mean(0), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1e-3), (0.25, 7.5e-4), (1.0, 0.0), (1.5, 0.0)])
def test_a_linear_learning_rate_goes_to_zero(progress: float, expected: float) -> None:
    env = vector_env(*TWO)
    learner = learner_of(env, learning_rate=1e-3, lr_schedule="linear")
    assert learner.update(batch_from(learner, env, 7), 0, progress)["learning_rate"] == pytest.approx(expected)


@pytest.mark.parametrize(("target", "grows"), [(1e9, True), (1e-12, False)])
def test_an_adaptive_learning_rate_follows_the_divergence(target: float, grows: bool) -> None:
    env = vector_env(*TWO)
    learner = learner_of(env, learning_rate=1e-3, lr_schedule="adaptive", desired_kl=target)
    found = learner.update(batch_from(learner, env, 7), 0, 0.0)["learning_rate"]
    assert found == pytest.approx(1.5e-3 if grows else 1e-3 / 1.5)


def test_the_variance_that_is_explained_is_that_of_the_value_function_also_with_lag() -> None:
    env = vector_env(*TWO)
    learner = learner_of(env, update_epochs=1)
    batch = batch_from(learner, env, 7)
    batch.log_probs -= torch.linspace(-1, 1, batch.log_probs.numel()).reshape(batch.log_probs.shape)
    with torch.no_grad():
        foreseen = learner.policy.critic(learner.policy.encoder(batch.observations)).squeeze(-1)[:-1][batch.valid]
        _, targets, _ = learner.compute_advantages(batch, lag=1)
    expected = 1 - (targets[batch.valid] - foreseen).var() / targets[batch.valid].var()
    assert learner.update(batch, lag=1, progress=0.0)["explained_variance"] == pytest.approx(float(expected), abs=1e-4)


# -------------------------------------------------------------------------------------------------------------- runner


def small_runner(**changes: Any) -> APPO:
    return APPO("CartPole-v1", None, {**SMALL, "seed": 5, **changes}, sim_backend="native", num_envs=3)


def quiet(runner: APPO, folder: Path) -> Run:
    runner.run = QuietRun(folder)
    return runner.run


def train(folder: Path, updates: int = 6, *, stop_at: int = 0, save_interval: int = 3, **changes: Any) -> APPO:
    """Train for ``updates`` updates, or until ``stop_at``; continue from a checkpoint in the directory."""
    with small_runner(**changes) as runner:
        run = quiet(runner, folder)
        if (folder / "checkpoint.pt").exists():
            runner.restore(run.load())
        runner.should_stop = lambda metrics: "enough" if metrics.iteration == stop_at else None
        runner.learn(updates, save_interval)
        run.close()
    return runner


def assert_same_weights(one: APPO, two: APPO) -> None:
    mine, theirs = one.learner.tensors(), two.learner.tensors()
    different = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
    assert not different, f"{different} differ"


@pytest.mark.parametrize(
    ("rl_cfg", "message"),
    [({"num_stepz": 3}, "num_stepz"), ({"network": {"hiden": (3,)}}, "hiden")],
    ids=["algorithm", "network"],
)
def test_unknown_settings_are_errors(rl_cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        small_runner(**rl_cfg)


@pytest.mark.parametrize(
    "rl_cfg",
    [
        {"lr_schedule": "cosine"},
        {"clip_schedule": "adaptive"},
        {"num_steps": 0},
        {"update_epochs": 0},
        {"minibatch_size": 0},
    ],
    ids=lambda rl_cfg: next(iter(rl_cfg)),
)
def test_settings_out_of_range_are_errors(rl_cfg: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(rl_cfg))):
        small_runner(**rl_cfg)


def test_a_network_may_be_given_as_a_dict() -> None:
    assert small_runner(network={"hidden": [5, 6], "lstm": 3}).config.network == NetworkConfig((5, 6), 3)


def test_a_training_step_takes_rollouts_updates_publishes_and_describes_itself_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> Any:
        method = getattr(APPO, name)

        def call(self: APPO, *args: Any) -> Any:
            calls.append(name)
            return method(self, *args)

        return call

    for name in ("rollouts", "read_rollouts", "update", "publish", "metrics"):
        monkeypatch.setattr(APPO, name, noted(name))
    train(tmp_path, 2, in_process=True)
    assert calls == ["rollouts", "read_rollouts", "update", "publish", "metrics"] * 2


def test_describing_a_training_step_changes_nothing(tmp_path: Path) -> None:
    with small_runner(in_process=True) as runner:
        run = quiet(runner, tmp_path)
        found: list[tuple[Metrics, Metrics]] = []

        def describe(metrics: Metrics) -> None:
            rest = (metrics.version, metrics.wait_ns, metrics.learn_ns, metrics.events)
            episodes = metrics.returns, metrics.lengths
            one, two = (runner.metrics(episodes, metrics.lags, metrics.learning, *rest) for _ in range(2))
            found.append((one, two))
            assert runner.weights is not None
            assert (runner.iteration, runner.weights.version) == (metrics.iteration, metrics.version)

        run.listeners.append(describe)
        runner.learn(2)
        run.close()  # the listener and the runner refer to each other
    assert [(one.iteration, two.iteration) for one, two in found] == [(1, 1), (2, 2)]


def test_a_checkpoint_restores_weights_optimiser_and_counters(tmp_path: Path) -> None:
    first = train(tmp_path, 3, deterministic=True)
    second = small_runner(seed=99)
    second.restore(QuietRun(tmp_path).load())
    assert_same_weights(first, second)
    assert (second.iteration, second.env_steps) == (3, first.env_steps)
    assert second.learner.optimizer.learning_rate == first.learner.optimizer.learning_rate
    mine, theirs = first.learner.optimizer.state_dict(), second.learner.optimizer.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_in_memory_does_not_change_when_training_goes_on() -> None:
    runner = small_runner()
    kept = runner.checkpoint()
    before = {name: tensor.clone() for name, tensor in kept["policy"].items()}
    with torch.no_grad():
        for parameter in runner.learner.policy.parameters():
            parameter += 1
    assert all(torch.equal(tensor, kept["policy"][name]) for name, tensor in before.items())


@pytest.mark.parametrize("changes", [{}, {"collectors": 2}, {"network": {"hidden": (8,), "lstm": 4}}],
                         ids=["one collector", "two", "lstm"])  # fmt: skip
def test_the_same_seed_gives_the_same_weights_in_deterministic_mode(tmp_path: Path, changes: dict[str, Any]) -> None:
    one, two = (train(tmp_path / name, deterministic=True, **changes) for name in "ab")
    assert_same_weights(one, two)


def test_two_collectors_on_threads_are_refused_in_deterministic_mode(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share torch's global RNG"):
        train(tmp_path, 1, deterministic=True, collectors=2, in_process=True)


def test_another_seed_gives_other_weights_in_deterministic_mode(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(seed), 2, deterministic=True, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.learner.tensors()["actor.0.weight"], two.learner.tensors()["actor.0.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"collectors": 2}, marks=pytest.mark.soak),
        pytest.param({"rollouts_per_update": 2}, marks=pytest.mark.soak),
        {"lr_schedule": "adaptive"},
    ],
    ids=["one collector", "two", "two rollouts each", "adaptive"],
)
def test_a_run_that_is_resumed_from_a_checkpoint_is_as_if_it_had_never_stopped(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = train(tmp_path / "whole", deterministic=True, **changes)
    train(tmp_path / "parts", stop_at=3, deterministic=True, **changes)
    resumed = train(tmp_path / "parts", deterministic=True, **changes)
    assert_same_weights(whole, resumed)
    assert (whole.iteration, whole.env_steps) == (resumed.iteration, resumed.env_steps)


def test_a_run_that_stops_between_two_checkpoints_is_resumed_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Ctrl-C and a reached target stop a run there."""
    whole = train(tmp_path / "whole", deterministic=True)
    train(tmp_path / "parts", stop_at=4, deterministic=True)
    assert_same_weights(whole, train(tmp_path / "parts", deterministic=True))


def test_the_file_of_metrics_has_a_line_for_every_update_also_of_a_resumed_run(tmp_path: Path) -> None:
    train(tmp_path, stop_at=3, deterministic=True)
    train(tmp_path, deterministic=True)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["iteration", "1", "2", "3", "4", "5", "6"]


def test_learn_closes_the_run_that_it_made(tmp_path: Path) -> None:
    with small_runner() as runner:
        runner.learn(1, log_dir=tmp_path)
    assert runner.run is not None
    left_open = not runner.run._file.closed
    runner.run.close()
    assert not left_open


def test_lag_is_reported_for_every_rollout_and_never_above_its_bound(tmp_path: Path) -> None:
    with small_runner(max_lag=2, rollouts_per_update=2) as runner:
        lags: list[int] = []
        quiet(runner, tmp_path).listeners.append(lambda metrics: lags.extend(metrics.lags))
        runner.learn(20)
    assert len(lags) == 40
    assert max(lags) <= 2


def test_ctrl_c_saves_a_checkpoint_and_ends_quietly(tmp_path: Path) -> None:
    with small_runner() as runner:

        def interrupt(metrics: Metrics) -> None:
            if metrics.iteration == 4:
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            quiet(runner, tmp_path).listeners.append(interrupt)
            runner.learn(100_000)
        finally:
            signal.signal(signal.SIGINT, before)
    assert runner.run is not None
    runner.run.close()
    assert runner.stop_reason == "Ctrl-C"
    assert QuietRun(tmp_path).load()["iteration"] == 4


def interrupted(folder: Path, moment: str) -> tuple[int, str]:
    """Exit code and errors of a program that gets Ctrl-C as a terminal sends it, to all its processes: while it starts
    its collectors, or after its first update."""
    code = f"""
        import sys
        from pathlib import Path
        from tests.support.training import preset_runner
        if __name__ == "__main__":
            with preset_runner("CartPole-v1", Path({str(folder)!r}), 0) as runner:
                runner.should_stop = lambda metrics: print("learning", flush=True)
                print("starting", flush=True)
                runner.learn(1_000_000)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            while process.stdout.readline() not in (f"{moment}\n", ""):
                pass
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=within(100))
        finally:
            process.kill()
    return process.returncode, errors


def test_ctrl_c_in_a_terminal_ends_a_program_quietly_with_a_checkpoint(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "learning") == (0, "")
    assert QuietRun(tmp_path).load()["iteration"] >= 1


def test_ctrl_c_while_collectors_start_ends_a_program_quietly(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "starting") == (0, "")


def test_collectors_end_also_when_the_last_checkpoint_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    runner = small_runner()
    monkeypatch.setattr(quiet(runner, tmp_path), "save", full)
    with pytest.raises(OSError, match="no space"):
        runner.learn(2)
    left = dict(runner.collectors.pids) if runner.collectors is not None else {}
    runner.close()
    assert not left, "learn() left its collectors running"


def test_a_collector_that_raises_ends_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    with APPO(Cliff, None, {**SMALL, "num_steps": 4}, sim_backend="gymnasium", num_envs=2) as runner:
        quiet(runner, tmp_path)
        with pytest.raises(CollectorError, match="ZeroDivisionError") as caught:
            runner.learn(10_000)
        ended = time.monotonic()
    assert ended - moment_of(str(caught.value)) < within(PROMISE)
    assert "training.py" in caught.value.remote_traceback


def test_an_environment_that_cannot_be_made_in_a_collector_ends_the_run(tmp_path: Path) -> None:
    learner = os.getpid()

    def make() -> Any:
        if os.getpid() != learner:
            raise LookupError("no such level")
        return Cliff()

    with APPO(make, None, SMALL, sim_backend="gymnasium", num_envs=2) as runner:
        quiet(runner, tmp_path)
        with pytest.raises(CollectorError, match="LookupError: no such level"):
            runner.learn(10)


# ------------------------------------------------------------------------------------------------------------ it learns


@pytest.mark.parametrize("seed", [0, 1])
def test_it_solves_cart_pole(tmp_path: Path, seed: int) -> None:
    with preset_runner("CartPole-v1", tmp_path, seed) as runner:
        runner.learn(updates_of("CartPole-v1", runner))
    assert mean_return(runner.learner.policy, "CartPole-v1") >= 475


def test_it_solves_cart_pole_although_its_collector_is_killed_five_times(tmp_path: Path) -> None:
    with preset_runner("CartPole-v1", tmp_path, 2) as runner:
        assert runner.run is not None
        killed: list[int] = []
        lost: list[CollectorLost] = []

        def kill(metrics: Metrics) -> None:
            lost.extend(event for event in metrics.events if isinstance(event, CollectorLost))
            if metrics.iteration >= 8 * (len(killed) + 1) and len(killed) < 5:
                assert runner.collectors is not None
                for pid in set(runner.collectors.pids.values()) - set(killed):  # the last one may not be replaced yet
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

        runner.run.listeners.append(kill)
        runner.learn(updates_of("CartPole-v1", runner))
    assert len(killed) == 5
    assert [event.pid for event in lost] == killed
    assert mean_return(runner.learner.policy, "CartPole-v1") >= 475


def test_it_learns_to_swing_up_a_pendulum(tmp_path: Path) -> None:
    """A random policy has about -1200, and what always pushes one way no more than -900."""
    with preset_runner("Pendulum-v1", tmp_path, 0, deterministic=True) as runner:
        runner.learn(updates_of("Pendulum-v1", runner, steps=150_000))
    assert mean_return(runner.learner.policy, "Pendulum-v1") > -500


@pytest.mark.soak  # a minute
def test_it_plays_better_than_chance_from_pixels(tmp_path: Path) -> None:
    """The ball has to be met a dozen steps before a brick is hit, so chance gets a quarter of a brick in a game."""
    with preset_runner("Bricks-v0", tmp_path, 0) as runner:
        runner.learn(updates_of("Bricks-v0", runner, steps=60_000))
    draw = np.random.default_rng(1)
    chance = mean_score("Bricks-v0", lambda observations: draw.integers(0, 3, len(observations)))
    policy = runner.learner.policy

    def act(observations: Any) -> Any:
        (name,) = policy.encoder.leaves
        actions, _ = policy.act({name: torch.from_numpy(observations)})
        return policy.to_env(actions)

    assert mean_score("Bricks-v0", act) > 1.25 * chance
