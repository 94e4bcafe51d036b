"""Names of traced functions, which only torch's log of calls shows, are looked up for it alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

from autosplit import split


@pytest.mark.parametrize("is_logged", [False, True])
def test_names_are_looked_up_for_the_log(
    monkeypatch: pytest.MonkeyPatch, *, is_logged: bool
) -> None:
    files: list[Any] = []
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda file, _: files.append(file))
    log = logging.Logger("calls", logging.DEBUG if is_logged else logging.INFO)
    monkeypatch.setattr(symbolic_convert, "trace_call_log", log)
    split(nn.Sequential(nn.Linear(3, 3)), backend="eager")(torch.randn(2, 3))
    assert bool(files) == is_logged
