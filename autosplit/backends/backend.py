"""``Backend`` turns graphs into callables. ``Eager`` is the backend that runs a graph operator by
operator.

Eager runs the same kernels as plain autograd, and so computes the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib.abc
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import fx

from autosplit.errors import SplitError
from autosplit.passes.analysis.operators import overload
from autosplit.passes.errors import StrideError
from autosplit.passes.graph import Role
from autosplit.passes.lowering import codegen
from autosplit.passes.lowering.forms import Strides
from autosplit.passes.subgraph import Subgraph, inline, inner_calls, subgraphs
from autosplit.torch_internals.operators import bind_operators

if TYPE_CHECKING:
    from autosplit.gathering import Gathering

Boxed = Callable[[list[Any]], list[Any]]


class Code(NamedTuple):
    """The result of compiling a graph.

    Attributes:
        call: takes one list of arguments, empties it, and returns the list of outputs.
        strides: strides that the backend chose for outputs that only the next graph reads.
    """

    call: Boxed
    strides: Mapping[Role, Strides] = {}


class Backend:
    """Compiles the graphs of one traced module to callables.

    Attributes:
        decompositions: maps operators that the trace must decompose to functions that compute them;
            None: no operator is decomposed.
        compiles: whether the backend is a compiler, instead of running operator by operator.
            Compilation takes seconds, so the caller avoids a second form of a graph. A compiled
            graph may write into the memory of donated arguments (``donate``), but not into views of
            arguments.
        generated: generated source of each compiled graph, by the graph's name.
        asserts_inputs: whether compiled graphs assert sizes and strides of their inputs, at each
            call. False: guards and earlier graphs guarantee them.
        gathering: gathers the sharded parameters that graphs read; None if no parameter is sharded.
        mode: one of ``MODES``.
    """

    decompositions: dict[Any, Callable[..., Any]] | None = None
    compiles = False
    generated: Mapping[str, str] = {}
    asserts_inputs = True
    gathering: Gathering | None = None
    mode = "default"

    def rewrite(self, joint: fx.GraphModule) -> None:
        """Prepare a joint graph, in place, before it is split."""

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        """Compile a graph without changing it.

        Args:
            name: name for the generated code. It is the name of the graph, such as
                ``backward_input``, or of a subgraph.
            module: the graph; it may call other graphs (``passes.subgraph``).
        """
        raise NotImplementedError


@contextlib.contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Disable Python's garbage collector inside the context, and collect the new objects once at
    its end.

    Tracing leaves tensors in reference cycles. Tracing and reading a checkpoint allocate so many
    objects that the collector would repeatedly scan all objects, half a million in a process with
    torch. Older objects are frozen inside the context, so that a full collection at its end scans
    the new objects only. Collecting the younger generations instead would make Python scan all
    objects soon afterwards, because their number has grown. Objects that the user has frozen stay
    frozen.
    """
    enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    if freezes:
        gc.collect(1)  # older garbage must not wait for a scan of all objects
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        # A search for leaks (gc.DEBUG_SAVEALL) must not report these objects.
        flags = gc.get_debug()
        gc.set_debug(0)
        # Twice: the first collection drops autograd's graph, which holds more tensors from C++.
        gc.collect(0)
        gc.collect(2 if freezes else 1)
        gc.set_debug(flags)
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


_SMALL = 128
"""Largest number of operators of a graph whose blocks are written inline. A call of a block costs
as much host time as an operator; larger graphs save time by compiling a block once.
"""


class Eager(Backend):
    """The backend that runs a graph as Python source: the source that ``dump`` writes, with the
    blocks of small graphs inline.

    Args:
        subgraph_calls: maps a subgraph to its compiled function; other subgraphs are compiled as
            Python.
        gathering: see ``Backend``.
    """

    def __init__(
        self,
        subgraph_calls: Mapping[Subgraph, Boxed] = types.MappingProxyType({}),
        gathering: Gathering | None = None,
    ) -> None:
        self._called = dict(subgraph_calls)
        self._compiles_all = not subgraph_calls
        self.gathering = gathering

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        """Generate and execute the Python source of a graph.

        Returns:
            the generated function. Its call raises SplitError if an input has other strides than
            the graph was traced with.
        """
        operators = [*inner_calls(module.graph)]
        is_small = len(operators) <= _SMALL and all(map(_is_of_aten, operators))
        if is_small and self._compiles_all and self.gathering is None:
            module = inline(module)
        return Code(self._python_function(name, module))

    def _python_function(self, name: str, module: fx.GraphModule) -> Boxed:
        source = f"{codegen.HEADER}\n\n{codegen.generate(name, module, writes_buffers=True)}"
        constants = codegen.constants(module)
        for called in subgraphs(module.graph):
            block, gathering = self._compiled(called), self.gathering
            constants[called.name] = gathering.block(name, block) if gathering else block
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        file = f"autosplit-generated/{name}-{digest}.py"
        space = types.ModuleType(name)
        # Tracebacks and debuggers read the failing line from the module's loader.
        space.__loader__ = _Source(source)
        code, operators = bind_operators(source)
        exec(compile(code, file, "exec"), space.__dict__)
        space.__dict__.update(operators)
        function: Any = getattr(space, name)
        function.__defaults__ = (constants,)
        if StrideError.__name__ not in source:
            return cast(Boxed, function)

        def call(args: list[Any]) -> list[Any]:
            try:
                results: list[Any] = function(args)
            except StrideError as error:
                raise SplitError(str(error)) from error
            return results

        return call

    def _compiled(self, called: Subgraph) -> Boxed:
        """Compile a subgraph, once."""
        if called not in self._called:
            self._called[called] = self._python_function(called.name, called.module)
        return self._called[called]


def _is_of_aten(node: fx.Node) -> bool:
    """Whether the node calls an operator of ATen, or takes a result of one."""
    op = overload(node)
    return node.target is operator.getitem if op is None else op.namespace == "aten"


@dataclasses.dataclass(frozen=True)
class _Source(importlib.abc.InspectLoader):
    text: str

    def get_source(self, fullname: str) -> str:
        return self.text


def _inductor() -> Backend:
    from .inductor import Inductor  # torch's compiler takes seconds to import

    return Inductor()


BACKENDS: Mapping[str, Callable[[], Backend]] = {"eager": Eager, "inductor": _inductor}


MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of ``torch.compile`` in which graphs can be compiled."""


_MAX_AUTOTUNE = (
    "backend='inductor', mode='max-autotune'; under torch.compile, where only one of mode= and "
    "options= is accepted, use options={'backend': 'inductor', 'mode': 'max-autotune'}"
)
"""Options that compile with a mode, as text for errors."""


def backend_named(name: str, mode: str = "default") -> Backend:
    """Create a backend of ``BACKENDS``, for one traced module, with a mode of ``MODES``."""
    backend = BACKENDS[name]()
    backend.mode = mode
    return backend


def check_backend(name: str, mode: str = "default") -> None:
    """Check the name of a backend, and its mode.

    Raises:
        SplitError: the backend or the mode is unknown, and the message lists the known ones; or the
            backend has no modes.
    """
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise SplitError(f"unknown backend {name!r}; known backends: {names}")
    if mode == "reduce-overhead":
        raise SplitError(
            "mode='reduce-overhead' is refused, because it only adds CUDA graphs: a CPU has none, "
            "and on a GPU they would write over results of microbatches whose backward is still to "
            f"come. Leave it out, or use {_MAX_AUTOTUNE}"
        )
    if mode not in MODES:
        names = ", ".join(map(repr, MODES))
        raise SplitError(f"unknown mode {mode!r} of torch.compile; known modes: {names}")
    if mode != "default" and name == "eager":
        raise SplitError(
            f"mode={mode!r} has no effect with backend='eager', which compiles nothing. Leave it "
            f"out, or use {_MAX_AUTOTUNE}"
        )
