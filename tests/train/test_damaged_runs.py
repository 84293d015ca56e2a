"""Run directories that are damaged, or that somebody else has made: an error, and nothing of them is executed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memlane import cli
from memlane.native import built_in_names
from memlane.train import Options, Run, train
from memlane.train.run import Metrics

STEPS = 32 * 32


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert "CartPole-v1" in built_in_names()
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    config = {"update_epochs": 1, "network": {"hidden": (8,)}}
    train(Options("CartPole-v1", max_steps=2 * STEPS, run_dir=run_dir, config=config))
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cli, "_warm_up", lambda: None)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def change_options(run_dir: Path, **changes: Any) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    config["options"].update(changes)
    (run_dir / "config.json").write_text(json.dumps(config))


def change_checkpoint(run_dir: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save(change(checkpoint), run_dir / "checkpoint.pt")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def zip_of_nothing(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as content:
        content.writestr("hello", "hello")


def span_two_disks(file: Path) -> None:
    content = bytearray(file.read_bytes())
    locator = content.rindex(b"PK\x06\x07")
    content[locator + 16] = 2
    file.write_bytes(content)


CONFIG, CHECKPOINT, METRICS = "config.json", "checkpoint.pt", "metrics.csv"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "config is empty": lambda run: (run / CONFIG).write_bytes(b""),
    "config is cut off": lambda run: cut(run / CONFIG),
    "config is not text": lambda run: (run / CONFIG).write_bytes(bytes(range(256))),
    "config is a directory": lambda run: replace_by_directory(run / CONFIG),
    "config is a link to itself": lambda run: loop(run / CONFIG),
    "config is a list": lambda run: (run / CONFIG).write_text("[1, 2]"),
    "config is nested too deeply": lambda run: (run / CONFIG).write_text("[" * 100_000),
    "options are null": lambda run: (run / CONFIG).write_text('{"options": null}'),
    "options are a list": lambda run: (run / CONFIG).write_text('{"options": [1]}'),
    "the environment is a number": lambda run: change_options(run, env=5),
    "the environment is unknown": lambda run: change_options(run, env="Cartpoule-v9", backend="gymnasium"),
    "the environment is empty": lambda run: change_options(run, env=""),
    "the backend is unknown": lambda run: change_options(run, backend="abacus"),
    "the algorithm is unknown": lambda run: change_options(run, algo="guessing"),
    "the seed is a text": lambda run: change_options(run, seed="one"),
    "the settings are a list": lambda run: change_options(run, config=[1, 2]),
    "a setting is unknown": lambda run: change_options(run, config={"mood": "good"}),
    "a setting is out of range": lambda run: change_options(run, config={"gamma": 7.98}),
    "the network is larger than any memory": lambda run: change_options(run, config={"network": {"hidden": [10**14]}}),
    "a setting of the environment is unknown": lambda run: change_options(run, env_settings={"mood": 1}),
    "the network is another": lambda run: change_options(run, config={"network": {"hidden": [4, 4]}}),
    "the checkpoint spans two disks": lambda run: span_two_disks(run / CHECKPOINT),
    "checkpoint is missing": lambda run: (run / CHECKPOINT).unlink(),
    "checkpoint is empty": lambda run: (run / CHECKPOINT).write_bytes(b""),
    "checkpoint is cut off": lambda run: cut(run / CHECKPOINT),
    "checkpoint is a directory": lambda run: replace_by_directory(run / CHECKPOINT),
    "checkpoint is another archive": lambda run: zip_of_nothing(run / CHECKPOINT),
    "checkpoint is a list": lambda run: change_checkpoint(run, lambda _: [1, 2]),
    "checkpoint has no policy": lambda run: change_checkpoint(run, lambda saved: {**saved, "policy": 0, "learner": 0}),
    "checkpoint is a link into the void": lambda run: (
        (run / CHECKPOINT).unlink(), (run / CHECKPOINT).symlink_to(run / "void"),
    ),
}  # fmt: skip
DAMAGE_OF_RESUME: dict[str, Callable[[Path], Any]] = {
    "metrics are empty": lambda run: (run / METRICS).write_bytes(b""),
    "metrics are not text": lambda run: (run / METRICS).write_bytes(bytes(range(256))),
    "metrics have no iteration": lambda run: (run / METRICS).write_text("a,b\n1,2\n"),
    "metrics are a directory": lambda run: replace_by_directory(run / METRICS),
    "the run's state is missing": lambda run: change_checkpoint(
        run, lambda saved: {key: value for key, value in saved.items() if key != "run"}
    ),
    "the number of updates is a text": lambda run: change_checkpoint(run, lambda saved: {**saved, "iteration": "one"}),
}


def require_one_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("command", ["resume", "eval"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_one_error(kind: str, command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGE[kind](run_dir)
    error = require_one_error(capsys, command, run_dir)
    assert len(error) < 2000


@pytest.mark.parametrize("kind", DAMAGE_OF_RESUME)
def test_a_run_that_is_damaged_where_only_a_resume_looks_is_one_error(
    kind: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE_OF_RESUME[kind](run_dir)
    require_one_error(capsys, "resume", run_dir, "--max-steps", 3 * STEPS)


@pytest.mark.parametrize("content", ["", "[]", '{"reason": 1, "env_steps": "x", "stopped_by": "max_steps"}', "\0"])
def test_a_damaged_result_is_one_error_of_the_report(
    content: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "result.json").write_text(content)
    error = require_one_error(capsys, "eval", run_dir, "--render", "gif", "--episodes", "1")
    assert f"the report of {run_dir} cannot be written" in error


# ------------------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_code_that_a_run_names_is_loaded_only_if_it_is_trusted(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = f"stranger_of_{command}"  # a module is imported once
    (run_dir / f"{stranger}.py").write_text("print('the stranger speaks')")
    monkeypatch.syspath_prepend(run_dir)
    change_options(run_dir, env=f"{stranger}:CartPole-v1", backend="gymnasium")
    error = require_one_error(capsys, command, run_dir)
    assert f"names code that would be loaded, '{stranger}:CartPole-v1'; if you trust it, pass --trust" in error
    assert stranger not in sys.modules
    cli.main([command, str(run_dir), "--trust"])
    assert "the stranger speaks" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_library_that_a_run_names_is_loaded_only_if_it_is_trusted(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = run_dir / "stranger.so"
    library.write_bytes(b"no library")
    change_options(run_dir, env=str(library), backend="native")
    assert "pass --trust" in require_one_error(capsys, command, run_dir)
    assert f"{library} cannot be loaded" in require_one_error(capsys, command, run_dir, "--trust")


@pytest.mark.parametrize(
    "name", ["config.json", "checkpoint.pt", "result.json", "report.html", "run.lock", "evaluation.gif"]
)
def test_a_link_in_a_run_is_replaced_and_not_followed(name: str, run_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    original = (run_dir / name).read_bytes() if (run_dir / name).exists() else b""
    victim.write_bytes(original)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(victim)
    if name == "evaluation.gif":
        assert cli.main(["eval", str(run_dir), "--episodes", "1", "--render", "gif"]) == 0
    else:
        assert cli.main(["resume", str(run_dir), "--max-steps", str(3 * STEPS)]) == 0
    assert victim.read_bytes() == original
    assert not (run_dir / name).is_symlink()


def test_metrics_are_not_appended_to_what_a_link_points_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.csv").symlink_to(victim)
    run = Run(run_dir, tensorboard=False)
    with pytest.raises(OSError, match="symbolic link"):
        run.record(Metrics(1, 1))
    run.close()
    assert os.stat(victim).st_size == 0
