"""Partition of the joint graph into forward and backward, with the division into F, I and W.

Forward keeps everything the outputs need, and every random operator: a random number drawn
in the backward would neither match the forward's nor leave the generator alone. In the
backward views are redone, because they cost nothing; what the user put under
``torch.utils.checkpoint``; and cheap operators, as far as the memory setting gives them time.
Operators that only the backward needs (a cast of a weight, say) move there.

Names of saved and deferred tensors: a module, and what the tensor is to it.

    layers_4_mlp_down_input       what a module was given
    layers_4_norm_output          what a module made
    layers_4_mlp_down_dy          the gradient of a module's output
    layers_4_attn_dx              the gradient of what a module was given
    layers_4_norm_weight_grad     the gradient of a parameter, all but done
    layers_4_attn_softmax         made and read within one module: the operator
    tanh_model_line_12            outside of all modules: the operator, file and line

A tensor is named for its readers behind the last boundary that it crosses. Inputs, parameters and
gradients of outputs keep the names that the user has for them.

The halves of the backward: backward_input | backward_weight, as the graph was divided.

The input-gradient graph I is what the input gradients need, or where no input needs one the chain
of derivatives down to the earliest parameters. Everything else may wait. Of
that, matrix products, convolutions and scatters do wait; views, pointwise work and reductions
go wherever fewer bytes cross. So the gradient of a norm's weight or of a bias is computed in I
when nobody else keeps the tensors it reduces (a vector crosses in place of [batch, sequence,
hidden] tensors), and in W when the deferred matrix products keep them anyway.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from torch import fx

from ..analysis.aliasing import is_free, producer, storage_root
from ..analysis.operators import is_random
from ..errors import PassError
from ..graph import (
    FORWARD_OUTPUT,
    GRADIENT,
    Kind,
    Regions,
    Role,
    SplitGraphs,
    ancestors,
    calls,
    inputs,
    origin_of,
    outputs,
    role_of,
    source_line,
)
from ..subgraph import subgraph_of
from .collectives import hide_collectives
from .extract import copied, extract
from .multiplier_search import best_division
from .reachability import Reachability

Modules = tuple[str, ...]

_CALL = re.compile(r"@(\d+)")
_NO_WORD = re.compile(r"\W+")


def name_boundaries(graph: fx.Graph, regions: Regions, reach: Reachability) -> None:
    """Rename the saved and deferred tensors in the joint graph; names are unique."""
    taken = {node.name for node in graph.nodes}
    repeats: Counter[str] = Counter()
    parameters = {node: role.name for role, node in outputs(graph, Kind.PARAMETER_GRAD)}
    readers = dict.fromkeys(regions.saved, regions.backward.runs)
    readers |= dict.fromkeys(regions.deferred, regions.weight.runs)
    for node, region in readers.items():
        if node.op != "call_function" or subgraph_of(node) is not None:
            continue  # results of a called graph have the names that they have there
        results = [parameters[each] for each in _views(node) if each in parameters]
        used = [origin_of(user).modules for user in _readers(node, region)]
        if used or not results:
            wanted = _name(node, used, derivative=node in reach.gradient)
        else:
            wanted = f"{results[0]}_grad"
        taken.discard(node.name)
        node.name = _unique(_identifier(wanted), taken, repeats)
        taken.add(node.name)


def _name(node: fx.Node, used: list[Modules], *, derivative: bool) -> str:
    """The name for a tensor that operators of these modules read."""
    made_in = origin_of(node).modules
    around = functools.reduce(_common, used) if used else made_in
    if around != made_in[: len(around)]:  # made outside of what reads it
        return f"{around[-1]}_{'dy' if derivative else 'input'}"
    operator = _operator(node) + ("_grad" if derivative else "")
    if not made_in:
        return operator + _place(node)
    if used and not any(modules[: len(made_in)] == made_in for modules in used):
        return f"{made_in[-1]}_{'dx' if derivative else 'output'}"
    return f"{made_in[-1]}_{operator}"


def _readers(node: fx.Node, region: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Operators of a region that read a value, directly or through views."""
    for view in _views(node):
        yield from (user for user in view.users if user in region and not is_free(user))


def _views(node: fx.Node) -> Iterable[fx.Node]:
    """The value and all views of it."""
    found = [node]
    for each in found:
        found += [user for user in each.users if user.op == "call_function" and is_free(user)]
    return found


def _common(one: Modules, other: Modules) -> Modules:
    """The modules around both."""
    pairs = zip(one, other, strict=False)
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _operator(node: fx.Node) -> str:
    """The operator that computed a value: ``softmax`` for ``aten._softmax_backward_data``."""
    name = str(producer(node).target).split(".")
    word = name[1] if name[0] == "aten" else name[0]
    return word.removesuffix("_data").removesuffix("_backward").strip("_").removeprefix("native_")


def _place(node: fx.Node) -> str:
    """File and line of the user's statement, where they are known."""
    path, _, line = source_line(node).partition(" ")[0].rpartition(":")
    stem, _ = os.path.splitext(os.path.basename(path))
    return f"_{stem}_line_{line}" if line else ""


def _identifier(text: str) -> str:
    numbered = _CALL.sub(lambda call: f"_call_{int(call[1]) + 1}", text)
    name = _NO_WORD.sub("_", numbered).strip("_")
    return f"_{name}" if name[0].isdigit() else name


def _unique(name: str, taken: Collection[str], repeats: Counter[str]) -> str:
    """The name, with a number behind it where a node has it already.

    Args:
        name: the name.
        taken: names of nodes.
        repeats: how often a number was needed before, by name; counted on.
    """
    found = name
    while found in taken:
        repeats[name] += 1
        found = f"{name}_{repeats[name] + 1}"
    return found


def partition_forward_backward(program: SplitGraphs) -> bool:
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


def _fill_backward(program: SplitGraphs, reach: Reachability) -> list[tuple[Role, fx.Node]]:
    """Divide the graph and fill in ``backward``; returns what forward must save for it."""
    graph = program.joint.graph
    regions = best_division(graph, reach, program.memory)
    program.regions = regions = hide_collectives(graph, reach, regions, program.memory.collectives)
    name_boundaries(graph, regions, reach)
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    program.backward = extract(
        program.joint,
        "backward",
        carried=[(saved.get(node) or role_of(node), node) for node in regions.backward.takes],
        compute=regions.backward.runs,
        returns=outputs(graph, *GRADIENT),
        on_demand=regions.backward.runs - reach.gradient,
    )
    return [
        (role, copied(graph, node) if storage_root(node) in reach.overwritten else node)
        for node, role in saved.items()
    ]


def split_backward(program: SplitGraphs) -> bool:
    """Fill in ``backward_input`` and ``backward_weight``; False where there is no backward.

    Where no input needs a gradient and there is no chain of derivatives either (see
    ``parameter_chain``), I only hands over what W needs.
    """
    regions = program.regions
    if regions is None:
        return False
    graph = program.joint.graph
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    deferred = {node: Role(Kind.DEFERRED, node.name) for node in regions.deferred}
    results = outputs(graph, Kind.PARAMETER_GRAD)
    released = [(role, value) for role, value in results if value in regions.released]
    program.backward_input = extract(
        program.joint,
        "backward_input",
        carried=[(saved.get(node) or role_of(node), node) for node in regions.input.takes],
        compute=regions.input.runs,
        returns=[
            *outputs(graph, Kind.INPUT_GRAD),
            *released,
            *((role, node) for node, role in deferred.items()),
        ],
        on_demand=regions.input.runs - regions.gradient,
    )
    program.backward_weight = extract(
        program.joint,
        "backward_weight",
        carried=[(deferred.get(node) or role_of(node), node) for node in regions.weight.takes],
        compute=regions.weight.runs,
        returns=[pair for pair in results if pair not in released],
        on_demand=regions.weight.runs - (regions.gradient - regions.urgent),
    )
    return True
