"""The first step of a model in a process of its own.

``python -m benchmarks.startup.first_step MODEL LAYERS WAY`` prints what it took as JSON: seconds
of the first and of a later step, bytes that a microbatch holds, and what the graph cache did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

from .fresh_process import command
from .models import MODELS, Batch

LATER = 3  # steps after the first; the fastest counts

Step = Callable[[Batch], Tensor]


def first_step(name: str, layers: int, way: str) -> dict[str, Any]:
    """Time to the end of the first backward, weight gradients included; imports do not count."""
    torch.manual_seed(0)
    model, batch = MODELS[name](layers)
    torch._dynamo.reset()  # imported here, not in the first step
    start = time.perf_counter()
    face = WAYS[way](model)
    _step(face, batch)
    first = time.perf_counter() - start
    later = []
    for _ in range(LATER):
        start = time.perf_counter()
        held = _step(face, batch)
        later.append(time.perf_counter() - start)
    return {"first": first, "later": min(later), "held": held, "cache": _outcome(face)}


def _step(face: Any, batch: Batch) -> int:
    """One microbatch; returns what it held between I and W."""
    face(**batch).loss.backward()
    held = 0
    if isinstance(face, autosplit.SplitModule):
        held = face.pending_bytes
        face.backward_weight()
    return held


def _outcome(face: Any) -> str:
    if not isinstance(face, autosplit.SplitModule) or not face.functions:
        return ""
    entry = face.functions[0].capture.entry
    return "" if entry is None else entry.outcome


def _split(backend: str) -> Callable[[nn.Module], Any]:
    return lambda model: autosplit.split(model, backend=backend)


def _compiled(backend: str) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "autosplit": _split("eager"),
    "aot_eager": _compiled("aot_eager"),
    "autosplit inductor": _split("inductor"),
    "inductor": _compiled("inductor"),
}


def main() -> None:
    command(__doc__, WAYS, first_step)


if __name__ == "__main__":
    main()
