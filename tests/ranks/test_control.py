"""Control messages arrive unchanged, in the call that they belong to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from autosplit.errors import CheckpointError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.control import Control
from tests.kept_ranks import ranks

SAME = [
    None,
    0.1 + 0.2,
    "a\u2028\n",
    {(0, 1): {3}, "b": frozenset({"c"})},
    torch.Size([2, 3]),
    ActionKind.FORWARD,
    Link(1e-5, math.inf),
    Span(1, Action.parse("2W3"), 0.25, 1e-300),
    TensorMeta(torch.Size([2]), torch.float32, True),
    build("dualpipe-v", 4, 4, ranks=2),
]


@contextlib.contextmanager
def unwatched(whom: str) -> Iterator[None]:
    yield


@ranks(2)
def test_all_of_it_arrives() -> None:
    rank = dist.get_rank()
    control = Control([1, 0], rank, dist.group.WORLD, unwatched)
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
    for value in SAME:
        result = control.gather((rank, value))
        assert result == [(1, value), (0, value)]
        assert all(type(item) is type(value) for _, item in result)
    assert all(torch.equal(item, tensor) for item in control.gather(tensor))
    error = control.gather(CheckpointError("no such file"))[1 - control.rank]
    assert (type(error), str(error)) == (CheckpointError, "no such file")
    assert control.broadcast([5 + rank, rank], 0) == [6, 1]
    assert control.all_reduce_and((1 << 62) + (5 if rank else 6), -1 if rank else 7) == [
        (1 << 62) + 4,
        7,
    ]
