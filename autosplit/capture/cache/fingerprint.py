"""Fingerprint of a graph of Dynamo: text that is equal only for equal joint graphs.

Everything that AOTAutograd can see is in it: operators and their arguments, where each input
comes from and how it lies in memory, the state of the module, how results are put together, and
what bodies of higher-order operators hold and custom operators are made of. Sizes that are left
open are in it as symbols. What has no text that says all of it (constant tensors, code that is out
of sight, sizes that depend on data) has no fingerprint.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.capture.module_paths import stack
from autosplit.passes.analysis.operators import OVERLOAD
from autosplit.torch_internals.dtensor import is_dtensor
from autosplit.torch_internals.dtensor_facts import dispatch_rules, meshes_of
from autosplit.torch_internals.pytree import tree_flatten

from .argument_text import NoFingerprintError, argument_text, is_torch_operator, target_name
from .custom_operators import definition_text
from .size_symbols import SizeSymbols


def fingerprint_lines(
    module: nn.Module,
    exported: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Any],
    symbols: SizeSymbols,
) -> Iterator[str]:
    """The fingerprint, line by line.

    Args:
        module: that was captured.
        exported: Dynamo's graph of it.
        args: that it was captured for.
        kwargs: that it was captured for.
        results: leaves of what the module returns; tensors stand for those that it computes.
        symbols: sizes that are left open.

    Raises:
        NoFingerprintError: the graph has none.
    """
    given = list(_given(exported, (*args, *kwargs.values())))
    known = _TensorNames(symbols, given)
    leaves = tree_flatten((args, kwargs))[0]
    for at, leaf in enumerate(leaves):
        yield f"input {at}: {known.describe(leaf, f'input {at}')}"
    for name, tensor in _state(module):
        yield f"state {name}: {known.describe(tensor, f'state {name}')}"
    if meshes_of((*leaves, *(tensor for _, tensor in _state(module)))):
        yield from _rules()
    yield from _graph_lines(exported, given, known)
    for at, leaf in enumerate(results):
        yield f"result {at}: {known.name(leaf)}"


def _given(exported: fx.GraphModule, values: tuple[Any, ...]) -> Iterator[tuple[fx.Node, Any, Any]]:
    """Each placeholder, with the value given for it and what stood for that when it was traced."""
    codegen: Any = exported.graph._codegen
    holes = exported.graph.find_nodes(op="placeholder")
    for node, value in zip(holes, codegen.dynamo_bytecode_flatten(*values), strict=True):
        yield node, value, traced_value(node)


def _graph_lines(
    exported: fx.GraphModule, given: Iterable[tuple[fx.Node, Any, Any]], known: _TensorNames
) -> Iterator[str]:
    """Lines of the placeholders, with the tensors given for them, of the other nodes, and of the
    bodies of higher-order operators.
    """
    for node, value, traced in given:
        # A size that is given was traced as a symbol, which tells more than what it is here.
        source = traced if isinstance(traced, torch.SymInt) else value
        yield f"placeholder {node.name}: {known.name(source)}"
        known.add(traced, f"node {node.name}")
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            known.add(traced_value(node), f"node {node.name}")
            yield from _lines(node)


def _body_lines(name: str, body: fx.GraphModule) -> Iterator[str]:
    """Lines of the body of a higher-order operator, whose inputs its call gives it."""
    if any(map(callable, body.meta.values())):  # which operators of a checkpoint to recompute
        raise NoFingerprintError("a function decides what is recomputed")
    yield f"body {name}"
    for node in body.graph.nodes:
        if node.op == "placeholder":
            yield f"takes {node.name} {argument_text(node.args)}"
        else:
            yield from _lines(node)
    yield f"end {name}"


def traced_value(node: fx.Node) -> Any:
    """What stands for a node's value: Dynamo has it under a name of its own, but for inputs."""
    return node.meta.get("val", node.meta.get("example_value"))


def _lines(node: fx.Node) -> Iterator[str]:
    """The line of a node; all lines of the body that it stands for."""
    if node.op == "get_attr":
        body = _attribute(node)
        if not isinstance(body, fx.GraphModule):
            raise NoFingerprintError(f"the graph holds a constant, {node.target}")
        yield from _body_lines(node.name, body)
    else:
        yield _line(node)


def _attribute(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _line(node: fx.Node) -> str:
    if node.op == "call_function":
        called = _called(node.target)
    elif node.op in {"call_method", "output"}:
        called = str(node.target)
    else:
        raise NoFingerprintError(f"the graph calls a module, {node.target}")
    line = f"{node.name}={node.op} {called} {argument_text(node.args)} {argument_text(node.kwargs)}"
    return f"{line} # {stack(node)} {node.meta.get('stack_trace')!r}"


def _called(target: Any) -> str:
    if isinstance(target, OVERLOAD) and not is_torch_operator(target):
        definition = definition_text(target)
        return f"{target.name()} {hashlib.sha256(definition.encode()).hexdigest()}"
    return target_name(target)


def _rules() -> Iterator[str]:
    """How operators on DTensors are traced, where that is not torch's way."""
    for what, rule in dispatch_rules():
        if not callable(rule):
            yield f"{what} {rule!r}"
            continue
        where = str(getattr(rule, "__module__", ""))
        if where.split(".")[0] != "torch" or "register_sharding" in where:
            raise NoFingerprintError(f"somebody else's {rule!r} says how DTensors {what}")
        if what.startswith("run"):  # others come with torch's version
            yield f"{what} {where}.{getattr(rule, '__qualname__', '')}"


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _has_open_sizes(traced: Any) -> bool:
    if not isinstance(traced, Tensor):
        return False
    layout = (*traced.shape, *traced.stride(), traced.storage_offset())
    return not all(type(size) is int for size in layout)


class _TensorNames:
    """Names of tensors, and numbers of their storages."""

    def __init__(self, symbols: SizeSymbols, given: Iterable[tuple[fx.Node, Any, Any]]) -> None:
        self._symbols = symbols
        self._open = {id(value): traced for _, value, traced in given if _has_open_sizes(traced)}
        self._names: dict[int, str] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def add(self, tensor: Any, name: str) -> None:
        """Name a tensor, unless it has a name."""
        if isinstance(tensor, Tensor):
            self._names.setdefault(id(tensor), name)
            self._kept.append(tensor)

    def name(self, tensor: Any) -> str:
        if isinstance(tensor, torch.SymInt):
            return self._symbols.text(tensor)
        if not isinstance(tensor, Tensor):
            return argument_text(tensor)
        if id(tensor) not in self._names:
            raise NoFingerprintError(
                f"a tensor of shape {list(tensor.shape)} is neither an input nor state"
            )
        return self._names[id(tensor)]

    def describe(self, value: Any, name: str) -> str:
        """All that tracing may look at but the data: metadata, and which storage it is."""
        if not isinstance(value, Tensor):
            return argument_text(value)
        if is_dtensor(value):
            return self._describe_shared(value, name)
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise NoFingerprintError(f"{name} is a tensor of a kind of its own")
        self.add(value, name)
        storage = value.untyped_storage()
        facts = (
            self._names[id(value)],
            type(value).__name__,
            *self._layout(value),
            value.dtype,
            value.device,
            self._storages.setdefault(storage._cdata, len(self._storages)),
            value.requires_grad,
            value.is_leaf,
            value._is_view(),
            value.is_conj(),
            value.is_neg(),
            value.is_inference(),
        )
        return repr(facts)

    def _layout(self, value: Tensor) -> tuple[Any, ...]:
        """Sizes, strides, offset, and the bytes of the storage, which no guard looks at where sizes
        are left open.
        """
        traced = self._open.get(id(value))
        if traced is None:
            shape, bytes_ = tuple(value.shape), value.untyped_storage().nbytes()
            return shape, value.stride(), value.storage_offset(), bytes_
        text = self._symbols.text
        sizes, steps = [*map(text, traced.shape)], [*map(text, traced.stride())]
        return sizes, steps, text(traced.storage_offset())

    def _describe_shared(self, value: Any, name: str) -> str:
        """The same of a DTensor: how it lies over ranks, and what this rank has of it."""
        if id(value) in self._open:
            raise NoFingerprintError(f"sizes of {name}, a DTensor, are symbols")
        self.add(value, name)
        facts = (
            self._names[id(value)],
            type(value).__name__,
            isinstance(value, nn.Parameter),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_leaf,
            value._is_view(),
            getattr(value._spec, "shard_order", None),
        )
        lies = argument_text((value.device_mesh, tuple(value.placements)))
        own = self.describe(value._local_tensor, f"{name} on this rank")
        return f"{facts!r} {lies} {own}"
