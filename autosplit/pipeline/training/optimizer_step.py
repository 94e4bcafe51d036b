"""One rank's optimizer steps, with the gradients clipped by the norm of the whole model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.torch_internals.dtensor import local_tensor


def same_value(one: object, other: object) -> bool:
    """Whether two settings are equal, and of one type; tensors by their values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients in place by max_norm / norm if ``norm``, that of the model, is greater.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, applied to this rank's share.
    """
    total: Tensor = torch.tensor(norm)
    # Of DTensors this rank's parts, which the plain number can be multiplied with.
    parts: Any = [_Part(local_tensor(each.grad)) for each in parameters if each.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(parts, max_norm, total)


class _Part(NamedTuple):
    grad: Tensor


class OptimizerStep:
    """One rank's optimizer, and what it moves.

    Args:
        parameters: this rank's.
        optimizer: moves them; None if there are none.
        max_norm: clips the norm of the whole model's gradient to this, if given.

    Attributes:
        optimizer: see above.
        norm: that of the last step; None without clipping.

    Raises:
        PipelineError: this is no optimizer, one of other parameters, or one that wants a closure.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        max_norm: float | None,
    ) -> None:
        if parameters:
            _check_moves(optimizer, parameters)
        self._parameters, self.optimizer = parameters, optimizer
        self._max_norm = max_norm
        self.norm: float | None = None

    @property
    def state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        found = {} if self.optimizer is None else self.optimizer.state
        values = (value for each in found.values() for value in each.values())
        return [value for value in values if isinstance(value, Tensor)]

    def step(self, agree: Callable[[], None] | None = None) -> None:
        """Clip by ``norm``, move and clear the gradients, and hear that all ranks have done so.

        Args:
            agree: comes back when every rank has called it, raises if one did not; None: whatever
                other ranks do, if there are any.
        """
        if self._max_norm is not None and self.norm is not None:
            clip_gradients(self._parameters, self._max_norm, self.norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if agree is not None:
            agree()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        # Those that it does not move would add up for ever, and count in the norm.
        for parameter in self._parameters:
            parameter.grad = None


def _wants_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _check_moves(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Other parameters get no gradient, and nobody would move these."""
    if not hasattr(optimizer, "param_groups"):
        raise PipelineError(
            f"optimizer_fn must return a torch.optim.Optimizer; got a {type(optimizer).__name__}"
        )
    if _wants_closure(optimizer):
        raise PipelineError(
            f"{type(optimizer).__name__} runs the model again in its step(closure), which a "
            "pipeline cannot do within a step: take an optimizer with step(), such as "
            "torch.optim.AdamW"
        )
    given = set(map(id, parameters))
    moved = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(each not in given for each in moved)
    if foreign:
        raise PipelineError(
            f"optimizer_fn built an optimizer of {len(moved)} parameters, {foreign} of which it "
            "was not given: build it of the list that it is called with, this rank's parameters"
        )
