"""How much of a model's collectives its weight gradients hide, of a tensor-parallel one and of a
mixture of experts: real ranks, whose products take known seconds, over a link that takes time.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autosplit
from autosplit import CollectiveCosts
from autosplit.passes.analysis.operator_cost import graph_flops, weight_flops
from autosplit.passes.analysis.operators import is_exchange, is_start
from autosplit.passes.graph import calls
from autosplit.ranks.launch import launch
from autosplit.torch_internals.dtensor import local_tensor

from ..results import Rows, table
from .link import KnownProducts, SlowLink

WIDTH, HEADS, TOKENS, BLOCKS = 256, 4, (8, 64), 3
PRODUCT = 0.002  # seconds of a weight gradient's product in a rank's part of an MLP
_FLOPS = 2 * WIDTH * 2 * WIDTH * TOKENS[0] * TOKENS[1]  # of that
DELAYS = (0.0, 0.5, 1.0, 2.0)  # of a collective, in multiples of that product
TARGET = 0.9
MEASURED = "split, measured"
Way: TypeAlias = str | CollectiveCosts
"""One of ``WAYS``; costs stand for "split, measured"."""

_OURS = ("eager", "split", MEASURED)
WAYS = (*_OURS, "torch.compile, Inductor", "Inductor, reordering")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model on two ranks.

    Attributes:
        build: makes it.
        tokens: batch and length of what it is given.
        flops: of a weight gradient's product that takes ``PRODUCT``.
        ways: of training it.
    """

    build: Callable[[DeviceMesh], nn.Module]
    tokens: tuple[int, int] = TOKENS
    flops: int = _FLOPS
    ways: tuple[str, ...] = _OURS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, size)).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        result: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def _model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(BLOCKS) for kind in (Attention, Mlp)))
    plan: dict[str, Any] = {}
    for at in range(2 * BLOCKS):
        first, second = ("qkv", "out") if at % 2 == 0 else ("up", "down")
        plan |= {f"{at}.{first}": ColwiseParallel(), f"{at}.{second}": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


TENSOR_PARALLEL = Subject(_model, ways=WAYS)


def _made(way: Way, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A model's forward, and what makes weight gradients that its backward has left.

    Args:
        way: how it is trained.
        model: the model.
    """
    costs = way if isinstance(way, CollectiveCosts) else None
    if costs is not None or way == "split":
        split = autosplit.split(model, overlap=costs)
        return split, split.backward_weight
    if way == "eager":
        return model, lambda: None
    return torch.compile(model, backend="inductor"), lambda: None


class _Timed(fx.Interpreter):
    """Seconds of every operator."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:  # real kernels give other strides than fake ones
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n] = time.perf_counter() - start
        return result


def _graphs(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, int]:
    """The fused backward, and the FLOPs of all weight gradients."""
    graphs = autosplit.split(model, (x,), memory="fast").functions[0].graphs
    if graphs.backward is None:
        raise RuntimeError("nothing of the model is trained")
    return graphs.backward, sum(weight_flops(graphs))


def _operator_seconds(backward: fx.GraphModule) -> dict[fx.Node, float]:
    """Of each operator, alone."""
    traced = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    values = [torch.zeros(value.shape, dtype=value.dtype) for value in traced]
    rounds = [_Timed(backward) for _ in range(4)]
    for each in rounds:
        each.run(*values)
    return {n: statistics.median(each.seconds[n] for each in rounds) for n in rounds[0].seconds}


def least_exposed(
    nodes: Sequence[fx.Node], seconds: Mapping[fx.Node, float], delay: float
) -> float:
    """Seconds for which a device that runs one operator at a time has to wait for collectives, in
    whichever order it runs them, by what depends on what: a lower bound.

    Args:
        nodes: the operators, in an order in which they can run.
        seconds: of each.
        delay: from the start of a collective to its end; they follow each other.
    """
    own = {node: 0.0 if is_exchange(node) else seconds[node] for node in nodes}
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        read = [each for each in node.all_input_nodes if each in own]
        before[node] = set(read).union(*(before[each] for each in read))
    starts: dict[fx.Node, float] = {}
    ends: list[float] = [sum(own.values())]
    for node in filter(is_start, nodes):
        found = [sum(own[each] for each in before[node])]
        for earlier, start in starts.items():
            between = [n for n in before[node] if earlier in before[n]]
            found.append(start + delay + sum(own[each] for each in between))
        starts[node] = max(found)
        behind = [n for n in nodes if node in before[n]]
        ends.append(starts[node] + delay + sum(own[each] for each in behind))
    return max(ends) - ends[0]


class _Ways:
    """All ways of training the same model on this rank."""

    def __init__(self, names: Collection[Way], build: Callable[[], nn.Module], x: Tensor) -> None:
        self._x = x
        self.models = {name: build() for name in names}
        self._made = {name: _made(name, model) for name, model in self.models.items()}

    def run(self, name: Way, link: SlowLink | None = None) -> float:
        """Seconds of a backward, from the loss to all gradients."""
        self.models[name].zero_grad()
        forward, weights = self._made[name]
        reorders = name == "Inductor, reordering"
        with torch._inductor.config.patch(reorder_for_compute_comm_overlap=reorders):
            loss = forward(self._x).square().mean()
            dist.barrier()
            if link is not None:
                link.exposed = 0.0
            start = time.perf_counter()
            loss.backward()
            weights()
            return time.perf_counter() - start

    def gradients(self, name: Way) -> list[Tensor]:
        return [local_tensor(p.grad).clone() for p in self.models[name].parameters()]

    def left(self, name: Way) -> int | None:
        """FLOPs of W, where there is one."""
        split = self._made[name][0]
        if not isinstance(split, autosplit.SplitModule):
            return None
        weight = split.functions[0].graphs.backward_weight
        return 0 if weight is None else graph_flops(weight.graph)


def _measured(flops: int) -> list[CollectiveCosts]:
    """What ranks measure over the link, for each delay."""
    mesh = init_device_mesh("cpu", (2,))
    link, _products = SlowLink(), KnownProducts(PRODUCT / flops)
    found = []
    for factor in DELAYS:
        link.seconds = factor * PRODUCT
        found.append(autosplit.measure_collectives(mesh))
    return found


def _rank(subject: Subject, steps: int, measured: Sequence[CollectiveCosts]) -> Rows:
    names = subject.ways
    build = functools.partial(subject.build, init_device_mesh("cpu", (2,)))
    torch.manual_seed(1)
    x = torch.randn(*subject.tokens, WIDTH, requires_grad=True)
    backward, weights = _graphs(build(), x)
    contenders: list[Way] = [*(name for name in names if name != MEASURED), *measured]
    ways = _Ways(contenders, build, x)
    for _ in range(2):  # compiles, and has gradients to add to
        for name in contenders:
            ways.run(name)
    expected = ways.gradients(names[0])
    same = {name: all(map(torch.equal, ways.gradients(name), expected)) for name in contenders}
    link, _products = SlowLink(), KnownProducts(PRODUCT / subject.flops)
    seconds, nodes = _operator_seconds(backward), list(calls(backward.graph))
    count = sum(map(is_start, nodes))
    rows = []
    for at, factor in enumerate(DELAYS):
        link.seconds = delay = factor * PRODUCT
        own = {name: measured[at] if name == MEASURED else name for name in names}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(steps):
            for name in names:
                taken = ways.run(own[name], link)
                found[name].append((taken, link.exposed))
        least = least_exposed(nodes, seconds, delay)
        eager = statistics.median(taken for taken, _ in found[names[0]])
        for name in names:
            taken, exposed = map(statistics.median, zip(*found[name], strict=True))
            left = ways.left(own[name])
            rows.append(
                {
                    "name": f"{name}, {factor:g}",
                    "way": name,
                    "delay": delay,
                    "seconds": taken,
                    "total": count * delay,
                    "hidden": count * delay - exposed,
                    "hideable": count * delay - least,
                    "beside": taken / eager,
                    "same": same[own[name]],
                    "early": None if left is None else 1 - left / weights,
                }
            )
    return rows


def measure(steps: int, subject: Subject = TENSOR_PARALLEL) -> Rows:
    """A row for each way and delay."""
    costs = launch(_measured, 2, (subject.flops,), timeout=300)[0]
    return launch(_rank, 2, (subject, steps, costs), timeout=900)[0]


def render(rows: Rows) -> str:
    """A table; shares below the target are bold."""
    body = []
    for row in rows:
        share = row["hidden"] / row["hideable"] if row["hideable"] > 0 else None
        text = "" if share is None else f"{share:.0%}"
        ours = row["way"] in ("split", MEASURED)
        early = row.get("early")
        if ours and share is not None and share < TARGET:
            text = f"**{text}**"
        body.append(
            [
                row["way"],
                f"{row['delay'] * 1e3:.2f}",
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['beside']:.2f}",
                f"{row['total'] * 1e3:.1f}",
                f"{row['hidden'] * 1e3:.1f}",
                f"{row['hideable'] * 1e3:.1f}",
                text,
                "" if early is None else f"{early:.0%}",
                "yes" if row["same"] else "no",
            ]
        )
    headers = [
        "way",
        "a collective, ms",
        "backward, ms",
        "/ eager",
        "collectives, ms",
        "hidden",
        "can be",
        "share",
        "W in I",
        "bits of eager",
    ]
    return table(headers, body)
