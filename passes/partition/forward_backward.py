"""Partition of the joint graph into forward and backward, with the division into F, I and W.

Forward keeps everything the outputs need, and every random operator: a random number drawn
in the backward would neither match the forward's nor leave the generator alone. In the
backward views are redone, because they cost nothing; what the user put under
``torch.utils.checkpoint``; and cheap operators, as far as the memory setting gives them time.
Operators that only the backward needs (a cast of a weight, say) move there.
"""

from __future__ import annotations

from torch import fx

from ..analysis.aliasing import storage_root
from ..analysis.operators import is_random
from ..errors import PassError
from ..graph import (
    BACKWARD_OUTPUT,
    FORWARD_OUTPUT,
    Kind,
    Role,
    SplitProgram,
    ancestors,
    calls,
    inputs,
    outputs,
    role_of,
    source_line,
)
from ..origin import origin_of
from .extract import copied, extract
from .hide_collectives import hide_collectives
from .multiplier_search import best_division
from .reachability import Reachability
from .tensor_names import name_boundaries


def partition_forward_backward(program: SplitProgram) -> bool:
    """Fill in ``forward`` and, where an output takes a gradient, ``regions`` and ``backward``.

    Raises:
        PassError: an output of the forward depends on an output's gradient, the backward needs
            a forward value that is not a tensor, or a memory budget cannot be met.
    """
    graph = program.joint.graph
    _refuse_draws_in_backward(graph)
    reach = Reachability.of(graph, late_input=program.memory.late_input)
    saved = _fill_backward(program, reach) if inputs(graph, Kind.TANGENT) else []
    program.forward = extract(
        program.joint,
        "forward",
        carried=[],
        compute=reach.forward | ancestors([node for _, node in saved]),
        returns=[*outputs(graph, *FORWARD_OUTPUT), *saved],
    )
    return True


def _refuse_draws_in_backward(graph: fx.Graph) -> None:
    """A custom backward may draw random numbers that depend on no gradient. Drawn in forward
    instead, they and all that follow would be others than autograd's.
    """
    if all(origin_of(node).is_backward is None for node in graph.nodes):
        return  # tracing had no backward to tell apart
    for node in calls(graph):
        if is_random(node) and origin_of(node).is_backward is not False:
            line = source_line(node)
            raise PassError(
                f"{node.target} draws random numbers in the backward"
                + (f" (from {line})" if line else "")
                + "; draw them in the forward and save them for it"
            )


def _fill_backward(program: SplitProgram, reach: Reachability) -> list[tuple[Role, fx.Node]]:
    """Divide the graph and fill in ``backward``; returns what forward must save for it."""
    graph = program.joint.graph
    regions = best_division(graph, reach, program.memory)
    if program.memory.overlap:
        regions = hide_collectives(graph, reach, regions, program.memory.rates)
    program.regions = regions
    name_boundaries(graph, regions, reach)
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    program.backward = extract(
        program.joint,
        "backward",
        carried=[(saved.get(node) or role_of(node), node) for node in regions.backward.takes],
        compute=regions.backward.runs,
        returns=outputs(graph, *BACKWARD_OUTPUT),
        on_demand=regions.backward.runs - reach.gradient,
    )
    return [
        (role, copied(graph, node) if storage_root(node) in reach.overwritten else node)
        for node, role in saved.items()
    ]
