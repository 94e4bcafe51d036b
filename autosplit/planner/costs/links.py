"""The links between ranks, for a plan."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from autosplit.errors import PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.engine.timing import measure_transfer, ring
from autosplit.pipeline.simulation.transfer import Transfer

_TIMEOUT = 60.0


def profile_transfer() -> Transfer:
    """The link between two processes of this machine, over gloo; for any two ranks.

    Starting them takes seconds; ranks that are there already can call ``measure_links``.

    Returns:
        Latency and bandwidth, with no ``message_bytes``.
    """
    return replace(launch(measure_links, 2, timeout=_TIMEOUT)[0], pairs={})


def measure_links() -> Transfer:
    """The links of each rank to the next and from the last to the first, with the messages that a
    trainer's stages send.

    Collective over the default process group; all ranks get the same.

    Raises:
        PlanError: there is only one rank.
    """
    if dist.get_world_size() < 2:
        raise PlanError("a link joins two ranks, and the default process group has one")
    device = device_of_group()
    groups = Groups(dist.get_world_size(), device, _TIMEOUT)
    try:
        return measure_transfer(groups, device, ring(groups.ranks))
    finally:
        groups.destroy()
