"""The report of a run: written from any directory that a run can leave, and well-formed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memlane.train.options import OptionError
from memlane.train.ui.formatting import short_number
from memlane.train.ui.report import write_report
from memlane.train.ui.report.metrics import read_metrics

CONFIG: dict[str, Any] = {
    "name": "CartPole-v1",
    "options": {"env": "CartPole-v1", "algo": "appo", "collectors": 2, "seed": 7, "target": None, "config": {}},
    "algorithm": {"learning_rate": 0.002, "update_epochs": 8},
    "backend": "native",
    "num_envs": 32,
    "max_steps": 500_000,
    "target": 475.0,
    "versions": {"memlane": "0.1", "torch": "2.13"},
}
RESULT = {
    "stopped_by": "target",
    "reason": "the target of 475 is reached",
    "mean_return": 480.0,
    "evaluation": {"episodes": 20, "mean_return": 499.5, "std_return": 1.25},
}
NAMES = [
    "iteration", "env_steps", "seconds", "mean_return", "steps_per_second", "lag_mean", "lag_max", "learner_busy",
    "collectors_busy", "env_share", "ring_fill", "restarts", "policy_loss", "value_loss", "entropy", "kl",
    "learning_rate",
]  # fmt: skip


def row(number: int) -> str:
    values = [number, 1000 * number, number / 10, min(5 * number, 500), 10_000, 0.5, 1, 0.9, 0.4, 0.3, 0.5, 0]
    values += [-0.01, 20 / number, 0.6, 0.01, 0.002]
    return ",".join(map(str, values))


def run(folder: Path, rows: list[str], result: dict[str, Any] | None = RESULT) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.csv").write_text("\n".join([",".join(NAMES), *rows]) + "\n")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)
        assert "nan" not in picture
    assert not re.search(r"(src|href)=.?https?:", text)  # it needs nothing from elsewhere
    return text


def test_a_page_has_all_plots_and_the_words_around_them(tmp_path: Path) -> None:
    text = page_of(run(tmp_path, [row(number) for number in range(1, 201)]))
    titles = re.findall(r"<figcaption>([^<]*)", text)
    for title in (
        "Return over steps", "Return over time", "Throughput, steps/s", "Policy lag, versions",
        "Ring fill, share of slots unread", "KL divergence of an update", "Policy loss", "Value loss",
    ):  # fmt: skip
        assert title in titles
    assert "not enough updates" not in text
    for words in (
        "the target of 475 is reached",
        "499",
        "± 1.25 over 20 episodes",
        "2 collectors with 32 environments each",
    ):
        assert words in text
    for name in ("learning_rate", "update_epochs", "torch", "2.13"):
        assert name in text


def test_the_commands_are_those_that_work(tmp_path: Path) -> None:
    folder = run(tmp_path / "a run", [row(1), row(2)])
    text = page_of(folder)
    assert f"memlane resume &#x27;{folder}&#x27; --target inf<" in text
    assert f"memlane eval &#x27;{folder}&#x27;" in text


@pytest.mark.parametrize(
    ("result", "limit"),
    [
        ({"stopped_by": "max_steps", "reason": "the limit", "env_steps": 500_100}, " --max-steps 1000000"),
        ({"stopped_by": "max_steps", "reason": "the limit", "env_steps": 1_900_000}, " --max-steps 2000000"),
        ({"stopped_by": "max_seconds", "reason": "the limit of 5 s is reached"}, ""),
        (None, ""),
    ],
)
def test_a_run_is_resumed_beyond_the_limit_that_stopped_it(
    tmp_path: Path, result: dict[str, Any] | None, limit: str
) -> None:
    folder = run(tmp_path, [row(1), row(2)], result)
    assert f"memlane resume {folder}{limit}<" in page_of(folder)


def test_tensorboard_is_named_where_its_events_are(tmp_path: Path) -> None:
    folder = run(tmp_path, [row(1), row(2)])
    text = page_of(folder)
    assert "not installed during this run" in text
    assert 'pip install "memlane[cli]"' in text
    (folder / "events.out.tfevents.1").write_bytes(b"")
    text = page_of(folder)
    assert f"tensorboard --logdir {folder}" in text
    assert "not installed during this run" not in text


def test_the_page_has_its_style_and_its_script_inside(tmp_path: Path) -> None:
    text = page_of(run(tmp_path, [row(1), row(2)]))
    assert ":root { color-scheme: light dark;" in text
    assert "pointermove" in text
    assert not re.search(r"\$\w", text)  # every placeholder of the template is filled in


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5000])
def test_any_number_of_updates_makes_a_page(tmp_path: Path, rows: int) -> None:
    text = page_of(run(tmp_path, [row(number) for number in range(1, rows + 1)]))
    assert len(text) < 400_000


def test_a_run_without_a_result_says_so(tmp_path: Path) -> None:
    assert "not finished: the run is in progress or was killed" in page_of(run(tmp_path, [row(1), row(2)], None))


def test_a_folder_with_nothing_but_its_config_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no updates yet" in page_of(tmp_path)


def test_a_run_that_was_stopped_before_its_evaluation_makes_a_page(tmp_path: Path) -> None:
    text = page_of(
        run(tmp_path, [row(1), row(2)], {"stopped_by": "Ctrl-C", "reason": "stopped by Ctrl-C", "evaluation": {}})
    )
    assert "stopped by Ctrl-C" in text
    assert "evaluation return" not in text


def test_returns_that_do_not_exist_are_gaps(tmp_path: Path) -> None:
    rows = [row(number).replace(f",{5 * number},", ",nan,", 1) for number in range(1, 4)]
    page_of(run(tmp_path, [*rows, row(4), row(5)]))


def test_updates_that_were_made_twice_count_once(tmp_path: Path) -> None:
    """The run was killed after its fifth, and its checkpoint was of the third."""
    folder = run(tmp_path, [row(number) for number in (1, 2, 3, 4, 5, 4, 5, 6)])
    assert read_metrics(folder / "metrics.csv")["iteration"] == [1, 2, 3, 4, 5, 6]


def test_a_last_line_that_was_cut_off_is_no_error(tmp_path: Path) -> None:
    folder = run(tmp_path, [row(1), row(2), row(3), ""])
    with (folder / "metrics.csv").open("a") as file:
        file.write("4,40")
    columns = read_metrics(folder / "metrics.csv")
    assert columns["iteration"][:3] == [1, 2, 3]
    page_of(folder)


def test_what_the_config_says_is_text_and_not_html(tmp_path: Path) -> None:
    folder = run(tmp_path, [row(1), row(2)])
    (folder / "config.json").write_text(json.dumps({**CONFIG, "name": "<script>alert(1)</script>"}))
    assert "<script>alert" not in page_of(folder)


def test_a_name_that_no_file_can_hold_is_an_error_and_the_page_before_stays(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", [])
    page = write_report(folder).read_bytes()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "name": "half a pair: \ud800"}))
    with pytest.raises(OptionError, match=r"cannot be written: its config\.json, .* is damaged"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == page


def test_a_target_that_is_out_of_reach_does_not_flatten_the_curve(tmp_path: Path) -> None:
    folder = run(tmp_path, [row(number) for number in range(1, 50)])
    (folder / "config.json").write_text(json.dumps({**CONFIG, "target": 1e9}))
    assert "target 1G" not in page_of(folder)


def test_a_gif_is_part_of_the_page(tmp_path: Path) -> None:
    folder = run(tmp_path, [row(1), row(2)])
    (folder / "evaluation.gif").write_bytes(b"GIF89a")
    assert "data:image/gif;base64,R0lGODlh" in page_of(folder)


def test_a_report_needs_no_torch() -> None:
    code = "import sys; from memlane.train.ui.report import write_report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.5, "0.5"), (475, "475"), (-123.456, "-123"), (1234, "1,234"), (12345, "12.3k"),
        (999_999, "1M"), (999_400, "999k"), (1_234_567, "1.23M"), (2e-3, "0.002"),
        (5e-4, "5e-4"), (math.nan, "-"), (math.inf, "∞"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text
