"""trace: from a module to callables, and what it writes on request."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import autosplit
from autosplit import CaptureError, SplitError
from autosplit.passes import PassError
from autosplit.runtime.build import DUMP_VARIABLE, trace
from autosplit.runtime.options import SplitOptions
from tests.zoo import SwiGLU


def test_dump_variable_writes_every_stage_of_the_pipeline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    split(torch.randn(3, 4, 16))
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["00_SwiGLU", "01_SwiGLU"]
    files = sorted(path.name for path in (tmp_path / "00_SwiGLU").iterdir())
    assert files[0] == "00_capture.joint.py"
    assert files[-1] == "11_split_backward.backward_weight.py"


def test_dumps_of_ranks_do_not_mix(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        autosplit.split(nn.Linear(2, 2), (torch.randn(1, 2),))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank0_00_Linear",
        "rank1_01_Linear",
    ]


def test_pass_error_becomes_a_split_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise PassError("an invariant is broken")

    monkeypatch.setattr("autosplit.runtime.build.run", fail)
    with pytest.raises(
        SplitError, match="Linear was captured but cannot be split: an invariant is broken"
    ):
        trace(nn.Linear(2, 2), (torch.randn(1, 2),), {}, SplitOptions())


def test_sparse_input() -> None:
    split = autosplit.split(nn.Linear(2, 2), fullgraph=True)
    with pytest.raises(CaptureError, match=r"an input has layout torch.sparse_coo; only strided"):
        split(torch.eye(2).to_sparse())
