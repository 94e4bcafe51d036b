"""``DeferredGraphBackward``: the pending W of one backward through one graph of ``torch.compile``.

A backward through a compiled model leaves one for each graph that took part. All that belongs to
one microbatch is delivered in one pass of the autograd engine, so that a parameter used in several
graphs gets one summed gradient, as from an ordinary ``backward()``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.engine_delivery import deliver_through_engine
from autosplit.backends.compiled_graph import Backend, compile_graph
from autosplit.passes import Kind, Role
from autosplit.passes.graph import STATE, inputs, outputs
from autosplit.runtime.gradient_dependence import borrowed_gradients
from autosplit.runtime.residuals import Residuals, own
from autosplit.torch_internals.autograd import without_autocast


class WeightGraph:
    """W of one graph, compiled.

    Attributes:
        state: parameters and buffers that it reads.
        tensors: tensors that I leaves for it.
        sizes: integers that I leaves for it.
        dense: whether all gradients are known to be strided.
    """

    def __init__(self, module: fx.GraphModule, backend: Backend) -> None:
        self._compiled = compile_graph("backward_weight", module, backend)
        self._borrowed = borrowed_gradients(module.graph)
        made = [value.meta["val"] for _, value in outputs(module.graph)]
        self.dense = all(each.layout is torch.strided for each in made)
        taken = inputs(module.graph, Kind.DEFERRED)
        self.state = tuple(inputs(module.graph, *STATE))
        self.tensors = tuple(r for r, node in taken.items() if _is_tensor(node))
        self.sizes = tuple(r for r, node in taken.items() if not _is_tensor(node))

    def run(self, values: dict[Role, Any]) -> dict[str, Tensor]:
        """Parameter name -> gradient, each a tensor of its own.

        Args:
            values: everything that it reads; emptied, so that every tensor can die at its last
                use inside the graph.
        """
        args = [values[role] for role in self._compiled.inputs]
        values.clear()
        with without_autocast():
            results = self._compiled.call(args)
        names = [role.name for role in self._compiled.outputs]
        pairs = zip(names, results, strict=True)
        return {name: grad.clone() if name in self._borrowed else grad for name, grad in pairs}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


@dataclasses.dataclass(eq=False)
class DeferredGraphBackward:
    """Pending W of one graph for one backward.

    Attributes:
        graph: what computes the gradients.
        deferred: the tensors that I left for it, checked for writes together with the state
            it reads.
        others: the integers that I left.
        targets: name of a gradient -> the parameter it goes to; others are not wanted.
        backward: number of the backward that left it; later ones have higher numbers.
        sequence: number of the graph's call; a backward runs higher ones first.
    """

    graph: WeightGraph
    deferred: Residuals
    others: Mapping[Role, Any]
    targets: Mapping[str, weakref.ref[nn.Parameter]]
    backward: int
    sequence: int
    due = False  # what the backward writes, I has written

    @classmethod
    def of(
        cls,
        graph: WeightGraph,
        values: Mapping[Role, Any],
        targets: Mapping[str, weakref.ref[nn.Parameter]],
        *,
        backward: int,
        sequence: int,
        lent: Collection[Role] = (),
    ) -> DeferredGraphBackward:
        """W on ``values``, all that ``graph`` reads; those in ``lent`` are copied."""
        state = tuple(values[role] for role in graph.state)
        names = tuple(role.name for role in (*graph.tensors, *graph.state))
        places = [at for at, role in enumerate(graph.tensors) if role in lent]
        tensors = own([values[role] for role in graph.tensors], places)
        deferred = Residuals(names, tensors, state, late=True)
        others = {role: values[role] for role in graph.sizes}
        return cls(graph, deferred, others, targets, backward, sequence)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the gradients and their parameters, where those still exist."""
        for name, target in self.targets.items():
            parameter = target()
            if parameter is not None:
                yield name, parameter

    named_leaves = named_parameters

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters without their names."""
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def dense(self) -> bool:
        """Whether all gradients are known to be strided."""
        return self.graph.dense

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that it keeps alive, parameters and buffers left out."""
        return self.deferred.tensors

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of these parameters (their ``id``)."""
        pairs = dict(self.named_parameters())
        wanted = {name for name, each in pairs.items() if id(each) not in parameters}
        self.targets = {name: ref for name, ref in self.targets.items() if name in wanted}

    def named_gradients(self) -> dict[str, Tensor]:
        """Run W. Gradients by the parameters' names.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        taken = self.deferred.take()
        roles = (*self.graph.tensors, *self.graph.state)
        values = {**self.others, **dict(zip(roles, taken, strict=True))}
        self.others = {}
        taken.clear()
        return self.graph.run(values)


def deliver(microbatches: Iterable[Sequence[DeferredGraphBackward]]) -> None:
    """Compute the gradients of microbatches and accumulate them through autograd.

    Args:
        microbatches: the works of each, in the order of its backward.

    Raises:
        SplitError: a deferred tensor was written in place since I.
    """
    for works in microbatches:
        deliver_through_engine(works)
