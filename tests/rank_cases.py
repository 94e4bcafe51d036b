"""Cases that ranks run in one launch, one after another."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

Case = Callable[[], list[str]]
"""What every rank runs; what is wrong comes back."""


class RankCases(dict[str, Case]):
    """Cases by name, in the order in which they run."""

    def add(self, run: Case) -> Case:
        """Have every rank run this, under its name."""
        self[run.__name__.replace("_", " ")] = run
        return run


def all_of(module: str) -> dict[str, list[str]]:
    """What is wrong in each of a module's ``CASES``."""
    found = {}
    for name, run in importlib.import_module(module).CASES.items():
        torch.manual_seed(0)
        try:
            found[name] = run()
        except Exception:
            found[name] = [traceback.format_exc()]
            break  # ranks are not at one place any more
        dist.barrier()
    return found
