"""Refusal of random numbers of Python's ``random``, which a graph would repeat."""

from __future__ import annotations

import random

from torch import fx, nn
from torch._dynamo.source import RandomValueSource

from autosplit.capture.diagnosis import definition
from autosplit.errors import CaptureError


def refuse_drawn(module: nn.Module, exported: fx.GraphModule) -> None:
    """Refuse a graph that holds a number drawn from Python's ``random``: it would never change.

    Raises:
        CaptureError: there is such a number in the graph.
    """
    sources = (getattr(node, "_dynamo_source", None) for node in exported.graph.nodes)
    if any(isinstance(source, RandomValueSource) for source in sources):
        raise CaptureError(
            f"{type(module).__name__}.forward (at {definition(module)}) draws from Python's "
            "random module, which a graph cannot repeat; draw with torch.rand instead"
        )


def refuse_own_generators(module: nn.Module) -> None:
    """Refuse modules with a ``random.Random``, whose numbers Dynamo takes for constants (seen with
    torch 2.13).

    Raises:
        CaptureError: a submodule has such a generator.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, random.Random):
                where = f"{name}.{key}" if name else key
                raise CaptureError(
                    f"{type(module).__name__} keeps a random.Random as {where!r}, whose numbers "
                    "torch.compile would repeat; draw with torch.rand or the random module"
                )
