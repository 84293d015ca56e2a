"""``new``: the directory that it writes builds, passes its own tests, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memlane.core import MemlaneError
from memlane.native import load
from memlane.native.build import _FAST, _FLAGS, build
from memlane.native.lowlevel import open_library
from memlane.native.new import DirectoryExists, NewError, new
from tests.support.processes import within


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment, built."""
    folder = new("orchard", tmp_path_factory.mktemp("new") / "orchard")
    build(folder / "orchard.c")
    return folder


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=within(100))


# ------------------------------------------------------------------------------------------------------ what is written


def test_the_folder_has_source_test_training_and_a_page(tmp_path: Path) -> None:
    names = {file.name for file in new("orchard", tmp_path / "new").iterdir()}
    assert names == {"orchard.c", "test_orchard.py", "train.py", "README.md"}


def test_the_folder_is_called_like_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new("orchard") == Path("orchard")
    assert (tmp_path / "orchard" / "orchard.c").exists()


def test_no_word_of_the_template_is_left(folder: Path) -> None:
    assert [file.name for file in folder.glob("*.[cpm]*") if "my_env" in file.read_text()] == []


def test_its_page_names_only_files_that_it_has(folder: Path) -> None:
    named = set(re.findall(r"\b\w+\.(?:c|py|so)\b", (folder / "README.md").read_text()))
    assert named <= {file.name for file in folder.iterdir()}


# -------------------------------------------------------------------------------------------------------- that it works


def test_it_is_built_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build(new("orchard", tmp_path / "new") / "orchard.c")
    assert capfd.readouterr().err == ""


def test_its_undefined_behaviour_is_none(tmp_path: Path) -> None:
    library = build(new("orchard", tmp_path / "new") / "orchard.c", debug=True)
    play = (
        "import sys; from memlane.native import load; envs = load(sys.argv[1], num_envs=8); envs.reset(seed=1)\n"
        "for _ in range(600): envs.step(envs.action_space.sample())\n"
        "envs.render(); envs.close()"
    )
    result = run_in(tmp_path, "-c", play, str(library))
    assert (result.returncode, result.stderr) == (0, "")


def test_it_has_the_name_that_was_given(folder: Path) -> None:
    assert open_library(folder / "orchard.so").name == "orchard"


def test_its_image_shows_something(folder: Path) -> None:
    envs = load(folder / "orchard.so")
    envs.reset(seed=1)
    image = envs.render()
    envs.close()
    assert image is not None
    assert len({tuple(color) for color in image.reshape(-1, 3).tolist()}) == 3


def test_it_passes_its_own_tests(folder: Path) -> None:
    result = run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b3 passed", result.stdout)


def test_its_training_is_far_better_than_chance(folder: Path) -> None:
    result = run_in(folder, "train.py")
    assert result.returncode == 0, result.stderr
    random, trained = (float(number) for number in re.findall(r"policy: mean return (\S+)", result.stdout))
    assert random < 1
    assert trained > 10


def test_training_without_the_library_says_how_to_make_it(tmp_path: Path) -> None:
    result = run_in(new("orchard", tmp_path / "new"), "train.py")
    assert result.returncode != 0
    assert "`memlane build`" in result.stderr


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["", "2fast", "a-b", "a b", "../up", "a.c", "böot", "_hidden"])
def test_what_is_no_identifier_is_no_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(NewError, match="cannot be a name: use the letters A to Z"):
        new(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "language"), [("lambda", "Python"), ("double", "C"), ("while", "Python")])
def test_words_of_the_languages_are_no_names(name: str, language: str, tmp_path: Path) -> None:
    with pytest.raises(NewError, match=f"it is a keyword of {language}"):
        new(name, tmp_path / "new")


@pytest.mark.parametrize("name", ["random", "numpy", "memlane", "train"])
def test_a_library_that_would_hide_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(NewError, match=rf"{name}\.so would hide the Python module {name} from `import {name}`"):
        new(name, tmp_path / "new")


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "orchard").mkdir()
    (tmp_path / "orchard" / "train.py").write_text("mine")
    with pytest.raises(DirectoryExists, match="already exists and was not changed"):
        new("orchard", tmp_path / "orchard")
    assert [file.name for file in (tmp_path / "orchard").iterdir()] == ["train.py"]
    assert (tmp_path / "orchard" / "train.py").read_text() == "mine"


def test_an_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "orchard").write_text("mine")
    with pytest.raises(DirectoryExists):
        new("orchard", tmp_path / "orchard")
    assert (tmp_path / "orchard").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_told() -> None:
    with pytest.raises(NewError, match="cannot be written"):
        new("orchard", "/proc/orchard")


def test_errors_are_those_that_python_programmers_catch() -> None:
    assert issubclass(NewError, MemlaneError)
    assert issubclass(NewError, ValueError)
    assert issubclass(DirectoryExists, FileExistsError)


# ------------------------------------------------------------------------------------------------------------- its page

PAGE = Path(__file__).parents[2] / "docs" / "native-envs.md"


def examples(kind: str) -> str:
    return "\n".join(re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL))


def test_the_examples_in_the_page_run_in_a_new_folder(tmp_path: Path) -> None:
    build(new("catcher", tmp_path / "new") / "catcher.c")
    result = run_in(tmp_path / "new", "-W", "error", "-c", examples("python"))
    assert (result.returncode, result.stderr) == (0, "")


def test_the_example_in_the_page_for_numba_runs(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "walk.py").write_text(examples("python numba"))  # numba reads the source
    result = run_in(tmp_path, "walk.py")
    assert (result.returncode, result.stderr) == (0, "")


def test_the_page_shows_the_code_that_the_new_file_has(tmp_path: Path) -> None:
    source = (new("catcher", tmp_path / "new") / "catcher.c").read_text()
    shown = [line.strip() for line in examples("c").splitlines() if line.strip() not in ("", "...")]
    assert [line for line in shown if line not in source] == []


def test_the_page_shows_the_flags_that_are_used() -> None:
    (command,) = re.findall(r"^cc .*$", PAGE.read_text(), re.MULTILINE)
    meant_for_the_result = [flag for flag in [*_FAST, *_FLAGS] if not flag.startswith("-W")]
    assert [flag for flag in meant_for_the_result if flag not in command.split()] == []
