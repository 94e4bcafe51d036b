"""What ranks tell each other is data: all of it arrives, and no text makes code run."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autosplit.errors import CheckpointError, PipelineError
from autosplit.mesh.costs import Link
from autosplit.module import SplitModule
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine import control
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.engine.control import OTHERS, Control, read, written
from autosplit.pipeline.engine.launch import launch
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


@pytest.mark.parametrize("value", [object(), Path("x"), print, {"a": [torch.nn.Linear]}, launch])
def test_what_is_no_plain_data_is_not_sent(value: object) -> None:
    with pytest.raises(PipelineError, match=r"expected plain data, and data of autosplit's own"):
        written(value)


class Calls:
    """Pickled, it is a call that whoever unpickles it makes."""

    def __init__(self, what: Any, *args: object) -> None:
        self._call = what, args

    def __reduce__(self) -> Any:
        return self._call


HOSTILE = [
    Calls(os.system, "true"),
    Calls(eval, "1"),
    Calls(exec, "1"),
    Calls(getattr, "", "join"),
    Calls(launch, print, 1),
    Calls(control.read, b""),
    Calls(Control, [0], 0, None, None),
    Calls(SplitModule, None),
    Calls(SystemExit, "text"),
    Calls(ActionKind, "no such kind"),
    Calls(TensorMeta),
    torch.nn.Linear(1, 1),
    Path("x"),
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_bytes_of_no_rank_are_refused(value: object) -> None:
    file = BytesIO()
    torch.save([value], file)
    for data in (file.getvalue(), pickle.dumps(value), b"", b"nonsense"):
        with pytest.raises(PipelineError, match="no data of this version of autosplit"):
            read(data)


def test_classes_that_nobody_has_imported_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(Link(1.0, 2.0))
    monkeypatch.delitem(sys.modules, Link.__module__)
    with pytest.raises(PipelineError, match="no data of this version of autosplit"):
        read(data)
    assert Link.__module__ not in sys.modules


def test_whoever_announces_loses_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []

    @contextlib.contextmanager
    def losing(whom: str) -> Iterator[None]:
        lost.append(whom)
        yield

    monkeypatch.setattr(control, "tell_in", lambda value, source, group, doing: value)
    group = cast("Any", object())
    for source in (0, 1):
        assert Control([3, 5], 5, group, losing).announce("plan", source) == "plan"
    assert lost == ["rank 3", OTHERS]
