"""How much of a tensor-parallel model's collectives its weight gradients hide: real ranks and
kernels, over a link that takes time.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autosplit
from autosplit.passes.analysis.collective_order import (
    CollectiveScheduler,
    OperatorTimes,
    exposed_time,
)
from autosplit.passes.analysis.collectives import is_start
from autosplit.passes.graph import calls
from autosplit.pipeline.engine.processes.launch import launch

from ..results import Rows, table

WIDTH, HEADS, TOKENS, BLOCKS = 256, 4, (8, 64), 3
DELAYS = (0.0, 0.5, 1.0, 2.0)  # of a collective, in multiples of a weight gradient's product
TARGET = 0.9
WAYS = (
    "eager",
    "split, overlap none",
    "split",
    "torch.compile, autosplit",
    "torch.compile, Inductor",
    "Inductor, reordering",
)


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


class SlowLink:
    """Collectives of a process that end ``seconds`` after they begin, one after another, at least.

    Their kernels for the CPU are replaced: Gloo does the work, and the wait sleeps.

    Attributes:
        seconds: how long.
        exposed: seconds that waits have taken.
    """

    def __init__(self) -> None:
        self.seconds = self.exposed = self._free = 0.0
        self._under_way: dict[int, tuple[Any, float]] = {}
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            self._library.impl("all_reduce", self._all_reduce, "CPU")
            self._library.impl("all_reduce_", self._all_reduce_, "CPU")
            self._library.impl("wait_tensor", self._wait, "CPU")

    def _all_reduce(self, tensor: Tensor, reduction: str, group: str) -> Tensor:
        return self._all_reduce_(tensor.clone(), reduction, group)

    def _all_reduce_(self, tensor: Tensor, reduction: str, group: str) -> Tensor:
        work = dist.all_reduce(tensor, async_op=True)
        self._free = max(time.perf_counter(), self._free) + self.seconds
        self._under_way[tensor.untyped_storage().data_ptr()] = work, self._free
        return tensor

    def _wait(self, tensor: Tensor) -> Tensor:
        work, end = self._under_way.pop(tensor.untyped_storage().data_ptr(), (None, 0.0))
        if work is not None:
            begun = time.perf_counter()
            work.wait()
            time.sleep(max(0.0, end - time.perf_counter()))
            self.exposed += time.perf_counter() - begun
        return tensor


def _model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(BLOCKS) for kind in (Attention, Mlp)))
    plan: dict[str, Any] = {}
    for at in range(2 * BLOCKS):
        first, second = ("qkv", "out") if at % 2 == 0 else ("up", "down")
        plan |= {f"{at}.{first}": ColwiseParallel(), f"{at}.{second}": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def _made(way: str, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A model's forward, and what makes weight gradients that its backward has left."""
    if way.startswith("split"):
        split = autosplit.split(model, overlap="none" if "none" in way else "collectives")
        return split, split.backward_weight
    if way == "eager":
        return model, lambda: None
    compiled = torch.compile(model, backend="autosplit" if "autosplit" in way else "inductor")
    return compiled, lambda: None


def _backward(loss: Tensor, weights: Callable[[], None]) -> float:
    """Seconds from the loss to all gradients."""
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    weights()
    return time.perf_counter() - start


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


def _hideable(model: nn.Module, x: Tensor, delays: list[float]) -> list[float]:
    """Seconds of collectives that the graph's dependences and operators' times let be hidden."""
    graphs = autosplit.split(model, (x,), overlap="none", memory="fast").functions[0].graphs
    backward = graphs.backward
    if backward is None:
        return [0.0] * len(delays)
    values = [
        torch.randn(value.shape) if value.is_floating_point() else torch.zeros_like(value)
        for node in backward.graph.find_nodes(op="placeholder")
        for value in [
            torch.empty_strided(
                node.meta["val"].shape, node.meta["val"].stride(), dtype=node.meta["val"].dtype
            )
        ]
    ]
    rounds = [_Timed(backward) for _ in range(4)]
    for each in rounds:
        each.run(*values)
    seconds = {n: statistics.median(each.seconds[n] for each in rounds) for n in rounds[0].seconds}
    nodes = list(calls(backward.graph))
    count = sum(map(is_start, nodes))
    found = []
    for delay in delays:
        costs = OperatorTimes(lambda node: seconds[node], lambda node, delay=delay: delay)  # type: ignore[misc]
        scheduler = CollectiveScheduler(nodes, costs)
        orders = [scheduler.order(f, hold=h).nodes for f in (1.0, 2.0, 4.0) for h in (True, False)]
        found.append(count * delay - min(exposed_time(o, costs=costs) for o in orders))
    return found


def _rank(ways: tuple[str, ...], steps: int) -> list[dict[str, Any]]:
    mesh, link = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), SlowLink()
    torch.manual_seed(1)
    x = torch.randn(*TOKENS, WIDTH, requires_grad=True)
    models = {way: _model(mesh) for way in ways}
    made = {way: _made(way, models[way]) for way in ways}
    for way in ways:  # compiles
        reorders = way == "Inductor, reordering"
        with torch._inductor.config.patch(reorder_for_compute_comm_overlap=reorders):
            for _ in range(2):
                forward, weights = made[way]
                _backward(forward(x).square().mean(), weights)
    product = _seconds(lambda: torch.mm(torch.randn(2 * WIDTH, 512), torch.randn(512, WIDTH)))
    shared = torch.tensor([product])
    dist.broadcast(shared, 0)
    delays = [factor * shared.item() for factor in DELAYS]
    hideable = _hideable(_model(mesh), x, delays)
    count = 2 * BLOCKS
    rows = []
    gradients: dict[str, list[Tensor]] = {}
    fastest: dict[tuple[str, float], float] = {}
    idle: dict[str, float] = {}
    for at, delay in enumerate(delays):
        taken: dict[str, list[float]] = {way: [] for way in ways}
        waited: dict[str, list[float]] = {way: [] for way in ways}
        link.seconds = delay
        for _ in range(steps):
            for way in ways:
                models[way].zero_grad()
                forward, weights = made[way]
                loss = forward(x).square().mean()
                link.exposed = 0.0
                taken[way].append(_backward(loss, weights))
                waited[way].append(link.exposed)
        for way in ways:
            seconds = fastest[way, delay] = statistics.median(taken[way])
            gradients[way] = [_local(p.grad) for p in models[way].parameters()]
            exposed = statistics.median(waited[way])
            hidden = count * delay - (exposed - idle.setdefault(way, exposed))
            rows.append(
                {
                    "name": f"{way}, {DELAYS[at]:g}",
                    "way": way,
                    "delay": delay,
                    "seconds": seconds,
                    "total": count * delay,
                    "hidden": hidden,
                    "hideable": hideable[at],
                    "beside": seconds / fastest[ways[0], delay],
                    "same": all(map(torch.equal, gradients[way], gradients[ways[0]])),
                }
            )
    return rows


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.clone()


def _seconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(steps: int, only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each way and delay; ways without ``only`` in their name are left out, but eager."""
    ways = tuple(way for way in WAYS if way == "eager" or only in way)
    yield from launch(_rank, 2, (ways, steps), timeout=900)[0]


def render(rows: Rows) -> str:
    """A table; shares below the target are bold."""
    body = []
    for row in rows:
        share = row["hidden"] / row["hideable"] if row["hideable"] > 0 else None
        text = "" if share is None else f"{share:.0%}"
        ours = row["way"] in ("split", "torch.compile, autosplit")
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
        "bits of eager",
    ]
    return table(headers, body)
