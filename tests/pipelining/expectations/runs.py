"""Runs cases on a rank, one after the other."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from autosplit.pipeline.engine.groups import disconnect

from . import neighbours, one_rank, own_orders, stages, two_ranks
from .bench import CASES, Bench

FILES = (one_rank, stages, neighbours, own_orders, two_ranks)  # each adds its own to CASES
ALONE = ("one_rank", "stages")  # of whose cases every rank runs its share
PATIENCE = timedelta(seconds=60)


def run_all(names: Sequence[str]) -> dict[str, str]:
    """What each case raised on the rank that came first; "" if it held."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    alone = [dist.new_group([each], timeout=PATIENCE) for each in range(2)][rank]
    single = [name for name in names if name.startswith(ALONE)]
    world = dist.group.WORLD
    shares: list[dict[str, str]] = [{}, {}]
    mine = {name: _failure(name, Bench(rank, world, alone)) for name in single[rank::2]}
    dist.all_gather_object(shares, mine)
    return (
        shares[0]
        | shares[1]
        | {name: _run(name, rank, alone) for name in names if name not in single}
    )


def _run(name: str, rank: int, alone: dist.ProcessGroup) -> str:
    # Of its own, so that the other rank does not wait for one that has failed.
    group = dist.new_group(timeout=PATIENCE)
    failure = _failure(name, Bench(rank, group, alone))
    if failure:
        disconnect(group, 1 - rank)
    failures: list[str] = ["", ""]
    dist.all_gather_object(failures, failure)
    dist.destroy_process_group(group)
    return "\n".join(f"rank {at}: {each}" for at, each in enumerate(failures) if each)


def _failure(name: str, bench: Bench) -> str:
    torch.manual_seed(0)
    try:
        CASES[name](bench)
    except BaseException:
        return traceback.format_exc()
    return ""
