"""The page that compares runs: groups, lines with bands, and tables, from any directories that runs can leave."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memlane.train import OptionError
from memlane.train.runs import find_runs
from memlane.train.ui.report import write_comparison
from memlane.train.ui.report.comparison import _resample
from tests.support.training import write_run
from tests.train.ui.test_report import Balanced


def page_of(directory: Path, path: Path | None = None) -> str:
    path = write_comparison(find_runs([directory]), path or directory / "compare.html")
    text = path.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)
        assert "nan" not in picture
    assert not re.search(r"(src|href)=.?https?:", text)
    return text


def plots_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(html.unescape(data)) for data in re.findall(r'data-plot="(.*?)"', text)]


def test_runs_that_differ_only_in_their_seed_are_one_line_with_a_band(tmp_path: Path) -> None:
    for seed, returns in enumerate([[0.0, 100.0], [0.0, 200.0], [0.0, 600.0]]):
        write_run(tmp_path / f"s{seed}", seed=seed, returns=returns)
    steps, seconds = plots_of(page_of(tmp_path))
    for plot in (steps, seconds):
        assert list(plot["lines"]) == ["appo"]
        assert plot["lines"]["appo"][-1] == 300
        assert [edge[-1] for edge in plot["bands"]["appo"]] == [100, 600]
    assert (steps["unit"], steps["x"][-1], seconds["unit"], seconds["x"][-1]) == ("steps", 200, "s", 1)


def test_groups_are_named_by_the_settings_that_tell_them_apart(tmp_path: Path) -> None:
    for rate in (0.001, 0.01):
        for seed in (0, 1):
            config = {"learning_rate": rate, "gamma": 0.9, "network": {"hidden": [8, 8]}}
            write_run(tmp_path / f"{rate}-{seed}", seed=seed, config=config)
    write_run(tmp_path / "other", algo="dqn", config={"gamma": 0.9})
    text = page_of(tmp_path)
    assert list(plots_of(text)[0]["lines"]) == ["appo · learning_rate=0.001", "appo · learning_rate=0.01", "dqn"]
    assert list(plots_of(text)[0]["bands"]) == ["appo · learning_rate=0.001", "appo · learning_rate=0.01"]
    assert "gamma" not in text


def test_a_setting_that_one_group_has_by_default_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config={})
    write_run(tmp_path / "b", config={"network": {"hidden": [8, 8]}})
    assert list(plots_of(page_of(tmp_path))[0]["lines"]) == [
        "appo · network.hidden=default",
        "appo · network.hidden=8,8",
    ]


def test_every_environment_has_plots_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", env="Pendulum-v1")
    titles = re.findall(r"<figcaption>([^<]*)", page_of(tmp_path))
    assert titles == [
        "CartPole-v1: return over steps", "CartPole-v1: return over time",
        "Pendulum-v1: return over steps", "Pendulum-v1: return over time",
    ]  # fmt: skip


def test_the_tables_say_what_was_reached(tmp_path: Path) -> None:
    for seed, count in enumerate((3, 5, 9)):
        write_run(tmp_path / f"s{seed}", seed=seed, returns=[470.0 + seed] * count, stopped_by="target", evaluation=500)
    write_run(tmp_path / "s3", seed=3, returns=[10.0], stopped_by="SIGTERM")
    (tmp_path / "s0" / "report.html").touch()
    text = page_of(tmp_path)
    for words in ("3 of 4", "500 / 900", "356 (10 to 472)", "500 (500 to 500)", "stopped", '<a href="s0/report.html">'):
        assert words in text
    assert '<a href="s1/report.html">' not in text


def test_links_go_from_the_page_to_the_reports(tmp_path: Path) -> None:
    write_run(tmp_path / "the runs" / "a")
    (tmp_path / "the runs" / "a" / "report.html").touch()
    (tmp_path / "pages").mkdir()
    text = page_of(tmp_path / "the runs", tmp_path / "pages" / "compare.html")
    assert '<a href="../the%20runs/a/report.html">' in text


def test_damaged_and_empty_runs_do_not_spoil_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    write_run(tmp_path / "new", seed=1, returns=[])
    write_run(tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    text = page_of(tmp_path)
    assert "3 runs in 1 group." in text
    assert str(tmp_path / "damaged") in text
    assert list(plots_of(text)[0]["lines"]) == ["appo"]


def test_what_configs_say_is_text_and_not_html(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, env="<script>alert(1)</script>", config={"x": f"<b>{name}</b>"})
    text = page_of(tmp_path)
    assert "<script>alert" not in text
    assert "<b>a" not in text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(OptionError, match=r"none/compare\.html cannot be written: No such file or directory"):
        write_comparison(find_runs([tmp_path]), tmp_path / "none" / "compare.html")


def test_a_line_is_drawn_between_the_points_of_a_run_and_kept_after_its_end() -> None:
    found = _resample([10.0, 20.0], [1.0, 3.0], [0.0, 10.0, 15.0, 20.0, 30.0])
    assert str(found) == "[nan, 1.0, 2.0, 3.0, 3.0]"
