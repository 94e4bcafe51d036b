"""Graphs that compute weight gradients, and their variants that accumulate in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.backends.compiled_graph import Backend, Boxed, compile_graph, hand_over
from autosplit.errors import SplitError
from autosplit.passes import Kind, PassError, Role
from autosplit.passes.graph import outputs
from autosplit.passes.manager import WeightForm, run_on_graph

from .gradient_accumulation import Accumulation


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
        self._writes = [role.name for role, _ in outputs(module.graph, Kind.WRITE)]
        self._variants: dict[Accumulation | None, Boxed] = {}

    def run(
        self, pool: list[Any], gradients: Sequence[Tensor] | None, accumulation: Accumulation
    ) -> tuple[list[Any], Sequence[Tensor]]:
        """The other results, and gradients: ``gradients``, or new ones without them.

        Args:
            pool: what was to be given, in that order; emptied.
            gradients: what to add into.
            accumulation: how to add.
        """
        inside = None
        if gradients is not None and not self._adds_outside(accumulation):
            inside = accumulation
            pool += gradients
        call = self._variants.get(inside) or self._variant(inside)
        results = self._written(call, pool) if self._writes else call(pool)
        if inside is not None:
            return results, gradients or ()
        made = results[len(self._others) :]
        del results[len(self._others) :]
        if gradients is None:
            return results, made
        for total, gradient in zip(gradients, made, strict=True):
            total.add_(gradient)
        return results, gradients

    def _written(self, call: Boxed, pool: list[Any]) -> list[Any]:
        """The results, without new values that are written here into what was given for them."""
        targets = [pool[self._given.index(Role(Kind.TARGET, name))] for name in self._writes]
        results = call(pool)
        with torch.no_grad():
            for target, value in zip(targets, results[-len(targets) :], strict=True):
                target.copy_(value)
        return results[: -len(targets)]

    def compile(self, accumulation: Accumulation | None = None) -> None:
        """Compile, unless that has been done, the form that adds up gradients in this way, or
        without one the form that returns new ones.
        """
        inside = accumulation is not None and not self._adds_outside(accumulation)
        self._variant(accumulation if inside else None)

    def _adds_outside(self, accumulation: Accumulation) -> bool:
        """Whether whole gradients are added after the graph, so that it needs no second form."""
        return self._only_vectors and accumulation.exact and self._backend.compiles_slowly

    @cached_property
    def _only_vectors(self) -> bool:
        """Whether the gradients are of norms and biases only, which are cheap to hold and to
        add.
        """
        wanted = {Role(Kind.PARAMETER_GRAD, name) for name in self.parameters}
        return all(
            value.meta["val"].ndim <= 1
            for role, value in outputs(self._module.graph)
            if role in wanted
        )

    def _variant(self, accumulation: Accumulation | None) -> Boxed:
        if accumulation not in self._variants:
            with collecting_new_objects_only():
                self._variants[accumulation] = self._make(accumulation)
        return self._variants[accumulation]

    def source(self, accumulation: Accumulation | None = None) -> fx.GraphModule:
        """The graph that is compiled to add up gradients in this way, or without one to return new
        ones.
        """
        if accumulation is None or self._adds_outside(accumulation):
            return self._module
        return accumulating(
            self._name, self._module, accumulation, fused=self._backend.writes_views
        )

    def _make(self, accumulation: Accumulation | None) -> Boxed:
        """A graph that takes what is given, then accumulators where it adds; and returns the other
        results, then new gradients where it does not, then new values of what it writes into.
        """
        name, module, given = self._name, self.source(accumulation), [*self._given]
        wanted = [*self._others]
        if accumulation is None:
            wanted += [Role(Kind.PARAMETER_GRAD, name) for name in self.parameters]
        else:
            name = f"{name}_accumulating"
            given += [Role(Kind.ACCUMULATOR, name) for name in self.parameters]
        graph = compile_graph(name, module, self._backend)
        hand_over(graph.strides, *self._takers)
        return graph.taking(given, wanted + [Role(Kind.WRITE, name) for name in self._writes])


Call: TypeAlias = str | tuple[str, int]
"""A call of a step: its name, and for how many microbatches at a time where that is not one."""


def accumulating(
    name: str, module: fx.GraphModule, accumulation: Accumulation, *, fused: bool = True
) -> fx.GraphModule:
    """The graph in a variant that adds into accumulators.

    Args:
        name: of the graph.
        module: the graph.
        accumulation: how to add.
        fused: whether the operators that make gradients may add, where ``accumulation`` lets them.

    Raises:
        SplitError: a pass broke an invariant.
    """
    fused = fused and not accumulation.exact
    try:
        return run_on_graph(
            name, module, WeightForm(adds=True, dtype=accumulation.dtype, fused=fused)
        )
    except PassError as error:
        raise SplitError(f"{name}_accumulating: {error}") from error
