"""The first step of a model in a process of its own.

``python -m benchmarks.startup.first_step MODEL LAYERS WAY`` prints what it took as JSON: seconds
of the first and of a later step, and bytes that a microbatch holds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

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
    run_step(face, batch)
    first = time.perf_counter() - start
    later = []
    for _ in range(LATER):
        start = time.perf_counter()
        run_step(face, batch)
        later.append(time.perf_counter() - start)
    return {"first": first, "later": min(later), "held": _held_bytes(face, batch)}


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


def measured(
    module: str,
    arguments: Sequence[object],
    cache: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Figures that a fresh process prints as JSON.

    Args:
        module: what the process runs.
        arguments: of its command line.
        cache: folder of torch's caches; empty for a cold start.
        variables: further environment variables.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "XDG_CACHE_HOME": cache,
        **variables,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("layers", type=int)
    parser.add_argument("way", choices=WAYS)
    options = parser.parse_args()
    set_up_process()
    print(json.dumps(first_step(options.model, options.layers, options.way)))


def set_up_process() -> None:
    """One thread, and no warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    main()
