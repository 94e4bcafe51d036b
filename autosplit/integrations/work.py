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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from ..compat import without_autocast
from ..compile import Backend, compile_graph
from ..errors import SplitError
from ..guard import refuse_frozen
from ..handover import Handover, distinct_bytes
from ..passes import Kind, Role
from ..passes.aliasing import storage_root
from ..passes.graph import STATE, inputs, outputs


class WeightGraph:
    """W of one graph, compiled.

    Attributes:
        state: parameters and buffers that it reads.
        tensors: tensors that I leaves for it.
        sizes: integers that I leaves for it.
    """

    def __init__(self, module: fx.GraphModule, backend: Backend) -> None:
        self._compiled = compile_graph("backward_weight", module, backend)
        self._borrowed = _borrowed(module.graph)
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
    taken: bool = False

    @classmethod
    def of(
        cls,
        graph: WeightGraph,
        values: Mapping[Role, Any],
        targets: Mapping[str, weakref.ref[nn.Parameter]],
        *,
        backward: int,
        sequence: int,
    ) -> Work:
        """Work on ``values``, all that ``graph`` reads."""
        state = tuple(values[role] for role in graph.state)
        names = tuple(role.name for role in (*graph.tensors, *graph.state))
        deferred = Handover(names, [values[role] for role in graph.tensors], state)
        others = {role: values[role] for role in graph.sizes}
        return cls(graph, deferred, others, targets, backward, sequence)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name of a gradient and its parameter, where the parameter still exists."""
        for name, target in self.targets.items():
            parameter = target()
            if parameter is not None:
                yield name, parameter

    def run(self) -> dict[str, Tensor]:
        """Parameter name -> gradient.

        Raises:
            SplitError: something deferred was written in place since I, or it ran before.
        """
        if self.taken:
            raise SplitError(
                "these weight gradients were taken for a delivery that failed and are lost; "
                "clear the gradients and repeat the step"
            )
        taken = self.deferred.take()
        self.taken = True
        roles = (*self.graph.tensors, *self.graph.state)
        values = {**self.others, **dict(zip(roles, taken, strict=True))}
        self.others = {}
        taken.clear()
        return self.graph.run(values)

    def __reduce__(self) -> NoReturn:
        raise SplitError(
            "a weight gradient is pending, which cannot be pickled or copied; call "
            "backward_weight() first"
        )


def deliver(works: Sequence[Work]) -> None:
    """Compute the gradients of one microbatch and accumulate them through autograd.

    Args:
        works: in the order in which the backward left them.

    Raises:
        SplitError: something deferred was written in place since I, or a parameter was frozen.
    """
    refuse_frozen(pair for work in works for pair in work.named_parameters())
    roots = []
    with torch.enable_grad():
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


def total_bytes(works: Iterable[Work]) -> int:
    """Bytes of distinct storage that the works hold."""
    return distinct_bytes(tensor for work in works for tensor in work.deferred.tensors)


def how_many(pending: int, microbatches: int | None) -> int:
    """How many microbatches ``backward_weight(microbatches)`` means.

    Raises:
        SplitError: nothing, or fewer than asked for, is pending.
    """
    if not pending:
        raise SplitError(
            "backward_weight() with nothing pending: call loss.backward() through the model "
            "first (each backward is one pending microbatch)"
        )
    count = pending if microbatches is None else microbatches
    if not 1 <= count <= pending:
        raise SplitError(
            f"backward_weight(microbatches={count}): {pending} pending; ask for 1 to {pending}"
        )
    return count
