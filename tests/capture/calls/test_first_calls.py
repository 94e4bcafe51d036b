"""A first call that leaves something behind and those after it are both found, and never for one
another.
"""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.capture import export
from autosplit.capture.cache.split_graph_cache import VARIABLE


class Settings:
    """What a model's key has by its class only."""

    def __init__(self) -> None:
        self.kind: str | None = None


class Settling(nn.Module):
    """Decides by its first inputs what it computes from then on."""

    factors = {"two": 2.0, "more": 3.0}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.kind is None:
            self.settings.kind = "two" if len(x) == 2 else "more"
        return torch.tanh(self.linear(x)).sum() * self.factors[self.settings.kind]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces nothing after ``Settling`` was traced for two rows."""
    check(Settling())

    def fail(*args: object) -> None:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(export, "fullgraph_capture", fail)


def check(model: Settling, rows: int = 2, steps: int = 2) -> autosplit.SplitModule:
    """Each step computes what eager autograd does, and leaves behind what it does."""
    plain, split = copy.deepcopy(model), autosplit.split(model, fullgraph=True)
    for _ in range(steps):
        for each in (plain, split):
            each(torch.ones(rows, 4)).backward()
        split.backward_weight()
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert expected.grad is not None
            assert torch.equal(mine.grad, expected.grad)
        assert model.settings.kind == plain.settings.kind is not None
    return split


def settled(kind: str) -> Settling:
    model = Settling()
    model.settings.kind = kind
    return model


@pytest.mark.usefixtures("untraced")
def test_the_first_call_and_the_second_are_found() -> None:
    split = check(Settling(), steps=3)
    assert len(split.functions) == 1
    assert "found" in split.report()


@pytest.mark.usefixtures("untraced")
def test_a_call_of_a_settled_model_is_no_first_call() -> None:
    split = check(settled("two"), steps=1)
    assert len(split.functions) == 1


@pytest.mark.usefixtures("untraced")
def test_a_first_call_is_not_found_as_one_after_it() -> None:
    model = Settling()
    split = check(model, steps=1)
    assert model.settings.kind == "two"
    assert not split.functions


def test_a_model_that_settled_otherwise_is_traced() -> None:
    check(Settling())
    split = check(settled("more"))
    assert "Graph cache: made and kept" in split.report()


def test_what_a_first_call_reads_elsewhere_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Settling())
    monkeypatch.setattr(Settling, "factors", {"two": 5.0, "more": 7.0})
    check(Settling())


def test_several_calls_that_differ_by_attributes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("two", "more"):
        check(settled(kind))

    def fail(*args: object) -> None:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(export, "fullgraph_capture", fail)
    for kind in ("two", "more", "two"):
        check(settled(kind), rows=2, steps=1)


def test_a_call_that_always_counts_is_refused_by_every_process() -> None:
    class Counting(Settling):
        def forward(self, x: Tensor) -> Tensor:
            self.settings.kind = "two" if self.settings.kind == "more" else "more"
            return torch.tanh(self.linear(x)).sum() * self.factors[self.settings.kind]

    for _ in range(2):
        split = autosplit.split(Counting(), fullgraph=True)
        with pytest.raises(autosplit.CaptureError, match="changes Python state"):
            split(torch.ones(2, 4))


def test_a_copy_made_before_a_call_changes_nothing() -> None:
    said = []
    for change in (lambda model: None, copy.deepcopy):

        class Own(Settings):
            """The first copy of one leaves the names of its slots in the class."""

        model = settled("two")
        model.settings = Own()
        model.settings.kind = "two"
        change(model)
        split = autosplit.split(model, fullgraph=True)
        split(torch.ones(2, 4))
        said.append(split.report().partition("Graph cache: ")[2].partition(".\n")[0])
    assert said == ["made and kept", "found"]


def test_a_call_without_graphs_leaves_no_marks() -> None:
    model = Settling()
    before = set(vars(model))
    autosplit.split(model)(torch.ones(2, 4))
    assert set(vars(model)) == before
