"""Split graphs of DTensors: found only where ranks, groups and placements are the same."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import autosplit
from autosplit.capture.cache import split_graph_cache
from autosplit.capture.cache.split_graph_cache import VARIABLE
from autosplit.passes.lowering import codegen
from autosplit.torch_internals.version import TORCH
from tests.fake_ranks import fake_mesh

KEPT = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11 captures calls of functions that it makes for each call"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


class Chain(nn.Module):
    """A module whose result is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(self.norm(x)).tanh())
        return found


def model(mesh: DeviceMesh, *, names: str = "up norm down") -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Chain(), mesh, {name: plan[name] for name in names.split()})


def trace(module: nn.Module) -> tuple[Any, str]:
    """A split module's functions, and what became of them."""
    before = counters["autosplit"].copy()
    (functions,) = autosplit.split(module, (torch.ones(2, 4, 8, requires_grad=True),)).functions
    what = [
        name.removeprefix("graph_")
        for name in counters["autosplit"] - before
        if name.startswith("graph_")
    ]
    return functions, " ".join(sorted(what))


@KEPT
def test_what_is_read_back_is_what_was_made() -> None:
    with fake_mesh() as mesh:
        made, first = trace(model(mesh))
        read, second = trace(model(mesh))
    assert (first, second) == ("miss", "hit")
    for name, module in made.graphs.graphs().items():
        assert codegen.generate(name, read.graphs.graphs()[name]) == codegen.generate(name, module)
    assert read.capture.shardings == made.capture.shardings
    kinds = {role.kind.value for role in read.capture.shardings}
    assert {"parameter", "output", "tangent"} <= kinds


@KEPT
def test_other_ranks_have_other_graphs() -> None:
    """Another place among the ranks, more of them, another name of the dimension."""
    found = []
    for setting in ({}, {"rank": 1}, {"shape": (4,)}, {"names": ("tensor",)}, {}):
        with fake_mesh(**setting) as mesh:
            found.append(trace(model(mesh))[1])
    assert found == ["miss", "miss", "miss", "miss", "hit"]


@KEPT
def test_other_groups_and_placements_have_other_graphs() -> None:
    """Graphs know groups by their names."""
    with fake_mesh((4,)):
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")) for _ in range(2)]
        mesh, again = (each["tp"] for each in meshes)
        assert again.get_group().group_name != mesh.get_group().group_name
        found = [trace(model(each))[1] for each in (mesh, again, mesh, again)]
        assert found == ["miss", "miss", "hit", "hit"]
        other = model(mesh)
        bias = other.up.bias.redistribute(placements=[Replicate()])
        other.up.bias = nn.Parameter(bias.detach())
        assert trace(other)[1] == "miss"
        assert trace(model(mesh, names="up down"))[1] == "miss"


@KEPT
def test_graphs_made_under_other_rules_are_others() -> None:
    with fake_mesh() as mesh:
        assert trace(model(mesh))[1] == "miss"
        with loss_parallel():
            assert trace(model(mesh))[1] == "miss"
            assert trace(model(mesh))[1] == "hit"
        assert trace(model(mesh))[1] == "hit"


def test_somebody_elses_rule_is_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    with fake_mesh() as mesh:
        trace(model(mesh))
        rules = propagator.op_strategy_funcs
        monkeypatch.setitem(rules, torch.ops.aten.erfinv.default, lambda mesh, schema: None)
        assert trace(model(mesh))[1] == "bypass"


@KEPT
def test_group_of_no_mesh_in_the_key_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be one of other ranks where the graph is read."""
    monkeypatch.setattr(split_graph_cache, "meshes_of", lambda values: [])
    with fake_mesh() as mesh:
        assert trace(model(mesh))[1] == "bypass miss"
