"""What Dynamo compiled, while it runs: the backward of such a graph (leaves, order, requests), and
graph breaks as Dynamo reports them, without another run of the model.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

from .autograd import will_run

_LONGEST_VIEW = 32  # nodes in a row


@dataclasses.dataclass(frozen=True)
class RunningBackward:
    """The call of a compiled backward that is under way.

    Attributes:
        node: the graph's, in autograd's graph.
        number: of the ``backward()``; later ones have higher numbers.
        sequence: of the graph's forward call; a backward runs higher ones first.
        again: whether it is to be differentiated again (``create_graph=True``).
    """

    node: Any
    number: int
    sequence: int
    again: bool


def running_backward() -> RunningBackward:
    """The backward call that the engine is running."""
    node = torch._C._current_autograd_node()
    # create_graph=True runs this inside another autograd function's forward, and only there
    # is forward-mode differentiation off; torch 2.11 does so only where it gives input gradients.
    again = not torch._C._is_fwd_grad_enabled() or torch.is_grad_enabled()
    number = torch._C._current_graph_task_id()
    return RunningBackward(node, number, -1 if node is None else node._sequence_nr(), again)


def accumulated(node: Any, parameters: Iterable[Tensor]) -> set[int] | None:
    """Those of a node's parameters (their ``id``) that the backward under way accumulates into: no
    one under ``torch.autograd.grad`` and ``backward(inputs=...)`` for others. None where it asks
    for some of them by either.
    """
    own = set(map(id, parameters))
    nodes = {id(each.variable): each for each in _operands(node) if id(leaf_of(each)) in own}
    try:
        found = {key for key, each in nodes.items() if will_run(each)}
    except RuntimeError:  # torch does not answer for what torch.autograd.grad was given
        return None
    return found if not found or len(found) == len(nodes) else None


def _operands(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def leaf_of(node: Any) -> Tensor | None:
    """The leaf that an operand in autograd's graph is; None if it was computed."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def node_of(results: Any, parameters: Iterable[Tensor], given: Iterable[Any]) -> Any:
    """The node in autograd's graph of a compiled graph's call, which has edges to parameters; None
    where there is none.

    Args:
        results: what the graph returned.
        parameters: what it was given to differentiate by.
        given: all that it was given.
    """
    own = set(map(id, parameters))
    before = {each.grad_fn for each in given if isinstance(each, Tensor)}
    for node in (each.grad_fn for each in results if isinstance(each, Tensor)):
        # Outputs that are views were made from the graph's own outputs, by a few nodes in a row.
        for _ in range(_LONGEST_VIEW):
            if node is None or node in before:
                break
            operands = _operands(node)
            if any(id(leaf_of(each)) in own for each in operands):
                return node
            node = operands[0] if len(operands) == 1 else None
    return None


_TORCH = os.path.dirname(torch.__file__)


@dataclasses.dataclass(frozen=True)
class BreakReason:
    """Why Dynamo ended a graph. ``line``: ``file:line code`` of the user, or empty."""

    line: str
    reason: str


class BreakWatch:
    """Collects Dynamo's reports from its construction to ``found()``."""

    def __init__(self) -> None:
        self._breaks = len(graph_break_reasons)
        self._attempts = get_compilation_metrics()

    def found(self) -> list[BreakReason]:
        """Ends of graphs, and functions that Dynamo gave up on."""
        if len(graph_break_reasons) < self._breaks:  # torch._dynamo.reset() empties the list
            self._breaks = 0
        ended = graph_break_reasons[self._breaks :]
        before = set(map(id, self._attempts))
        failed = [each for each in get_compilation_metrics() if each.fail_reason]
        return [
            *(BreakReason(_users_line(each.user_stack), _short(each.reason)) for each in ended),
            *(_given_up(each) for each in failed if id(each) not in before),
        ]


def _given_up(attempt: Any) -> BreakReason:
    path = attempt.fail_user_frame_filename or attempt.co_filename or ""
    number = attempt.fail_user_frame_lineno or attempt.co_firstlineno or 0
    what = f"all of {attempt.co_name}" if attempt.co_name else "such a call"
    reason = f"{_short(attempt.fail_reason)}; {what} runs without a graph"
    return BreakReason(_place(path, number), reason)


def _users_line(stack: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in stack if not frame.filename.startswith(_TORCH)]
    return _place(own[-1].filename, own[-1].lineno or 0) if own else ""


def _place(path: str, number: int) -> str:
    return f"{path}:{number} {linecache.getline(path, number).strip()}".strip() if path else ""


def _short(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "Branch on the value of a tensor"
    return reason.strip().partition("\n")[0]
