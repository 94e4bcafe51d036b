"""Runs cases on a rank, one after the other."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from autosplit.pipeline.engine.messages.process_groups import disconnect

from . import one_rank, own_orders, stages, two_ranks
from .bench import CASES, Bench

FILES = (one_rank, own_orders, stages, two_ranks)  # each adds its own to CASES
PATIENCE = timedelta(seconds=60)


def run_all(names: Sequence[str]) -> dict[str, str]:
    """What each case raised on the rank that came first; "" if it held."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    alone = [dist.new_group([each], timeout=PATIENCE) for each in range(2)][rank]
    return {name: _run(name, rank, alone) for name in names}


def _run(name: str, rank: int, alone: dist.ProcessGroup) -> str:
    # Of its own, so that the other rank does not wait for one that has failed.
    group = dist.new_group(timeout=PATIENCE)
    failure = ""
    torch.manual_seed(0)
    try:
        CASES[name](Bench(rank, group, alone))
    except BaseException:
        failure = traceback.format_exc()
        disconnect(group, 1 - rank)
    failures: list[str] = ["", ""]
    dist.all_gather_object(failures, failure)
    dist.destroy_process_group(group)
    return "\n".join(f"rank {at}: {each}" for at, each in enumerate(failures) if each)
