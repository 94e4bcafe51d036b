"""How much of dispatch and combine the weight gradients of a mixture of experts hide, timed over a
link that takes time; and what that is worth in a pipeline, counted in graphs and played by the
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autosplit
from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.mesh.costs import Overlap
from autosplit.passes import Rates
from autosplit.passes.analysis.collective_order import exposed_time
from autosplit.passes.analysis.operator_cost import duration, graph_flops
from autosplit.passes.analysis.operators import is_start
from autosplit.passes.graph import calls
from autosplit.pipeline import build
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs

from ..results import Rows, table
from . import collectives
from .collectives import PRODUCT, TARGET, TOKENS, WIDTH, Attention, Subject, least_exposed

EXPERTS, CAPACITY, LAYERS = 4, 128, 3
"""Of a layer; tokens that an expert takes of each rank's; of the model."""

_FLOPS = 2 * (EXPERTS // 2) * (2 * CAPACITY) * WIDTH * 4 * WIDTH
DELAYS = (0.001, 0.002, 0.004)
STAGES, MICROBATCHES = 2, 4
WAYS = ("none", "collectives", "known")


class Mixture(nn.Module):
    """Experts, each of which takes those tokens of each rank that want it most."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep, self.norm = ep, nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        sizes = ((EXPERTS, WIDTH, 4 * WIDTH), (EXPERTS, 4 * WIDTH, WIDTH))
        self.up, self.down = (
            nn.Parameter(distribute_tensor(torch.randn(each), ep, [Shard(0)])) for each in sizes
        )

    def _exchanged(self, x: Tensor) -> Tensor:
        parts = [EXPERTS // self.ep.size()] * self.ep.size()
        found: Tensor = all_to_all_single_autograd(x, parts, parts, self.ep.get_group())
        return found

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        gate, rows = self.router(tokens).softmax(-1).t().topk(CAPACITY)
        ranks = self.ep.size()
        came = self._exchanged(tokens[rows]).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        up, down = (cast("DTensor", each).to_local() for each in (self.up, self.down))
        made = torch.bmm(nn.functional.gelu(torch.bmm(came, up)), down)
        back = self._exchanged(made.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1))
        mixed = (back * gate[..., None]).flatten(0, 1)
        return x + torch.zeros_like(tokens).index_add(0, rows.flatten(), mixed).view_as(x)


def _model(ep: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (Attention(), Mixture(ep))))


MIXTURE = Subject(_model, flops=_FLOPS)


def _costs(delay: float) -> CollectiveCosts:
    return CollectiveCosts(Link(delay, math.inf), DeviceSpeed(_FLOPS / PRODUCT, math.inf))


class _Counted:
    """One way of splitting a stage: its F, I, W and B.

    Attributes:
        backward: the operators of B.
        weights: floating-point operations of W.
    """

    def __init__(self, ep: DeviceMesh, overlap: Overlap) -> None:
        x = torch.randn(*TOKENS, WIDTH, requires_grad=True)
        model = autosplit.split(_model(ep), (x,), overlap=overlap, memory="fast")
        graphs = model.functions[0].graphs
        parts = (graphs.forward, graphs.backward_input, graphs.backward_weight, graphs.backward)
        modules = [cast("fx.GraphModule", each) for each in parts]
        self._nodes = [list(calls(each.graph)) for each in modules]
        self.backward = self._nodes[3]
        self.weights = graph_flops(modules[2].graph)

    def exposed(self, rates: Rates) -> float:
        """Waits of I and W for collectives."""
        return sum(exposed_time(each, rates=rates) for each in self._nodes[1:3])

    def seconds(self, rates: Rates) -> list[float]:
        """Of F, I, W and B, waits included."""
        return [
            exposed_time(each, rates=rates) + sum(duration(node, rates) for node in each)
            for each in self._nodes
        ]


def _costs_of(seconds: Sequence[float]) -> Costs:
    """Of a pipeline of such stages."""
    forward, inputs, weights, whole = seconds
    return Costs(
        [(forward, inputs, weights)] * STAGES,
        [StageMemory(1.0, 1.0)] * STAGES,
        full=[min(whole, inputs + weights)] * STAGES,
    )


def _rank() -> list[dict[str, Any]]:
    ep = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    known = {way: _Counted(ep, way) for way in WAYS[:2]}
    rows = []
    for delay in DELAYS:
        counted = {**known, WAYS[2]: _Counted(ep, _costs(delay))}
        plain, rates = counted["none"], _costs(delay).rates
        total = delay * sum(map(is_start, plain.backward))
        times = {node: duration(node, rates) for node in plain.backward}
        least = least_exposed(plain.backward, times, delay)
        for way, found in counted.items():
            seconds = found.seconds(rates)
            costs = _costs_of(seconds)
            searched = search(costs, MICROBATCHES, ranks=STAGES, placement=[0, 1], work=60_000)
            rows.append(
                {
                    "name": f"{way}, {1e3 * delay:g}",
                    "way": way,
                    "delay": delay,
                    "total": total,
                    "hidden": total - found.exposed(rates),
                    "hideable": total - least,
                    "early": 1 - found.weights / plain.weights,
                    "seconds": seconds,
                    "named": costs.timeline(build("1f1b", STAGES, MICROBATCHES)).makespan,
                    "searched": costs.timeline(searched).makespan,
                }
            )
    return rows


def timed(steps: int, only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each way and delay, of real ranks."""
    yield from collectives.measure(steps, only, MIXTURE)


def measure(only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each way and delay with ``only`` in its name."""
    yield from (row for row in launch(_rank, 2, timeout=300)[0] if only in row["name"])


def render(rows: Rows) -> str:
    """A table; shares below the target are bold."""
    body = []
    for row in rows:
        share = row["hidden"] / row["hideable"]
        text = f"{share:.0%}"
        body.append(
            [
                row["way"],
                f"{row['delay'] * 1e3:g}",
                *(f"{row[name] * 1e3:.1f}" for name in ("total", "hidden", "hideable")),
                f"**{text}**" if share < TARGET and row["way"] == "known" else text,
                f"{row['early']:.0%}",
                *(f"{each * 1e3:.1f}" for each in row["seconds"]),
                *(f"{row[name] * 1e3:.1f}" for name in ("named", "searched")),
            ]
        )
    headers = [
        "overlap",
        "a collective, ms",
        "collectives, ms",
        "hidden",
        "can be",
        "share",
        "W in I",
        *("F", "I", "W", "B"),
        "1f1b, ms",
        "searched, ms",
    ]
    return table(headers, body)
