"""Calls of functions in a fresh process, with one thread and its own folder of torch's caches."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch


def in_process(
    function: Callable[..., dict[str, Any]],
    *arguments: str | float,
    cache: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The figures that a function returns in a fresh process.

    Args:
        function: a function of a module.
        arguments: its arguments.
        cache: folder of torch's caches; empty for a cold start.
        variables: further environment variables.

    Raises:
        RuntimeError: the process failed.
    """
    call = function.__module__, function.__name__, json.dumps(arguments)
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *call],
        env={**os.environ, **folders, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(module: str, function: str, arguments: str) -> None:
    """Print the figures of a call as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    call = getattr(importlib.import_module(module), function)
    print(json.dumps(call(*json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
