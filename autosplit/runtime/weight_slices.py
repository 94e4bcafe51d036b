"""W in slices: one W as several calls, each with some of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from autosplit.backends.backend import Backend
from autosplit.errors import SplitError
from autosplit.passes import Kind, PassError, Role
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import STATE, inputs, outputs
from autosplit.passes.lowering.slice_weight_graph import slice_weight_graph
from autosplit.passes.verify import verify_graph
from autosplit.runtime.residuals import Constants, HandOver, Residuals

from .compiled_graph import GradientGraph
from .gradient_accumulation import Accumulation


class _Slice(NamedTuple):
    """One slice.

    Attributes:
        graph: what it runs; takes everything that is left of the hand-over.
        borrowed: gradients that are not tensors of their own.
        known: what is known of all that it leaves for the next slice.
        tensors_at: which of the tensors handed to it the next slice gets.
        state_at: likewise of the parameters and buffers.
    """

    graph: GradientGraph
    borrowed: frozenset[str]
    known: HandOver
    tensors_at: Sequence[int]
    state_at: Sequence[int]


class SlicedWeight:
    """W cut into slices of near-equal FLOPs, to be run in order.

    Each takes a hand-over and leaves one for the next, without what no later slice reads.

    Args:
        module: W.
        handed: roles of what I hands over, in order.
        count: how many slices.
        borrowed: gradients that are not tensors of their own (``GradientDependence.borrowed``).
        constants_of: the constants that graphs read.
        backend: how graphs are compiled.

    Attributes:
        modules: the slices' graphs.

    Raises:
        SplitError: W cannot be cut into so many.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        handed: Sequence[Role],
        count: int,
        *,
        borrowed: Collection[str],
        constants_of: Callable[[Iterable[fx.GraphModule]], Constants],
        backend: Backend,
    ) -> None:
        try:
            self.modules = modules = slice_weight_graph(module, count)
            for part in modules:
                verify_graph("backward_weight_slice", part, "slices")
        except PassError as error:
            raise SplitError(str(error)) from error
        self._slices: list[_Slice] = []
        given = list(handed)
        for index, part in enumerate(modules):
            later = modules[index + 1 :]
            made, given = _slice(part, given, later, borrowed, constants_of(later), backend)
            self._slices.append(made)

    @property
    def parameter_names(self) -> tuple[tuple[str, ...], ...]:
        """For each slice the parameters whose gradients it makes."""
        return tuple(tuple(each.graph.parameters) for each in self._slices)

    def compile(self, accumulation: Accumulation | None = None) -> None:
        """As ``GradientGraph.compile``, every slice."""
        for each in self._slices:
            each.graph.compile(accumulation)

    def borrowed(self, index: int) -> frozenset[str]:
        """Gradients of a slice that share storage, or that a later slice reads."""
        return self._slices[index].borrowed

    def run(
        self,
        index: int,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None,
        accumulation: Accumulation,
        run: Callable[..., tuple[list[Any], Sequence[Tensor]]] = GradientGraph.run,
    ) -> tuple[Sequence[Tensor], Residuals]:
        """Run one slice.

        Args:
            index: which one.
            deferred: what I or the slice before left; taken.
            gradients: what to add into, in the order of the slice's ``parameter_names``.
            accumulation: how to add.
            run: runs a graph with the other arguments of ``GradientGraph.run``.

        Returns:
            ``gradients``, or without them new tensors, and what the next slice needs.

        Raises:
            SplitError: something deferred was written in place meanwhile.
        """
        graph, _, known, tensors_at, state_at = self._slices[index]
        read = deferred.state
        pool = deferred.take()
        kept = [pool[at] for at in tensors_at]
        made, found = run(graph, pool, gradients, accumulation)
        return found, Residuals(known, kept + made, tuple([read[at] for at in state_at]))


def _slice(
    module: fx.GraphModule,
    given: list[Role],
    following: Sequence[fx.GraphModule],
    borrowed: Collection[str],
    constants: Constants,
    backend: Backend,
) -> tuple[_Slice, list[Role]]:
    """A slice, and what it hands to the next."""
    later = {role for each in following for role in inputs(each.graph)}
    results = outputs(module.graph)
    made = [role for role, _ in results if role.kind is Kind.DEFERRED]
    tensors = [role for role in given if role.kind not in STATE]
    state = [role for role in given if role.kind in STATE]
    tensors_at = [at for at, role in enumerate(tensors) if role in later]
    state_at = [at for at, role in enumerate(state) if role in later]
    graph = GradientGraph(
        "backward_weight_slice",
        module,
        given,
        [role.name for role, _ in results if role.kind is Kind.PARAMETER_GRAD],
        made,
        following,
        backend=backend,
    )
    held = {storage_root(value) for role, value in results if role.kind is Kind.DEFERRED}
    held |= {node for role, node in inputs(module.graph).items() if role in later}
    shared = {
        role.name
        for role, value in results
        if role.kind is Kind.PARAMETER_GRAD and storage_root(value) in held
    }
    kept = [tensors[at] for at in tensors_at] + made
    left = [state[at] for at in state_at]
    names = tuple([role.name for role in (*kept, *left)])
    known = HandOver(names, constants, late=True)
    return _Slice(graph, frozenset(borrowed) | shared, known, tensors_at, state_at), kept + left
