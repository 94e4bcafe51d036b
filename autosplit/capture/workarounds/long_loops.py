"""Loops that would be unrolled too far.

Models that scan over a sequence may have a closed form for compilers beside the loop, and ask
``torch.compiler.is_exporting()`` which one to take: transformers' Mamba has
``associative_scan``. Unrolled, a loop over a short sequence runs faster than the closed form
and computes what eager mode does, bit for bit; over a long one its graph takes minutes to trace.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.torch import tracing_state_functions

LIMIT = 2048
"""Operators from one line of one call: 512 steps of a state-space model."""


class LongLoopError(TorchDynamoException):
    """A line is in the graph too often."""


class UnrollingLimit:
    """Attributes:
    line: of a loop that was unrolled too far; None as long as there is none.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self._seen: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()

    def see(self, graph: OutputGraph) -> None:
        """Count an operator of the line that is being traced.

        Raises:
            LongLoopError: there were too many.
        """
        frame: Any = graph.current_tx
        seen = self._seen.setdefault(frame, Counter())
        seen[frame.lineno] += 1
        if seen[frame.lineno] > LIMIT:
            self.line = f"{frame.f_code.co_filename}:{frame.lineno}"
            raise LongLoopError(f"{self.line} is in the graph more than {LIMIT} times")


@contextlib.contextmanager
def unrolling_limited() -> Iterator[UnrollingLimit]:
    """Dynamo stops tracing in here where it unrolls a loop too far."""
    limit = UnrollingLimit()
    original: Any = OutputGraph.create_proxy

    def create_proxy(graph: OutputGraph, *args: Any, **kwargs: Any) -> Any:
        limit.see(graph)
        return original(graph, *args, **kwargs)

    with patch.object(OutputGraph, "create_proxy", create_proxy):
        yield limit


def compiled_not_exported() -> AbstractContextManager[Any]:
    """Dynamo answers so if a forward asks; in torch 2.11 it has the other answer for all."""
    return patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})
