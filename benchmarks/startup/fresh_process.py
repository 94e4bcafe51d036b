"""Measures one model in a process of its own, as ``python -m MODULE MODEL LAYERS WAY``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .models import MODELS


def measured(module: str, model: str, layers: int, way: str, cache: str) -> dict[str, Any]:
    """What a module's ``command`` finds in a fresh process.

    Args:
        module: whose ``main`` calls ``command``.
        model: of ``MODELS``.
        layers: its depth.
        way: of the module's ways.
        cache: folder of torch's caches; empty for a cold start.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", module, model, str(layers), way]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def command(
    description: str | None,
    ways: Iterable[str],
    measure: Callable[[str, int, str], dict[str, Any]],
) -> None:
    """Print as JSON what ``measure`` finds for the model, depth and way of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("layers", type=int)
    parser.add_argument("way", choices=ways)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(measure(options.model, options.layers, options.way)))
