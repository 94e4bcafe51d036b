"""Blocks that fill a key-value cache, as functions that return the keys and values.

A model of transformers that is called without a cache makes an empty one. Each layer writes its
keys and values to the entry ``layer_idx`` of this cache, so no two layers would have the same
graph. ``CachedBlock`` calls a layer with a cache of one entry, and returns the keys and values that
the layer writes. A layer with another cache entry than ``DynamicLayer``, such as a sliding window,
is not captured as a block, but as a part of the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_ARGUMENTS = ("cache", "past_key_values", "layer_past")


class _OnePlace:
    """A cache with one entry, to which a layer writes whatever its ``layer_idx``."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: Any, values: Any, *place: Any, **options: Any) -> Any:
        return self.layer.update(keys, values)


class CachedBlock(nn.Module):
    """A block that is called without a cache, and returns its results, keys and values.

    Args:
        block: the block.
        name: name of the argument for the cache.
        at: position of the argument for the cache.
        layer: ``layer()`` returns an empty cache entry.
    """

    def __init__(self, block: nn.Module, name: str, at: int, layer: Callable[[], Any]) -> None:
        super().__init__()
        self.block = block
        self.train(block.training)
        self._name, self._at, self._layer = name, at, layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with an empty cache; return its results, and the keys and values in the
        cache.
        """
        layer = self._layer()
        cache, at = _OnePlace(layer), self._at
        if len(args) > at:
            results = self.block(*args[:at], cache, *args[at + 1 :], **kwargs)
        else:
            results = self.block(*args, **{**kwargs, self._name: cache})
        return results, layer.keys, layer.values


def cache_argument(block: nn.Module) -> tuple[str, int] | None:
    """Name and position of a block's argument for a cache that it fills; None if it has none."""
    parameters = [*inspect.signature(block.forward).parameters]
    is_loaded = sys.modules.get("transformers.cache_utils") is not None
    return next(
        ((n, parameters.index(n)) for n in _ARGUMENTS if is_loaded and n in parameters), None
    )


def caching(
    block: nn.Module,
    name: str,
    at: int,
    plain: Callable[..., Any],
    operator: Callable[[CachedBlock], Callable[..., Any]],
) -> Callable[..., Any]:
    """Make a forward that replaces a block's. If the forward gets an empty cache, it calls the
    operator of a ``CachedBlock`` and fills the cache. Otherwise it calls ``plain``.

    Args:
        block: the block that the forward replaces.
        name: name of the argument for the cache.
        at: position of the argument for the cache.
        plain: the block as an operator.
        operator: turns a module into an operator.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    numbers: set[Any] = {vars(part).get("layer_idx") for part in block.modules()} - {None}
    if len(numbers) != 1:
        return plain
    (place,) = numbers
    cached = operator(CachedBlock(block, name, at, DynamicLayer))
    filled = DynamicLayer()
    filled.lazy_initialization(torch.empty(0), torch.empty(0))
    has_dtype, has_device = hasattr(filled, "dtype"), hasattr(filled, "device")

    # Dynamo traces this function for each layer: a loop or a call in it would take longer than the
    # call of the block. So would an entry's ``lazy_initialization``, which makes two tensors that
    # nothing reads.
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Call the block; fill an empty cache with the block's keys and values."""
        by_position = len(args) > at
        cache: Any = args[at] if by_position else kwargs.get(name)
        if type(cache) is DynamicCache and len(cache.layers) > place:
            layer = cache.layers[place]
            if type(layer) is DynamicLayer and not layer.is_initialized:
                if by_position:
                    results, keys, values = cached(*args[:at], None, *args[at + 1 :], **kwargs)
                else:
                    results, keys, values = cached(*args, **{**kwargs, name: None})
                if has_dtype:
                    layer.dtype = keys.dtype
                if has_device:
                    layer.device = keys.device
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                return results
        return plain(*args, **kwargs)

    return forward
