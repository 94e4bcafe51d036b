"""One graph compiled by a backend, with its arguments and results by role; and those that compute
weight gradients, with their variants that accumulate in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.backends.backend import (
    Backend,
    Boxed,
    Strides,
    collecting_new_objects_only,
    with_strides,
)
from autosplit.errors import BackendError, SplitError
from autosplit.passes import Kind, PassError, Role
from autosplit.passes.graph import inputs, outputs
from autosplit.passes.manager import accumulating
from autosplit.torch_internals.autograd import add_together, checks_nan

from .anomaly import copied, refuse_nan


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


def propagate_strides(strides: Mapping[Role, Strides], *takers: fx.GraphModule | None) -> None:
    """Propagate chosen strides to graphs that are compiled later."""
    for module in takers:
        for role, node in inputs(module.graph).items() if module else ():
            node.meta["val"] = with_strides(node.meta["val"], strides.get(role))


def compile_graph(name: str, module: fx.GraphModule, backend: Backend) -> CompiledGraph:
    """Compile one graph.

    Raises:
        BackendError: the backend cannot compile it; names the graph.
    """
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


_SMALL = 2**20  # bytes of all weight gradients of a microbatch


class GradientGraph:
    """I, W, a slice of it, or B: as it was split, and in variants that add into accumulators.

    Args:
        name: of the graph.
        module: the graph.
        given: what callers hand over, in their order.
        parameters: whose gradients are wanted, in the order of the results.
        others: roles of what else is wanted, in the order of the results.
        takers: graphs that take some of that, and are compiled after this one.
        backend: how graphs are compiled.
    """

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        given: Sequence[Role],
        parameters: Sequence[str],
        others: Sequence[Role] = (),
        takers: Sequence[fx.GraphModule] = (),
        *,
        backend: Backend,
    ) -> None:
        self._name = name
        self._module = module
        self._given = given
        self.parameters = parameters
        self._others = others
        self._takers = takers
        self._backend = backend
        self._variants: dict[tuple[torch.dtype | None, bool], Boxed] = {}

    def run(
        self, pool: list[Any], gradients: Sequence[Tensor] | None, dtype: torch.dtype | None
    ) -> tuple[list[Any], Sequence[Tensor]]:
        """The other results, and gradients: ``gradients``, or new ones without them.

        Args:
            pool: what was to be given, in that order; emptied.
            gradients: what to add into.
            dtype: of these; None where each has its gradient's own.

        Raises:
            AnomalyError: under anomaly detection, a gradient has a NaN.
        """
        if checks_nan():
            return self._checked(pool, gradients, dtype)
        return self._run(pool, gradients, dtype)

    def _checked(
        self, pool: list[Any], gradients: Sequence[Tensor] | None, dtype: torch.dtype | None
    ) -> tuple[list[Any], Sequence[Tensor]]:
        # Of sharded parameters there may be nothing to copy yet.
        given = None
        if self._backend.gathering is None:
            given = dict(zip(self._given, copied(pool), strict=True))
        results, made = self._run(pool, gradients, dtype)
        wanted = [*self._others, *(Role(Kind.PARAMETER_GRAD, name) for name in self.parameters)]
        returned = zip(wanted, [*results, *made], strict=True)
        refuse_nan(self._name, returned, self._module, given)
        return results, made

    def _run(
        self, pool: list[Any], gradients: Sequence[Tensor] | None, dtype: torch.dtype | None
    ) -> tuple[list[Any], Sequence[Tensor]]:
        inside = gradients is not None and not self._adds_outside
        if gradients is not None and inside:
            pool += gradients
        call = self._variants.get((dtype, inside)) or self._variant(dtype, inside)
        results = call(pool)
        if inside:
            return results, gradients or ()
        made = results[len(self._others) :]
        del results[len(self._others) :]
        if gradients is None:
            return results, made
        add_together(gradients, made)
        return results, gradients

    def compile(self, dtype: torch.dtype | None, *, adds: bool) -> None:
        """Compile, unless that has been done, the form that adds gradients into sums of a dtype,
        or the one that returns new ones.
        """
        self._variant(dtype, adds and not self._adds_outside)

    @cached_property
    def _adds_outside(self) -> bool:
        """Whether gradients are added behind the graph, all at once, so that it needs no second
        form: those that are cheap to hold, as they are small; or, where a second form takes seconds
        to compile, of norms and biases only, and sparse ones, to which such a backend cannot add.
        """
        wanted = {Role(Kind.PARAMETER_GRAD, name) for name in self.parameters}
        made = [v.meta["val"] for role, v in outputs(self._module.graph) if role in wanted]
        dense = all(value.layout is torch.strided for value in made)
        if self._backend.compiles:
            return not dense or all(value.ndim <= 1 for value in made)
        return bool(dense and sum(value.nbytes for value in made) <= _SMALL)

    def _variant(self, dtype: torch.dtype | None, adds: bool) -> Boxed:
        key = dtype, adds
        if key not in self._variants:
            with collecting_new_objects_only():
                self._variants[key] = self._make(*key)
        return self._variants[key]

    def source(self, dtype: torch.dtype | None, *, adds: bool) -> fx.GraphModule:
        """The graph that is compiled to add gradients into sums of a dtype, or to return new ones.

        Raises:
            SplitError: a pass broke an invariant.
        """
        if not adds or self._adds_outside:
            return self._module
        try:
            return accumulating(self._name, self._module, dtype)
        except PassError as error:
            raise SplitError(f"{self._name}_accumulating: {error}") from error

    def _make(self, dtype: torch.dtype | None, adds: bool) -> Boxed:
        """A graph that takes what is given, then accumulators where it adds; and returns the other
        results, then new gradients where it does not.
        """
        name, module, given = self._name, self.source(dtype, adds=adds), [*self._given]
        wanted = [*self._others]
        if not adds:
            wanted += [Role(Kind.PARAMETER_GRAD, name) for name in self.parameters]
        else:
            name = f"{name}_accumulating"
            given += [Role(Kind.ACCUMULATOR, name) for name in self.parameters]
        graph = compile_graph(name, module, self._backend)
        propagate_strides(graph.strides, *self._takers)
        return graph.taking(given, wanted)
