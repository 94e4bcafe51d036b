"""Compilation of one graph by a backend, with its arguments and results by role."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from autosplit.errors import BackendError, SplitError
from autosplit.passes.errors import PassError
from autosplit.passes.graph import Role, inputs, outputs
from autosplit.passes.subgraph import inline

from .backend import Backend, Boxed, Code, Strides, restrided
from .cudagraphs import CudaGraphs
from .eager import Eager

__all__ = [
    "BACKENDS",
    "Backend",
    "Boxed",
    "Code",
    "CompiledGraph",
    "backend_named",
    "check_backend",
    "compile_graph",
    "hand_over",
    "holds_open_sizes",
    "positions",
    "prepare_joint",
]


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph as a callable.

    Attributes:
        call: takes one list, empties it, and returns a list. The caller keeps no reference
            to what it handed over, so every tensor dies at its last use inside.
        inputs: role of every item of the list it takes.
        outputs: role of every item of the list it returns.
        strides: of outputs that only the next graph sees, where the backend chose them.
    """

    call: Boxed
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    strides: Mapping[Role, Strides]

    def taking(self, given: Sequence[Role], wanted: Sequence[Role]) -> Boxed:
        """``call`` for a list in the order of ``given``, of which the graph may take a part; its
        results in the order of ``wanted``, None for what it does not return.
        """
        order, call = positions(self.inputs, given), self.call
        at = {role: index for index, role in enumerate(self.outputs)}
        picked = [at.get(role, -1) for role in wanted]  # the last is a None that is added
        takes_all = order == [*range(len(given))]
        if takes_all and picked == [*range(len(self.outputs))]:
            return call
        take, pick = _getter(order), _getter(picked)

        def run(pool: list[Any]) -> list[Any]:
            args = pool
            if not takes_all:
                args = [*take(pool)]
                pool.clear()
            results = call(args)
            results.append(None)
            return [*pick(results)]

        return run


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What stands in these places of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[at] for at in places]


def positions(wanted: Iterable[Role], given: Sequence[Role]) -> list[int]:
    """Index of each wanted role among the given ones."""
    at = {role: index for index, role in enumerate(given)}
    return [at[role] for role in wanted]


def hand_over(strides: Mapping[Role, Strides], *takers: fx.GraphModule | None) -> None:
    """Propagate chosen strides to graphs that are compiled later."""
    for module in takers:
        for role, node in inputs(module.graph).items() if module else ():
            node.meta["val"] = restrided(node.meta["val"], strides.get(role))


def compile_graph(name: str, module: fx.GraphModule, backend: Backend) -> CompiledGraph:
    """Compile one graph.

    Raises:
        BackendError: the backend cannot compile it; names the graph.
    """
    if not backend.calls_subgraphs:
        module = inline(module)
    with _errors_name(name, backend):
        call, strides = backend.compile(name, module)
    if backend.gathering is not None:
        call = backend.gathering.graph(name, module, call)
    taken = tuple(inputs(module.graph))
    returned = tuple(role for role, _ in outputs(module.graph))
    return CompiledGraph(call, taken, returned, strides)


def prepare_joint(joint: fx.GraphModule, backend: Backend) -> None:
    """Let a backend rewrite a joint graph, in place, before it is split.

    Raises:
        BackendError: it fails.
    """
    with _errors_name("joint", backend):
        backend.rewrite(joint)


@contextlib.contextmanager
def _errors_name(graph: str, backend: Backend) -> Iterator[None]:
    try:
        yield
    except (BackendError, PassError):
        raise  # a PassError says that the graph cannot be split, whatever runs it
    except Exception as error:
        kind = type(backend).__name__.lower()
        raise BackendError(
            f"backend {kind!r} cannot compile the {graph} graph ({type(error).__name__}: {error}); "
            "backend='eager' runs every graph that can be split"
        ) from error


def check_backend(name: str) -> None:
    """Raises:
    SplitError: the backend is unknown; lists the known ones.
    """
    if name not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise SplitError(f"unknown backend {name!r}; known backends: {known}")


def holds_open_sizes(name: str) -> bool:
    """Whether graphs of this backend may have symbolic sizes of inputs."""
    return name in _OPEN_SIZES


def backend_named(name: str) -> Backend:
    """A backend of ``BACKENDS``, for one traced module.

    Raises:
        SplitError: the backend is unknown; lists the known ones.
    """
    check_backend(name)
    return BACKENDS[name]()


def _inductor() -> Backend:
    from .inductor import Inductor  # torch's compiler takes seconds to import

    return Inductor()


BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "eager": Eager,
    "inductor": _inductor,
    "cudagraphs": CudaGraphs,
}

# Inductor assumes more about sizes while it compiles, W and later variants behind the guards; a
# CUDA graph replays the addresses and sizes that it recorded.
_OPEN_SIZES = frozenset({"eager"})
