"""Repeated blocks of a model: the candidates for separate captures, one for each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator

import torch
from torch import nn

_HOOKS = re.compile(r"(_global)?_(forward|backward)(_pre)?_hooks")
_TABLES = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_TABLES, nn.Sequential)


class BlockModule(nn.Module):
    """A module that is a candidate for a repeated block wherever it is in its model."""


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Map names to repeated blocks: elements of module lists, dictionaries and sequences, and every
    ``BlockModule``, that look like another such element. No block is inside of another block.

    The blocks are candidates. Guards decide whether two blocks can have the same graph.
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
    # Parts of a block that occurs once may look like parts of repeated blocks, and occur once, too.
    counts = Counter(kinds[name] for name in outermost)
    repeated = (name for name in sorted(outermost) if counts[kinds[name]] > 1)
    return {name: model.get_submodule(name) for name in repeated}


def spares_tracing(model: nn.Module, blocks: Collection[nn.Module] | None = None) -> bool:
    """Whether capturing each kind of ``blocks`` once takes less time than capturing the model
    whole. The default is all repeated blocks.

    At least a third of the modules must be in blocks that look like an earlier block. With more
    than two kinds, two blocks of each kind are subtracted instead of one.

    A kind costs a capture of its own. A kind that is refused once the model is traced costs another
    trace of the model, and with many kinds, one is likely refused. In U-Nets and in a T5 with few
    layers, that exceeds what repeats spare.
    """
    blocks = repeated_blocks(model).values() if blocks is None else blocks
    kinds = {look_of(block): block for block in blocks}.values()
    repeated, first = (sum(1 for b in group for _ in b.modules()) for group in (blocks, kinds))
    subtracted = first if len(kinds) <= 2 else 2 * first
    return 3 * (repeated - subtracted) >= sum(1 for _ in model.modules())


def _shared_state(model: nn.Module) -> set[int]:
    """The ``id`` of each parameter and buffer that the model has under several names."""
    names: Counter[int] = Counter()
    for spaces in (model.named_parameters, model.named_buffers):
        names.update(id(tensor) for _, tensor in spaces(remove_duplicate=False))
    return {identity for identity, count in names.items() if count > 1}


def has_plain_forward(block: nn.Module) -> bool:
    """Whether calling the block calls only its class's forward.

    Hooks, and a ``__call__`` other than ``nn.Module.__call__``, are traced with the surrounding
    model; a separate capture of the block would trace them a second time. The ``__call__`` of
    transformers' layers is allowed, because it only adds recomputation. Recomputed blocks are not
    captured separately.
    """
    call = type(block).__call__
    if call is not nn.Module.__call__ and call.__module__ != "transformers.modeling_layers":
        return False
    spaces = (vars(block), vars(torch.nn.modules.module))
    hooks = (hook for space in spaces for name, hook in space.items() if _HOOKS.fullmatch(name))
    return "forward" not in vars(block) and not any(hooks)


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the elements of all containers, if the elements have submodules, and
    of every ``BlockModule``.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_element = isinstance(module, _CONTAINERS) and not isinstance(child, _TABLES)
        if (is_element and len(child._modules)) or isinstance(child, BlockModule):
            yield path, child
        yield from _elements(child, f"{path}.")


def look_of(block: nn.Module) -> Hashable:
    """A key for a block's structure: blocks with different keys cannot have the same graph."""
    state = [*block.named_parameters(), *block.named_buffers()]
    layout = tuple(
        (name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in state
    )
    return type(block), block.training, layout
