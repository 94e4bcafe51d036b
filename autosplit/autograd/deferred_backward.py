"""``DeferredBackward``: the pending W of one backward through one whole graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import without_autocast


@dataclasses.dataclass(slots=True, eq=False)
class DeferredBackward:
    """Pending W of one backward through one graph.

    Attributes:
        functions: its graphs.
        deferred: residuals of I.
        early: weight gradients that I made, in the order of ``functions.early_parameters``.
        state: parameters and buffers as they were in the forward.
        skipped: parameters that get no gradient: no output that depends on them took part, or
            the gradient was dropped.
        backward: number of the backward in autograd's engine.
        owner: of what the forward read as a parameter, the parameter that has its gradient in the
            end: the sharded one of a gathered one; None where each is its own.
        writes: how often each sharded parameter was written when the forward ran.
    """

    functions: SplitFunctions
    deferred: Residuals
    early: Sequence[Tensor]
    state: State
    skipped: frozenset[str]
    backward: int
    owner: Callable[[Tensor], Tensor] | None = None
    writes: Sequence[int] = ()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that it keeps alive, parameters and buffers left out."""
        return (*self.deferred.tensors, *self.early)

    def named_leaves(self) -> Iterator[tuple[str, Tensor]]:
        """The leaves that W's gradients are of: those of the forward, wherever they are now."""
        for name in self.functions.parameter_names:
            if name not in self.skipped:
                yield name, self.state[name]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that get a gradient."""
        own = self.owner
        for name, leaf in self.named_leaves():
            yield name, leaf if own is None else own(leaf)

    @property
    def parameters(self) -> list[Tensor]:
        """The same without their names."""
        names, state = self.functions.parameter_names, self.state
        if self.owner is not None:
            return [self.owner(state[name]) for name in names if name not in self.skipped]
        return [state[name] for name in names if name not in self.skipped]

    @property
    def due(self) -> bool:
        """Whether W is to run though nobody wants a gradient of it: it writes."""
        return self.functions.writes_late

    def named_gradients(self) -> dict[str, Tensor]:
        """Run W. Gradients in the order of ``functions.parameter_names``, skipped ones too.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        with without_autocast():
            gradients = summed_gradients([self])
        return dict(zip(self.functions.parameter_names, gradients, strict=True))

    @property
    def dense(self) -> bool:
        """Whether all gradients are known to be strided."""
        return self.functions.dependence.dense

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of these parameters (their ``id``)."""
        found = [name for name, each in self.named_parameters() if id(each) in parameters]
        self.skipped = self.skipped.union(found)


def summed_gradients(works: Sequence[DeferredBackward]) -> Sequence[Tensor]:
    """Weight gradients of one microbatch, or summed over several that run as one W, in the order
    of ``parameter_names``.
    """
    functions = works[0].functions
    late = functions.backward_weight_together([work.deferred for work in works])
    if not functions.early_parameters:
        return late
    early = [reduce(torch.add, each) for each in zip(*(w.early for w in works), strict=True)]
    found = dict(zip(functions.early_parameters, early, strict=True))
    found |= zip(functions.late_parameters, late, strict=True)
    return [found[name] for name in functions.parameter_names]
