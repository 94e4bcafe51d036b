"""Backends by name, and what compilation leaves to the garbage collector."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest
import torch
from torch import Tensor, fx, nn

import autosplit
from autosplit.backends.backend import BACKENDS, Code, Eager, collecting_new_objects_only
from autosplit.errors import BackendError, SplitError

# --- models for commands --------------------------------------------------------------------------


def linear() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(nn.Linear(12, 6), nn.GELU()), (torch.randn(3, 12),)


# --- names of backends, and what a backend that fails says ----------------------------------------


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


# --- how Eager runs a graph ----------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "functions"), [(3, 1), (40, 41)])
def test_small_graphs_write_blocks_inline(blocks: int, functions: int) -> None:
    """A block has four operators; see ``_SMALL``."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()) for _ in range(blocks)]
    model, x = nn.Sequential(*layers), torch.randn(2, 4)
    split = autosplit.split(model)
    split(x)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith("autosplit-generated/"):
            calls.append(file)

    sys.setprofile(note)
    try:
        output = split(x)
    finally:
        sys.setprofile(None)
    assert len(calls) == functions
    assert torch.equal(output, model(x))


# --- what the garbage collector looks at while graphs are made ------------------------------------


def test_collector_goes_on_where_it_was_on() -> None:
    for was_on in (True, False):
        try:
            (gc.enable if was_on else gc.disable)()
            with collecting_new_objects_only():
                with collecting_new_objects_only():
                    assert not gc.isenabled()
                assert not gc.isenabled()
            assert gc.isenabled() is was_on
        finally:
            gc.enable()
