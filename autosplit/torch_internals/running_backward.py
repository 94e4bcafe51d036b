"""Autograd's engine while it runs the backward of a compiled graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LONGEST_VIEW = 32  # nodes in a row


@dataclasses.dataclass(frozen=True)
class RunningBackward:
    """The call of a compiled backward that is under way.

    Attributes:
        number: of the ``backward()``; later ones have higher numbers.
        sequence: of the graph's forward call; a backward runs higher ones first.
        leaves: leaf inputs of the forward call, and whether the backward accumulates into
            each: into none under ``torch.autograd.grad``, only into those that are named under
            ``backward(inputs=...)``.
        again: whether it is to be differentiated again (``create_graph=True``).
    """

    number: int
    sequence: int
    leaves: list[tuple[Tensor, bool]]
    again: bool


def running_backward(is_ours: Callable[[Tensor], bool]) -> RunningBackward:
    """What the engine is running now, with those leaves that ``is_ours`` accepts."""
    node = torch._C._current_autograd_node()
    following = () if node is None else node.next_functions
    edges = [function for function, _ in following if function is not None]
    pairs = [(getattr(function, "variable", None), function) for function in edges]
    # The engine does not answer for a leaf that the user asked for by torch.autograd.grad; the
    # caller's are known to nobody.
    leaves = [
        (leaf, bool(torch._C._will_engine_execute_node(function)))
        for leaf, function in pairs
        if leaf is not None and is_ours(leaf)
    ]
    # create_graph=True runs this inside another autograd function's forward, and only there
    # is forward-mode differentiation off; torch 2.11 does so only where it gives input gradients.
    again = not torch._C._is_fwd_grad_enabled() or torch.is_grad_enabled()
    number = torch._C._current_graph_task_id()
    return RunningBackward(number, -1 if node is None else node._sequence_nr(), leaves, again)


def watch_gradients(
    results: Any,
    is_ours: Callable[[Tensor], bool],
    note: Callable[[tuple[Tensor | None, ...]], None],
) -> None:
    """Have ``note`` called with the gradients that arrive at the outputs of a compiled graph,
    before its backward runs: None for an output that none arrives at.

    Args:
        results: what the graph returned.
        is_ours: whether a leaf was an input of that call.
        note: gets a gradient for each output of the graph's forward.
    """
    tensors = [each for each in results if isinstance(each, Tensor)]
    for node in (each.grad_fn for each in tensors):
        # Outputs that are views were made from the graph's own outputs, by a few nodes in a row.
        for _ in range(_LONGEST_VIEW):
            if node is None:
                break
            leaves = [getattr(function, "variable", None) for function, _ in node.next_functions]
            if any(leaf is not None and is_ours(leaf) for leaf in leaves):
                node.register_prehook(note)
                return
            node = node.next_functions[0][0] if len(leaves) == 1 else None


def compiled_node(results: Any) -> type | None:
    """The class of the nodes that stand in autograd's graph for calls of a compiled graph, which
    has one of its own; None where no result has a history.

    Args:
        results: what a call returned.
    """
    for node in (each.grad_fn for each in results if isinstance(each, Tensor)):
        for _ in range(_LONGEST_VIEW):
            if node is None:
                break
            if node.name() == "CompiledFunctionBackward":
                return type(node)
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None


def output_shape(node: Any, index: int = 0) -> tuple[int, ...]:
    """Shape of a result of the operator whose backward is this autograd node."""
    return tuple(node._input_metadata[index].shape)
