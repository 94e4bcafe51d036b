"""Which submodules are captured by themselves: blocks that a model has several of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator

import torch
from torch import nn

_HOOKS = re.compile(r"(_global)?_(forward|backward)(_pre)?_hooks")
_TABLES = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_TABLES, nn.Sequential)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> block, for elements of lists, dictionaries and sequences of modules that look alike:
    the outermost such, none inside of another.

    Whether they are alike, guards tell; here is what is worth asking them.
    """
    shared = _shared_state(model)
    kinds = {
        name: look_of(block)
        for name, block in _elements(model, "")
        if shared.isdisjoint(map(id, (*block.parameters(), *block.buffers())))
    }
    counts = Counter(kinds.values())
    alike = {name for name, look in kinds.items() if counts[look] > 1}
    outermost = {name for name in alike if not any(name.startswith(f"{o}.") for o in alike)}
    return {name: model.get_submodule(name) for name in sorted(outermost)}


def _shared_state(model: nn.Module) -> set[int]:
    """Identities of parameters and buffers that have several names."""
    names: Counter[int] = Counter()
    for spaces in (model.named_parameters, model.named_buffers):
        names.update(id(each) for _, each in spaces(remove_duplicate=False))
    return {each for each, count in names.items() if count > 1}


def has_plain_forward(block: nn.Module) -> bool:
    """Whether calling the block calls its class's forward and nothing else: hooks are traced with
    the model around, and there they would be traced a second time.
    """
    spaces = (vars(block), vars(torch.nn.modules.module))
    hooks = (each for space in spaces for name, each in space.items() if _HOOKS.fullmatch(name))
    return "forward" not in vars(block) and not any(hooks)


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of all containers, with submodules of their own."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if (
            isinstance(module, _CONTAINERS)
            and not isinstance(child, _TABLES)
            and len(child._modules)
        ):
            yield path, child
        yield from _elements(child, f"{path}.")


def look_of(block: nn.Module) -> Hashable:
    """What is equal for blocks that may have the same graph."""
    state = [*block.named_parameters(), *block.named_buffers()]
    lying = tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in state)
    return type(block), block.training, lying
