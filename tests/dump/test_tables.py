"""report(): the tables say what is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autosplit
from autosplit import SplitError
from autosplit.dump.tables import short_source
from tests.zoo import SwiGLU


def test_report_of_a_linear_layer() -> None:
    split = autosplit.split(nn.Linear(3, 2), (torch.randn(4, 3, requires_grad=True),))
    # W computes dW with 2*4*3*2 = 48 FLOPs, and the bias gradient by a sum.
    assert split.report().splitlines() == [
        "Linear: args[0] -> output",
        "",
        "graph                    ops    views    GFLOPs    state in    other in    out",
        "---------------------  -----  -------  --------  ----------  ----------  -----",
        "F  forward                 1        1   4.8e-08        32 B        48 B   80 B",
        "I  backward_input          1        0   4.8e-08        24 B        80 B  128 B",
        "W  backward_weight         2        2   4.8e-08         0 B        80 B   32 B",
        "B  backward (unsplit)      3        2   9.6e-08        24 B        80 B   80 B",
        "",
        "Saved by F for the backward: 1 tensors, 48 B.",
        "Deferred by I for W: 2 tensors, 80 B:",
        "",
        "tensor       shape        bytes  made at    for the gradient of",
        "-----------  ---------  -------  ---------  ---------------------",
        "args_0       f32[4, 3]     48 B             weight",
        "grad_output  f32[4, 2]     32 B             weight and 1 more",
        "",
        "Deferred: 100.0 % of the weight gradients' floating-point operations (4.8e-08 of 4.8e-08 "
        "GFLOPs a microbatch).",
        "",
        "memory             after F    I to W    weight FLOPs in I    recomputed ops    time",
        "---------------  ---------  --------  -------------------  ----------------  ------",
        "fast                  48 B      80 B                   0%                 0    0.0%",
        "balanced (used)       48 B      80 B                   0%                 0    0.0%",
        "lean                  48 B      80 B                   0%                 0    0.0%",
    ]


def test_boundary_names_line_and_consumer() -> None:
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    rows = split.report().splitlines()
    (row,) = [row for row in rows if row.endswith("down.weight") and "f32[2, 4, 40]" in row]
    assert row.startswith("down_input ")
    assert "zoo.py:" in row
    assert "self.down(F.silu" in row


def test_report_without_gradients() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    with torch.no_grad():
        split(torch.randn(4, 3))
    assert "Captured without gradients: there is no backward" in split.report()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_report_of_a_graph_with_nothing_to_do() -> None:
    model = autosplit.split(Scaled(), torch.ones(0, requires_grad=True))
    assert model.report().splitlines()[-1].endswith("0.0%")


def test_report_prefers_the_graph_with_a_backward() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    split(torch.randn(4, 3))
    with torch.no_grad():
        split(torch.randn(4, 3))
    assert "Deferred by I for W" in split.report()


def test_nothing_captured(tmp_path) -> None:
    split = autosplit.split(nn.Linear(3, 2))
    with pytest.raises(SplitError, match="nothing captured yet: call the module, capture"):
        split.report()
    with pytest.raises(SplitError, match="nothing captured yet"):
        split.dump(tmp_path)


def test_short_source() -> None:
    assert short_source("/a/b/model.py:12 return x") == "model.py:12 return x"
    assert short_source("/a/b/model.py:12 " + "x" * 90) == "model.py:12 " + "x" * 45 + "..."
    assert short_source("") == ""
