"""Blocks that fill a cache of keys and values, as functions that return what they put there.

A model of transformers that is called without a cache makes an empty one, and each layer writes
its keys and values to the place in it that ``layer_idx`` tells: every layer would be its own kind.
``CachedBlock`` gives a layer a cache with one place, and returns what it finds there afterwards.
Layers whose caches are of another kind than ``DynamicLayer`` (windows) are captured with the model.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_ARGUMENTS = ("cache", "past_key_values", "layer_past")

# What filling a place sets, and what some versions set besides.
_FILLED = {"device", "is_initialized", "keys", "values"}
_OTHERS = {"dtype", "record_past"}


class CachedBlock(nn.Module):
    """A block that is called without a cache, and returns its results, keys and values.

    Args:
        block: the block.
        name: of the argument that takes the cache.
        at: its place among positional ones.
    """

    def __init__(self, block: nn.Module, name: str, at: int) -> None:
        super().__init__()
        self.block = block
        self.train(block.training)
        self._name, self._at = name, at
        self._place: Any = _one_place()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = self._place()
        args, kwargs = _with_cache(cache, self._name, self._at, args, kwargs)
        results = self.block(*args, **kwargs)
        return results, cache.keys, cache.values


def cache_argument(block: nn.Module) -> tuple[str, int] | None:
    """Name and place of the argument in which a block may be given a cache that it fills."""
    taken = [*inspect.signature(block.forward).parameters]
    known = sys.modules.get("transformers.cache_utils") is not None
    return next(((n, taken.index(n)) for n in _ARGUMENTS if known and n in taken), None)


def caching(
    block: nn.Module,
    name: str,
    at: int,
    plain: Callable[..., Any],
    operator: Callable[[CachedBlock], Callable[..., Any]],
) -> Callable[..., Any]:
    """A forward that calls one operator where there is no cache, and another where there is an
    empty one, which it fills.

    Args:
        block: whose forward it stands for.
        name: of the argument that takes the cache.
        at: its place among positional ones.
        plain: the block as an operator.
        operator: makes a module one.
    """
    from transformers.cache_utils import DynamicCache

    numbers: set[Any] = {vars(each).get("layer_idx") for each in block.modules()} - {None}
    configs = [each.config for each in block.modules() if hasattr(each, "config")]
    if len(numbers) != 1:
        return plain
    (place,) = numbers
    layers = DynamicCache(config=configs[0] if configs else None).layers
    layer = layers[place] if place < len(layers) else _plain_layer()
    if not _is_known(layer):
        return plain
    kind, has_dtype = type(layer), "dtype" in vars(layer)
    cached = operator(CachedBlock(block, name, at))

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache: Any = args[at] if len(args) > at else kwargs.get(name)
        if type(cache) is DynamicCache and len(cache.layers) > place:
            layer = cache.layers[place]
            if type(layer) is kind and not layer.is_initialized:
                others, named = _with_cache(None, name, at, args, kwargs)
                results, keys, values = cached(*others, **named)
                # As lazy_initialization does, which makes empty tensors first.
                layer.is_initialized, layer.device = True, keys.device
                if has_dtype:
                    layer.dtype = keys.dtype
                layer.keys, layer.values = keys, values
                return results
        return plain(*args, **kwargs)

    return forward


def _with_cache(
    cache: Any, name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with another cache."""
    if len(args) > at:
        return (*args[:at], cache, *args[at + 1 :]), kwargs
    return args, {**kwargs, name: cache}


def _plain_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    return DynamicLayer()


def _is_known(layer: Any) -> bool:
    """Whether filling a layer of a cache sets what ``caching`` does, and nothing else."""
    if type(layer) is not type(_plain_layer()):
        return False
    layer.lazy_initialization(torch.empty(0), torch.empty(0))
    return _FILLED <= {*vars(layer)} <= _FILLED | _OTHERS


@functools.cache  # guards ask which class it is
def _one_place() -> type:
    from transformers.cache_utils import DynamicLayer

    class OnePlace:
        """A cache for one layer, whatever its number: it does as a layer of ``DynamicCache``."""

        is_initialized = False
        record_past = False
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
