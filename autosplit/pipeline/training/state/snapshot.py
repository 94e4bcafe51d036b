"""Copies of parameters, optimizer state, buffers and random generators, for rollback."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.device import accelerator_kind, generator_state, set_generator_state

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
        self._optimizer = optimizer
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
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        apply_settings(self._optimizer, self._settings)
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
