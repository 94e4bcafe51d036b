"""Partition the joint graph into forward, backward_input and backward_weight.

**Forward** has all operators that the outputs need, and every random operator. A random number
drawn in the backward would differ from the forward's and would advance the generator. The backward
recomputes views, which cost nothing; regions that the user put under ``torch.utils.checkpoint``;
and cheap operators, as far as the memory setting allows. Operators that only the backward needs,
such as a cast of a weight, move to the backward.

**I** has the operators that input gradients need; if no input needs one, the chain of derivatives
down to the earliest parameters. All other operators may be deferred. Matrix products, convolutions
and scatters are deferred; views, pointwise operators and reductions go where fewer bytes cross. An
example is the gradient of a norm's weight or of a bias, a sum over [batch, sequence, hidden]
tensors. I computes it if nothing else in W needs these tensors, so that only a vector crosses. W
computes it if deferred matrix products keep the tensors anyway.

**Names** of saved and deferred tensors consist of a module and the tensor's relation to it:

    layers_4_mlp_down_input       an input of the module
    layers_4_norm_output          the output of the module
    layers_4_mlp_down_dy          the gradient of the module's output
    layers_4_attn_dx              the gradient of the module's input
    layers_4_norm_weight_grad     the gradient of a parameter, up to a view
    layers_4_attn_softmax         computed and read within one module: the operator
    tanh_model_line_12            outside all modules: the operator, file and line

A tensor is named by its readers after the last boundary that it crosses. Inputs, parameters and
gradients of outputs keep the user's names.
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
    BACKWARD_WRITE,
    FORWARD_OUTPUT,
    GRADIENT,
    WEIGHT_OUTPUT,
    Kind,
    Region,
    Regions,
    Role,
    SplitGraphs,
    ancestors,
    calls,
    from_source_line,
    inputs,
    origin_of,
    outputs,
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
    """Give the saved and deferred tensors of the joint graph unique names."""
    used_names = {node.name for node in graph.nodes}
    repeats: Counter[str] = Counter()
    parameters = {node: role.name for role, node in outputs(graph, Kind.PARAMETER_GRAD)}
    readers = dict.fromkeys(regions.saved, regions.backward.runs)
    readers |= dict.fromkeys(regions.deferred, regions.weight.runs)
    for node, region in readers.items():
        if node.op != "call_function" or subgraph_of(node) is not None:
            continue  # results of a called graph keep its names
        results = [parameters[view] for view in _views(node) if view in parameters]
        used = [origin_of(user).modules for user in _readers(node, region)]
        if used or not results:
            wanted = _name(node, used, derivative=node in reach.gradient)
        else:
            wanted = f"{results[0]}_grad"
        used_names.discard(node.name)
        node.name = _unique(_identifier(wanted), used_names, repeats)
        used_names.add(node.name)


def _name(node: fx.Node, used: list[Modules], *, derivative: bool) -> str:
    """The name of a saved or deferred tensor, from the modules of the operators that read it."""
    made_in = origin_of(node).modules
    enclosing = functools.reduce(_common, used) if used else made_in
    if enclosing != made_in[: len(enclosing)]:  # computed outside the modules that read it
        return f"{enclosing[-1]}_{'dy' if derivative else 'input'}"
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
    """The node, and all views of its value."""
    views = [node]
    for view in views:
        views += [user for user in view.users if user.op == "call_function" and is_free(user)]
    return views


def _common(one: Modules, other: Modules) -> Modules:
    """The modules that enclose both stacks: their common prefix."""
    pairs = zip(one, other, strict=False)
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _operator(node: fx.Node) -> str:
    """Short name of the operator that computed a value: ``softmax`` for
    ``aten._softmax_backward_data``.
    """
    name = str(producer(node).target).split(".")
    word = name[1] if name[0] == "aten" else name[0]
    return word.removesuffix("_data").removesuffix("_backward").strip("_").removeprefix("native_")


def _place(node: fx.Node) -> str:
    """File and line of the user's statement, or an empty string."""
    path, _, line = source_line(node).partition(" ")[0].rpartition(":")
    stem, _ = os.path.splitext(os.path.basename(path))
    return f"_{stem}_line_{line}" if line else ""


def _identifier(text: str) -> str:
    numbered = _CALL.sub(lambda call: f"_call_{int(call[1]) + 1}", text)
    name = _NO_WORD.sub("_", numbered).strip("_")
    return f"_{name}" if name[0].isdigit() else name


def _unique(name: str, used_names: Collection[str], repeats: Counter[str]) -> str:
    """The name, with a number appended if a node already has the name.

    Args:
        name: the name.
        used_names: names of nodes.
        repeats: maps a name to the last number appended to it; updated.
    """
    candidate = name
    while candidate in used_names:
        repeats[name] += 1
        candidate = f"{name}_{repeats[name] + 1}"
    return candidate


def partition_forward_backward(program: SplitGraphs) -> bool:
    """Fill in ``forward`` and, if an output has a gradient, ``regions`` and ``backward``.

    Returns:
        True: the program has changed.

    Raises:
        PassError: an output of the forward depends on an output's gradient, the backward needs
            a forward value that is not a tensor, or a memory budget cannot be met.
    """
    graph = program.joint.graph
    _refuse_draws_in_backward(graph)
    reach = Reachability.of(graph, defer_whole_backward=program.memory.defer_whole_backward)
    saved = _fill_backward(program, reach) if inputs(graph, Kind.TANGENT) else []
    region = Region(reach.forward | ancestors([node for _, node in saved]))
    results = [*outputs(graph, *FORWARD_OUTPUT), *saved]
    program.forward = extract(program.joint, "forward", region, results)
    return True


def _refuse_draws_in_backward(graph: fx.Graph) -> None:
    """Refuse random numbers that a custom backward draws. A draw that depends on no gradient would
    run in the forward. That draw and all later draws would then differ from autograd's.
    """
    if all(origin_of(node).is_backward is None for node in graph.nodes):
        return  # tracing recorded no backward
    for node in calls(graph):
        if is_random(node) and origin_of(node).is_backward is not False:
            raise PassError(
                f"{node.target} draws random numbers in the backward{from_source_line(node)}; draw "
                "the numbers in the forward and save them for the backward"
            )


def _fill_backward(program: SplitGraphs, reach: Reachability) -> list[tuple[Role, fx.Node]]:
    """Divide the joint graph and fill in ``regions`` and ``backward``. Return (role, node) of each
    tensor that forward must save.
    """
    graph = program.joint.graph
    regions = best_division(graph, reach, program.memory)
    program.regions = regions = hide_collectives(graph, reach, regions, program.memory.collectives)
    name_boundaries(graph, regions, reach)
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    results = outputs(graph, *GRADIENT, *BACKWARD_WRITE)
    program.backward = extract(program.joint, "backward", regions.backward, results, saved)
    return [
        (role, copied(graph, node) if storage_root(node) in reach.overwritten else node)
        for node, role in saved.items()
    ]


def split_backward(program: SplitGraphs) -> bool:
    """Fill in ``backward_input`` and ``backward_weight``; False if there is no backward.

    If no input needs a gradient and ``parameter_chain`` is empty, I only passes on the tensors that
    W needs.
    """
    regions = program.regions
    if regions is None:
        return False
    graph = program.joint.graph
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    deferred = {node: Role(Kind.DEFERRED, node.name) for node in regions.deferred}
    results = outputs(graph, *WEIGHT_OUTPUT)
    early = [(role, value) for role, value in results if value in regions.early_weight_grads]
    of_input = [
        *outputs(graph, Kind.INPUT_GRAD, Kind.BACKWARD_UPDATE),
        *early,
        *((role, node) for node, role in deferred.items()),
    ]
    program.backward_input = extract(
        program.joint, "backward_input", regions.input, of_input, saved
    )
    late = [pair for pair in results if pair not in early]
    program.backward_weight = extract(
        program.joint, "backward_weight", regions.weight, late, deferred
    )
    return True
