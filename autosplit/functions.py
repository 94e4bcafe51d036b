"""The callables of one module at one set of input shapes: F, I, W and the unsplit backward.

The functional core under both faces, SplitModule (autograd) and Stage (explicit state).
Nothing here keeps tensors: state comes in, results go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx

from .compile import CompiledGraph, compile_graph
from .errors import SplitError
from .handover import Handover, State, TensorSpec
from .passes import Kind, SplitGraphs
from .passes.aliasing import storage_root
from .passes.graph import GRADIENT, STATE, descendants, inputs, outputs

if TYPE_CHECKING:
    from .capture import Capture


class ForwardResult(NamedTuple):
    """What F returns.

    Attributes:
        outputs: the module's result leaves, then new values of mutated inputs
            (``SplitFunctions.output_names``).
        updates: new values of mutated buffers (``SplitFunctions.updated_state``).
        saved: for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: Handover


class SplitFunctions:
    """F, I, W and B of one traced module.

    Attributes:
        graphs: what is run.
        output_names: paths of the outputs of ``forward``, in order.
        updated_inputs: paths of inputs that the module writes into.
        updated_state: names of buffers that the module writes into.
        parameter_names: names of the gradients of ``backward_weight``, in order.
        tangent_specs: output path -> the gradient that the backward expects for it; outputs
            not listed are not differentiable.
    """

    def __init__(self, traced: Capture, graphs: SplitGraphs, backend: str) -> None:
        self.capture = traced
        self.graphs = graphs
        self._backend = backend
        self._forward = compile_graph("forward", graphs.forward, backend)
        self._input_index = {name: index for index, name in enumerate(traced.inputs)}
        updated = _names(self._forward.outputs, Kind.UPDATE)
        self.updated_inputs = [name for name in updated if name in self._input_index]
        self.updated_state = [name for name in updated if name not in self._input_index]
        self.output_names = _names(self._forward.outputs, Kind.OUTPUT) + self.updated_inputs
        self._saved_names = _names(self._forward.outputs, Kind.SAVED)
        self.tangent_specs = {
            role.name: TensorSpec.of(node.meta["val"])
            for role, node in inputs(graphs.joint.graph, Kind.TANGENT).items()
        }
        gradients = [role for role, _ in outputs(graphs.joint.graph, *GRADIENT)]
        self.parameter_names = _names(gradients, Kind.PARAMETER_GRAD)

    @property
    def has_backward(self) -> bool:
        return self.graphs.backward is not None

    @cached_property
    def output_specs(self) -> dict[str, TensorSpec]:
        """Output path -> spec, for outputs that are tensors."""
        pairs = outputs(self.graphs.forward.graph, Kind.OUTPUT, Kind.UPDATE)
        values = {role.name: getattr(value, "meta", {}).get("val") for role, value in pairs}
        return {name: TensorSpec.of(v) for name, v in values.items() if isinstance(v, Tensor)}

    @cached_property
    def gradient_sources(self) -> dict[str, frozenset[str]]:
        """Parameter name -> outputs whose gradient its own depends on."""
        graph = self.graphs.joint.graph
        reached = {
            role.name: descendants([node]) for role, node in inputs(graph, Kind.TANGENT).items()
        }
        return {
            role.name: frozenset(name for name, nodes in reached.items() if value in nodes)
            for role, value in outputs(graph, Kind.PARAMETER_GRAD)
        }

    @cached_property
    def borrowed_gradients(self) -> frozenset[str]:
        """Parameters whose gradient is not a tensor of its own: it shares storage with
        another gradient or with what the caller handed in, or overlaps itself. Whoever adds
        into gradients in place must copy these first.
        """
        if self.graphs.backward is None:
            return frozenset()
        pairs = [(r, v) for r, v in outputs(self.graphs.backward.graph) if isinstance(v, fx.Node)]
        uses = Counter(storage_root(value) for _, value in pairs)
        return frozenset(
            role.name
            for role, value in pairs
            if role.kind is Kind.PARAMETER_GRAD
            and (
                uses[storage_root(value)] > 1
                or storage_root(value).op != "call_function"
                or 0 in value.meta["val"].stride()
            )
        )

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F. ``leaves``: flattened ``(args, kwargs)``; emptied."""
        args: list[Any] = [
            state[role.name] if role.kind in STATE else leaves[self._input_index[role.name]]
            for role in self._forward.inputs
        ]
        leaves.clear()
        results = self._forward.call(args)
        outs: list[Any] = []
        new_inputs: list[Any] = []
        updates: list[Tensor] = []
        saved: list[Tensor] = []
        for role, value in zip(self._forward.outputs, results, strict=True):
            if role.kind is Kind.OUTPUT:
                outs.append(value)
            elif role.kind is Kind.SAVED:
                saved.append(value)
            elif role.name in self._input_index:
                new_inputs.append(value)
            else:
                updates.append(value)
        read = {name: state[name] for name in self._backward_state}
        return ForwardResult(outs + new_inputs, updates, Handover(self._saved_names, saved, read))

    def backward_input(
        self, saved: Handover, state: State, output_grads: dict[str, Tensor | None]
    ) -> tuple[dict[str, Tensor], Handover]:
        """I. Returns (input path -> gradient, deferred). Empties ``output_grads``.

        Raises:
            SplitError: a gradient does not fit its output, or something saved was written
                in place since the forward.
        """
        call = self._backward_input
        results = self._run_backward(call, saved, state, output_grads)
        names = _names(call.outputs, Kind.INPUT_GRAD)
        grads = dict(zip(names, results, strict=False))
        deferred = results[len(names) :]
        read = {name: state[name] for name in _names(self._backward_weight.inputs, *STATE)}
        return grads, Handover(_names(call.outputs, Kind.DEFERRED), deferred, read)

    def backward_weight(self, deferred: Handover, state: State) -> list[Tensor]:
        """W. Returns gradients in the order of ``parameter_names``.

        Raises:
            SplitError: something deferred was written in place since I.
        """
        names = _names(self._backward_input.outputs, Kind.DEFERRED)
        tensors = dict(zip(names, deferred.take(), strict=True))
        return self._call(self._backward_weight, tensors, {}, state)

    def backward(
        self, saved: Handover, state: State, output_grads: dict[str, Tensor | None]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """B, unsplit. Returns (input path -> gradient, gradients by ``parameter_names``).
        Empties ``output_grads``.

        Raises:
            SplitError: as ``backward_input``.
        """
        results = self._run_backward(self._backward, saved, state, output_grads)
        roles = self._backward.outputs
        pairs = list(zip(roles, results, strict=True))
        grads = {role.name: value for role, value in pairs if role.kind is Kind.INPUT_GRAD}
        return grads, [value for role, value in pairs if role.kind is Kind.PARAMETER_GRAD]

    @cached_property
    def _backward_input(self) -> CompiledGraph:
        return self._compiled("backward_input")

    @cached_property
    def _backward_weight(self) -> CompiledGraph:
        return self._compiled("backward_weight")

    @cached_property
    def _backward(self) -> CompiledGraph:
        return self._compiled("backward")

    @cached_property
    def _backward_state(self) -> list[str]:
        """Parameters and buffers that any backward graph reads."""
        backward = self.graphs.backward
        return [role.name for role in inputs(backward.graph, *STATE)] if backward else []

    def _compiled(self, name: str) -> CompiledGraph:
        module = self.graphs.graphs().get(name)
        if module is None:
            raise SplitError("this module was traced without gradients; it has no backward")
        return compile_graph(name, module, self._backend)

    def _run_backward(
        self,
        call: CompiledGraph,
        saved: Handover,
        state: State,
        output_grads: dict[str, Tensor | None],
    ) -> list[Any]:
        values = {name: self._tangent(name, output_grads.get(name)) for name in self.tangent_specs}
        output_grads.clear()
        tensors = dict(zip(self._saved_names, saved.take(), strict=True))
        return self._call(call, tensors, values, state)

    @staticmethod
    def _call(
        call: CompiledGraph,
        handed: dict[str, Tensor],
        tangents: dict[str, Tensor],
        state: State,
    ) -> list[Any]:
        """Run a backward graph. Empties the dictionaries: what they hold must be able to die
        inside the graph.
        """
        sources: dict[Kind, Mapping[str, Tensor]] = {Kind.PARAMETER: state, Kind.BUFFER: state}
        sources |= {Kind.TANGENT: tangents, Kind.SAVED: handed, Kind.DEFERRED: handed}
        args = [sources[role.kind][role.name] for role in call.inputs]
        handed.clear()
        tangents.clear()
        return call.call(args)

    def _tangent(self, name: str, grad: Tensor | None) -> Tensor:
        """The gradient as the graph was traced with it: its dtype and strides, never None."""
        spec = self.tangent_specs[name]
        if grad is None:
            return spec.zeros()
        if grad.shape != spec.shape or grad.dtype != spec.dtype:
            raise SplitError(
                f"the gradient of {name} must be {spec.dtype} {list(spec.shape)}, "
                f"got {grad.dtype} {list(grad.shape)}"
            )
        return spec.conform(grad)


def _names(roles: Iterable[Any], *kinds: Kind) -> list[str]:
    return [role.name for role in roles if role.kind in kinds]
