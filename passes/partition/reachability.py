"""Which results of a joint graph each node is needed for."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
from torch import fx

from ..analysis.aliasing import storage_root
from ..analysis.collectives import is_exchange
from ..analysis.operators import CHECKS, checkpoint_region, is_effect, is_random
from ..errors import PassError
from ..graph import (
    FIXED,
    FORWARD_OUTPUT,
    PRIMAL,
    Kind,
    ancestors,
    calls,
    descendants,
    inputs,
    outputs,
    role_of,
)
from ..origin import origin_of
from .parameter_chain import parameter_chain

_SUMS = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


@dataclasses.dataclass(frozen=True)
class Reachability:
    """Sets of nodes of one joint graph.

    Attributes:
        forward: needed by the outputs of the forward, by its side effects and random operators.
        gradient: depends on the gradient of an output, or on what the backward writes into.
        urgent: needed by what I must compute: the input gradients, or where no input needs one
            the chain of derivatives down to the earliest parameters, see ``parameter_chain``.
        redone: nodes of ``forward`` that the user wants recomputed and not saved.
        overwritten: what the forward, or I, overwrites when it is done.
        input_grads: the gradients that I returns, and what it writes.
        weight_grads: the gradients that W returns, and what it writes.
        waiting: reads what W writes into, at the time when W runs.
    """

    forward: set[fx.Node]
    gradient: set[fx.Node]
    urgent: set[fx.Node]
    recomputed: set[fx.Node]
    overwritten: set[fx.Node]
    input_grads: list[fx.Node]
    weight_grads: list[fx.Node]
    waiting: set[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, *, late_input: bool = False) -> Reachability:
        """Look at a joint graph.

        Args:
            graph: the graph.
            late_input: see ``Memory``.

        Raises:
            PassError: an output of the forward depends on an output's gradient.
        """
        gradient = descendants([*inputs(graph, Kind.TANGENT, Kind.TARGET).values()])
        # Effects of the forward, assertions on values above all, stay in it though nobody reads
        # them, and so do random operators, which move the generator.
        unread = [n for n in calls(graph) if is_random(n) or (is_effect(n) and _is_forwards(n))]
        results = _values(graph, *FORWARD_OUTPUT)
        forward = ancestors([*results, *(node for node in unread if node not in gradient)])
        if forward & gradient:
            names = ", ".join(sorted(node.name for node in forward & gradient)[:5])
            raise PassError(f"forward values depend on output gradients: {names}")
        input_grads = _values(graph, Kind.INPUT_GRAD)
        weight_grads = _values(graph, Kind.PARAMETER_GRAD)
        writes, waiting = _values(graph, Kind.WRITE), _waiting(graph)
        weight_grads += [value for value in writes if value in waiting]
        early = [value for value in writes if value not in waiting]
        urgent = ancestors(input_grads + early)
        if not (input_grads or late_input):
            urgent |= parameter_chain(graph, gradient, weight_grads)
        return cls(
            forward=forward,
            gradient=gradient,
            urgent=urgent,
            recomputed={node for node in forward if _is_inside_checkpoint(node, gradient)},
            overwritten=_overwritten(graph, waiting),
            input_grads=input_grads + early,
            weight_grads=weight_grads,
            waiting=waiting,
        )

    @cached_property
    def releasable(self) -> set[fx.Node]:
        """What allocates the weight gradients that I may compute. Those that ranks reduce are not
        among them: which half of the backward runs a collective must not hang on what is estimated
        for one rank.
        """
        reduced = descendants([n for n in self.gradient - self.urgent if is_exchange(n)])
        made = {storage_root(node) for node in self.weight_grads if node not in reduced}
        made = {node for node in made if node.op == "call_function"}
        return made & self.gradient - self.waiting

    def is_kept(self, node: fx.Node) -> bool:
        """Whether the module keeps the value until W anyway: a parameter, a buffer that the
        forward does not overwrite, or what W writes into.
        """
        fixed = node.op == "placeholder" and role_of(node).kind in FIXED
        return fixed and node not in self.overwritten


def _is_forwards(node: fx.Node) -> bool:
    """Whether the effect is one of the forward's: what the backward checks it also computes."""
    return node.target not in CHECKS or not origin_of(node).is_backward


def _values(graph: fx.Graph, *kinds: Kind) -> list[fx.Node]:
    return [value for _, value in outputs(graph, *kinds) if isinstance(value, fx.Node)]


def _is_inside_checkpoint(node: fx.Node, gradient: set[fx.Node]) -> bool:
    """Whether the user asked for recomputation and only the checkpointed region reads the
    value. What leaves the region is an ordinary value that may be saved.
    """
    region = checkpoint_region(node)
    readers = [user for user in node.users if user not in gradient]
    return region is not None and all(checkpoint_region(user) == region for user in readers)


def _overwritten(graph: fx.Graph, waiting: set[fx.Node]) -> set[fx.Node]:
    names = {role.name for role, _ in outputs(graph, Kind.UPDATE, Kind.WRITE)}
    state = inputs(graph, Kind.BUFFER, Kind.INPUT, Kind.TARGET)
    return {node for role, node in state.items() if role.name in names} - waiting


def _waiting(graph: fx.Graph) -> set[fx.Node]:
    """What is added to by the backward and read by nothing else, with the sums: over microbatches
    they are the same whenever W runs. All else that is written is written by I.
    """
    read = {role.name for role in inputs(graph, *PRIMAL)}
    written = {role.name: value for role, value in outputs(graph, Kind.WRITE)}
    found: set[fx.Node] = set()
    for role, target in inputs(graph, Kind.TARGET).items():
        chain = [target]
        while len(chain[-1].users) == 1:
            (user,) = chain[-1].users
            if chain[-1] is written[role.name] and role.name not in read:
                found.update(chain)
            if user.target not in _SUMS or user.kwargs or chain[-1] in user.args[1:]:
                break
            chain.append(user)
    return found
