"""Refuse calls for which a captured graph would be wrong.

- Autocast around the backward. Autograd applies autocast to operators of a backward, too: a product
  that the forward computed in float32 gets a gradient in bfloat16. A graph is captured before its
  backward runs, on the assumption that the backward runs outside of autocast.
- DTensors between stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from autosplit.device import accelerator_kind
from autosplit.errors import CaptureError, SplitError
from autosplit.passes.analysis.operators import is_recomputed, overload
from autosplit.passes.graph import Kind, source_line
from autosplit.passes.subgraph import inner_calls

if TYPE_CHECKING:
    from .functions import SplitFunctions


def autocast_state() -> tuple[Hashable, ...]:
    """The dtype of autocast on the CPU and on the accelerator; False if it is off."""
    accelerator = accelerator_kind()
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(accelerator) and torch.get_autocast_dtype(accelerator),
    )


class AutocastGuard:
    """Refuses a backward of one graph that autocast would change."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self._graph = backward.graph
        self._passed: set[Hashable] = {(False, False)}

    def check_autocast(self) -> None:
        """Refuse the backward if the present autocast state would change it.

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
    """Whether the present autocast state gives the operator's result another dtype."""
    op = overload(node)
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    if op is None or is_recomputed(node) or not any(map(_is_floating, operands)):
        return False
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda operand: operand.meta["val"]
    )
    return _dtypes(op(*args, **kwargs)) != _dtypes(node.meta["val"])


def refuse_dtensors(name: str, module: nn.Module, functions: SplitFunctions) -> None:
    """Refuse DTensors among the inputs and outputs of a stage.

    Raises:
        CaptureError: names the DTensor, with its mesh and placements.
    """
    for role, sharding in functions.capture.shardings.items():
        if role.kind in (Kind.INPUT, Kind.OUTPUT):
            verb = "takes" if role.kind is Kind.INPUT else "returns"
            raise CaptureError(
                f"{name} ({type(module).__name__}) {verb} {role.name}, a DTensor ({sharding}); "
                "stages exchange local tensors. Pass local ones, and leave use_local_output=True "
                "in the plan of parallelize_module"
            )


def misfit(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> str:
    """A phrase for errors that quotes the signature of the module's forward and says why it does
    not accept these arguments; empty if it accepts them.
    """
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if not module._forward_pre_hooks:  # which may change the arguments
            return f"takes {signature}: {error}"
    return ""


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dtypes(result: Any) -> list[torch.dtype | None]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [item.dtype if isinstance(item, Tensor) else None for item in results]
