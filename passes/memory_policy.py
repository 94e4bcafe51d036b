"""The ``memory`` setting: how recomputation and early weight gradients are traded for memory, and
what weight gradients hide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from .errors import PassError


class Rates(NamedTuple):
    """What operators and collectives take, all in one unit of time.

    Attributes:
        flops: of matrix products and the like that a device does in it.
        bytes: that its operators read and write in it.
        call: time that any operator takes besides.
        exchanged: bytes that ranks bring to each other in it, those of an all-reduce counted twice.
        start: time that any collective takes besides.
    """

    flops: float
    bytes: float
    call: float
    exchanged: float
    start: float


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
        overlap: whether what can run while collectives are under way does so, weight gradients
            above all.
        rates: by which that is decided; None: by estimates, from which links may be far.
    """

    name: str
    recompute: float
    waiting: float = 1.0
    budget: int | None = None
    late_input: bool = False
    overlap: bool = False
    rates: Rates | None = None

    @property
    def releases_weights(self) -> bool:
        """Whether I may compute weight gradients."""
        return self.waiting < 1


FAST = Memory("fast", recompute=0.0)
BALANCED = Memory("balanced", recompute=0.02)
LEAN = Memory("lean", recompute=0.02, waiting=0.55)

MEMORY: Mapping[str, Memory] = {each.name: each for each in (FAST, BALANCED, LEAN)}


OVERLAP = ("collectives", "none")
"""What weight gradients may hide."""


def memory_setting(
    memory: str | int, *, late_input: bool = False, overlap: str | Rates = "none"
) -> Memory:
    """The setting of that name; a number is a budget in bytes.

    A budget bounds the distinct storage that one microbatch holds between I and W, that is
    what I hands over. What F saves, what lives only inside a graph, and parameters and
    gradients are not in it. Rates for ``overlap`` are ``"collectives"`` by these.

    Raises:
        PassError: an unknown name (lists the known ones), or no number of bytes.
    """
    rates = overlap if isinstance(overlap, Rates) else None
    if rates is None and overlap not in OVERLAP:
        known = ", ".join(map(repr, OVERLAP))
        raise PassError(f"unknown overlap {overlap!r}; known ones: {known}")
    hides = rates is not None or overlap == "collectives"
    if isinstance(memory, str):
        if memory in MEMORY:
            named = MEMORY[memory]
            return dataclasses.replace(named, late_input=late_input, overlap=hides, rates=rates)
    elif isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        name = f"{memory} bytes"
        return Memory(name, BALANCED.recompute, 0.0, memory, late_input, hides, rates)
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
