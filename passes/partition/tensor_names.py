"""Names of saved and deferred tensors: a module, and what the tensor is to it.

    layers_4_mlp_down_input       what a module was given
    layers_4_norm_output          what a module made
    layers_4_mlp_down_dy          the gradient of a module's output
    layers_4_attn_dx              the gradient of what a module was given
    layers_4_norm_weight_grad     the gradient of a parameter, all but done
    layers_4_attn_softmax         made and read within one module: the operator
    tanh_model_line_12            outside of all modules: the operator, file and line

A tensor is named for its readers behind the last boundary that it crosses. Inputs, parameters and
gradients of outputs keep the names that the user has for them.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from torch import fx

from ..analysis.aliasing import is_free, producer
from ..graph import Kind, Regions, outputs, source_line
from ..origin import origin_of
from ..subgraph import subgraph_of
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
