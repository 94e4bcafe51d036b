"""Names of backends, and what a backend that fails says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autosplit
from autosplit.backends.backend import Code
from autosplit.backends.eager import Eager
from autosplit.errors import BackendError, SplitError
from autosplit.runtime.split_options import BACKENDS


class Broken(Eager):
    def compile(self, name: str, module: fx.GraphModule) -> Code:
        raise RuntimeError("no kernel for that")


@pytest.mark.parametrize("name", ["", "Inductor", "cudagraphs"])
def test_unknown_backend_lists_the_known_ones(name: str) -> None:
    with pytest.raises(SplitError, match=r"unknown backend.*'eager', 'inductor'"):
        autosplit.split(nn.Linear(2, 2), backend=name)


def test_failure_names_graph_and_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "broken", Broken)  # type: ignore[arg-type]
    expected = r"'broken' cannot compile the forward graph \(RuntimeError: no kernel for that\)"
    with pytest.raises(BackendError, match=expected):
        autosplit.split(nn.Linear(2, 2), (torch.randn(1, 2),), backend="broken")


def test_failure_is_no_reason_to_split_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "broken", Broken)  # type: ignore[arg-type]
    split = autosplit.split(nn.Linear(2, 2), backend="broken")

    def call(x: Tensor) -> Tensor:
        output: Tensor = split(x)
        return output

    for _ in range(2):
        with pytest.raises(BackendError, match="backend='eager' runs every graph"):
            call(torch.randn(1, 2))
