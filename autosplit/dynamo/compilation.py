"""From a graph of Dynamo to the callable that runs in its place."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.parameter_request import refuse_asking, sample
from autosplit.backends.compiled_graph import Boxed, backend_named, hand_over, prepare
from autosplit.backends.compiled_graph import compile_graph as compile_split
from autosplit.capture.aot_convention import AotGraphs
from autosplit.capture.aot_session import (
    Splitter,
    compile_graph,
    frozen_parameters,
    input_sources,
    refuse_thawed,
)
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import GRADIENT, inputs, outputs
from autosplit.passes.lowering.lent_memory import lent
from autosplit.runtime.autocast_guard import AutocastGuard
from autosplit.runtime.gradient_dependence import gradient_sources
from autosplit.runtime.saved_tensors import is_shared
from autosplit.torch_internals.accumulate_grad import watched
from autosplit.torch_internals.distributed import data_parallel
from autosplit.torch_internals.running_backward import (
    RunningBackward,
    compiled_node,
    running_backward,
    stand_ins,
    watch_gradients,
)

from .compiled_call import Call, call_of
from .deferred_work import WeightGraph, Work
from .graph_outcome import Part


class Token(Protocol):
    """A forward call."""

    @property
    def whole(self) -> bool:
        """Whether its backward computes weight gradients too."""


class Owner(Protocol):
    """Whoever collects deferred work."""

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The parameter's name, where the owner knows it."""

    def compiled(self, part: Part) -> None:
        """A graph was compiled."""

    def entered(self, part: Part, parameters: Sequence[nn.Parameter]) -> Token:
        """A graph is called in a forward; what is returned comes back with its work.

        Args:
            part: the graph.
            parameters: those whose gradients would wait.
        """

    def deferred(self, work: Work, token: Any) -> None:
        """The backward of a graph has left work."""


class Compilation:
    """One graph of Dynamo, compiled.

    Which of its inputs are parameters is known from the ``nn.Parameter`` objects that Dynamo
    calls it with.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], owner: Owner, graphs: str
    ) -> None:
        self._owner = owner
        self._backend = backend_named(graphs)
        self._frozen = frozen_parameters(example_inputs)
        self._split: _SplitBackward | None = None
        roles = _roles(input_sources(module), example_inputs, owner)
        self._names = {role.name: index for index, role in enumerate(roles)}
        self._part = Part(module, [role.name for role in roles if role.kind is Kind.PARAMETER])
        splitter = Splitter(
            compile=self._compile,
            prepare=partial(prepare, backend=self._backend),
            give_up=self._part.give_up,
            infer=self._infer,
            decompositions=self._backend.decompositions,
        )
        self._run = compile_graph(module, example_inputs, roles, splitter)
        owner.compiled(self._part)

    def __call__(self, *args: Any) -> Any:
        refuse_thawed(args, self._frozen)
        indices = self._split.parameters if self._split is not None else ()
        parameters = {index: args[index] for index in indices}
        token = self._owner.entered(self._part, [*parameters.values()])
        if self._split is None:
            return self._known(self._run(*args))
        call = Call(
            parameters,
            token,
            frozenset(index for index in self._split.lenders if _is_batch(args[index])),
        )
        given = list(args)
        if not token.whole:
            for index in call.parameters:
                given[index] = call.leaf(index)
            _tie(given, call)
        results = self._run(*given)
        self._split.watch(call, results)
        return self._known(results)

    def _known(self, results: Any) -> Any:
        """Note, once, which of autograd's nodes are calls of this graph."""
        if self._part.node is None and self._part.graphs is not None:
            self._part.node = compiled_node(results)
        return results

    def _compile(self, aot: AotGraphs) -> tuple[Boxed, Boxed]:
        """F and I for AOTAutograd."""
        forward = compile_split("forward", aot.forward, self._backend)
        hand_over(forward.strides, aot.backward_input)
        backward_input = compile_split("backward_input", aot.backward_input, self._backend)
        hand_over(backward_input.strides, aot.graphs.backward_weight)
        backward = backward_input.call
        self._part.graphs = aot.graphs
        if aot.parameters and aot.graphs.backward_weight is not None:
            weight = WeightGraph(aot.graphs.backward_weight, self._backend)
            self._split = _SplitBackward(aot, backward, weight, self._owner, self._names)
            backward = self._split
        return forward.call, backward

    def _infer(self, module: fx.GraphModule) -> Boxed:
        prepare(module, self._backend)
        return compile_split("forward", module, self._backend).call


class _SplitBackward:
    """I of one graph, whose surplus results are left for W.

    Attributes:
        parameters: index of the graph's input -> name of its deferred gradient.
    """

    def __init__(
        self,
        aot: AotGraphs,
        backward_input: Boxed,
        weight: WeightGraph,
        owner: Owner,
        places: Mapping[str, int],
    ) -> None:
        """``places``: name of an input -> its index."""
        self.parameters = aot.parameters
        # What W holds of inputs (their index) and of gradients of outputs (None).
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
        self._autocast_guard = AutocastGuard(aot.graphs.backward or aot.graphs.joint)
        self._whole = threading.local()

    def watch(self, call: Call, results: Any) -> None:
        """Note which outputs the backward brings no gradient for, and whether autocast is on.

        AOTAutograd puts zeros in the place of absent gradients; in plain autograd, what is only
        behind those gets no gradient at all. And it switches autocast off.
        """

        def note(grads: tuple[Tensor | None, ...]) -> None:
            self._autocast_guard.check()
            pairs = zip(self._results, grads, strict=False)
            call.absent = frozenset(name for name, grad in pairs if grad is None)
            self._whole.call = call if call.token.whole else None

        parameters = {id(each) for each in call.parameters.values()} if call.token.whole else ()
        watch_gradients(
            results,
            lambda leaf: id(leaf) in parameters or (call_of(leaf) or (None,))[0] is call,
            note,
        )

    def __call__(self, args: list[Any]) -> list[Any]:
        whole: Call | None = getattr(self._whole, "call", None)
        if whole is not None:
            self._whole.call = None
            return self._all(args, whole)
        running = running_backward(lambda leaf: call_of(leaf) is not None)
        call, wanted = self._origin(running)
        values = {role: args[at] for role, at in self._state.items()}
        results = self._backward_input(args)
        values |= zip(self._left, results[len(self._slots) :], strict=True)
        del results[len(self._slots) :]
        targets = {
            self.parameters[index]: weakref.ref(call.parameters[index])
            for index in wanted
            if call.parameters[index].requires_grad  # frozen since the forward: as autograd does
            and not self._is_absent(self.parameters[index], call)
        }
        tied = [found[1] for leaf in running.tied if (found := call_of(leaf)) is not None]
        if targets and watched([call.parameters[index] for index in tied]):
            self._all_now(values, results, targets, {self.parameters[index] for index in tied})
        elif targets:
            work = Work.of(
                self._weight,
                values,
                targets,
                backward=running.number,
                sequence=running.sequence,
                lent=[
                    r for r, at in self._lent.items() if at in call.batch or is_shared(values[r])
                ],
            )
            self._owner.deferred(work, call.token)
        pairs = zip(self._slots, results, strict=True)
        return [None if self._is_absent(role.name, call) else grad for role, grad in pairs]

    def _all_now(
        self,
        values: dict[Role, Any],
        results: list[Any],
        targets: Mapping[str, weakref.ref[nn.Parameter]],
        tied: Collection[str],
    ) -> None:
        """W at once, for hooks that came between the forward and the backward: the engine calls
        those of ``tied`` parameters now, whose gradients go into ``results``.
        """
        found = self._weight.run(values)
        for at, role in enumerate(self._slots):
            if role.name in tied and role.name in targets:
                results[at] = found.pop(role.name)
        rest = [(targets[name](), grad) for name, grad in found.items() if name in targets]
        alive = [(parameter, grad) for parameter, grad in rest if parameter is not None]
        if alive:
            torch.autograd.backward([each for each, _ in alive], [grad for _, grad in alive])

    def _all(self, args: list[Any], call: Call) -> list[Any]:
        """I and W: the parameters themselves wait for their gradients."""
        values = {role: args[at] for role, at in self._state.items()}
        results = self._backward_input(args)
        values |= zip(self._left, results[len(self._slots) :], strict=True)
        found = self._weight.run(values)
        pairs = zip(self._slots, results, strict=False)
        grads = [found.get(role.name) if grad is None else grad for role, grad in pairs]
        named = zip(self._slots, grads, strict=True)
        return [None if self._is_absent(role.name, call) else grad for role, grad in named]

    def _origin(self, running: RunningBackward) -> tuple[Call, list[int]]:
        """The forward call, and the inputs whose gradients this backward is to accumulate."""
        if running.again:
            raise SplitError(
                "create_graph=True: a split backward cannot be differentiated again; run the "
                "model without autosplit where double backward is needed"
            )
        if running.asked:
            refuse_asking()
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


def _tie(given: list[Any], call: Call) -> None:
    """Put some of the parameters behind what stands for them among a graph's inputs."""
    if data_parallel():  # it counts how often the engine comes by
        return
    some = [index for index in sample([*call.parameters]) if not watched([call.parameters[index]])]
    if not some:
        return
    leaves = [given[index] for index in some]
    made = stand_ins(leaves, [call.parameters[index] for index in some])
    for index, tensor in zip(some, made, strict=True):
        given[index] = tensor


def _is_batch(value: Any) -> bool:
    """Made by the loop, which may write into it once ``backward()`` is over."""
    return isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter)


def _roles(sources: list[str], example_inputs: Sequence[Any], owner: Owner) -> list[Role]:
    """Parameters that need a gradient, and everything else, under names of their own."""
    roles: list[Role] = []
    taken: set[str] = set()
    for source, value in zip(sources, example_inputs, strict=True):
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        name = (owner.name_of(value) if trained else None) or _readable(source)
        while name in taken:
            name += "_"
        taken.add(name)
        roles.append(Role(Kind.PARAMETER if trained else Kind.INPUT, name))
    return roles


def _readable(source: str) -> str:
    """``L['self']._modules['a']._parameters['weight']`` -> ``a.weight``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    # After a graph break, Dynamo finds what was on the stack there in ___stack0, ___stack1, ...
    return re.sub(r"^(?:self|___stack\d+)\.", "", re.sub(r"^L\['(\w+)'\]", r"\1", text)) or "input"
