"""One rank's optimizer steps: clipped, on every rank or on none, and early where that is asked.

Clipping of a model's gradients, whose norm all ranks know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.results import Agreement
from autosplit.pipeline.training.state.snapshot import (
    OptimizerSnapshot,
    Settings,
    apply_settings,
    changed,
    group_settings,
)
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import versions


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


def leaves_alone(max_norm: float, norm: float) -> bool:
    """Whether ``clip_gradients`` would multiply by exactly 1; not so for a norm that is no number.

    The formula is that of ``torch.nn.utils.clip_grads_with_norm_``, in its precision.
    """
    return bool(max_norm / (torch.tensor(norm) + 1e-6) >= 1.0)


@dataclass
class _Early:
    """An optimizer step that was taken before the model's gradient norm was known.

    Attributes:
        agreement: brings the norm.
        snapshot: what was before; None without an optimizer.
        gradients: what it was taken with.
        settings: the optimizer's behind it.
        settled: whether the norm was looked at and the weights are right.
    """

    agreement: Agreement
    snapshot: OptimizerSnapshot | None
    gradients: list[Tensor | None]
    settings: Settings
    settled: bool = False


class OptimizerStep:
    """One rank's optimizer: clipped steps, optimistic steps, and rollback.

    Args:
        max_norm: clips the norm of the whole model's gradient to this, if given.
        device: where the parameters are.

    Attributes:
        norm: the last norm that was looked at; None without clipping.
    """

    def __init__(
        self,
        *,
        max_norm: float | None,
        device: torch.device,
    ) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._optimizer: torch.optim.Optimizer | None = None
        self._max_norm = max_norm
        self._device = device
        self._calm = False
        self._early: _Early | None = None
        self.norm: float | None = None

    def drive(
        self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Set the optimizer and this rank's parameters, which it moves; None if there are none.

        Raises:
            PipelineError: this is no optimizer, one of other parameters, or one that wants a
                closure.
        """
        if parameters:
            _check_moves(optimizer, parameters)
        self._parameters, self._optimizer = parameters, optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's; None where it has no parameters."""
        return self._optimizer

    @property
    def state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        found = {} if self._optimizer is None else self._optimizer.state
        values = (value for each in found.values() for value in each.values())
        return [value for value in values if isinstance(value, Tensor)]

    def step(self, norm: float | None, agree: Callable[[], None]) -> None:
        """Clip, move and clear the gradients, and hear that all ranks have done so.

        Args:
            norm: of the whole model's gradient; None does not clip.
            agree: comes back when every rank has called it, raises if one did not.
        """
        self._move(norm)
        agree()
        self._clear()

    def step_alone(self) -> None:
        """Move and clear the gradients, whatever other ranks do."""
        self._move(None)
        self._clear()

    def step_early(self, agreement: Agreement) -> None:
        """Move as if nothing were to be clipped, unless the step before was clipped.

        ``settle`` finds out. Where gradients are clipped at every step, all is as in ``step``.

        Raises:
            PipelineError: the optimizer writes into gradients, which then cannot be used again.
        """
        if not self._calm:
            self.norm = agreement.norm()
            self._calm = self._passes(self.norm)
            self._move(self.norm)
            self._clear()
            return
        snapshot = self._snapshot()
        gradients = [p.grad for p in self._parameters]
        before = versions(g for g in gradients if g is not None)
        self._move(None)
        if versions(g for g in gradients if g is not None) != before:
            raise PipelineError(
                f"{type(self._optimizer).__name__} writes into gradients, so that a step cannot be "
                "taken back to clip them: use step(), or build the trainer without max_grad_norm"
            )
        self._clear()
        settings = [] if self._optimizer is None else group_settings(self._optimizer)
        self._early = _Early(agreement, snapshot, gradients, settings)

    def settle(self) -> None:
        """Look at the norm of a step that was taken early; clip and take it again if need be."""
        early = self._early
        if early is None or early.settled:
            return
        self.norm = early.agreement.norm()
        early.settled, self._calm = True, self._passes(self.norm)
        if not self._calm:
            self._again(early, self.norm)

    @property
    def expects_more(self) -> bool:
        """Whether the last step was taken early and no other has confirmed it."""
        return self._early is not None

    def confirm(self) -> bool:
        """``settle``, and forget that step; whether what was run since ran on wrong weights.

        All ranks hear the same, also one that has settled and had the right weights: what the
        others sent it was wrong.
        """
        self.settle()
        wrong = self._early is not None and not self._calm
        self._early = None
        return wrong

    def take_back(self) -> None:
        """Go back behind a step that was taken early and not settled, after a failure."""
        early, self._early = self._early, None
        if early is not None and early.snapshot is not None and not early.settled:
            early.snapshot.restore()

    def _again(self, early: _Early, norm: float) -> None:
        optimizer = self._optimizer
        if optimizer is None or early.snapshot is None:
            return
        # A scheduler may have set the learning rate of the next step by now.
        since = changed(early.settings, group_settings(optimizer))
        kept = [p.grad for p in self._parameters]
        early.snapshot.restore()
        for parameter, gradient in zip(self._parameters, early.gradients, strict=True):
            parameter.grad = gradient
        self._move(norm)
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
        apply_settings(optimizer, since)

    def _passes(self, norm: float) -> bool:
        return self._max_norm is None or leaves_alone(self._max_norm, norm)

    def _move(self, norm: float | None) -> None:
        if self._max_norm is not None and norm is not None:
            clip_gradients(self._parameters, self._max_norm, norm)
        if self._optimizer is not None:
            self._optimizer.step()

    def _clear(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        # Those that it does not move would add up for ever, and count in the norm.
        for parameter in self._parameters:
            parameter.grad = None

    def _snapshot(self) -> OptimizerSnapshot | None:
        return None if self._optimizer is None else OptimizerSnapshot(self._optimizer, self._device)


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
