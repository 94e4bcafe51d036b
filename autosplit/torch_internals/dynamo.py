"""Read what Dynamo records: fake values of nodes, names of sources, and reasons of graph breaks."""

from __future__ import annotations

import dataclasses
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons


def traced_value(node: fx.Node) -> Any:
    """The fake value of a node: ``meta["val"]``, or else ``meta["example_value"]``, which Dynamo
    writes.
    """
    return node.meta.get("val", node.meta.get("example_value"))


def source_name(source: Any) -> str:
    """Python expression of one of Dynamo's sources; empty if the source has none."""
    try:
        name = getattr(source, "name", "")
        return name() if callable(name) else str(name)
    except NotImplementedError:
        return ""


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a module's graph and of the graphs of its submodules."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def input_sources(module: fx.GraphModule) -> list[str]:
    """Python expression of each input of Dynamo's graph, such as ``L['self'].weight``."""
    nodes = module.graph.find_nodes(op="placeholder")
    return [source_name(getattr(node, "_dynamo_source", None)) for node in nodes]


_TORCH = os.path.dirname(torch.__file__)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@dataclasses.dataclass(frozen=True)
class BreakReason:
    """The reason why Dynamo ended a graph.

    Attributes:
        line: ``file:line code`` of the user; empty if unknown.
        reason: the first line of Dynamo's reason.
    """

    line: str
    reason: str


class BreakWatch:
    """Collects the graph breaks that Dynamo reports between the creation of this object and
    ``reasons()``.
    """

    def __init__(self) -> None:
        self._breaks = len(graph_break_reasons)
        self._attempts = get_compilation_metrics()

    def reasons(self) -> list[BreakReason]:
        """Reasons of graph breaks, and of functions that Dynamo could not compile."""
        if len(graph_break_reasons) < self._breaks:  # torch._dynamo.reset() empties the list
            self._breaks = 0
        ended = graph_break_reasons[self._breaks :]
        earlier_ids = set(map(id, self._attempts))
        failed = [attempt for attempt in get_compilation_metrics() if attempt.fail_reason]
        return [
            *(
                BreakReason(_users_line(graph_break.user_stack), _short(graph_break.reason))
                for graph_break in ended
            ),
            *(_given_up(attempt) for attempt in failed if id(attempt) not in earlier_ids),
        ]


def is_standard_library(path: str) -> bool:
    """Whether a file is part of Python itself. Installed packages may be in a folder below."""
    is_below = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
    return is_below or path.startswith("<frozen ")


def _given_up(attempt: Any) -> BreakReason:
    path = attempt.fail_user_frame_filename or attempt.co_filename or ""
    number = attempt.fail_user_frame_lineno or attempt.co_firstlineno or 0
    subject = f"all of {attempt.co_name}" if attempt.co_name else "this call"
    reason = f"{_short(attempt.fail_reason)}; {subject} runs without a graph"
    return BreakReason(_place(path, number), reason)


def _users_line(stack: Sequence[traceback.FrameSummary]) -> str:
    frames = [
        frame
        for frame in stack
        if not (frame.filename.startswith(_TORCH) or is_standard_library(frame.filename))
    ]
    user_frames = frames or [*stack][-1:]  # without user code, the model is a module of torch
    return _place(user_frames[-1].filename, user_frames[-1].lineno or 0) if user_frames else ""


def _place(path: str, number: int) -> str:
    return f"{path}:{number} {linecache.getline(path, number).strip()}".strip() if path else ""


def _short(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "Branch on the value of a tensor"
    return reason.strip().partition("\n")[0]
