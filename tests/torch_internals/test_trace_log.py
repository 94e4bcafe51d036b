"""What torch's structured log says of graphs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from autosplit.splitting import split


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        self.graphs[artifact.get("name", "")] = str(getattr(record, "payload", ""))


def test_graphs_are_artifacts_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    log, heard = logging.getLogger("torch.__trace"), Heard()
    monkeypatch.setattr(log, "handlers", [heard])
    split(nn.Linear(4, 4), torch.ones(2, 4))
    wanted = {f"autosplit_{name}" for name in ("forward", "backward_input", "backward_weight")}
    assert wanted <= heard.graphs.keys()
    assert "torch.ops.aten.mm" in heard.graphs["autosplit_backward_weight"]
