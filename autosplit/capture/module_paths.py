"""The modules in which an operation of a captured graph ran, by their names in the model."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_ENTRY = re.compile(r"(?:\.__dict__\['_modules'\]|\._modules)?\[(?:'([^']*)'|(\d+))\]")


def name_modules(captured: fx.GraphModule, model: nn.Module) -> None:
    """Rename modules in a captured graph's metadata to their names in ``model.named_modules()``.

    Dynamo names a module by the path on which the forward reached it. The path goes through
    ``__dict__['_modules']`` if the model looks up its children itself, as wrappers with a
    ``__getattr__`` do. It may also go through a list or another object that refers to the module.
    If the path is one of the module's names in the model, the module keeps that name. Otherwise it
    gets the first of its names.
    """
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(str(id(module)), []).append(name)
    for graph in (part for part in captured.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack:
                named = {
                    key: (_named(names, key, path), kind) for key, (path, kind) in stack.items()
                }
                node.meta["nn_module_stack"] = named


def _named(names: dict[str, list[str]], key: str, path: str) -> str:
    """The module's name in the model. If the model has no name for it, the path on which the
    forward reached it.
    """
    reached = _reached(path)
    module_names = names.get(key.partition("@")[0], [reached])
    return reached if reached in module_names else module_names[0]


@functools.lru_cache(maxsize=1024)  # a module's operations repeat its path
def _reached(path: str) -> str:
    """Dynamo's path to a module as a dotted name; a dotted name is unchanged."""
    if "[" not in path:
        return path
    dotted = _ENTRY.sub(lambda m: "." + next(filter(None, m.groups())), _ROOT.sub("", path))
    return dotted.removeprefix(".")


def stack(node: fx.Node) -> tuple[str, ...]:
    """Names of the modules in which an operation ran, outermost first.

    The second call of a module has the suffix ``@1``, as in ``block@1``. A checkpointed region has
    the modules common to all its operations. Call ``name_modules`` first.
    """
    # Operations of a custom autograd function have no module stack.
    operations = [
        operation for operation in inside(node) or () if operation.meta.get("nn_module_stack")
    ]
    if operations:
        return functools.reduce(common, map(stack, operations))
    return frames(node.meta.get("nn_module_stack", {}))


def inside(node: fx.Node) -> list[fx.Node] | None:
    """The operations inside a checkpointed region; None if the node is not one."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and node.graph.owning_module is not None:
            body = operator.attrgetter(str(argument.target))(node.graph.owning_module)
            if isinstance(body, fx.GraphModule):
                return [n for n in body.graph.nodes if n.op.startswith("call_")]
    return None


def frames(module_stack: Mapping[Any, tuple[str, Any]]) -> tuple[str, ...]:
    """Module names in Dynamo's ``nn_module_stack``, outermost first, without the model itself."""
    names = []
    for key, (path, _) in module_stack.items():
        name, call = _reached(path), str(key).partition("@")[2]
        if name:
            names.append(f"{name}@{call}" if call else name)
    return tuple(names)


def common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """The common prefix of two module stacks."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return a[:length]
