"""Training runs: their directories, what ends them, what they leave, and how they are resumed."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memlane.train import Metrics, OptionError, Options, evaluate, load_policy, train
from memlane.train.runs import read_run
from tests.support.processes import PATIENCE, wait_for
from tests.support.training import Cliff

_SETTINGS: dict[str, dict[str, Any]] = {
    "appo": {"num_steps": 8, "update_epochs": 1, "in_process": True},
    "dqn": {"num_steps": 8, "learning_starts": 50, "samples_per_insert": 4.0, "in_process": True},
}


def options_of(run_dir: Path, algo: str, config: dict[str, Any] | None = None, **changes: Any) -> Options:
    given = {"env": "CartPole-v1", "algo": algo, "num_envs": 2, "max_steps": 100, "run_dir": run_dir, **changes}
    return Options(**given, config={**_SETTINGS[algo], **(config or {})})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short run of each algorithm."""
    folder = tmp_path_factory.mktemp("finished")
    for algo in _SETTINGS:
        train(options_of(folder / algo, algo))
    return {algo: folder / algo for algo in _SETTINGS}


@pytest.fixture
def runs(finished: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies of them, to change."""
    return {algo: Path(shutil.copytree(run_dir, tmp_path / algo)) for algo, run_dir in finished.items()}


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("appo", {"config": {"learning_rate": 1e-5}, "num_envs": 4}),
        ("appo", {"env": "memlane/CartPole-v1"}),
        ("dqn", {"config": {"learning_rate": 1e-5, "tau": 0.1}}),
    ],
)
def test_a_run_is_resumed_with_other_options_that_fit_its_checkpoint(
    runs: dict[str, Path], algo: str, changes: dict[str, Any]
) -> None:
    assert train(options_of(runs[algo], algo, max_steps=200, **changes), resume=True).env_steps >= 200


@pytest.mark.parametrize(
    ("algo", "changes", "wanted", "required"),
    [
        ("appo", {"env": "Acrobot-v1"}, "env='Acrobot-v1'", "env='CartPole-v1'"),
        ("appo", {"config": {"network": {"hidden": (8,)}}}, "network.hidden=(8,)", "network.hidden=(64, 64)"),
        ("appo", {"config": {"network": {"lstm": 8}}}, "network.lstm=8", "network.lstm=0"),
        ("dqn", {"num_envs": 4}, "num_envs=4", "num_envs=2"),
        (
            "dqn",
            {"config": {"samples_per_insert": 8, "dueling": True}},
            "samples_per_insert=8.0, dueling=True",
            "samples_per_insert=4.0, dueling=False",
        ),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_an_error_and_change_nothing(
    runs: dict[str, Path], algo: str, changes: dict[str, Any], wanted: str, required: str
) -> None:
    before = {path.name: path.read_bytes() for path in runs[algo].iterdir()}
    with pytest.raises(OptionError) as caught:
        train(options_of(runs[algo], algo, max_steps=200, **changes), resume=True)
    assert str(caught.value) == (
        f"{runs[algo]} cannot be resumed with {wanted}: its checkpoint was saved with {required}; resume it with that, "
        "or train in another run_dir"
    )
    assert {path.name: path.read_bytes() for path in runs[algo].iterdir()} == before


def test_another_algorithm_is_an_error(runs: dict[str, Path]) -> None:
    with pytest.raises(
        OptionError, match=r"cannot be resumed with algo='dqn': its checkpoint was saved with algo='appo'"
    ):
        train(options_of(runs["appo"], "dqn"), resume=True)


def test_a_run_is_resumed_in_a_directory_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="resume needs run_dir"):
        train(Options("CartPole-v1"), resume=True)
    with pytest.raises(OptionError, match=f"there is no directory {tmp_path}/none"):
        train(Options("CartPole-v1", run_dir=tmp_path / "none"), resume=True)
    with pytest.raises(OptionError, match=r"is not a run directory: it has no config\.json"):
        train(Options("CartPole-v1", run_dir=tmp_path), resume=True)


def test_a_missing_or_damaged_checkpoint_is_an_error_that_names_it(runs: dict[str, Path]) -> None:
    run_dir = runs["appo"]
    checkpoint = run_dir / "checkpoint.pt"
    config, content = (run_dir / "config.json").read_bytes(), checkpoint.read_bytes()
    damages = {
        content[: len(content) // 2]: f"{checkpoint} is damaged",
        content[:2000] + bytes(100) + content[2100:]: f"the checkpoint in {run_dir} cannot be loaded",
        None: f"{run_dir} has no checkpoint.pt",
    }
    for damage, message in damages.items():
        checkpoint.unlink() if damage is None else checkpoint.write_bytes(damage)
        for load in (lambda: load_policy(run_dir), lambda: train(options_of(run_dir, "appo"), resume=True)):
            with pytest.raises(OptionError, match=message):
                load()
    assert (run_dir / "config.json").read_bytes() == config


def test_a_missing_replay_is_an_error_that_names_it(runs: dict[str, Path]) -> None:
    (replay,) = runs["dqn"].glob("replay-*.memlane")
    replay.unlink()
    with pytest.raises(OptionError, match=r"replay-\d\.memlane is missing: the replay belongs to the checkpoint"):
        train(options_of(runs["dqn"], "dqn", max_steps=200), resume=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is damaged: JSONDecodeError"),
        ('{"options": 3}', "config.json is damaged: TypeError"),
        ('{"options": {"env": "CartPole-v1", "speed": 3}}', r"is of another version of memlane, .*\['speed'\]"),
    ],
)
def test_a_damaged_config_is_an_error_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(OptionError, match=message):
        load_policy(tmp_path)


def test_an_evaluation_needs_episodes(finished: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="episodes must be at least 1, found 0"):
        evaluate(load_policy(finished["appo"]), "CartPole-v1", "native", episodes=0)


# ---------------------------------------------------------------------------------------------------------- directories


def test_a_run_gets_a_directory_that_names_it_and_another_one_in_the_same_second_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memlane.train.run_dir.time.strftime", lambda _: "20260101-000000")
    results = [train(options_of(None, "appo", seed=3)) for _ in range(2)]  # type: ignore[arg-type]
    assert [str(result.run_dir) for result in results] == [
        "runs/CartPole-v1-appo-s3-20260101-000000",
        "runs/CartPole-v1-appo-s3-20260101-000000-2",
    ]
    for result in results:
        assert json.loads((result.run_dir / "config.json").read_text())["options"]["run_dir"] == str(result.run_dir)


def test_a_second_training_in_a_directory_is_refused_while_the_first_goes_on_and_changes_nothing(
    tmp_path: Path,
) -> None:
    errors: list[str] = []

    def train_there_too(metrics: Metrics) -> None:
        if metrics.iteration == 1:
            before = sorted(path.name for path in tmp_path.iterdir())
            for resume in (False, True):
                with pytest.raises(OptionError) as caught:
                    train(options_of(tmp_path, "appo"), resume=resume)
                errors.append(str(caught.value))
            assert sorted(path.name for path in tmp_path.iterdir()) == before

    train(options_of(tmp_path, "appo", save_seconds=1e-9), on_update=train_there_too)
    assert "has a run already" in errors[0]
    assert "has no checkpoint.pt" in errors[1]  # the first update has not been saved yet

    def resume_too(metrics: Metrics) -> None:  # noqa: ARG001
        if not errors[2:]:
            with pytest.raises(OptionError) as caught:
                train(options_of(tmp_path, "appo", max_steps=400), resume=True)
            errors.append(str(caught.value))

    train(options_of(tmp_path, "appo", max_steps=200), resume=True, on_update=resume_too)
    assert f"{tmp_path} is in use: pid {os.getpid()} (this process) trains in it" in errors[2]


def test_the_directory_is_told_before_the_collectors_start(tmp_path: Path) -> None:
    told: list[Path] = []
    train(options_of(tmp_path, "appo"), on_start=told.append)
    assert told == [tmp_path]


# --------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("algo", _SETTINGS)
def test_a_limit_is_checked_at_every_update(tmp_path: Path, algo: str, deterministic: bool) -> None:
    config = {"in_process": True}
    result = train(options_of(tmp_path, algo, config, max_steps=100, deterministic=deterministic))
    assert result.stopped_by == "max_steps"
    assert 100 <= result.env_steps < 100 + 2 * 8
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["iteration"] == result.iteration


def test_a_deterministic_run_that_is_stopped_anywhere_is_resumed_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    config = {"in_process": True, "lr_schedule": "constant"}

    def options(name: str, max_steps: int) -> Options:
        return options_of(tmp_path / name, "appo", config, max_steps=max_steps, deterministic=True, save_interval=4)

    whole = train(options("whole", 400))
    for max_steps in (40, 200, 300, 400):  # before the first checkpoint of the interval, and between two
        parts = train(options("parts", max_steps), resume=max_steps > 40)
    assert (whole.iteration, whole.env_steps) == (parts.iteration, parts.env_steps)
    one, two = (load_policy(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def metrics_rows(run_dir: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in (run_dir / "metrics.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize("limit", ["target", "max_steps"])
def test_a_finished_run_is_evaluated_and_not_trained_when_it_is_resumed(runs: dict[str, Path], limit: str) -> None:
    run_dir = runs["appo"]
    before = json.loads((run_dir / "result.json").read_text())
    started: list[Path] = []
    changes: dict[str, Any] = {} if limit == "max_steps" else {"max_steps": 10_000, "target": -1.0}
    if limit == "target":  # which counts over 100 episodes
        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        checkpoint["run"]["recent_returns"] = [1.0] * 100
        torch.save(checkpoint, run_dir / "checkpoint.pt")
    result = train(options_of(run_dir, "appo", **changes), resume=True, on_start=started.append)
    assert (result.stopped_by, result.iteration, result.env_steps) == (limit, before["iteration"], before["env_steps"])
    assert result.evaluation["episodes"] == 20
    assert not started
    assert metrics_rows(run_dir) == list(range(1, before["iteration"] + 1))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_written_when_its_time_has_come_and_the_report_exists_from_the_first_on(tmp_path: Path) -> None:
    found: list[tuple[bool, bool]] = []

    def look(metrics: Metrics) -> None:  # noqa: ARG001
        found.append(((tmp_path / "checkpoint.pt").exists(), (tmp_path / "report.html").exists()))

    train(options_of(tmp_path, "appo", save_seconds=1e-9), on_update=look)
    assert found[0] == (False, False)
    assert set(found[1:]) == {(True, True)}


def test_without_time_or_interval_there_is_a_checkpoint_at_the_end(tmp_path: Path) -> None:
    found: list[bool] = []
    result = train(
        options_of(tmp_path, "dqn", save_seconds=math.inf, save_interval=10**9),
        on_update=lambda _: found.append((tmp_path / "checkpoint.pt").exists()),
    )
    assert not any(found)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == result.iteration
    assert [path.name for path in tmp_path.glob("replay*")] == [checkpoint["replay"]]


def test_a_function_of_the_caller_that_raises_leaves_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    def fail(metrics: Metrics) -> None:
        if metrics.iteration == 3:
            raise ArithmeticError("the caller's own")

    with pytest.raises(ArithmeticError, match="the caller's own"):
        train(options_of(tmp_path, "appo"), on_update=fail)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["iteration"] == 3
    info = read_run(tmp_path)
    assert (info.state, info.reason) == ("failed", "ArithmeticError: the caller's own")
    assert "the caller&#x27;s own" in (tmp_path / "report.html").read_text()
    train(options_of(tmp_path, "appo"), resume=True)
    assert read_run(tmp_path).state == "finished"


def test_a_collector_that_raises_is_the_reason_of_a_failed_run(tmp_path: Path) -> None:
    options = Options(Cliff, backend="gymnasium", num_envs=2, run_dir=tmp_path, config=_SETTINGS["appo"])
    with pytest.raises(ZeroDivisionError):
        train(options)
    info = read_run(tmp_path)
    assert info.state == "failed"
    assert "ZeroDivisionError" in info.reason


def train_for_ever(options: Options, resume: bool) -> None:
    train(options, resume=resume)


@pytest.mark.parametrize("algo", _SETTINGS)
def test_a_run_that_is_killed_again_and_again_is_resumed_each_time(tmp_path: Path, algo: str) -> None:
    seed = int(os.environ.get("MEMLANE_KILL_SEED", random.randrange(2**31)))
    print(f"MEMLANE_KILL_SEED={seed}")
    rng = random.Random(seed)
    options = options_of(tmp_path, algo, max_steps=10**9, target=math.inf, save_interval=1)
    checkpoint = tmp_path / "checkpoint.pt"
    reached = 0
    for number in range(4):
        process = mp.get_context("fork").Process(target=train_for_ever, args=(options, number > 0))
        process.start()
        try:
            before = checkpoint.stat().st_ino if checkpoint.exists() else 0
            assert wait_for(lambda: checkpoint.exists() and checkpoint.stat().st_ino != before, PATIENCE)  # noqa: B023
            time.sleep(rng.uniform(0, 0.2))
        finally:
            process.kill()
            process.join()
        iteration = torch.load(checkpoint, weights_only=True)["iteration"]
        assert iteration > reached
        reached = iteration
        assert read_run(tmp_path).state == "killed"
        assert (tmp_path / "report.html").exists()
    env_steps = torch.load(checkpoint, weights_only=True)["env_steps"]
    result = train(options_of(tmp_path, algo, max_steps=env_steps + 100), resume=True)
    assert result.iteration > reached
    assert metrics_rows(tmp_path) == list(range(1, result.iteration + 1))


# -------------------------------------------------------------------------------------------------------------- signals


@pytest.fixture
def default_actions() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_at(iteration: int, number: int) -> Callable[[Metrics], None]:
    def send(metrics: Metrics) -> None:
        if metrics.iteration == iteration:
            os.kill(os.getpid(), number)

    return send


@pytest.mark.usefixtures("default_actions")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_stops_after_the_update_with_a_checkpoint_and_a_report(
    tmp_path: Path, number: int, name: str, deterministic: bool
) -> None:
    options = options_of(tmp_path, "appo", max_steps=10**9, deterministic=deterministic)
    result = train(options, on_update=send_at(3, number))
    assert (result.stopped_by, result.reason, result.iteration) == (name, f"stopped by {name}", 3)
    assert result.evaluation == {}
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["iteration"] == 3
    assert f"stopped by {name}" in (tmp_path / "report.html").read_text()
    assert read_run(tmp_path).state == "stopped"


@pytest.mark.usefixtures("default_actions")
def test_a_signal_in_the_evaluation_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)

    monkeypatch.setattr("memlane.train.trainer.evaluate", slow)
    result = train(options_of(tmp_path, "appo"))
    assert (result.stopped_by, result.evaluation) == ("SIGTERM", {})
    assert read_run(tmp_path).state == "stopped"


@pytest.mark.usefixtures("default_actions")
def test_a_second_signal_ends_a_training_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlane.train.interrupts._SAME_SECONDS", 0.0)

    def send_twice(metrics: Metrics) -> None:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train(options_of(tmp_path, "appo", max_steps=10**9), on_update=send_twice)
    assert caught.value.code == 143
