"""When DistributedDataParallel reduces its buckets, around a plain model and around a split one."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import autosplit
from autosplit.ranks.launch import launch

from ..results import Rows, table
from .collectives import WIDTH, Mlp

BLOCKS, ROWS, BUCKET_MIB = 8, 256, 3
ALLOWED = 10  # points between the shares of one bucket
OPTIONS = ("", "find_unused_parameters", "static_graph", "gradient_as_bucket_view")
PLAIN, SPLIT = "plain model", "split model"


def measure(steps: int) -> Rows:
    """A row for each option and model."""
    return launch(_rank, 2, (steps,), timeout=600)[0]


def _rank(steps: int) -> Rows:
    torch.set_num_threads(1)
    rows: Rows = []
    for option in OPTIONS:
        torch.manual_seed(0)
        plain = nn.Sequential(*(Mlp() for _ in range(BLOCKS)))
        split = copy.deepcopy(plain)
        models = {PLAIN: plain, SPLIT: autosplit.split(split)}
        contenders = {way: _Contender(model, option) for way, model in models.items()}
        for step in range(steps + 3):  # buckets are rebuilt after the first step
            order = [*contenders.values()]
            for contender in order if step % 2 else order[::-1]:
                contender.step()
        pairs = zip(plain.parameters(), split.parameters(), strict=True)
        is_same = all(torch.equal(_gradient(one), _gradient(other)) for one, other in pairs)
        for way, contender in contenders.items():
            steady = contender.shares[3:]
            shares = [statistics.median(shares) for shares in zip(*steady, strict=True)]
            seconds = statistics.median(contender.seconds[3:])
            name = f"{option or 'default'}, {way}"
            row = {"name": name, "option": option, "way": way, "shares": shares}
            rows.append({**row, "seconds": seconds, "same": is_same})
    return rows


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient")
    return parameter.grad


class _Contender:
    """A wrapped model, with the share of each backward after which each bucket was reduced."""

    def __init__(self, module: nn.Module, option: str) -> None:
        options: dict[str, Any] = {option: True} if option else {}
        self._wrapped = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MIB, **options)
        self._fired: list[float] = []
        self._wrapped.register_comm_hook(None, self._reduce)
        self.shares: list[list[float]] = []
        self.seconds: list[float] = []

    # DistributedDataParallel accepts no annotations that are text.
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        self._fired.append(time.perf_counter())
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def step(self) -> None:
        self._wrapped.zero_grad()
        loss: Tensor = self._wrapped(torch.ones(ROWS, WIDTH)).square().mean()
        self._fired.clear()
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.shares.append([100 * (fired - start) / (end - start) for fired in self._fired])
        self.seconds.append(end - start)


def render(rows: Rows) -> str:
    """A line a model; shares further from the plain model's than allowed are bold."""
    cells: list[list[str]] = []
    plain: dict[str, Any] = {}
    for row in rows:
        plain = row if row["way"] == PLAIN else plain
        pairs = zip(row["shares"], plain["shares"], strict=True)
        shares = [_share(share, expected) for share, expected in pairs]
        ratio = "" if row is plain else f"{row['seconds'] / plain['seconds']:.2f}"
        bits = "" if row is plain else "yes" if row["same"] else "no"
        milliseconds = f"{1e3 * row['seconds']:.0f}"
        cells.append([row["option"], row["way"], ", ".join(shares), milliseconds, ratio, bits])
    heads = ["option", "around a", "buckets reduced at, % of backward", "backward, ms"]
    return table([*heads, "/ plain", "bits of plain"], cells)


def _share(share: float, expected: float) -> str:
    return f"{share:.0f}" if abs(share - expected) <= ALLOWED else f"**{share:.0f}**"
