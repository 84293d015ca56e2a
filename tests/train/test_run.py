"""The run directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memlane.train import Run


def test_a_missing_tensorboard_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import fails
    Run(tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        'tensorboard is not installed, so metrics are written to metrics.csv only: pip install "memlane[cli]"'
    ]
    assert not list(tmp_path.glob("events*"))
