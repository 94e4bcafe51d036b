"""The default process group: its device and size, and plain data over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.mesh.group_device import device_of_group
from autosplit.pipeline.engine.faults.store_register import Register, await_ending

from . import plain_messages

# Whoever loses a peer looks this long for what became of it.
_PATIENCE = 1.0


def gather(value: object) -> list[Any]:
    """``value`` of every process, by rank; see ``plain_messages``. Collective.

    Raises:
        PipelineError: a process did not take part; it names one that has ended.
    """
    with _naming_the_lost():
        return plain_messages.gather_in(value, None, _device_of_news())


def tell(value: object, source: int) -> Any:
    """``value`` of process ``source``, on all of them; see ``plain_messages``. Collective.

    Raises:
        PipelineError: as ``gather``.
    """
    with _naming_the_lost():
        return plain_messages.tell_in(value, source, None, _device_of_news())


def register_of_world() -> Register:
    """What the ranks of the default process group leave for each other."""
    world = dist.group.WORLD
    if world is None:
        raise PipelineError("there is no default process group")
    return Register(world.get_group_store())


@contextlib.contextmanager
def _naming_the_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        found = next(await_ending(register_of_world(), ranks, _PATIENCE), "lost the other ranks")
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise PipelineError(f"{found}, and rank {dist.get_rank()} needs it: {reason}") from error


def _device_of_news() -> torch.device:
    return torch.device("cpu") if "gloo" in dist.get_backend_config() else device_of_group()


def process_count(ranks: int | None, stages: int) -> int:
    """How many processes hold the ``stages`` stages.

    Args:
        ranks: what the user asked for; None takes the size of the default process group.

    Raises:
        PipelineError: no process group where one is needed, or a count that does not fit.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if ranks is None and world is None and stages > 1:
        raise PipelineError(
            f"{stages} stages need a process group and there is none: run under "
            f"'torchrun --nproc-per-node {stages}' inside autosplit.pipeline.process_group(), or "
            "through autosplit.pipeline.launch; ranks=1 holds all stages in this one process"
        )
    count = (world or 1) if ranks is None else ranks
    if not 1 <= count <= stages:
        raise PipelineError(
            f"{count} processes cannot hold {stages} stages: each needs at least one stage; "
            f"start at most {stages} or cut the model into more stages"
        )
    if count > 1 and count != world:
        raise PipelineError(
            f"ranks={ranks} but the process group has {world or 'no'} processes: "
            "leave ranks out to use them all, or say ranks=1 for one process"
        )
    return count
