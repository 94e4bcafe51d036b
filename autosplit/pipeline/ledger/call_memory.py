"""The memory of a stage's calls while they run: live tensors of their graphs, and kernel workspace.

Kernel workspace is what an operator allocates beyond its results while it runs. No graph shows it:
a kernel copies an operand whose layout it cannot use, converts one to another dtype, or keeps
partial sums for each thread. So each distinct operator is run once and measured, on tensors with
the layouts in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from autosplit.device import generator_state, generators_kept
from autosplit.passes.analysis.aliasing import is_view, spanned_elements, storage_bytes
from autosplit.passes.analysis.operator_cost import value_bytes
from autosplit.passes.analysis.operators import is_accumulation, is_effect, overload
from autosplit.passes.graph import Kind, concrete, inputs, outputs, tensor_of
from autosplit.passes.lowering.accumulate import accumulate
from autosplit.passes.lowering.buffers import LiveBytes, allocated
from autosplit.runtime.functions import SplitFunctions
from autosplit.torch_internals.allocations import allocations_on, can_count
from autosplit.torch_internals.pytree import tree_map

# These operators trust that their operand is a valid factorization, and may crash on others.
_FACTORIZATIONS = ("aten::linalg_", "aten::_linalg_", "aten::lu_")


Size = Callable[[Any], int]
"""Returns the number for a symbolic size."""


class KernelWorkspace:
    """Measures the workspace of operators of graphs, once for each distinct operator.

    Args:
        device: the device of the graphs. On the CPU, nothing can be measured while another profiler
            runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[Hashable, int] = {}

    @property
    def measurable(self) -> bool:
        """Whether allocations can be counted now."""
        return can_count(self._device)

    def of_graph(self, graph: fx.Graph, size: Size = concrete) -> dict[fx.Node, int]:
        """Maps operators of a graph to their workspace in bytes; operators without workspace are
        left out.

        Operators that cannot be run alone are left out, too: collectives, custom operators, and
        operators that refuse arbitrary values.

        Args:
            graph: the graph.
            size: returns the number for a symbolic size; by default that of the example inputs.
        """
        measurable = [node for node in graph.nodes if _is_measurable(node)]
        signatures = {node: _signature(node, size) for node in measurable}
        unknown = {
            signature: node
            for node, signature in signatures.items()
            if signature not in self._measured
        }
        if unknown and self.measurable:
            self._measured |= self._measure(unknown, size)
        peaks = {node: self._measured.get(signature, 0) for node, signature in signatures.items()}
        workspace = {node: peak - _result_bytes(node, size) for node, peak in peaks.items()}
        return {node: more for node, more in workspace.items() if more > 0}

    def _measure(self, nodes: Mapping[Hashable, fx.Node], size: Size) -> dict[Hashable, int]:
        """Peak bytes of each operator, including its results; 0 for an operator that fails."""
        failed: set[Hashable] = set()
        with torch.no_grad(), generators_kept(), allocations_on(self._device) as allocations:
            for signature, node in nodes.items():
                values = {n: _values(n, _like, size) for n in node.all_input_nodes}
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                allocations.mark()
                try:
                    node.target(*args, **kwargs)  # type: ignore[operator]
                except Exception:  # the values are made up
                    failed.add(signature)
                allocations.mark()
                del args, kwargs, values
        runs = allocations.stretches()[::2]
        starts = [0, *(stretch.end for stretch in allocations.stretches()[1::2])]
        return {
            signature: 0 if signature in failed else run.highest - start
            for signature, run, start in zip(nodes, runs, starts, strict=False)
        }


def _is_measurable(node: fx.Node) -> bool:
    op = overload(node)
    if op is None or op.namespace != "aten" or is_view(node):
        return False
    if op._schema.name.startswith(_FACTORIZATIONS) or (
        is_effect(node) and not is_accumulation(node)
    ):
        return False
    operands = [tensor_of(operand) for operand in node.all_input_nodes]
    return all(operand is None or operand.layout is torch.strided for operand in operands)


def _signature(node: fx.Node, size: Size) -> Hashable:
    """A key of an operator's call: calls with equal keys run the same kernel on equal sizes."""
    values = fx.map_arg((node.args, node.kwargs), lambda n: _values(n, _layout, size))
    return node.target, repr(values)


def _values(node: fx.Node, of_tensor: Callable[[Tensor, Size], Any], size: Size) -> Any:
    """A node's value, with ``of_tensor`` applied to each tensor, and with concrete sizes."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return of_tensor(leaf, size)
        return size(leaf) if isinstance(leaf, torch.SymInt) else leaf

    return tree_map(of_leaf, node.meta.get("val"))


def _layout(tensor: Tensor, size: Size) -> Hashable:
    shape, strides = map(size, tensor.shape), map(size, tensor.stride())
    return tensor.dtype, tensor.device, tuple(shape), tuple(strides)


def _result_bytes(node: fx.Node, size: Size) -> int:
    """Bytes that ``LiveBytes`` counts as the node's allocation."""
    return 0 if is_accumulation(node) else sum(storage_bytes(at, size) for at in allocated(node))


def _like(fake: Tensor, size: Size) -> Tensor:
    """A real tensor with the layout of a fake one. Its values are ones, but zeros for integers,
    which may be indices.
    """
    sizes, strides = [*map(size, fake.shape)], [*map(size, fake.stride())]
    fill = torch.ones if fake.is_floating_point() or fake.is_complex() else torch.zeros
    return fill(spanned_elements(sizes, strides), dtype=fake.dtype, device=fake.device).as_strided(
        sizes, strides
    )


_Call = tuple[str, bool, int]


class CallMemory:
    """The memory of stages' calls at the sizes of their functions; each is computed once.

    Args:
        device: the device of the stages.
        grad_dtype: the dtype of the sums of gradients; None for each gradient's dtype.
    """

    def __init__(self, device: torch.device, grad_dtype: torch.dtype | None = None) -> None:
        self._device, self._workspace = device, KernelWorkspace(device)
        self._grad_dtype = grad_dtype
        self._calls: WeakKeyDictionary[SplitFunctions, dict[_Call, LiveBytes]]
        self._calls = WeakKeyDictionary()

    def again(self, functions: SplitFunctions) -> int:
        """Bytes of the buffers that a forward writes. Copies of these buffers are kept until the
        forward runs again.
        """
        updates = outputs(functions.source("forward").graph, Kind.UPDATE)
        return sum(value_bytes(node.meta["val"]) for _, node in updates)

    @property
    def generators(self) -> int:
        """Bytes of one state of the CPU's random generator; 0 for stages on an accelerator, because
        host memory is not counted.
        """
        return generator_state(self._device).nbytes if self._device.type == "cpu" else 0

    def converted_sums(self, functions: SplitFunctions, call: str) -> dict[str, int]:
        """Maps each parameter to the bytes of its gradient sum, if the sum has another dtype than
        the gradient that the call computes.
        """
        if (dtype := self._grad_dtype) is None:
            return {}
        gradients = {
            role.name: tensor_of(value)
            for role, value in outputs(functions.source(call, dtype).graph, Kind.PARAMETER_GRAD)
        }
        return {
            name: concrete(value.numel()) * dtype.itemsize
            for name, value in gradients.items()
            if value is not None and value.dtype != dtype
        }

    def addition_workspace(self, functions: SplitFunctions, call: str) -> int:
        """The most workspace, in bytes, for adding one gradient to its sum after the graph has run;
        0 if the graph itself adds.
        """
        module = functions.source(call, self._grad_dtype, adds=True)
        if inputs(module.graph, Kind.ACCUMULATOR):
            return 0
        graph = accumulate(module, self._grad_dtype).graph
        workspace = self._workspace.of_graph(graph, functions.size)
        additions = [size for node, size in workspace.items() if is_accumulation(node)]
        return max(additions, default=0)

    def of_call(
        self, functions: SplitFunctions, call: str, *, adds: bool = False, count: int = 1
    ) -> LiveBytes:
        """The tensors that are alive while a call runs, in bytes.

        Args:
            functions: the functions of a stage.
            call: the name of one of the stage's methods.
            adds: whether the call adds to existing gradients, instead of creating them.
            count: the number of microbatches of a joined W.
        """
        calls = self._calls.setdefault(functions, {})
        key = call, adds, count
        if key in calls:
            return calls[key]
        module = functions.source(call, self._grad_dtype, adds=adds, count=count)
        workspace = self._workspace.of_graph(module.graph, functions.size)
        live = LiveBytes(module, workspace, functions.size)
        if self._workspace.measurable:
            calls[key] = live
        return live
