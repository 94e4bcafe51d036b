"""Run-time reads of numbers and tensors in the backward of a custom autograd function.

A training loop may set an attribute of a class, or a global, between forward and backward: the
scale of an auxiliary loss, for example. Dynamo traces a function's backward together with its
forward and records the value at that time as a constant. ``BackwardReads`` makes each such read an
operator of the backward's graph.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable

from autosplit.capture.workarounds.dynamo import current_line
from autosplit.errors import CaptureError, SplitError
from autosplit.passes.analysis.operators import READ
from autosplit.passes.graph import source_line
from autosplit.torch_internals.dynamo import all_nodes, source_name, traced_value
from autosplit.torch_internals.operators import register_fake
from autosplit.torch_internals.patches import patched

_NUMBERS = {float: torch.float64, int: torch.int64}
_READABLE = (Tensor, *_NUMBERS, bool, str, type(None))
# Dynamo's method that looks up an attribute; torch 2.14 has renamed it.
_GET_ATTRIBUTE = (
    "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
)
_GLOBAL = re.compile(r"G\['(\w+)'\]((?:\.\w+)*)")

_LIBRARY = torch.library.Library(READ, "DEF")
_LIBRARY.define("tensor(str place, int[] size, ScalarType dtype, Device device) -> Tensor")


def _read(place: str, size: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    value = eval(place, {"sys": sys})
    read = _as_tensor(value) if isinstance(value, (Tensor, *_NUMBERS)) else None
    if read is None or ([*read.shape], read.dtype, read.device) != ([*size], dtype, device):
        raise SplitError(
            f"the backward of a custom autograd function reads {place.partition('].')[2]}, which "
            f"must have shape {[*size]} and {dtype} on {device}, as in the forward, but is now "
            f"{value!r}: between forward and backward, set it to a value of the same kind"
        )
    return read.clone()  # W reads it after the loop may have written into it


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")


def _traced(place: str, size: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("tensor", _read, "CompositeExplicitAutograd")
register_fake(_LIBRARY, "tensor", _traced)
_OPERATOR: Any = getattr(torch.ops, READ).tensor.default


class BackwardReads:
    """Run-time reads of attributes and globals by the custom backwards of one capture.

    Attributes:
        numbers: whether numbers are read when the backward runs; otherwise they are constants of
            the graph.
        read_numbers: whether the capture has a run-time read of a number.
    """

    def __init__(self, *, numbers: bool) -> None:
        self.numbers, self.read_numbers = numbers, False
        self._depth = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Context in which Dynamo keeps reads of attributes and globals by custom backwards as
        operators of its graphs.
        """
        trace: Any = AutogradFunctionApplyVariable.trace_backward_graph
        build: Any = VariableTracker.build
        attribute: Any = getattr(AutogradFunctionVariable, _GET_ATTRIBUTE)

        def trace_backward(function: Any, *args: Any) -> Any:
            self._depth += 1
            try:
                return trace(function, *args)
            finally:
                self._depth -= 1

        def build_variable(tx: Any, value: Any, source: Any = None, *rest: Any, **how: Any) -> Any:
            # Integers are sizes and dimensions as well, which a graph must know.
            is_read = self._depth and type(value) in (Tensor, float)
            read = self._operator(tx, value, source) if is_read else None
            return build(tx, value, source, *rest, **how) if read is None else read

        def attribute_of_function(function: Any, tx: Any, name: str) -> Any:
            """Dynamo's variable of an attribute of the custom autograd function's class."""
            value = getattr(function.fn_cls, name, NotImplemented)
            if function.source is None or type(value) not in _READABLE:
                return attribute(function, tx, name)
            source = AttrSource(function.source, name)
            if not self._depth:
                return build(tx, value, source)
            read = self._operator(tx, value, source)
            if read is None:
                is_global = _place(tx, value, source) is not None
                raise _constant(function.fn_cls, name, value, is_global=is_global)
            return read

        with (
            patched(AutogradFunctionApplyVariable, "trace_backward_graph", trace_backward),
            patched(VariableTracker, "build", staticmethod(build_variable)),
            patched(AutogradFunctionVariable, _GET_ATTRIBUTE, attribute_of_function),
        ):
            yield

    def _operator(self, tx: Any, value: Any, source: Any) -> Any:
        """Return Dynamo's variable for an operator that reads the value when the backward runs.
        None if the graph keeps the value as a constant.
        """
        is_tensor = type(value) is Tensor
        is_read = is_tensor or (type(value) in _NUMBERS and self.numbers)
        place = _place(tx, value, source) if is_read else None
        if place is None:
            return None
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
        for attribute in ("shape", "dtype", "device") if is_tensor else ():
            install_guard(AttrSource(source, attribute).make_guard(GuardBuilder.EQUALS_MATCH))
        kind = _as_tensor(value)
        args = place, [*kind.shape], kind.dtype, kind.device
        read = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", _OPERATOR, args, {}))
        if is_tensor:
            return read
        self.read_numbers = True
        return read.call_method(tx, "item", [], {})


def refuse_written(exported: fx.GraphModule) -> None:
    """Refuse a custom backward that writes into a tensor of a class or a module, because the graph
    would write into a copy.

    Raises:
        CaptureError: names the tensor and the line.
    """
    for node in all_nodes(exported):
        if node.target is _OPERATOR and traced_value(node)._version:
            place = str(node.args[0]).partition("].")[2]
            raise CaptureError(
                f"the backward of a custom autograd function writes into {place} (from "
                f"{source_line(node)}), which is neither a buffer nor an attribute of a "
                "parameter. Register it as a buffer of the module"
            )


def _constant(function: type, name: str, value: Any, *, is_global: bool) -> CaptureError:
    """The error for a read in a custom backward whose value would be a constant of the graph.

    Args:
        function: the class that is read.
        name: the name of the attribute.
        value: the value of the attribute.
        is_global: whether the attribute can be read from any scope, by way of a Python module.
    """
    attribute = f"{function.__name__}.{name}"
    if not is_global:
        cure = f"Define the class {function.__name__} at the top level of a module"
    elif type(value) in (Tensor, *_NUMBERS):
        cure = "Compute with it, instead of a branch"
    else:
        cure = "Set it to a number or a tensor before the first forward"
    # A context cannot keep a tensor of a class in a function, but needs to keep none.
    if not isinstance(value, Tensor):
        cure += (
            f", or read it in the function's forward (ctx.{name} = {attribute}), where each new "
            "value captures a new graph"
        )
    return CaptureError(
        f"{current_line()} reads {attribute} = {value!r} in a backward. In a backward, a graph can "
        "read numbers and tensors of functions that are defined at the top level of a module, and "
        f"cannot branch on numbers. {cure}"
    )


def _place(tx: Any, value: Any, source: Any) -> str | None:
    """Python expression that evaluates to the value in any scope. None if no such expression
    exists. Also None for values in modules of Python, torch and numpy, which stay constant.
    """
    match = _GLOBAL.fullmatch(source_name(source))
    if match is None:
        return None
    scope = tx.output.global_scope
    root, rest = scope.get(match[1]), match[2]
    if not isinstance(root, ModuleType):
        root, rest = sys.modules.get(scope["__name__"]), f".{match[1]}{rest}"
    name = getattr(root, "__name__", "")
    if name.partition(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}:
        return None
    place = f"sys.modules[{name!r}]{rest}"
    try:
        return place if eval(place, {"sys": sys}) is value else None
    except (AttributeError, KeyError):
        return None
