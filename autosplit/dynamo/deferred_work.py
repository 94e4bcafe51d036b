"""Weight gradients that one compiled graph has deferred, and how they are delivered.

A backward through a compiled model leaves one ``Work`` for each graph that took part. All
that belongs to one microbatch is delivered in one pass of the autograd engine, so that a
parameter used in several graphs gets one summed gradient and its hooks fire once, as after
an ordinary ``backward()``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.frozen_parameters import thawed
from autosplit.backends.compiled_graph import Backend, compile_graph
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import STATE, inputs, outputs
from autosplit.runtime.saved_tensors import Handover, own
from autosplit.torch_internals.backward_task import without_autocast


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
        self._borrowed = _borrowed(module.graph)
        made = [value.meta["val"] for _, value in outputs(module.graph)]
        self.dense = all(each.layout is torch.strided for each in made)
        taken = inputs(module.graph, Kind.DEFERRED)
        self.state = tuple(inputs(module.graph, *STATE))
        self.tensors = tuple(r for r, node in taken.items() if _is_tensor(node))
        self.sizes = tuple(r for r, node in taken.items() if not _is_tensor(node))

    def run(self, values: dict[Role, Any]) -> dict[str, Tensor]:
        """Parameter name -> gradient, each a tensor that nobody else holds.

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


def _borrowed(graph: fx.Graph) -> frozenset[str]:
    """Gradients that share storage with another one or with what was handed in. Autograd may
    keep a gradient as ``.grad`` and later add into it in place.
    """
    roots = {role.name: storage_root(value) for role, value in outputs(graph)}
    uses = Counter(roots.values())
    return frozenset(
        name for name, root in roots.items() if uses[root] > 1 or root.op == "placeholder"
    )


@dataclasses.dataclass(eq=False)
class Work:
    """W of one graph for one backward.

    Attributes:
        graph: what computes the gradients.
        deferred: the tensors that I left for it, watched together with the state it reads.
        others: the integers that I left.
        targets: name of a gradient -> the parameter it goes to; others are not wanted.
        backward: number of the backward that left it; later ones have higher numbers.
        sequence: number of the graph's call; a backward runs higher ones first.
    """

    graph: WeightGraph
    deferred: Handover
    others: Mapping[Role, Any]
    targets: Mapping[str, weakref.ref[nn.Parameter]]
    backward: int
    sequence: int

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
    ) -> Work:
        """Work on ``values``, all that ``graph`` reads; those in ``lent`` are copied."""
        state = tuple(values[role] for role in graph.state)
        names = tuple(role.name for role in (*graph.tensors, *graph.state))
        places = [at for at, role in enumerate(graph.tensors) if role in lent]
        tensors = own([values[role] for role in graph.tensors], places)
        deferred = Handover(names, tensors, state, late=True)
        others = {role: values[role] for role in graph.sizes}
        return cls(graph, deferred, others, targets, backward, sequence)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name of a gradient and its parameter, where the parameter still exists."""
        for name, target in self.targets.items():
            parameter = target()
            if parameter is not None:
                yield name, parameter

    @property
    def parameters(self) -> list[Tensor]:
        """The same without their names."""
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def dense(self) -> bool:
        """Whether all gradients are known to be strided."""
        return self.graph.dense

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it keeps alive, parameters and buffers left out."""
        return self.deferred.tensors

    def drop(self, parameters: Collection[int]) -> None:
        """These (their ``id``) get no gradient any more."""
        pairs = dict(self.named_parameters())
        wanted = {name for name, each in pairs.items() if id(each) not in parameters}
        self.targets = {name: ref for name, ref in self.targets.items() if name in wanted}

    def run(self) -> dict[str, Tensor]:
        """Parameter name -> gradient.

        Raises:
            SplitError: something deferred was written in place since I.
        """
        taken = self.deferred.take()
        roles = (*self.graph.tensors, *self.graph.state)
        values = {**self.others, **dict(zip(roles, taken, strict=True))}
        self.others = {}
        taken.clear()
        return self.graph.run(values)


def deliver(microbatches: Iterable[Sequence[Work]]) -> None:
    """Compute the gradients of microbatches and accumulate them through autograd.

    Args:
        microbatches: each with what its backward left, in that order.

    Raises:
        SplitError: something deferred was written in place since I.
    """
    for works in microbatches:
        _deliver(works)


def _deliver(works: Sequence[Work]) -> None:
    roots = []
    with torch.enable_grad(), thawed(each for work in works for each in work.parameters):
        # The engine runs the newest node first: gradients add up in the order of the backward.
        for work in reversed(works):
            targets = dict(work.named_parameters())
            if targets:
                root = _Deliver.apply(work, list(targets), *targets.values())  # type: ignore[no-untyped-call]
                roots.append(root)
        if roots:
            torch.autograd.backward(roots)


class _Deliver(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: Any, work: Work, names: list[str], *parameters: Tensor) -> Tensor:
        ctx.work, ctx.names = work, names
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        work, ctx.work = ctx.work, None
        grads = work.run()
        return (None, None, *map(grads.pop, ctx.names))
