"""Resuming a run and loading its policy: what has to fit, and what is said when it does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from memlane.train import OptionError, Options, evaluate, load_policy, train

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
    (runs["dqn"] / "replay.memlane").unlink()
    with pytest.raises(OptionError, match=r"replay\.memlane is missing: the replay belongs to the checkpoint"):
        train(options_of(runs["dqn"], "dqn"), resume=True)


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
