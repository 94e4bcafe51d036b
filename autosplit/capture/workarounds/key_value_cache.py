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
        args, kwargs = _with_cache(_OnePlace(layer), self._name, self._at, args, kwargs)
        results = self.block(*args, **kwargs)
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
    # An entry's ``lazy_initialization`` would be traced for longer than the call of the block,
    # because it makes two tensors that nothing reads.
    of_keys = [attribute for attribute in ("dtype", "device") if hasattr(filled, attribute)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Call the block; fill an empty cache with the block's keys and values."""
        cache: Any = args[at] if len(args) > at else kwargs.get(name)
        if type(cache) is DynamicCache and len(cache.layers) > place:
            layer = cache.layers[place]
            if type(layer) is DynamicLayer and not layer.is_initialized:
                positional, named = _with_cache(None, name, at, args, kwargs)
                results, keys, values = cached(*positional, **named)
                for attribute in of_keys:
                    setattr(layer, attribute, getattr(keys, attribute))
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                return results
        return plain(*args, **kwargs)

    return forward


def _with_cache(
    cache: Any, name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call, with ``cache`` as the argument for the cache."""
    if len(args) > at:
        return (*args[:at], cache, *args[at + 1 :]), kwargs
    return args, {**kwargs, name: cache}
