"""Long work says that it goes on, and all of it how long it took."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest
import torch
from torch import nn

import autosplit
from autosplit.text import progress
from autosplit.text.progress import working


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    handler, log = Lines(), logging.getLogger("autosplit")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()  # type: ignore[attr-defined]  # of what loggers are enabled for
    return handler.lines


def test_captures_are_logged_and_why_there_is_another(lines: list[str]) -> None:
    model = autosplit.split(nn.Linear(4, 4))
    for shape in ((2, 4), (2, 2, 4), (2, 4)):
        model(torch.randn(shape)).sum().backward()
    first, second = lines
    assert first.startswith("capturing Linear: ")
    assert second.startswith("capturing Linear, as none of its 1 graphs holds for this call: ")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_a_log_the_first_rank_says_that_it_goes_on(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with working("searching"):
        time.sleep(0.2)
    message = capsys.readouterr().err
    assert message == ("autosplit: searching: 0 s so far\n" if rank == "0" else "")
    assert not [item for item in threading.enumerate() if item.name == "autosplit-progress"]


def test_counted_work_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with working("comparing", total=40, unit="step") as counted:
        for _ in range(7):
            counted.advance(lambda: "loss 2.31")
        time.sleep(0.2)
    line = capsys.readouterr().err
    assert line == "autosplit: comparing: step 7 of 40, loss 2.31, 0 s so far, 0 s left\n"


def test_counted_work_has_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with working("comparing", total=2, unit="step") as counted:
        counted.advance(lambda: "loss 2.31")
    assert "comparing:   0%" in capsys.readouterr().err
