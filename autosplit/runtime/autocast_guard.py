"""Refusal of autocast around a backward where it would change the results.

Autograd runs the operators of a backward through autocast too, if ``backward()`` is called
inside it: a product that the forward computed in float32 gets a gradient in bfloat16. A split
graph is traced before that is known, with a backward outside of autocast.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.device import accelerator_kind
from autosplit.errors import SplitError
from autosplit.passes.analysis.operators import is_recomputed, overload
from autosplit.passes.graph import source_line
from autosplit.passes.subgraph import inner_calls


def autocast_state() -> tuple[Hashable, ...]:
    """The dtype that autocast is on with for each kind of device; False where it is off."""
    other = accelerator_kind()
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(other) and torch.get_autocast_dtype(other),
    )


class AutocastGuard:
    """Check of autocast before the backward of one graph."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self._graph = backward.graph
        self._passed: set[Hashable] = {(False, False)}

    def check(self) -> None:
        """Refuse a backward that autocast, as it is now, would change.

        Raises:
            SplitError: names the operator and the user's line.
        """
        state = autocast_state()
        if state in self._passed:
            return
        changed = next(filter(_is_cast, inner_calls(self._graph)), None)
        if changed is not None:
            line = source_line(changed)
            raise SplitError(
                f"backward() inside autocast would run {changed.target}"
                + (f" (of {line})" if line else "")
                + " in another precision than the forward did; call backward() outside of "
                "autocast, which need only cover the forward and the loss"
            )
        self._passed.add(state)


@torch.no_grad()
def _is_cast(node: fx.Node) -> bool:
    """Whether autocast, as it is now, gives the operator's result another dtype."""
    op = overload(node)
    given = [each.meta.get("val") for each in node.all_input_nodes]
    if op is None or is_recomputed(node) or not any(map(_is_floating, given)):
        return False
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    return _dtypes(op(*args, **kwargs)) != _dtypes(node.meta["val"])


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dtypes(result: Any) -> list[torch.dtype | None]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [each.dtype if isinstance(each, Tensor) else None for each in results]
