"""Names and roles of the inputs of a graph that Dynamo found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from autosplit.passes import Kind, Role


def input_roles(
    sources: list[str],
    example_inputs: Sequence[Any],
    name_of: Callable[[nn.Parameter], str | None],
) -> list[Role]:
    """PARAMETER for parameters that need a gradient, INPUT for the rest, with distinct names.

    Args:
        sources: where Dynamo found each input, as Python.
        example_inputs: values of the inputs.
        name_of: name of a parameter, where it is known.
    """
    roles: list[Role] = []
    taken: set[str] = set()
    for source, value in zip(sources, example_inputs, strict=True):
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        name = (name_of(value) if trained else None) or _readable(source)
        while name in taken:
            name += "_"
        taken.add(name)
        roles.append(Role(Kind.PARAMETER if trained else Kind.INPUT, name))
    return roles


def _readable(source: str) -> str:
    """``L['self']._modules['a']._parameters['weight']`` -> ``a.weight``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    # After a graph break, Dynamo finds what was on the stack there in ___stack0, ___stack1, ...
    return re.sub(r"^(?:self|___stack\d+)\.", "", re.sub(r"^L\['(\w+)'\]", r"\1", text)) or "input"


def is_batch(value: Any) -> bool:
    """Whether the training loop made the tensor, and may write into it after ``backward()``."""
    return isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter)
