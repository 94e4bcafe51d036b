"""The callables of one module at one set of input shapes: F, I, W and the unsplit backward.

The functional core of SplitModule (autograd) and Stage (explicit state). Nothing here keeps
tensors: state comes in, results go out. Positions of values are worked out once; a call only moves
references.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx

from autosplit.backends.compiled_graph import Backend
from autosplit.errors import SplitError
from autosplit.passes import Kind, SplitGraphs
from autosplit.passes.analysis.symbolic_sizes import concrete, is_size
from autosplit.passes.graph import STATE, inputs, outputs
from autosplit.passes.lowering.lent_memory import lent
from autosplit.passes.subgraph import inlined
from autosplit.runtime.activations.last_uses import last_uses
from autosplit.runtime.activations.saved_tensors import Constants, Residuals, State, TensorSpec
from autosplit.torch_internals.dtensor import Sharding

from .autocast_guard import AutocastGuard
from .backward_graphs import BackwardGraphs
from .dtensor_values import DTensorValues, local_tensors
from .forward_graph import ForwardGraph
from .gradient_accumulation import EXACT, Accumulation
from .gradient_dependence import GradientDependence
from .gradient_graphs import Call, CalledVariant
from .weight_slices import SlicedWeight

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture


class ForwardResult(NamedTuple):
    """Results of F.

    Attributes:
        outputs: the module's result leaves, then new values of mutated inputs
            (``SplitFunctions.output_names``).
        updates: new values of mutated buffers (``SplitFunctions.updated_state``).
        saved: residuals for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: Residuals


class SplitFunctions:
    """F, I, W and B of one traced module.

    Attributes:
        output_names: paths of the outputs of ``forward``, in order.
        updated_inputs: paths of inputs that the module writes into.
        updated_state: names of buffers that the module writes into.
        forward_state: names of the parameters and buffers that F reads.
        parameter_names: names of all gradients of parameters, in the order in which B returns
            them.
        base: what was captured: itself, unless it was made by ``at``.
        early_parameters: those that I returns, under a memory setting that lets it.
        late_parameters: those that W returns, in order.
        tangent_specs: output path -> the gradient that the backward expects for it; outputs
            not listed are not differentiable.
        dependence: static facts about the gradients.
    """

    def __init__(self, traced: Capture, graphs: SplitGraphs, backend: Backend) -> None:
        self.capture = traced
        self._graphs = graphs if backend.calls_subgraphs else inlined(graphs)
        graphs = self._graphs
        self._dtensors = DTensorValues(traced.shardings)
        self.base = self
        self._backend = backend
        self._size: Callable[[Any], int] = concrete
        self._forward = ForwardGraph(graphs, traced.inputs, backend)
        self.output_names = self._forward.output_names
        self.updated_inputs = self._forward.updated_inputs
        self.updated_state = self._forward.updated_state
        self.forward_state = self._forward.read
        tangents = inputs(graphs.joint.graph, Kind.TANGENT)
        self.tangent_specs = self._specs({r.name: n.meta["val"] for r, n in tangents.items()})
        self._tangents = [(n, self.output_names.index(n)) for n in self.tangent_specs]
        self.dependence = GradientDependence(graphs, traced.inputs, self._tangents)
        self._backward = BackwardGraphs(
            traced,
            graphs,
            saved=self._forward.saved,
            tangents=self.tangent_specs,
            dependence=self.dependence,
            backend=backend,
        )
        places = {name: at for at, name in enumerate(traced.inputs)}
        targets = [role.name for role in self._backward.read if role.kind is Kind.TARGET]
        self._targets = [(name, places.get(name)) for name in targets]
        crossing = (*self._forward.saved, *self._backward.read)
        self._saved_names = tuple([role.name for role in crossing])
        self.parameter_names = self._backward.parameter_names
        self.early_parameters = self._backward.early_parameters
        self.late_parameters = self._backward.late_parameters

    @cached_property
    def graphs(self) -> SplitGraphs:
        """The graphs with all their operators; those that are run may call graphs of blocks."""
        return inlined(self._graphs)

    def at(self, leaves: Sequence[Any]) -> SplitFunctions:
        """The same graphs, for a call with other sizes of inputs.

        Args:
            leaves: of the call; the guards hold for it.
        """
        sizes = self.capture.sizes
        if sizes is None:
            return self
        twin = copy.copy(self)
        twin._size = sizes.value(leaves)
        twin.__dict__.pop("output_specs", None)
        tangents = inputs(self._graphs.joint.graph, Kind.TANGENT)
        twin.tangent_specs = twin._specs({r.name: n.meta["val"] for r, n in tangents.items()})
        return twin

    def fits_budget(self, leaves: Sequence[Any]) -> bool:
        """Whether the graphs keep the budget that they were made for in a call with these input
        leaves: it was met for the sizes that were traced.
        """
        sizes = self.capture.sizes
        return sizes is None or self._graphs.memory.budget is None or not sizes.larger(leaves)

    def _specs(self, traced: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Specs of traced tensors with the sizes that they have in a call."""
        return {name: TensorSpec.of(value).at(self._size) for name, value in traced.items()}

    @cached_property
    def autocast_guard(self) -> AutocastGuard:
        """Checks autocast before a backward that comes from autograd."""
        return AutocastGuard(self._graphs.backward or self._graphs.joint)

    @property
    def generated(self) -> Mapping[str, str]:
        """Name of a graph -> source that the backend generated, of the graphs compiled so far."""
        return self._backend.generated

    def compile(
        self,
        calls: Iterable[Call] = ("backward_input", "backward_weight"),
        accumulation: Accumulation = EXACT,
        *,
        slices: int = 1,
    ) -> None:
        """Compile the graphs of these calls ahead of their first run.

        Args:
            calls: names of methods, in the order of one step: the first of a kind makes
                gradients, later ones add to them. ``("backward_weight", 4)`` is W of four
                microbatches in one call.
            accumulation: how they add.
            slices: into how many parts W will be run.

        Raises:
            SplitError: an unknown call.
            BackendError: the backend cannot compile a graph.
        """
        self._backward.compile(calls, accumulation, slices)

    def source(
        self,
        call: str,
        accumulation: Accumulation = EXACT,
        *,
        microbatches: int = 1,
        adds: bool = False,
    ) -> fx.GraphModule:
        """The graph behind a call, as it is given to the backend.

        Args:
            call: the name of a method.
            accumulation: how gradients are added.
            microbatches: of how many microbatches, for W.
            adds: whether it adds into gradients that are there.
        """
        if call == "forward":
            return self.graphs.forward
        return self._backward.source(CalledVariant(call, microbatches, adds), accumulation)

    @property
    def has_backward(self) -> bool:
        return self._graphs.backward is not None

    @cached_property
    def gradient_shardings(self) -> dict[str, Sharding]:
        """Parameter -> how its gradient lies over ranks when it is made, where it is a DTensor."""
        lying = self.capture.shardings.items()
        return {role.name: lies for role, lies in lying if role.kind is Kind.PARAMETER_GRAD}

    @cached_property
    def defers_numbers(self) -> bool:
        """Whether W takes numbers read from data, or sizes that are left open: these differ between
        microbatches, of which one graph cannot hold several.
        """
        if self.capture.sizes is not None or self.writes_late:
            return True
        weight = self._graphs.backward_weight
        taken = [] if weight is None else inputs(weight.graph, Kind.DEFERRED).values()
        return any(map(is_size, taken))

    @cached_property
    def writes_late(self) -> bool:
        """Whether W writes into something, microbatch by microbatch."""
        return self.has_backward and bool(self._backward.weight_writes)

    def concatenates(self, one: Residuals, other: Residuals) -> bool:
        """Whether W of two microbatches that ran these graphs can be one call: on the same
        parameters and buffers, without numbers of their own or writes.
        """
        return not self.defers_numbers and all(map(operator.is_, one.state, other.state))

    @cached_property
    def forward_constants(self) -> Constants:
        """The constants that F reads."""
        return Constants.of([self._graphs.forward], self.capture.guards.name_of)

    @cached_property
    def last_uses(self) -> Mapping[str, int]:
        """Name of a saved or deferred tensor -> its place in the order in which they die."""
        return last_uses(self._graphs)

    @cached_property
    def output_specs(self) -> dict[str, TensorSpec]:
        """Output path -> spec, for outputs that are tensors."""
        pairs = outputs(self._graphs.forward.graph, Kind.OUTPUT, Kind.UPDATE)
        values = {role.name: getattr(value, "meta", {}).get("val") for role, value in pairs}
        return self._specs({name: v for name, v in values.items() if isinstance(v, Tensor)})

    @cached_property
    def lent(self) -> list[tuple[int, int | None]]:
        """Places of deferred tensors in the caller's memory, each with the place of the input that
        it lies in, or None for one in an incoming gradient.
        """
        lenders = lent(self._graphs)
        if not lenders:
            return []
        places = {name: at for at, name in enumerate(self.capture.inputs)}
        roles = enumerate(self._backward.backward_input.handed)
        found = [(at, lenders[role]) for at, role in roles if role in lenders]
        return [(at, places.get(r.name) if r.kind is Kind.INPUT else None) for at, r in found]

    @cached_property
    def borrowed(self) -> list[bool]:
        """For each of ``parameter_names`` whether its gradient is not a tensor of its own."""
        return [name in self.dependence.borrowed for name in self.parameter_names]

    @cached_property
    def constant_outputs(self) -> list[int]:
        """Places of outputs that are not differentiable."""
        names = enumerate(self.output_names)
        return [at for at, name in names if name not in self.tangent_specs]

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F. ``leaves``: flattened ``(args, kwargs)``; emptied."""
        dtensors = self._dtensors
        if dtensors:
            state = dtensors.local_state(state)
            leaves[:] = dtensors.local(Kind.INPUT, self.capture.inputs, leaves)
        read = [state[role.name] for role in self._backward.read if role.kind in STATE]
        read += [state[name] if at is None else leaves[at] for name, at in self._targets]
        values = self._forward.run(state, leaves)
        constants, donated = self._backward.constants, self._forward.donated
        loose = len(self._targets)
        saved = Residuals(
            self._saved_names, values.saved, tuple(read), constants, donated, loose=loose
        )
        if not dtensors:
            return ForwardResult(values.outputs, values.updates, saved)
        results = len(self.output_names) - len(self.updated_inputs)
        names, outputs = self.output_names, values.outputs
        returned = dtensors.whole(Kind.OUTPUT, names[:results], outputs[:results])
        written = dtensors.whole(Kind.UPDATE, names[results:], outputs[results:])
        updates = dtensors.whole(Kind.UPDATE, self.updated_state, values.updates)
        return ForwardResult([*returned, *written], updates, saved)

    def backward_input(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        """I.

        Args:
            saved: residuals of F; taken.
            output_grads: in the order of ``output_names``; emptied.
            gradients: what to add the gradients of ``early_parameters`` into.
            accumulation: how to add.

        Returns:
            Gradients in the order of ``capture.inputs``, None where there is none; residuals
            for W; and the gradients of ``early_parameters``, as from ``backward_weight``.

        Raises:
            SplitError: a gradient does not fit its output, or a saved tensor was written
                in place since the forward.
        """
        read, half = saved.state, self._backward.backward_input
        pool = self._backward_pool(saved, output_grads)
        results, early = half.graph.run(pool, local_tensors(gradients), accumulation)
        deferred = results[half.inputs :]
        del results[half.inputs :]
        kept = tuple([read[at] for at in half.read_at])
        residuals = Residuals(
            half.names, deferred, kept, half.constants, late=True, loose=half.loose
        )
        found = self._made(self.early_parameters, early, gradients)
        return self._dtensors.whole(Kind.INPUT_GRAD, self.capture.inputs, results), residuals, found

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> Sequence[Tensor]:
        """W.

        Args:
            deferred: residuals of I; taken.
            gradients: what to add into, in the order of ``late_parameters``; none of them may
                share storage with another or with anything else that is handed over.
            accumulation: how to add.

        Returns:
            ``gradients``; without them new tensors in that order, of which those named by
            ``dependence.borrowed`` may share storage.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        given = local_tensors(gradients)
        _, found = self._backward.weight.run(deferred.take(), given, accumulation)
        return self._made(self.late_parameters, found, gradients)

    def backward_weight_together(
        self,
        deferred: Sequence[Residuals],
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> Sequence[Tensor]:
        """W of several microbatches in one call, with one matrix product for each parameter
        over all of them, which rounds differently from one for each microbatch.

        Args:
            deferred: residuals of I, of each; taken. All must have run on the same parameters and
                buffers.
            gradients: as for ``backward_weight``.
            accumulation: how to add the sum over these microbatches.

        Returns:
            As ``backward_weight``, summed over the microbatches.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        count = len(deferred)
        if count == 1:
            return self.backward_weight(deferred[0], gradients, accumulation)
        graph = self._backward.together(count)
        taken = [each.take() for each in deferred]
        pool: list[Any] = []
        for tensors in taken:
            pool += tensors
            tensors.clear()
        _, found = graph.run(pool, local_tensors(gradients), accumulation)
        return self._made(self.late_parameters, found, gradients)

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """B, unsplit: I and W in one call. Arguments and results are theirs.

        Raises:
            SplitError: as ``backward_input``.
        """
        graph, given = self._backward.unsplit, local_tensors(gradients)
        pool = self._backward_pool(saved, output_grads)
        results, found = graph.run(pool, given, accumulation)
        grads = self._dtensors.whole(Kind.INPUT_GRAD, self.capture.inputs, results)
        return grads, self._made(self.parameter_names, found, gradients)

    def sliced(self, count: int) -> SlicedWeight:
        """W in slices; the same object for the same count.

        Raises:
            SplitError: W cannot be cut into so many.
        """
        return self._backward.sliced(count)

    def weight_slice(
        self,
        count: int,
        index: int,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> tuple[Sequence[Tensor], Residuals]:
        """One slice of W; see ``SlicedWeight.run``."""
        weight = self.sliced(count)
        found, left = weight.run(index, deferred, local_tensors(gradients), accumulation)
        return self._made(weight.parameter_names[index], found, gradients), left

    def _made(
        self, names: Sequence[str], found: Sequence[Tensor], into: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """Weight gradients as the user gets them: what they were added into, or new ones."""
        if into is not None:
            return into
        return self._dtensors.whole(Kind.PARAMETER_GRAD, names, found)

    def _backward_pool(self, saved: Residuals, output_grads: list[Tensor | None]) -> list[Any]:
        """Arguments of I or B in the only list that refers to them, so that they can die inside."""
        if self._dtensors:
            output_grads[:] = self._dtensors.local(Kind.TANGENT, self.output_names, output_grads)
        tangents = [self._tangent(name, output_grads[at]) for name, at in self._tangents]
        output_grads.clear()
        return [*tangents, *saved.take()]

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
