"""What ranks tell each other is data: all of it arrives, and no text makes code run."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autosplit.errors import CheckpointError, PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine import control
from autosplit.pipeline.engine.control import OTHERS, Control, read, written
from autosplit.pipeline.engine.shapes import TensorMeta
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.timeline import Span

SAME = [
    None,
    True,
    -3,
    2**70,
    0.1 + 0.2,
    math.inf,
    "a\u2028\ud7ff\n",
    [],
    (1, [2.0, (None,)]),
    {(0, 1): {3}, "b": frozenset({"c"})},
    torch.Size([2, 3]),
    torch.bfloat16,
    ActionKind.FORWARD,
    Link(1e-5, math.inf),
    Span(1, Action.parse("2W3"), 0.25, 1e-300),
    TensorMeta(torch.Size([2]), torch.float32, True),
    build("dualpipe-v", 4, 4, ranks=2),
]


@pytest.mark.parametrize("value", SAME, ids=lambda value: type(value).__name__)
def test_what_is_read_is_what_was_written(value: object) -> None:
    found = read(written(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    value = torch.randn(3, 2).to(dtype)
    for each in (value, value.t(), value[0, 0], value[:0]):
        found = read(written(each))
        assert found.dtype is dtype
        assert found.shape == each.shape
        assert torch.equal(found, each)


def test_errors_keep_type_and_message() -> None:
    found = read(written([CheckpointError("no such file")]))[0]
    assert type(found) is CheckpointError
    assert str(found) == "no such file"


@pytest.mark.parametrize("value", [object(), Path("x"), print, {"a": [torch.nn.Linear]}, b"x"])
def test_what_is_no_plain_data_is_not_sent(value: object) -> None:
    with pytest.raises(PipelineError, match=r"expected (plain data|data of autosplit's own)"):
        written(value)


HOSTILE = [
    {"own": [["os", "system"], {"dict": [["command", "true"]]}]},
    {"own": [["builtins", "eval"], {"dict": []}]},
    {"own": [["autosplit.pipeline.engine.launch", "launch"], {"dict": []}]},
    {"own": [["autosplit.pipeline.engine.launch", "pickle"], {"dict": []}]},
    {"own": [["autosplit.pipeline.simulation.timeline", "dataclass"], {"dict": []}]},
    {
        "own": [
            ["autosplit.pipeline.simulation.timeline", "Span"],
            {"dict": [["rank", 0], ["__class__", 1]]},
        ]
    },
    {"own": [["autosplit.nowhere", "Span"], {"dict": []}]},
    {"own": [["autosplit.pipeline.simulation.timeline", "Span"], 1]},
    {"own": [["autosplit.pipeline.simulation.timeline", "Span"], [0, 1, 2, 3]]},
    {"own": [["autosplit.mesh.costs", "Link"], [0]]},
    {"own": [["autosplit.pipeline.schedule.action", "ActionKind"], "no such kind"]},
    {"own": [["autosplit.pipeline.simulation.timeline", "Span"], "text"]},
    {"own": [["builtins", "SystemExit"], "text"]},
    {"dtype": "load"},
    {"dtype": "nowhere"},
    {"tensor": [{"dtype": "float32"}, [3], "AAAA"]},
    {"dict": [[[1], 2]]},
    {"lambda": []},
    {"tuple": 1, "set": 2},
    {},
]


@pytest.mark.parametrize("form", HOSTILE, ids=repr)
def test_texts_of_no_rank_are_refused(form: object) -> None:
    with pytest.raises(PipelineError, match="no data of this version of autosplit"):
        read(json.dumps([form]))


def test_what_is_pickled_is_refused() -> None:
    with pytest.raises(PipelineError, match="no data of this version of autosplit"):
        read(b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.")


def test_whoever_announces_loses_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []

    @contextlib.contextmanager
    def losing(whom: str) -> Iterator[None]:
        lost.append(whom)
        yield

    monkeypatch.setattr(control, "tell_in", lambda value, source, group: value)
    group = cast("Any", object())
    for source in (0, 1):
        assert Control([3, 5], 5, group, losing).announce("plan", source) == "plan"
    assert lost == ["rank 3", OTHERS]
