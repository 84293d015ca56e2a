"""The examples in the README and in the guide to vector environments are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, VECTOR_ENVS = ROOT / "README.md", ROOT / "docs" / "vector-envs.md"
PRINTS = [
    r"\(64, 4\) 0\n",
    r"\d+ steps, mean return \d+, see runs/readme/report\.html\n",
    r"\{'obs': \(256, 4\), 'action': \(256,\), .*'next_obs': \(256, 4\), .*\}\n",
]


def test_the_readme_has_the_examples_that_are_tested_here() -> None:
    assert len(examples()) == len(PRINTS)


@pytest.mark.parametrize("number", range(len(PRINTS)))
def test_an_example_in_the_readme_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(examples()[number])
    run = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(PRINTS[number], run.stdout)


def test_the_examples_in_the_guide_to_vector_environments_run(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples(VECTOR_ENVS)))
    run = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def examples(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
