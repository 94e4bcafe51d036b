"""``Backend``: the interface of what compiles graphs, and the garbage collector meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import fx

from autosplit.passes.graph import Role, concrete

if TYPE_CHECKING:
    from autosplit.sharded.gathering import Gathering

Boxed = Callable[[list[Any]], list[Any]]
Strides = tuple[int | torch.SymInt, ...]


class Code(NamedTuple):
    """A compiled graph.

    Attributes:
        call: takes one list, empties it and returns a list.
        strides: of outputs that only the next graph sees, where the backend chose them.
    """

    call: Boxed
    strides: Mapping[Role, Strides] = {}


def restrided(value: Any, strides: Strides | None) -> Any:
    """A fake tensor with the strides that a backend chose for it, if it did."""
    if strides is None or [*map(concrete, strides)] == [*map(concrete, value.stride())]:
        return value
    return value.new_empty_strided(value.shape, strides)


class Backend(Protocol):
    """Makes callables of the graphs of one traced module.

    Attributes:
        gathering: gathers the parameters that graphs read, where they are sharded.
    """

    gathering: Gathering | None

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Operators to trace through, rather than to record; None for those of eager."""

    @property
    def generated(self) -> Mapping[str, str]:
        """Name of a graph -> source that the backend generated for it, of those compiled."""

    @property
    def writes_views(self) -> bool:
        """Whether a graph may write into views of its arguments."""

    @property
    def reuses_memory(self) -> bool:
        """Whether a graph may write into the memory of donated arguments (``donate``)."""

    @property
    def compiles_slowly(self) -> bool:
        """Whether a graph takes seconds to compile, so that a second variant is to be avoided."""

    @property
    def calls_subgraphs(self) -> bool:
        """Whether a graph may call others (``passes.subgraph``), rather than hold all operators."""

    def rewrite(self, joint: fx.GraphModule) -> None:
        """Prepare a joint graph, in place, before it is split."""

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        """Compile a graph, which is left as it is."""


_FROZEN = ContextVar("frozen by a context around this one", default=False)


@contextlib.contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Freeze the objects that exist, so that the collector looks only at those made inside, and
    collect what is left of them in the end: tracing leaves tensors in cycles.

    Tracing allocates so much that it would go through the half a million objects of a process with
    torch again and again. Does nothing where the process has frozen objects itself.
    """
    # Counting frozen objects goes through all of them.
    if _FROZEN.get() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    outer = _FROZEN.set(True)
    try:
        yield
    finally:
        _FROZEN.reset(outer)
        # Whoever looks for leaks (gc.DEBUG_SAVEALL) is to be told of others than these.
        flags = gc.get_debug()
        gc.set_debug(0)
        gc.collect()
        gc.set_debug(flags)
        gc.unfreeze()
