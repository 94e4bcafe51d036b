"""Buffers that F writes where they are, as eager mode writes running statistics.

F's graph is functional: it returns new values of buffers, for which batch norm copies both
statistics. The code that runs writes a new value over the old one if nothing else reads either of
them. Graphs stay functional, and so do dumps and the programs of the flight recorder.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import producer
from ..analysis.operators import IN_PLACE
from ..graph import Kind, Role, SplitGraphs, computed_outputs, inputs, is_like

_PLACE = "buffer_place"
"""Key in the ``meta`` of a new value: the position of the buffer in the call of its operator."""

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_STATISTICS = (3, 4)
"""Positions of running mean and variance among the arguments and the results of a batch norm."""


def mark_buffer_writes(program: SplitGraphs) -> bool:
    """Pass: mark the new values that may be written over buffers; False, as no graph changes."""
    graph = program.forward.graph
    buffers = inputs(graph, Kind.BUFFER)
    returned = Counter(value for _, value in computed_outputs(graph))
    places: dict[fx.Node, int] = {}
    for role, value in computed_outputs(graph, Kind.UPDATE):
        buffer = buffers.get(Role(Kind.BUFFER, role.name))
        is_read = len(value.users) > 1 or returned[value] > 1
        place = None if buffer is None or is_read else _place(value, buffer)
        if place is not None:
            places[value] = place
    writes = Counter(map(producer, places))
    for value, place in places.items():
        if value.target in IN_PLACE or writes[producer(value)] == len(_STATISTICS):
            value.meta[_PLACE] = place
    return False


def _place(value: fx.Node, buffer: fx.Node) -> int | None:
    """The position of the buffer in a call that can write ``value`` over it, or None."""
    maker, at = producer(value), 0
    if maker.target is BATCH_NORM and value.target is operator.getitem:
        at = value.args[1]  # type: ignore[assignment]
    can_write = at in _STATISTICS or (value.target in IN_PLACE and not value.kwargs)
    is_written = can_write and maker.args[at] is buffer and [*buffer.users] == [maker]
    return at if is_written and is_like(value, buffer) else None


def written_buffer(value: fx.Node) -> Any | None:
    """The buffer over which running code writes a value, or None."""
    place = value.meta.get(_PLACE)
    return None if place is None else producer(value).args[place]
