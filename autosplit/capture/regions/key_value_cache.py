"""Blocks that fill a cache of keys and values, as functions that return what they put there.

A model of transformers that is called without a cache makes an empty one, and each layer writes
its keys and values to the place in it that ``layer_idx`` tells: every layer would be its own kind.
``CachedBlock`` gives a layer a cache with one place, and returns what it finds there afterwards.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_ARGUMENT = "past_key_values"


class CachedBlock(nn.Module):
    """A block that is called without a cache, and returns its results, keys and values."""

    def __init__(self, block: nn.Module, make: Callable[[], Any]) -> None:
        super().__init__()
        self.block = block
        self.train(block.training)
        self._make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = self._make()
        results = self.block(*args, **kwargs, past_key_values=cache)
        return results, cache.keys, cache.values


def fills_cache(block: nn.Module) -> bool:
    """Whether the block may be called with a cache that it fills."""
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and _ARGUMENT in inspect.signature(block.forward).parameters


def caching(
    block: nn.Module,
    plain: Callable[..., Any],
    operator: Callable[[CachedBlock], Callable[..., Any]],
) -> Callable[..., Any]:
    """A forward that calls one operator where there is no cache, and another where there is an
    empty one, which it fills.

    Args:
        block: whose forward it stands for.
        plain: the block as an operator.
        operator: makes a module one.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    numbers: set[Any] = {vars(each).get("layer_idx") for each in block.modules()} - {None}
    if len(numbers) != 1 or not _is_known(DynamicLayer()):
        return plain
    (place,) = numbers
    cached = operator(CachedBlock(block, _one_place()))

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(_ARGUMENT)
        if type(cache) is DynamicCache and len(cache.layers) > place:
            layer = cache.layers[place]
            if type(layer) is DynamicLayer and not layer.is_initialized:
                others = {name: given for name, given in kwargs.items() if name != _ARGUMENT}
                results, keys, values = cached(*args, **others)
                layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
                layer.keys, layer.values = keys, values
                return results
        return plain(*args, **kwargs)

    return forward


def _is_known(layer: Any) -> bool:
    """Whether a layer of a cache, once it is filled, has what ``caching`` sets and nothing else."""
    layer.lazy_initialization(torch.empty(0), torch.empty(0))
    return {*vars(layer)} == {"dtype", "device", "is_initialized", "keys", "values"}


@functools.cache  # guards ask which class it is
def _one_place() -> type:
    from transformers.cache_utils import DynamicLayer

    class OnePlace:
        """A cache for one layer, whatever its number: it does as a layer of ``DynamicCache``."""

        is_initialized = False
        keys: Tensor
        values: Tensor
        lazy_initialization = DynamicLayer.lazy_initialization
        write = DynamicLayer.update

        def update(
            self, key_states: Tensor, value_states: Tensor, *place: Any, **options: Any
        ) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = self.write(key_states, value_states)
            return found

    return OnePlace
