"""What Dynamo compiled, while it runs: the backward of such a graph (leaves, order, requests), and
graph breaks as Dynamo reports them, without another run of the model.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

from .autograd import is_asked_for, will_run

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
        linked: those of them that are linked to their parameter, see ``LinkedLeaves``.
        asked: whether it is for such parameters, by either.
        again: whether it is to be differentiated again (``create_graph=True``).
    """

    number: int
    sequence: int
    leaves: list[tuple[Tensor, bool]]
    linked: list[Tensor]
    asked: bool
    again: bool


class LinkedLeaves(torch.autograd.Function):
    """Leaves in the place of parameters, with edges in the autograd graph to those, so that a
    backward that asks for a parameter is noticed. No gradient arrives at either, as a rule.
    """

    @staticmethod
    def forward(ctx: Any, leaves: list[Tensor], *both: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *[None] * len(ctx.leaves), *grads)


def linked_leaves(leaves: list[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Inputs for a graph: tensors over the leaves' memory, with edges to the parameters too."""
    made: Sequence[Tensor] = LinkedLeaves.apply(leaves, *leaves, *parameters)  # type: ignore[no-untyped-call]
    return made


def is_link(node: Any) -> bool:
    """Whether a node of autograd's graph is that of ``linked_leaves``."""
    return isinstance(node, LinkedLeaves._backward_cls)


def leaf_of(node: Any, result: int) -> Tensor | None:
    """The leaf that an operand in autograd's graph is or stands for; None if it was computed."""
    leaf: Tensor | None = node.leaves[result] if is_link(node) else getattr(node, "variable", None)
    return leaf


def _edges(node: Any, result: int) -> tuple[Any, Any]:
    """Nodes of a leaf and, where it is linked to a parameter, of that."""
    if not is_link(node):
        return node, None
    following = node.next_functions
    return following[result][0], following[len(node.leaves) + result][0]


def running_backward(is_ours: Callable[[Tensor], bool]) -> RunningBackward:
    """The backward call that the engine is running, with the leaves that ``is_ours`` accepts."""
    node = torch._C._current_autograd_node()
    following = () if node is None else node.next_functions
    found = [(leaf_of(*edge), _edges(*edge)) for edge in following if edge[0] is not None]
    ours = [(leaf, nodes) for leaf, nodes in found if leaf is not None and is_ours(leaf)]
    # The engine does not answer for a leaf that the user asked for by torch.autograd.grad; the
    # caller's are known to nobody.
    leaves = [(leaf, will_run(node)) for leaf, (node, _) in ours]
    ordinary = any(wanted for _, wanted in leaves)
    behind = [(leaf, node) for leaf, (_, node) in ours if node is not None]
    asked = not ordinary and any(is_asked_for(node) for _, node in behind)
    linked = [leaf for leaf, _ in behind]
    # create_graph=True runs this inside another autograd function's forward, and only there
    # is forward-mode differentiation off; torch 2.11 does so only where it gives input gradients.
    again = not torch._C._is_fwd_grad_enabled() or torch.is_grad_enabled()
    number = torch._C._current_graph_task_id()
    return RunningBackward(
        number, -1 if node is None else node._sequence_nr(), leaves, linked, asked, again
    )


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
            leaves = [leaf_of(*edge) for edge in node.next_functions]
            if any(leaf is not None and is_ours(leaf) for leaf in leaves):
                node.register_prehook(note)
                return
            node = node.next_functions[0][0] if len(leaves) == 1 else None


def python_function(node: Any) -> str | None:
    """Name and module of the ``torch.autograd.Function`` that a node is of, where it may compute
    gradients: those that torch puts around modules hand them on, but for reentrant checkpoints.
    """
    kind = getattr(type(node), "_forward_cls", None)
    where = "" if kind is None else kind.__module__
    hands_on = where.startswith(("torch.", "autosplit.")) and where != "torch.utils.checkpoint"
    return None if kind is None or hands_on else f"{kind.__qualname__} ({where})"


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
