"""F + I + W of the eager backend against plain autograd's forward and backward, on one rank."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import autosplit
from autosplit.cli.inspect import example_inputs
from autosplit.compare import Workload
from autosplit.text.figures import quartiles, ratios
from examples.models import convnet, llama, mlp

from ..results import Rows, table


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Medians over interleaved rounds; ratios are medians of the rounds' own ratios."""

    name: str
    autograd_ms: float
    stage_ms: float
    parts_ms: tuple[float, float, float]
    stage_ratio: float
    fused_ratio: float
    module_ratio: float
    spread: float


def measure_all(rounds: int) -> Rows:
    """The second of two stages of each example: it has inputs that need a gradient."""
    torch.set_num_threads(1)
    cases: dict[str, Workload] = {"llama": llama(), "mlp": mlp(), "convnet": convnet()}
    found: Rows = []
    for name, workload in cases.items():
        module, (x,), _ = example_inputs(workload, name, 2, 1, input_grads=True)
        found.append(dataclasses.asdict(measure(name, module, x, rounds)))
    return found


def measure(name: str, module: nn.Module, x: Tensor, rounds: int) -> Overhead:
    """Time the four ways to run one microbatch, one after another, ``rounds`` times."""
    reference, wrapped = copy.deepcopy(module), autosplit.split(copy.deepcopy(module))
    stage = autosplit.Stage(module, [x])
    grad = torch.randn(stage.output_specs[0][0])
    parts: list[tuple[float, ...]] = []

    def plain() -> None:
        reference(x.detach().requires_grad_()).backward(grad)

    def split_module() -> None:
        wrapped(x.detach().requires_grad_()).backward(grad)
        wrapped.backward_weight()

    def split_stage() -> None:
        marks = [time.perf_counter()]
        stage.forward(0, [x.detach()]).clear()
        marks.append(time.perf_counter())
        stage.backward_input(0, [grad])
        marks.append(time.perf_counter())
        stage.backward_weight(0)
        marks.append(time.perf_counter())
        parts.append(tuple(b - a for a, b in itertools.pairwise(marks)))

    def fused_stage() -> None:
        stage.forward(0, [x.detach()]).clear()
        stage.backward(0, [grad])

    ways = (plain, split_stage, fused_stage, split_module)
    for way in ways * 2:
        way()
    parts.clear()
    times = [[_seconds(way) for way in ways] for _ in range(rounds)]
    plain_s, stage_s, fused_s, module_s = (list(column) for column in zip(*times, strict=True))
    low, middle, high = quartiles(ratios(stage_s, plain_s))
    first, second, third = (1e3 * statistics.median(column) for column in zip(*parts, strict=True))
    return Overhead(
        name,
        1e3 * statistics.median(plain_s),
        1e3 * statistics.median(stage_s),
        (first, second, third),
        middle,
        _ratio(fused_s, plain_s),
        _ratio(module_s, plain_s),
        high - low,
    )


def render(rows: Rows) -> str:
    """A row for each example."""
    headers = [
        "stage of",
        "autograd ms",
        "F + I + W ms",
        "F",
        "I",
        "W",
        "(F+I+W) / autograd",
        "spread",
        "(F+B) / autograd",
        "SplitModule / autograd",
    ]
    cells = [
        [
            row["name"],
            f"{row['autograd_ms']:.1f}",
            f"{row['stage_ms']:.1f}",
            *(f"{part:.1f}" for part in row["parts_ms"]),
            f"{row['stage_ratio']:.3f}",
            f"{row['spread']:.3f}",
            f"{row['fused_ratio']:.3f}",
            f"{row['module_ratio']:.3f}",
        ]
        for row in rows
    ]
    return table(headers, cells)


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
