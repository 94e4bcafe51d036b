"""Graphs in torch's structured trace."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._logging._internal import trace_log

import autosplit


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_the_graphs_of_a_capture_are_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Records()
    monkeypatch.setattr(trace_log, "handlers", [handler])
    autosplit.split(nn.Linear(3, 3), torch.ones(2, 3))
    texts = {
        record.metadata["artifact"]["name"]: record.payload
        for record in handler.records
        if record.metadata.get("artifact", {}).get("name", "").startswith("autosplit_")
    }
    names = ["joint", "forward", "backward", "backward_input", "backward_weight"]
    assert [*texts] == [f"autosplit_{name}" for name in names]
    assert "addmm" in texts["autosplit_forward"]
    assert "mm" not in texts["autosplit_backward_input"]
