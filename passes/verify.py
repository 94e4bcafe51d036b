"""Invariants of a program, as a table. Every violation is collected and raised at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import fx

from .errors import PassError
from .graph import (
    FORWARD_OUTPUT,
    GRADIENT,
    PRIMAL,
    STATE,
    Kind,
    Program,
    calls,
    inputs,
    outputs,
    source_line,
)
from .ops import is_attention, is_effect, is_random, is_recomputed

_BACKWARD = ("backward", "backward_input", "backward_weight")

# What may enter each graph. The rest of an invariant such as "backward_input never depends
# on backward_weight" follows: nothing that W returns is among what I may take.
_MAY_ENTER = {
    "joint": PRIMAL | {Kind.TANGENT},
    "forward": PRIMAL,
    "backward": STATE | {Kind.SAVED, Kind.TANGENT},
    "backward_input": STATE | {Kind.SAVED, Kind.TANGENT},
    "backward_weight": STATE | {Kind.DEFERRED},
}
_MAY_LEAVE = {
    "joint": FORWARD_OUTPUT | GRADIENT,
    "forward": FORWARD_OUTPUT | {Kind.SAVED},
    "backward": GRADIENT,
    "backward_input": frozenset({Kind.INPUT_GRAD, Kind.DEFERRED}),
    "backward_weight": frozenset({Kind.PARAMETER_GRAD}),
}


def verify(program: Program, after: str = "the pipeline") -> None:
    """Check every invariant on every graph that exists.

    Args:
        program: the program to check.
        after: what ran before, for the message.

    Raises:
        PassError: lists every violation with its graph, node and source line.
    """
    found = [line for check in INVARIANTS for line in check(program)]
    if found:
        raise PassError(f"after {after}:\n" + "\n".join(f"  - {line}" for line in found))


def _lint(program: Program) -> Iterator[str]:
    for name, module in program.graphs().items():
        try:
            module.graph.lint()
        except RuntimeError as error:
            yield f"{name}: {error}"


def _values_known(program: Program) -> Iterator[str]:
    for name, module in program.graphs().items():
        for node in calls(module.graph):
            if "val" not in node.meta and not is_effect(node):
                yield _at(name, node, "has no meta['val']")


def _roles_allowed(program: Program) -> Iterator[str]:
    for name, module in program.graphs().items():
        for role, node in inputs(module.graph).items():
            if role.kind not in _MAY_ENTER[name]:
                yield _at(name, node, f"{role} must not enter this graph")
        for role, _ in outputs(module.graph):
            if role.kind not in _MAY_LEAVE[name]:
                yield f"{name}: {role} must not leave this graph"


def _boundaries_match(program: Program) -> Iterator[str]:
    pairs = (
        ("forward", "backward", Kind.SAVED),
        ("backward_input", "backward_weight", Kind.DEFERRED),
    )
    graphs = program.graphs()
    for giver, taker, kind in pairs:
        if giver not in graphs or taker not in graphs:
            continue
        given = [role for role, _ in outputs(graphs[giver].graph, kind)]
        taken = list(inputs(graphs[taker].graph, kind))
        if sorted(map(str, given)) != sorted(map(str, taken)):
            yield f"{giver} returns {kind.value} {given}, {taker} takes {taken}"
        for role, value in outputs(graphs[giver].graph, kind):
            if not isinstance(value, fx.Node) or not isinstance(
                value.meta.get("val"), (torch.Tensor, torch.SymInt)
            ):
                yield f"{giver}: {role} is {value!r}; boundaries carry tensors or SymInts only"


def _outputs_once(program: Program) -> Iterator[str]:
    if program.backward_weight is None and program.backward is not None:
        return
    halves = ("forward", "backward_input", "backward_weight")
    parts = [module for name, module in program.graphs().items() if name in halves]
    if not parts:
        return
    kept = FORWARD_OUTPUT | GRADIENT
    wanted = Counter(role for role, _ in outputs(program.joint.graph, *kept))
    made = Counter(role for part in parts for role, _ in outputs(part.graph, *kept))
    for role in wanted | made:
        if wanted[role] != made[role]:
            yield f"{role} is returned {made[role]} times over the graphs, not {wanted[role]}"


def _backward_is_pure(program: Program) -> Iterator[str]:
    for name, module in program.graphs().items():
        if name not in _BACKWARD:
            continue
        for node in calls(module.graph):
            if is_random(node):
                yield _at(name, node, f"{node.target} may draw random numbers in a backward")
            elif is_attention(node) and not is_recomputed(node):
                yield _at(name, node, f"{node.target} runs attention's forward in a backward")
            elif is_effect(node):
                yield _at(name, node, f"{node.target} has a side effect in a backward")


def _at(graph: str, node: fx.Node, what: str) -> str:
    line = source_line(node)
    return f"{graph}: {node.name}: {what}" + (f" (from {line})" if line else "")


INVARIANTS: tuple[Callable[[Program], Iterator[str]], ...] = (
    _lint,
    _values_known,
    _roles_allowed,
    _boundaries_match,
    _outputs_once,
    _backward_is_pure,
)
