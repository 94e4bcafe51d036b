"""The ``memory`` setting: how recomputation and early weight gradients are traded for memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from .errors import PassError


class CollectiveCosts(NamedTuple):
    """What a collective takes, in the time in which a device moves one byte. By default as if links
    between devices were a tenth as fast as memory (NVLink beside HBM, loopback beside DRAM).

    Attributes:
        start: besides.
        byte: for each byte that ranks bring to each other, those of an all-reduce counted twice.
    """

    start: float = 200_000.0
    byte: float = 8.0


@dataclasses.dataclass(frozen=True)
class Memory:
    """How memory, recomputation and deferred weight gradients are traded.

    Attributes:
        name: what the user asked for.
        recompute: time to spend on recomputing cheap operators, as a share of the step's
            estimated time.
        waiting: least share of the weight gradients' FLOPs that is deferred to W. Below 1, I
            computes the weight gradients that free the most bytes for their FLOPs.
        budget: bytes to hold between I and W for one microbatch; None asks for the fewest that
            ``waiting`` allows.
        late_input: whether I computes nothing where no input needs a gradient, and W does all of
            the backward in one graph: a pipeline's other stages wait for no such I.
        collectives: what they take, by which weight gradients are chosen that hide them.
    """

    name: str
    recompute: float
    waiting: float = 1.0
    budget: int | None = None
    late_input: bool = False
    collectives: CollectiveCosts = CollectiveCosts()  # noqa: RUF009 (immutable)

    @property
    def releases_weights(self) -> bool:
        """Whether I may compute weight gradients."""
        return self.waiting < 1


FAST = Memory("fast", recompute=0.0)
BALANCED = Memory("balanced", recompute=0.02)
LEAN = Memory("lean", recompute=0.02, waiting=0.55)

MEMORY: Mapping[str, Memory] = {each.name: each for each in (FAST, BALANCED, LEAN)}


def memory_setting(
    memory: str | int, *, late_input: bool = False, collectives: CollectiveCosts | None = None
) -> Memory:
    """The setting of that name; a number is a budget in bytes.

    A budget bounds the distinct storage that one microbatch holds between I and W, that is
    what I hands over. What F saves, what lives only inside a graph, and parameters and
    gradients are not in it.

    Raises:
        PassError: an unknown name (lists the known ones), or no number of bytes.
    """
    costs = CollectiveCosts() if collectives is None else collectives
    if isinstance(memory, str):
        if memory in MEMORY:
            return dataclasses.replace(MEMORY[memory], late_input=late_input, collectives=costs)
    elif isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        name = f"{memory} bytes"
        return Memory(name, BALANCED.recompute, 0.0, memory, late_input, costs)
    known = ", ".join(map(repr, MEMORY))
    raise PassError(
        f"memory is one of {known}, or the bytes that one microbatch may hold between I and W; "
        f"got {memory!r}"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """Capacity of an edge in three currencies, which the caller weighs against each other.

    Attributes:
        bytes: storage of a saved or deferred tensor.
        time: time of recomputing an operator.
        flops: work of a weight gradient that I computes.
    """

    bytes: int = 0
    time: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.bytes + other.bytes, self.time + other.time, self.flops + other.flops)
