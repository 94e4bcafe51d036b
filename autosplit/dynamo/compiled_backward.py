"""``Part``: one graph that Dynamo found; ``SplitBackward``: runs its I and queues its W.

At each call the graph gets, in place of a parameter whose gradient is deferred, a leaf that
shares its data. Autograd then knows nothing of the parameter until its gradient is there: no
hook fires early, no reducer counts it. The leaf remembers the call, and with it the
parameter, until the graph's backward runs.

A backward through a compiled model leaves pending work for each graph that took part. All that
belongs to one microbatch is delivered in one pass of the autograd engine, so that a parameter used
in several graphs gets one summed gradient, as from an ordinary ``backward()``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
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
from autosplit.torch_internals.dynamo import RunningBackward, running_backward, watch_gradients

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

    def leaf(self, index: int) -> Tensor:
        """A leaf that the graph gets in place of a parameter."""
        leaf = self.parameters[index].detach().requires_grad_()
        setattr(leaf, _CALL, (self, index))
        return leaf


def call_of(leaf: Tensor | None) -> tuple[Call, int] | None:
    """The call that a leaf was made for, and its index among the graph's inputs; None for other
    tensors.
    """
    found: tuple[Call, int] | None = getattr(leaf, _CALL, None)
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
    writes_late = False  # what the backward writes, I has written

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
        self._unsplit = threading.local()

    def watch(self, call: Call, results: Any) -> None:
        """Note which outputs the backward brings no gradient for, and whether autocast is on.

        AOTAutograd puts zeros in the place of absent gradients; in plain autograd, what is only
        behind those gets no gradient at all. And it switches autocast off.
        """

        named = zip(self._results, results, strict=False)
        watched = watch((name, each) for name, each in named if name in self._read_inside)

        def note(grads: tuple[Tensor | None, ...]) -> None:
            refuse_partial(watched)
            self._autocast_guard.check()
            pairs = zip(self._results, grads, strict=False)
            call.absent = frozenset(name for name, grad in pairs if grad is None)
            self._unsplit.call = call if call.token.unsplit else None

        parameters = {id(each) for each in call.parameters.values()} if call.token.unsplit else ()
        watch_gradients(
            results,
            lambda leaf: id(leaf) in parameters or (call_of(leaf) or (None,))[0] is call,
            note,
        )

    def __call__(self, args: list[Any]) -> list[Any]:
        unsplit: Call | None = getattr(self._unsplit, "call", None)
        if unsplit is not None:
            self._unsplit.call = None
            return self._run_unsplit(args, unsplit)
        running = running_backward(lambda leaf: call_of(leaf) is not None)
        call, wanted = self._origin(running)
        values = {role: args[at] for role, at in self._state.items()}
        results = self._backward_input(args)
        values |= zip(self._left, results[len(self._slots) :], strict=True)
        del results[len(self._slots) :]
        targets = {
            self.parameters[index]: call.parameters[index]
            for index in wanted
            if call.parameters[index].requires_grad  # frozen since the forward: as autograd does
            and not self._is_absent(self.parameters[index], call)
        }
        linked = [found[1] for leaf in running.linked if (found := call_of(leaf)) is not None]
        if targets and has_gradient_hooks([call.parameters[index] for index in wanted]):
            named = {self.parameters[index] for index in linked}
            self._weights_for_late_hooks(values, results, targets, named)
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

    def _weights_for_late_hooks(
        self,
        values: dict[Role, Any],
        results: list[Any],
        targets: Mapping[str, nn.Parameter],
        linked: Collection[str],
    ) -> None:
        """W at once, for hooks that came between the forward and the backward: the engine calls
        those of ``linked`` parameters now, whose gradients go into ``results``.
        """
        found = self._run_weight(values)
        for at, role in enumerate(self._slots):
            if role.name in linked and role.name in targets:
                results[at] = found.pop(role.name)
        rest = [(targets[name], grad) for name, grad in found.items() if name in targets]
        if rest:
            torch.autograd.backward([each for each, _ in rest], [grad for _, grad in rest])

    def _run_weight(self, values: dict[Role, Any]) -> dict[str, Tensor]:
        """W now. Empties ``values``."""
        work = PendingWork(self._weight, self._weight.deferred(values), {})
        values.clear()
        return work.named_gradients()

    def _run_unsplit(self, args: list[Any], call: Call) -> list[Any]:
        """I and W, for parameters that are inputs of the node themselves."""
        values = {role: args[at] for role, at in self._state.items()}
        results = self._backward_input(args)
        values |= zip(self._left, results[len(self._slots) :], strict=True)
        found = self._run_weight(values)
        pairs = zip(self._slots, results, strict=False)
        grads = [found.get(role.name) if grad is None else grad for role, grad in pairs]
        named = zip(self._slots, grads, strict=True)
        return [None if self._is_absent(role.name, call) else grad for role, grad in named]

    def _origin(self, running: RunningBackward) -> tuple[Call, list[int]]:
        """The forward call, and indices of inputs whose gradients this backward accumulates."""
        if running.again:
            raise SplitError(
                "create_graph=True: a split backward cannot be differentiated again; run the "
                "model without autosplit where double backward is needed"
            )
        if running.asked:
            refuse_parameter_request()
        found = [(call_of(leaf), wanted) for leaf, wanted in running.leaves]
        ours = [(*each, wanted) for each, wanted in found if each is not None]
        if not ours:
            raise SplitError(
                "the backward of a split graph runs outside the autograd engine; its weight "
                "gradients would be lost. Run it without autosplit"
            )
        return ours[0][0], [index for _, index, wanted in ours if wanted]

    def _is_absent(self, name: str, call: Call) -> bool:
        sources = self._sources.get(name)
        return sources is not None and sources <= call.absent
