"""The ``memory`` setting: a trade-off of memory, recomputation and early weight gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from .errors import PassError


class CollectiveCosts(NamedTuple):
    """The cost of a collective, in bytes of device-memory traffic. The defaults assume that links
    between devices have a tenth of the bandwidth of memory (NVLink and HBM, loopback and DRAM).

    Attributes:
        start: fixed cost per collective.
        byte: cost of each byte exchanged; an all-reduce exchanges each byte twice.
    """

    start: float = 200_000.0
    byte: float = 8.0


@dataclasses.dataclass(frozen=True)
class Memory:
    """A trade-off of memory, recomputation and deferred weight gradients.

    Attributes:
        name: as the user gave it.
        recompute: the most time for recomputing cheap operators, as a share of the step's
            estimated time.
        waiting: the least share of the weight gradients' FLOPs that is deferred to W. Below 1, I
            computes the weight gradients that free the most bytes for their FLOPs.
        budget: the most bytes of deferred tensors of one microbatch; None: the fewest that
            ``waiting`` allows.
        defer_whole_backward: whether W does the whole backward, in one graph, if no input needs a
            gradient. In a pipeline, no other stage waits for I of such a stage.
        collectives: costs of collectives; they decide which weight gradients I computes to hide
            collectives.
        recomputes_results: whether the backward may recompute results of called graphs.
    """

    name: str
    recompute: float
    waiting: float = 1.0
    budget: int | None = None
    defer_whole_backward: bool = False
    collectives: CollectiveCosts = CollectiveCosts()  # noqa: RUF009 (immutable)
    recomputes_results: bool = True

    @property
    def allows_early_weight_grads(self) -> bool:
        """Whether I may compute weight gradients."""
        return self.waiting < 1


FAST = Memory("fast", recompute=0.0)
BALANCED = Memory("balanced", recompute=0.02)
LEAN = Memory("lean", recompute=0.02, waiting=0.55)

MEMORY: Mapping[str, Memory] = {setting.name: setting for setting in (FAST, BALANCED, LEAN)}


def memory_setting(
    memory: str | int,
    *,
    defer_whole_backward: bool = False,
    collectives: CollectiveCosts | None = None,
) -> Memory:
    """The setting with a name in ``MEMORY``, or with a budget in bytes.

    A budget bounds the distinct storage of the tensors that one microbatch keeps between I and W.
    Saved tensors, temporaries of a graph, parameters and gradients do not count.

    Raises:
        PassError: ``memory`` is neither a known name nor a number of bytes. The error lists the
            known names.
    """
    costs = CollectiveCosts() if collectives is None else collectives
    if isinstance(memory, str):
        if memory in MEMORY:
            return dataclasses.replace(
                MEMORY[memory], defer_whole_backward=defer_whole_backward, collectives=costs
            )
    elif isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        name = f"{memory} bytes"
        return Memory(name, BALANCED.recompute, 0.0, memory, defer_whole_backward, costs)
    names = ", ".join(map(repr, MEMORY))
    raise PassError(
        f"memory must be {names}, or the bytes that one microbatch may hold between I and W; "
        f"got {memory!r}"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """The price of an edge in three units, which the caller weighs against each other.

    Attributes:
        bytes: storage of a saved or deferred tensor.
        time: time of recomputing an operator.
        flops: FLOPs of a weight gradient that I computes.
    """

    bytes: int = 0
    time: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.bytes + other.bytes, self.time + other.time, self.flops + other.flops)
