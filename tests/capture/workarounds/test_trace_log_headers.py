"""Dynamo parses source files for its log of traced calls only where that is read."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

import autosplit


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of lines whose function Dynamo asked for."""
    found: list[str] = []

    def get_funcname(filename: str, lineno: int) -> None:
        found.append(filename)

    monkeypatch.setattr(symbolic_convert, "get_funcname", get_funcname)
    return found


def test_without_the_log_no_file_is_parsed(looked_up: list[str]) -> None:
    autosplit.split(nn.Linear(3, 3), (torch.ones(2, 3),))
    assert not looked_up


def test_with_the_log_its_lines_name_functions(
    looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = symbolic_convert.trace_call_log
    monkeypatch.setattr(log, "isEnabledFor", lambda level: level >= logging.DEBUG)
    autosplit.split(nn.Linear(3, 3), (torch.ones(2, 3),))
    assert looked_up
