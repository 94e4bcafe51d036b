"""``Backend``: what makes callables of graphs; ``Eager``, operator by operator: the same kernels as
plain autograd, so the same bits. And the garbage collector meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib.abc
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from autosplit.errors import SplitError
from autosplit.passes.errors import StrideError
from autosplit.passes.graph import Role, concrete
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import Subgraph, subgraphs
from autosplit.torch_internals.operators import DirectOperators

if TYPE_CHECKING:
    from autosplit.sharded import Gathering

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


def with_strides(value: Any, strides: Strides | None) -> Any:
    """A fake tensor with the strides that a backend chose for it, if it did."""
    if strides is None or [*map(concrete, strides)] == [*map(concrete, value.stride())]:
        return value
    return value.new_empty_strided(value.shape, strides)


class Backend:
    """Makes callables of the graphs of one traced module.

    Attributes:
        decompositions: operators to trace through, rather than to record; None for those of eager.
        compiles: whether graphs are compiled, not run as they are: that takes seconds, so a second
            variant is to be avoided; what is compiled may write into the memory of donated
            arguments (``donate``), and not into views of arguments.
        generated: name of a graph -> source that was generated for it, of those compiled.
        gathering: gathers the parameters that graphs read, where they are sharded.
    """

    decompositions: dict[Any, Callable[..., Any]] | None = None
    compiles = False
    generated: Mapping[str, str] = {}
    gathering: Gathering | None = None

    def rewrite(self, joint: fx.GraphModule) -> None:
        """Prepare a joint graph, in place, before it is split."""

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        """Compile a graph, which is left as it is; it may call others (``passes.subgraph``)."""
        raise NotImplementedError


@contextlib.contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Collect once, in the end, what is left of the objects made inside: tracing leaves tensors in
    cycles, and allocates so much that the collector would go through the half a million objects of
    a process with torch again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Whoever looks for leaks (gc.DEBUG_SAVEALL) is to be told of others than these.
        flags = gc.get_debug()
        gc.set_debug(0)
        # Twice: autograd's graph, which the first collection drops, holds other tensors from C++.
        gc.collect(0)
        gc.collect(1)
        gc.set_debug(flags)
        if enabled:
            gc.enable()


_OPERATORS = DirectOperators()


class Eager(Backend):
    """Runs the very source that ``dump`` writes.

    Args:
        known: compiled graphs that others call; the rest are compiled here.
        gathering: see ``Backend``.
    """

    def __init__(
        self,
        subgraph_calls: Mapping[Subgraph, Boxed] = types.MappingProxyType({}),
        gathering: Gathering | None = None,
    ) -> None:
        self._called = dict(subgraph_calls)
        self.gathering = gathering

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        source = f"{codegen.HEADER}\n\n{codegen.generate(name, module)}"
        constants = codegen.constants(module)
        for called in subgraphs(module.graph):
            block, gathering = self._compiled(called), self.gathering
            constants[called.name] = gathering.block(name, block) if gathering else block
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        file = f"autosplit-generated/{name}-{digest}.py"
        space = types.ModuleType(name)
        # Tracebacks and debuggers ask the module's loader for the line that failed.
        space.__loader__ = _Source(source)
        exec(compile(source, file, "exec"), space.__dict__)
        space.__dict__["aten"] = _OPERATORS
        function: Any = getattr(space, name)
        function.__defaults__ = (constants,)
        if StrideError.__name__ not in source:
            return Code(function)

        def call(args: list[Any]) -> list[Any]:
            try:
                results: list[Any] = function(args)
            except StrideError as error:
                raise SplitError(str(error)) from error
            return results

        return Code(call)

    def _compiled(self, called: Subgraph) -> Boxed:
        """A graph that others call, compiled once."""
        if called not in self._called:
            self._called[called] = self.compile(called.name, called.module).call
        return self._called[called]


@dataclasses.dataclass(frozen=True)
class _Source(importlib.abc.InspectLoader):
    text: str

    def get_source(self, fullname: str) -> str:
        return self.text


def _inductor() -> Backend:
    from .inductor import Inductor  # torch's compiler takes seconds to import

    return Inductor()


BACKENDS: Mapping[str, Callable[[], Backend]] = {"eager": Eager, "inductor": _inductor}


def backend_named(name: str) -> Backend:
    """A backend of ``BACKENDS``, for one traced module."""
    return BACKENDS[name]()


def check_backend(name: str) -> None:
    """Raises:
    SplitError: the backend is unknown; lists the known ones.
    """
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise SplitError(f"unknown backend {name!r}; known backends: {names}")
