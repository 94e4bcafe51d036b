"""State of modules: parameters and buffers by name, and train/eval modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from operator import is_not
from typing import Any

import torch
from torch import nn


class StateReader:
    """Reader of a module's parameters and buffers by name, as they are at the time of the call.

    Looks each one up where the module keeps it, so that a parameter that was moved or
    replaced since is found, without walking the module tree on every call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._index()

    def _index(self) -> None:
        slots: dict[str, tuple[dict[str, Any], str]] = {}
        children: list[tuple[dict[str, Any], str]] = []
        for prefix, child in self._module.named_modules(remove_duplicate=False):
            modules, *spaces = map(_table, (child._modules, child._parameters, child._buffers))
            children += [(modules, name) for name in modules]
            for space in spaces:
                for name in space:
                    slots[f"{prefix}.{name}" if prefix else name] = (space, name)
        self._names, self._slots, self._children = list(slots), list(slots.values()), children
        self._found = self._present()

    def _present(self) -> list[Any]:
        return [modules.get(name) for modules, name in self._children]

    def __call__(self) -> dict[str, torch.Tensor]:
        if any(map(is_not, self._present(), self._found)):
            self._index()  # a submodule was replaced
        tensors = [space[name] for space, name in self._slots]
        pairs = zip(self._names, tensors, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}


def _table(names: Any) -> dict[str, Any]:
    """The dictionary in which a module keeps its own; TorchScript keeps them elsewhere."""
    return names if isinstance(names, dict) else dict(names.items())


def share_state(proxy: nn.Module, module: nn.Module) -> None:
    """Make ``proxy`` hold the very parameters, buffers and submodules of ``module``.

    The dictionaries are shared, not copied: both have one ``state_dict`` without a prefix,
    and replacing a parameter on either replaces it on both.
    """
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        proxy.__dict__[name] = module.__dict__[name]
    proxy.training = module.training


def hold_state(stage: nn.Module, model: nn.Module, names: Iterable[str]) -> None:
    """Register these parameters and buffers of ``model`` in ``stage`` too, under the same names, in
    containers where the model has modules.
    """
    for name in names:
        *path, last = name.split(".")
        owner, place = model, stage
        for part in path:
            owner = getattr(owner, part)
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]  # type: ignore[assignment]
        if last in owner._parameters:
            place.register_parameter(last, owner._parameters[last])
        else:
            lasting = last not in owner._non_persistent_buffers_set
            place.register_buffer(last, owner._buffers[last], persistent=lasting)
        place.train(owner.training)


@contextlib.contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Every submodule is in training or evaluation afterwards as it was before."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
