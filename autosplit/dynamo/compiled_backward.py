"""``Part``: one graph that Dynamo found; ``SplitBackward``: runs its I and queues its W.

At each call the graph's node in autograd's graph is found behind its results. It remembers the
call, and with it the parameters, until its backward runs, which gives no gradient for those that
are deferred.

A backward through a compiled model leaves pending work for each graph that took part. All that
belongs to one microbatch is delivered in one pass of the autograd engine, so that a parameter used
in several graphs gets one summed gradient, as from an ordinary ``backward()``.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.function import refuse_parameter_request, refuse_partial, watch
from autosplit.autograd.pending import PendingWork
from autosplit.backends.backend import Backend, Boxed
from autosplit.capture.aot_convention import AotGraphs
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import weight_flops
from autosplit.passes.graph import GRADIENT, STATE, inputs, outputs, source_line
from autosplit.passes.lowering.buffers import lent
from autosplit.runtime.compiled_graph import compile_graph
from autosplit.runtime.gradient_dependence import (
    borrowed_gradients,
    gradient_sources,
    outputs_read_inside,
)
from autosplit.runtime.refusals import AutocastGuard
from autosplit.runtime.residuals import HandOver, Residuals, is_shared
from autosplit.torch_internals.autograd import has_gradient_hooks
from autosplit.torch_internals.dynamo import (
    RunningBackward,
    accumulated,
    node_of,
    running_backward,
)

from .pending_weights import ForwardCall


class Part:
    """One graph of a model, compiled.

    Attributes:
        parameters: names of the parameters that need a gradient. Where modules share code,
            they share the graph; the names are those of the first.
        graphs: the split graphs; None where the graph has no backward or was not split.
        reason: why it was not split; empty where it was, or has no backward.
        lines: ``file.py:3-9`` for the user's lines that the graph holds.
    """

    def __init__(self, module: fx.GraphModule, parameters: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        self.graphs: SplitGraphs | None = None
        self.reason = ""
        self.lines = _lines(module.graph)

    def give_up(self, reason: str) -> None:
        """Record why the graph cannot be split; its backward is an ordinary one."""
        self.reason = reason

    @property
    def is_split(self) -> bool:
        """Whether there is a W."""
        weight = None if self.graphs is None else self.graphs.backward_weight
        return weight is not None and bool(outputs(weight.graph))

    @property
    def state(self) -> str:
        """``split``, or why not."""
        if self.is_split or self.reason:
            return self.reason or "split"
        return "no backward" if self.graphs is None else "no parameters"

    @property
    def weight_flops(self) -> tuple[int, int]:
        """Floating-point operations of weight gradients in W, and in I all the same."""
        return (0, 0) if self.graphs is None else weight_flops(self.graphs)


def _lines(graph: fx.Graph) -> str:
    """The user's lines behind the graph, file by file."""
    found: dict[str, set[int]] = {}
    for node in graph.nodes:
        place = source_line(node).partition(" ")[0]
        path, _, number = place.rpartition(":")
        if path and number.isdigit():
            found.setdefault(os.path.basename(path), set()).add(int(number))
    return ", ".join(f"{name}:{_span(numbers)}" for name, numbers in found.items())


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


_CALL = "_autosplit_call"


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a graph.

    Attributes:
        parameters: index of the graph's input -> parameter.
        token: the forward call that it belongs to.
        batch: indices of other inputs that no earlier operator computed.
        absent: outputs that the backward brings no gradient for, by name.
    """

    parameters: dict[int, nn.Parameter]
    token: ForwardCall
    batch: frozenset[int] = frozenset()
    absent: frozenset[str] = frozenset()


def call_of(node: Any) -> Call | None:
    """The call that a node of autograd's graph is of; None for other nodes."""
    found: Call | None = getattr(node, _CALL, None)
    return found


class WeightFacts(NamedTuple):
    """What is known of a graph's weight gradients.

    Attributes:
        dense: whether all are known to be strided.
        borrowed: names of those that are not tensors of their own.
    """

    dense: bool
    borrowed: Collection[str]


class WeightGraph:
    """W of one graph, compiled.

    Attributes:
        handed: what I leaves for it: tensors and integers.
        state: parameters and buffers that it reads.
        parameter_names: names of the gradients that it makes; all are late.
        dependence: what is known of them.
    """

    early_parameters: Sequence[str] = ()

    def __init__(self, module: fx.GraphModule, backend: Backend) -> None:
        compiled = compile_graph("backward_weight", module, backend)
        made = [value.meta["val"] for _, value in outputs(module.graph)]
        dense = all(each.layout is torch.strided for each in made)
        self.dependence = WeightFacts(dense, borrowed_gradients(module.graph))
        self.handed = tuple(inputs(module.graph, Kind.DEFERRED))
        self.state = tuple(inputs(module.graph, *STATE))
        names = tuple([role.name for role in (*self.handed, *self.state)])
        self._known = HandOver(names, late=True)
        self._call = compiled.taking([*self.handed, *self.state], compiled.outputs)
        self.parameter_names = self.late_parameters = [role.name for role in compiled.outputs]

    def backward_weight_together(self, deferred: Sequence[Residuals]) -> Sequence[Tensor]:
        """W of one microbatch."""
        (residuals,) = deferred
        return self._call(residuals.take())

    def deferred(self, values: Mapping[Role, Any], lent: Collection[Role] = ()) -> Residuals:
        """What I left, of all that it left and the state; what is in ``lent`` is copied."""
        state = tuple([values[role] for role in self.state])
        left = Residuals(self._known, [values[role] for role in self.handed], state)
        left.own([at for at, role in enumerate(self.handed) if role in lent])
        return left


class DeferredGraphOwner(Protocol):
    """Collects the deferred W of graphs."""

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The parameter's name, where the owner knows it."""

    def compiled(self, part: Part) -> None:
        """Note that a graph was compiled."""

    def entered(self, part: Part, parameters: Sequence[nn.Parameter]) -> ForwardCall:
        """Note that a graph is called, and tell which forward call it belongs to.

        Args:
            part: the graph.
            parameters: those whose gradients would be deferred.
        """

    def deferred(self, work: PendingWork, call: ForwardCall) -> None:
        """Queue the W of a graph whose I has run."""


class SplitBackward:
    """I of one graph, which queues W.

    Attributes:
        parameters: index of the graph's input -> name of its deferred gradient.
    """

    def __init__(
        self,
        aot: AotGraphs,
        backward_input: Boxed,
        weight: WeightGraph,
        owner: DeferredGraphOwner,
        places: Mapping[str, int],
    ) -> None:
        """``places``: name of an input -> its index."""
        self.parameters = aot.parameters
        # Deferred tensors in memory of inputs (their index) and of gradients of outputs (None).
        self._lent = {role: places.get(lender.name) for role, lender in lent(aot.graphs).items()}
        self.lenders = {index for index in self._lent.values() if index is not None}
        self._backward_input = backward_input
        self._weight = weight
        self._owner = owner
        self._results = aot.results
        positions = {role: at for at, role in enumerate(inputs(aot.backward_input.graph))}
        self._state = {role: positions[role] for role in weight.state}
        returned = [role for role, _ in outputs(aot.backward_input.graph)]
        self._slots, self._left = returned[: aot.slots], returned[aot.slots :]
        self._sources = gradient_sources(aot.graphs.joint.graph, *GRADIENT)
        self._read_inside = outputs_read_inside(aot.graphs.joint.graph)
        self._autocast_guard = AutocastGuard(aot.graphs.backward or aot.graphs.joint)

    def watch(self, call: Call, given: Sequence[Any], results: Any) -> None:
        """Have the node of a call know it, and note which outputs the backward brings no gradient
        for, and whether autocast is on.

        AOTAutograd puts zeros in the place of absent gradients; in plain autograd, what is only
        behind those gets no gradient at all. And it switches autocast off.
        """
        node = node_of(results, call.parameters.values(), given)
        if node is None:
            return
        named = zip(self._results, results, strict=False)
        watched = watch((name, each) for name, each in named if name in self._read_inside)

        def note(grads: tuple[Tensor | None, ...]) -> None:
            refuse_partial(watched)
            self._autocast_guard.check()
            pairs = zip(self._results, grads, strict=False)
            call.absent = frozenset(name for name, grad in pairs if grad is None)

        setattr(node, _CALL, call)
        node.register_prehook(note)

    def __call__(self, args: list[Any]) -> list[Any]:
        running = running_backward()
        call, wanted = self._origin(running)
        values = {role: args[at] for role, at in self._state.items()}
        results = self._backward_input(args)
        values |= zip(self._left, results[len(self._slots) :], strict=True)
        del results[len(self._slots) :]
        targets = {
            self.parameters[index]: parameter
            for index, parameter in wanted.items()
            if parameter.requires_grad  # frozen since the forward: as autograd does
            and not self._is_absent(self.parameters[index], call)
        }
        if targets and (call.token.unsplit or has_gradient_hooks([*wanted.values()])):
            # The engine calls hooks now, those that came between the forward and the backward, too.
            work = PendingWork(self._weight, self._weight.deferred(values), {})
            values.clear()
            found = work.named_gradients()
            for at, role in enumerate(self._slots):
                if role.name in targets:
                    results[at] = found[role.name]
        elif targets:
            shared = [
                role
                for role, at in self._lent.items()
                if at in call.batch or is_shared(values[role])
            ]
            work = PendingWork(
                self._weight,
                self._weight.deferred(values, shared),
                weakref.WeakValueDictionary(targets),  # Dynamo keeps the graph, and this with it
                frozenset(self._weight.parameter_names) - targets.keys(),
                running.number,
                sequence=running.sequence,
            )
            self._owner.deferred(work, call.token)
        pairs = zip(self._slots, results, strict=True)
        return [None if self._is_absent(role.name, call) else grad for role, grad in pairs]

    def _origin(self, running: RunningBackward) -> tuple[Call, dict[int, nn.Parameter]]:
        """The forward call, and the inputs whose gradients this backward accumulates."""
        if running.again:
            raise SplitError(
                "create_graph=True: a split backward cannot be differentiated again; run the "
                "model without autosplit where double backward is needed"
            )
        call = call_of(running.node)
        if call is None:
            raise SplitError(
                "the backward of a split graph runs outside the autograd engine; its weight "
                "gradients would be lost. Run it without autosplit"
            )
        if call.token.unsplit:
            return call, call.parameters
        wanted = accumulated(running.node, call.parameters.values())
        if wanted is None:
            refuse_parameter_request()
        return call, {at: each for at, each in call.parameters.items() if id(each) in wanted}

    def _is_absent(self, name: str, call: Call) -> bool:
        sources = self._sources.get(name)
        return sources is not None and sources <= call.absent
