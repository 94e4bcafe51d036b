"""A backward that passes weight gradients to autograd slice by slice, for data parallelism.

Autograd runs each slice of the fused backward as one autograd node. The slice's inputs are the
parameters whose gradients it completes. So hooks of a reducer fire as early as in the unsplit
model::

    outputs ── Split: slice 0 ── Slice 1 ── ... ── Slice n ── Inputs ── inputs, anchor
                    │               │                 │
               parameters       parameters        parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autosplit.passes import Kind, Role
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import State
from autosplit.torch_internals.autograd import untraced, without_autocast


class BackwardSlices:
    """The slices of one call's backward.

    Args:
        functions: the graphs of the call.
        state: parameters and buffers by name.

    Attributes:
        parameters: the parameters of each slice.
        zero: the gradient that one node of the chain passes to the next, a zero on the parameters'
            device.
    """

    def __init__(self, functions: SplitFunctions, state: State) -> None:
        self._names = functions.backward_graphs.sliced.parameters
        self._inputs = functions.capture.inputs
        self.parameters = [[*map(state.__getitem__, names)] for names in self._names]
        with torch.no_grad():
            self.zero = self.parameters[0][0].new_zeros(())

    def anchor(self, leaf: Tensor, leaves: Sequence[Any]) -> Tensor:
        """Build the chain of nodes after the first slice; return its tensor, an input of the node
        ``Split``.

        Args:
            leaf: the leaf of the weight anchor.
            leaves: the inputs of the graph.
        """
        node: Any = _Slice.apply
        token: Tensor = node(self.zero, lambda _: [None, *self.inputs()], leaf, *leaves)
        for at in reversed(range(1, len(self.parameters))):
            run = partial(self._run_slice, at)
            token = node(self.zero, run, token, *self.parameters[at])
        return token

    def _run_slice(self, at: int, gradient: Tensor) -> list[Tensor | None]:
        """Run slice number ``at``; return the gradients of the next node and of the parameters."""
        return [gradient, *self.weights(at)]

    def begin_backward(
        self,
        slices: Iterator[dict[Role, Any]],
        borrowed: Collection[str],
        skipped: Collection[str],
        idle: Collection[int],
    ) -> None:
        """Begin a backward that runs in slices.

        Args:
            slices: yields the gradients of each slice.
            borrowed: names of parameters whose gradients are copied, because they share memory.
            skipped: names of parameters without a gradient.
            idle: positions of inputs without a gradient.
        """
        self._slices, self._borrowed, self._skipped, self._idle = slices, borrowed, skipped, idle
        self._gradients: dict[Role, Tensor] = {}

    def weights(self, at: int) -> list[Tensor | None]:
        """Run slice number ``at``, and return the gradients of its parameters. If some outputs have
        no gradient, the graph may complete parameters in another order. Then later slices run, too,
        until all gradients of these parameters exist.
        """
        roles = [Role(Kind.PARAMETER_GRAD, name) for name in self._names[at]]
        self._run_until(roles)
        return [self._weight(role) for role in roles]

    def inputs(self) -> list[Tensor | None]:
        """Run the remaining slices, and return the gradients of the inputs."""
        roles = [Role(Kind.INPUT_GRAD, name) for name in self._inputs]
        self._run_until(None)
        grads = [self._gradients.pop(role, None) for role in roles]
        return [None if at in self._idle else grad for at, grad in enumerate(grads)]

    def _run_until(self, roles: Sequence[Role] | None) -> None:
        with without_autocast():
            while roles is None or not self._gradients.keys() >= {*roles}:
                gradients = next(self._slices, None)
                if gradients is None:
                    return
                self._gradients |= gradients

    def _weight(self, role: Role) -> Tensor | None:
        gradient = self._gradients.pop(role, None)
        if gradient is None or role.name in self._skipped:
            return None
        return gradient.clone() if role.name in self._borrowed else gradient


class _Slice(torch.autograd.Function):
    """The autograd function of one slice after the first, or of the inputs, which end the chain.

    Args of ``forward``:
        zero: the tensor that represents the slice in the node before it.
        run: runs the slice; returns the gradients of the other arguments.
        values: the next node's tensor, and the slice's parameters; for the inputs, the leaf of the
            weight anchor and the inputs.
    """

    @staticmethod
    def forward(ctx: Any, zero: Tensor, run: Callable[[Tensor], Any], *values: Any) -> Tensor:
        ctx.run = run
        return zero.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.run(gradient))
