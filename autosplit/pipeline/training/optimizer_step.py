"""One rank's optimizer steps: clipped, on every rank or on none, and early where that is asked.

Clipping of a model's gradients, whose norm all ranks know; copies of parameters, optimizer state,
buffers and random generators, for rollback.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.device import accelerator_kind, generator_state, set_generator_state
from autosplit.errors import PipelineError
from autosplit.pipeline.engine.results import Agreement
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import versions

Settings = list[dict[str, Any]]
"""Per parameter group of an optimizer, all but its parameters."""


class GeneratorState:
    """States of the random generators: the CPU's, and that of ``device``."""

    def __init__(self, device: torch.device) -> None:
        devices = [torch.device("cpu")]
        if device.type == accelerator_kind():
            devices.append(device)
        self._states = [(each, generator_state(each)) for each in devices]

    def restore(self) -> None:
        """Go back there."""
        for device, state in self._states:
            set_generator_state(device, state)


class OptimizerSnapshot:
    """A copy of all that an optimizer step changes: parameters, the optimizer's state and groups,
    and random generators. Takes as much memory as parameters and state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._random = GeneratorState(device)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._values = [(p, p.detach().clone()) for p in parameters]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._settings = group_settings(optimizer)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot is used up."""
        for parameter, value in self._values:
            parameter.copy_(value)
        # Whatever the step has put into the state is not the copy's.
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)
        apply_settings(self.optimizer, self._settings)
        self._random.restore()


class ForwardState:
    """What running the forward changes: buffers and random generators."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._random = GeneratorState(device)
        buffers = (buffer for module in modules for buffer in module.buffers())
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        self._random.restore()
        for buffer, value in self._buffers:
            buffer.copy_(value)


def group_settings(optimizer: torch.optim.Optimizer) -> Settings:
    """A copy of the groups' settings, such as learning rates."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def apply_settings(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Set the groups' settings that are given."""
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)


def changed(before: Settings, after: Settings) -> Settings:
    """Of ``after``, what is not as ``before``."""
    return [
        {name: value for name, value in late.items() if not same_value(early.get(name), value)}
        for early, late in zip(before, after, strict=True)
    ]


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
        parameters: this rank's.
        optimizer: moves them; None if there are none.
        max_norm: clips the norm of the whole model's gradient to this, if given.
        device: where the parameters are.

    Attributes:
        optimizer: see above.
        norm: the last norm that was looked at; None without clipping.
        early: the last step, if it was taken early and no other has confirmed it.

    Raises:
        PipelineError: this is no optimizer, one of other parameters, or one that wants a closure.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        max_norm: float | None,
        device: torch.device,
    ) -> None:
        if parameters:
            _check_moves(optimizer, parameters)
        self._parameters, self.optimizer = parameters, optimizer
        self._max_norm = max_norm
        self._device = device
        self._calm = False
        self.early: _Early | None = None
        self.norm: float | None = None

    @property
    def state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        found = {} if self.optimizer is None else self.optimizer.state
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
                f"{type(self.optimizer).__name__} writes into gradients, so that a step cannot be "
                "taken back to clip them: use step(), or build the trainer without max_grad_norm"
            )
        self._clear()
        settings = [] if self.optimizer is None else group_settings(self.optimizer)
        self.early = _Early(agreement, snapshot, gradients, settings)

    def settle(self) -> None:
        """Look at the norm of a step that was taken early; clip and take it again if need be."""
        early = self.early
        if early is None or early.settled:
            return
        self.norm = early.agreement.norm()
        early.settled, self._calm = True, self._passes(self.norm)
        if not self._calm:
            self._again(early, self.norm)

    def confirm(self) -> bool:
        """``settle``, and forget that step; whether what was run since ran on wrong weights.

        All ranks hear the same, also one that has settled and had the right weights: what the
        others sent it was wrong.
        """
        if self.early is None:
            return False
        self.settle()
        wrong = not self._calm
        self.early = None
        return wrong

    def take_back(self) -> None:
        """Go back behind a step that was taken early and not settled, after a failure."""
        early, self.early = self.early, None
        if early is not None and early.snapshot is not None and not early.settled:
            early.snapshot.restore()

    def _again(self, early: _Early, norm: float) -> None:
        optimizer = self.optimizer
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
        if self.optimizer is not None:
            self.optimizer.step()

    def _clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        # Those that it does not move would add up for ever, and count in the norm.
        for parameter in self._parameters:
            parameter.grad = None

    def _snapshot(self) -> OptimizerSnapshot | None:
        return None if self.optimizer is None else OptimizerSnapshot(self.optimizer, self._device)


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
