"""Cutting a model into stages: which layers a stage holds, and with which weights."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import nn

from autosplit.errors import PipelineError


def stage_layers(layers: int, index: int, stages: int) -> range:
    """The layers of stage `index`: as even as possible, longer stages first.

    Raises:
        PipelineError: fewer layers than stages, or no such stage.
    """
    if not 0 <= index < stages:
        raise PipelineError(f"stage index must be in 0..{stages - 1}, got {index}")
    if layers < stages:
        raise PipelineError(
            f"cannot divide {layers} layers over {stages} stages; "
            f"use at most {layers} stages or at least {stages} layers"
        )
    size, longer = divmod(layers, stages)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


@contextlib.contextmanager
def seeded(seed: int, part: int) -> Iterator[None]:
    """Random numbers that depend on `seed` and `part` only.

    Each part of a model draws its weights in its own such block, so that a stage built alone
    has the weights that it has in the whole. The caller's generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + part)
        yield


def sequential_stage(
    layer: Callable[[int], nn.Module], layers: int, seed: int, index: int, stages: int
) -> nn.Sequential:
    """Stage `index` of a model that is a chain: `layer(number)` builds one of its layers.

    Layers keep their number in the whole model as their name, so a stage's state_dict is a
    subset of the whole model's.
    """
    modules = OrderedDict[str, nn.Module]()
    for number in stage_layers(layers, index, stages):
        with seeded(seed, number):
            modules[str(number)] = layer(number)
    return nn.Sequential(modules)
