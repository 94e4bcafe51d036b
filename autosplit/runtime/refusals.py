"""Refusals of what a captured graph would get wrong: autocast around its backward, memory shared
between inputs, DTensors between stages.

Autograd runs the operators of a backward through autocast too, if ``backward()`` is called
inside it: a product that the forward computed in float32 gets a gradient in bfloat16. A split
graph is traced before that is known, with a backward outside of autocast."""

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
from autosplit.runtime.residuals import State

if TYPE_CHECKING:
    from .functions import SplitFunctions


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


def refuse_dtensors(name: str, module: nn.Module, functions: SplitFunctions) -> None:
    """Check that what a stage takes from others and hands to others is no DTensor.

    Raises:
        CaptureError: one is; says how it lies over ranks.
    """
    for role, lies in functions.capture.shardings.items():
        if role.kind in (Kind.INPUT, Kind.OUTPUT):
            verb = "takes" if role.kind is Kind.INPUT else "returns"
            raise CaptureError(
                f"{name} ({type(module).__name__}) {verb} {role.name}, a DTensor ({lies}); stages "
                "hand each other local tensors. Pass local ones, and leave use_local_output=True "
                "in the plan of parallelize_module"
            )


def misfit(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> str:
    """What the module's forward takes, and what is wrong with these arguments; empty where they
    fit, as far as its signature tells.
    """
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if not module._forward_pre_hooks:  # which may bring them into order
            return f"takes {signature}: {error}"
    return ""


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dtypes(result: Any) -> list[torch.dtype | None]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [each.dtype if isinstance(each, Tensor) else None for each in results]


def refuse_overlap(functions: SplitFunctions, leaves: Sequence[Any], state: State) -> None:
    """Raise SplitError where an input that the module writes into shares its storage with
    another input, a parameter or a buffer: the graph was captured as if it did not. One tensor
    that is several inputs was captured as one.
    """
    inputs = zip(functions.capture.inputs, leaves, strict=True)
    tensors = [pair for pair in inputs if isinstance(pair[1], Tensor)]
    owners: dict[int, dict[int, list[str]]] = {}
    for kind in (tensors, {id(t): (n, t) for n, t in state.items()}.values()):
        for name, tensor in kind:
            storage = tensor.untyped_storage().data_ptr()
            owners.setdefault(storage, {}).setdefault(id(tensor), []).append(name)
    for sharing in owners.values():
        names = [name for each in sharing.values() for name in each]
        written = [name for name in names if name in functions.updated_inputs]
        if written and len(sharing) > 1:
            others = [name for name in names if name != written[0]]
            raise SplitError(
                f"the module writes into {written[0]}, which shares its memory with "
                f"{', '.join(others)}; pass a clone"
            )
