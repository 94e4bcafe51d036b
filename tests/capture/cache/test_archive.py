"""Archives: what is read is what was written, and what would be read as something else is not."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autosplit
from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.capture.cache.archive import NoArchiveError, pack_graphs, unpack_graphs
from autosplit.passes import SplitGraphs


class Mixed(nn.Module):
    """Slices, indices, dtypes, ranges of numbers and constants among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.conv(self.table(torch.tensor([[3, 1, 0, 6, 2]])).mT * x[:, None, 1:6])
        y = torch.where(y > float("-inf"), y, torch.full_like(y, 1e-7)).clamp(min=-0.0)
        low, high = torch.split(y, [1, 3], dim=1)
        gathered = torch.cat([low, high[:, [2, 0, 1]]], 1).to(torch.float64)
        return {"loss": gathered.logsumexp((1, 2)).sum(), "half": y.half(), "last": y[..., -1]}


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mixed": lambda: (Mixed(), torch.ones(1, 8)),
    "transformer layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        torch.ones(2, 3, 8, requires_grad=True),
    ),
    "norms": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4)),
        torch.ones(2, 2, 5, 5),
    ),
}


def split(model: nn.Module, x: Tensor) -> SplitGraphs:
    (functions,) = autosplit.split(model, (x,)).functions
    return functions.graphs


@pytest.fixture(autouse=True)
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPLIT_CACHE", "0")


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_is_read_is_what_was_written(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    graphs = split(*make())
    found, _ = unpack_graphs(pack_graphs(graphs), FakeTensorMode(allow_non_fake_inputs=True))
    assert found.memory == graphs.memory
    assert found.graphs().keys() == graphs.graphs().keys()
    for name, module in graphs.graphs().items():
        assert text(found.graphs()[name]) == text(module)


def test_rates_are_kept() -> None:
    costs = CollectiveCosts(Link(1e-5, 1e9), DeviceSpeed(1e12, 1e11))
    (functions,) = autosplit.split(*MODELS["norms"](), overlap=costs).functions
    found, _ = unpack_graphs(pack_graphs(functions.graphs), FakeTensorMode())
    assert found.memory == functions.graphs.memory
    assert found.memory.rates == costs.rates


def test_graphs_are_kept_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = split(*MODELS["mixed"]())
    monkeypatch.setattr(fx.Graph, "create_node", None)
    assert pack_graphs(graphs)


class Level(enum.IntEnum):
    LOW = 2


class Count(int):
    pass


@pytest.mark.parametrize("value", [Level.LOW, Count(2)], ids=["enumeration", "subclass"])
def test_what_equals_a_plain_value_is_not_written_as_one(value: Any) -> None:
    graphs = split(*MODELS["mixed"]())
    call = next(node for node in graphs.forward.graph.nodes if node.op == "call_function")
    call.kwargs = {**call.kwargs, "dim": value}
    with pytest.raises(NoArchiveError, match=type(value).__name__):
        pack_graphs(graphs)


def text(module: fx.GraphModule) -> list[str]:
    return [
        f"{n.op} {n.target} {n.name} {n.args} {n.kwargs} {value_text(n)} {n.meta.get('role')} "
        f"{n.meta.get('roles')} {n.meta.get('stack_trace')} {n.meta.get('origin')}"
        for n in module.graph.nodes
    ]


def value_text(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [
        (v.dtype, v.device, v.shape, v.stride(), v.storage_offset(), v.requires_grad)
        if isinstance(v, Tensor)
        else v
        for v in values
    ]
