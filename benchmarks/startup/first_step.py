"""The first step of a model: seconds, and bytes that a microbatch holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

from .models import MODELS, Batch

Step = Callable[[Batch], Tensor]


def first_step(name: str, layers: int, way: str) -> dict[str, Any]:
    """Time to the end of the first backward, weight gradients included; imports do not count."""
    torch.manual_seed(0)
    model, batch = MODELS[name](layers)
    torch._dynamo.reset()  # imported here, not in the first step
    start = time.perf_counter()
    face = WAYS[way](model)
    run_step(face, batch)
    first = time.perf_counter() - start
    return {"first": first, "held": _held_bytes(face, batch)}


def run_step(face: Any, batch: Batch) -> None:
    """One microbatch, weight gradients included."""
    face(**batch).loss.backward()
    if isinstance(face, autosplit.SplitModule):
        face.backward_weight()


def _held_bytes(face: Any, batch: Batch) -> int:
    """Bytes that a microbatch holds between I and W."""
    if not isinstance(face, autosplit.SplitModule):
        return 0
    face(**batch).loss.backward()
    return face.pending_bytes


def _split(backend: str) -> Callable[[nn.Module], Any]:
    return lambda model: autosplit.split(model, backend=backend)


def _compiled(backend: str) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend)


def _regional(backend: str) -> Callable[[nn.Module], Any]:
    """Each block compiled by itself, as accelerate's ``compile_regions`` does."""

    def compiled(model: nn.Module) -> nn.Module:
        tables = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        for block in [block for table in tables for block in table]:
            block.compile(backend=backend)
        return model

    return compiled


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "autosplit": _split("eager"),
    "aot_eager": _compiled("aot_eager"),
    "autosplit inductor": _split("inductor"),
    "inductor": _compiled("inductor"),
    "regional aot_eager": _regional("aot_eager"),
    "regional inductor": _regional("inductor"),
}
