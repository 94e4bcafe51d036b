"""Generate Python source from a graph. Dumps show the source that runs, except that small graphs
run with the blocks that they call written inline.

The generated function is boxed: it takes one list and empties it. It deletes every name after its
last use, so each tensor is freed inside the function as early as possible, if the caller kept no
reference. A result overwrites an operand if ``reusable_operands`` allows it. A linear layer is one
call, see ``linear_calls``. Comments show shapes, roles and the user's source lines. In the source
that runs, F also writes buffers where they are; in dumps it returns new values.

Before an operator that addresses memory by strides (``as_strided``), the function checks strides at
run time: some real kernels return other strides than torch's fake kernels promised to tracing
(batch norm of a transposed input), and the operator would read other elements.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import os
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..analysis.operators import IN_PLACE, OPERATORS, OVERLOAD, overload
from ..errors import PassError, StrideError
from ..graph import (
    SUBGRAPH,
    from_source_line,
    outputs,
    placeholders,
    role_of,
    source_line,
    value_text,
)
from ..subgraph import operands
from .buffer_writes import BATCH_NORM, written_buffer
from .buffers import last_uses, reusable_operands
from .linear import linear_calls


def stride_check(node: fx.Node, name_of: Callable[[fx.Node], str]) -> list[str]:
    """Source lines that check strides before the node; empty if it does not address memory by
    strides.

    Raises:
        PassError: the operand's strides are not known before the graph runs.
    """
    if node.target not in OPERATORS["addresses"]:
        return []
    operand: Any = node.args[0]
    value = operand.meta["val"]
    name = name_of(operand)
    # The stride of a dimension with one element is irrelevant.
    expected = {dim: value.stride(dim) for dim, size in enumerate(value.shape) if size != 1}
    if not all(type(stride) is int for stride in (*expected.values(), *value.shape)):
        raise PassError(
            f"{node.target} addresses memory by strides in a graph with symbolic sizes"
            f"{from_source_line(node)}"
        )
    if not expected or 0 in value.shape:
        return []
    strides = "".join(f"{name}.stride({dim}), " for dim in expected).strip()
    message = _message(node, tuple(value.stride()))
    return [
        f"    if ({strides}) != {tuple(expected.values())}:",
        f"        from {StrideError.__module__} import StrideError",
        f"        raise StrideError({message!r} + str({name}.stride()))",
    ]


def _message(node: fx.Node, expected: tuple[int, ...]) -> str:
    line = source_line(node)
    return (
        f"{node.target}"
        + (f" (of {line})" if line else "")
        + f" addresses memory by the strides {expected} that tracing saw; call "
        "contiguous() on the tensor first. The kernel returned strides "
    )


HEADER = "import operator\n\nimport torch\n\naten = torch.ops.aten\n"


def generate(
    name: str, module: fx.GraphModule, *, fold_views: bool = False, writes_buffers: bool = False
) -> str:
    """Source of ``def name(args, constants)`` for one graph.

    ``args`` is a list in the order of the placeholders; it is emptied. ``constants`` maps names to
    tensors and submodules of the graph module, and to the functions of called graphs, which are
    boxed too. The function returns a list in the order of the outputs.

    Args:
        name: the function's name.
        module: the graph.
        fold_views: whether views that only one matrix product reads are written inside that
            product's call. This makes the source easier to read.
        writes_buffers: whether operators write the new values of buffers that
            ``mark_buffer_writes`` marked over the old values, and return the buffers.

    Raises:
        PassError: a value in the graph cannot be written as Python source.
    """
    graph = module.graph
    linear, products = linear_calls(graph)
    if fold_views:
        _fold_views(graph, products, linear)
    last_use = _delayed(last_uses(graph), products)
    reused = reusable_operands(graph)
    unpacked = _unpacked(graph)
    items = {item for group in unpacked.values() for item in group}

    def expression_of(node: fx.Node) -> str:
        return call_of(node) if node in products else node_name(node)

    def call_of(node: fx.Node) -> str:
        if node in linear:
            return f"aten.linear.default({', '.join(map(expression_of, linear[node]))})"
        return _call(node, expression_of)

    lines = [f"def {name}(args, constants={{}}):"]
    lines += _unpack(placeholders(graph), last_use)
    source = ""
    for node in graph.nodes:
        if node.op == "placeholder" or node in products or node in items:
            continue
        if node.op == "output":
            lines.append("    return [")
            lines += [f"        {_text(value)},  # {role}" for role, value in outputs(graph)]
            lines.append("    ]")
            continue
        line = source_line(node)
        if line and line != source:
            lines.append(f"    # {_without_folder(line)}")
            source = line
        lines += stride_check(node, node_name)
        results = unpacked.get(node, [])
        dead = [
            value
            for last in (node, *results)
            for value in last_use.get(last, [])
            if value not in unpacked  # no name holds several results
        ]
        reuse = reused.get(node)
        lines.append(_statement(node, results, dead, reuse, call_of, writes_buffers))
    return "\n".join(lines) + "\n"


_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


def _fold_views(
    graph: fx.Graph, products: dict[fx.Node, fx.Node], linear: Collection[fx.Node]
) -> None:
    """Map each view that only one matrix product reads, directly or through other such views, to
    that product. Results of calls of ``linear`` are products, even if they are views.
    """
    for node in reversed(graph.nodes):
        is_alone = len(node.users) == 1 and node not in products and node not in linear
        if is_alone and is_view(node) and node.target not in OPERATORS["addresses"]:
            (reader,) = node.users
            product = products.get(reader, reader)
            if product.target in _PRODUCTS or product in linear:
                products[node] = product


def _delayed(
    last_use: dict[fx.Node, list[fx.Node]], products: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """The last uses of values once the views in ``products`` are written into the calls of their
    products. The views themselves are left out.
    """
    if not products:
        return last_use
    delayed: dict[fx.Node, list[fx.Node]] = {}
    for node, values in last_use.items():
        for value in values:
            readers = [products[user] for user in value.users if user in products]
            if value not in products:
                delayed.setdefault(max([node, *readers]), []).append(value)
    return delayed


def _unpacked(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each operator with several results to the nodes that pick them, if all are picked, each
    once: one statement assigns them.
    """
    unpacked: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        values = node.meta.get("val")
        if not isinstance(values, tuple) or SUBGRAPH in node.meta:
            continue
        picked = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(node.users) == len(values) > 1 and picked.keys() == {*range(len(values))}:
            unpacked[node] = [picked[at] for at in range(len(values))]
    return unpacked


def constants(module: fx.GraphModule) -> dict[str, Any]:
    """Tensors and submodules that the graph reads from its module, by target."""
    targets = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return {target: operator.attrgetter(target)(module) for target in sorted(targets)}


def _unpack(nodes: list[fx.Node], last_use: dict[fx.Node, list[fx.Node]]) -> list[str]:
    if not nodes:
        return ["    args.clear()"]
    lines = ["    ("]
    for node in nodes:
        shape = value_text(node.meta.get("val"))
        role = role_of(node)
        is_named = re.sub(r"\W", "_", role.name).strip("_") == node.name.strip("_")
        text = f"{role.kind.value if is_named else role}{', for its shape' * _gives_shape(node)}"
        lines.append(f"        {node_name(node)},  # {text}: {shape}")
    lines += ["    ) = args", "    args.clear()"]
    used = {node for dead in last_use.values() for node in dead}
    used |= {operand for node in nodes for user in node.users for operand in user.all_input_nodes}
    unused = [node_name(node) for node in nodes if node not in used]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    return lines


def _gives_shape(node: fx.Node) -> bool:
    """Whether a convolution's weight is read only for its shape: no input gradient is computed."""
    convolutions: list[Any] = [*node.users]
    return bool(convolutions) and all(
        user.target is torch.ops.aten.convolution_backward.default
        and node not in user.args[:2]
        and not user.args[-1][0]
        for user in convolutions
    )


def _without_folder(line: str) -> str:
    """A source line with its file's name only, such as ``modeling_llama.py:244 code``."""
    path, _, code = line.partition(" ")
    return f"{os.path.basename(path)} {code}".strip()


def _statement(
    node: fx.Node,
    results: list[fx.Node],
    dead: list[fx.Node],
    reused: int | None,
    call_of: Callable[[fx.Node], str],
    writes_buffers: bool,
) -> str:
    """Source of one operator; ``results`` are the names of its results if there are several."""
    if SUBGRAPH in node.meta:
        return _subgraph_call(node, dead)
    call = call_of(node) if reused is None else _call_in_place(node, reused)
    if writes_buffers:
        call = _buffer_write(node) or call
    text = f"    {', '.join(map(node_name, results or [node]))} = {call}"
    if dead:
        text += f"; del {', '.join(node_name(item) for item in dead)}"
    return f"{text}  # {value_text(node.meta.get('val'))}"


def _buffer_write(node: fx.Node) -> str:
    """Source of a call that writes new values over buffers, and returns the results of ``node``;
    empty for other nodes.
    """
    if node.target is BATCH_NORM and any(map(written_buffer, node.users)):
        arguments = [*map(_text, node.args)]
        call = f"aten._native_batch_norm_legit.default({', '.join(arguments)})"
        return f"(*{call}, {arguments[3]}, {arguments[4]})"
    writes = node.target in IN_PLACE and written_buffer(node) is not None
    return _call_in_place(node, 0) if writes else ""


def _subgraph_call(node: fx.Node, dead: list[fx.Node]) -> str:
    """Source of the call of a subgraph. The called function empties its argument list, so tensors
    are freed inside the call.
    """
    name, gone = node_name(node), [node_name(item) for item in dead if item is not node]
    text = f"    {name} = [{', '.join(map(node_name, operands(node)))}]"
    text += f"; del {', '.join(gone)}" if gone else ""
    text += f"; {name} = constants[{node.meta[SUBGRAPH].name!r}]({name})"
    return text + (f"; del {name}" if node in dead else "")


def _call(node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
    if node.op == "get_attr":
        return f"constants[{str(node.target)!r}]"
    if node.target is operator.getitem:
        return f"{_text(node.args[0], name_of)}[{_text(node.args[1])}]"
    arguments = [_text(value, name_of) for value in node.args]
    arguments += [f"{key}={_text(value, name_of)}" for key, value in node.kwargs.items()]
    return f"{_callee(node)}({', '.join(arguments)})"


def _call_in_place(node: fx.Node, operand: int) -> str:
    """Source of a call that writes its result over an operand."""
    operands = [_text(value) for index, value in enumerate(node.args) if index != operand]
    return f"{IN_PLACE[node.target]}({', '.join([_text(node.args[operand]), *operands])})"


def _callee(node: fx.Node) -> str:
    target = node.target
    op = overload(node)
    # A real kernel may return other strides than its fake one, for which a view was legal. A
    # reshape is a view where possible, and copies otherwise.
    if op in OPERATORS["reshapes"]:
        return "aten.reshape.default"
    if op is not None:
        return _text(op)
    if getattr(target, "namespace", "") == "higher_order":
        return f"torch.ops.higher_order.{target}"
    module = getattr(target, "__module__", "")
    name = getattr(target, "__name__", "")
    if module == "_operator" and hasattr(operator, name):
        return f"operator.{name}"
    if module == "builtins" and hasattr(builtins, name):
        return name
    if module.split(".")[0] == "torch" and hasattr(torch, name):
        return f"torch.{name}"
    raise PassError(f"{node.name} calls {target!r}, which cannot be written as Python source")


def node_name(node: fx.Node) -> str:
    """The name of a node's value in the source."""
    return f"{node.name}_" if keyword.iskeyword(node.name) else node.name


def _text(value: object, name_of: Callable[[fx.Node], str] = node_name) -> str:
    """Source of an argument."""
    match value:
        case fx.Node():
            return name_of(value)
        case tuple():
            items = ", ".join(_text(item) for item in value)
            return f"({items},)" if len(value) == 1 else f"({items})"
        case list():
            return "[" + ", ".join(_text(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
        case slice():
            return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case float() if value != value or value in (float("inf"), float("-inf")):
            return f"float({str(value)!r})"
        case complex():
            return f"complex({_text(value.real)}, {_text(value.imag)})"
        case bool() | int() | float() | str() | None:
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, OVERLOAD):
        return str(value) if value.namespace == "aten" else f"torch.ops.{value}"
    raise PassError(
        f"an argument is {value!r} ({type(value).__name__}), which cannot be written as Python "
        "source"
    )
