"""``Compilation``: a graph that Dynamo found, split, compiled and callable in its place.

Names and roles of the inputs of a graph that Dynamo found.

``torch.compile(model, backend="autosplit")``: every graph that Dynamo finds is split.

The backward of each graph computes the gradients of its inputs; those of its parameters wait
until ``autosplit.backward_weight(model)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from autosplit.autograd.pending import PendingBound
from autosplit.backends.backend import Boxed
from autosplit.capture.aot_convention import AotGraphs
from autosplit.capture.aot_session import (
    Splitter,
    compile_dynamo_graph,
    frozen_parameters,
    input_sources,
    refuse_thawed,
    traced_modules,
    unsplit,
)
from autosplit.dynamo.compiled_backward import (
    Call,
    DeferredGraphOwner,
    Part,
    SplitBackward,
    WeightGraph,
)
from autosplit.dynamo.pending_weights import PendingOnParameters
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.runtime.compiled_graph import compile_graph, hand_over, prepare_joint
from autosplit.runtime.split_options import SplitOptions, backend_named
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dtensor import is_dtensor


def input_roles(
    sources: list[str],
    example_inputs: Sequence[Any],
    name_of: Callable[[nn.Parameter], str | None],
) -> list[Role]:
    """PARAMETER for parameters that need a gradient, INPUT for the rest, with distinct names.

    Args:
        sources: where Dynamo found each input, as Python.
        example_inputs: values of the inputs.
        name_of: name of a parameter, where it is known.
    """
    roles: list[Role] = []
    taken: set[str] = set()
    for source, value in zip(sources, example_inputs, strict=True):
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        name = (name_of(value) if trained else None) or _readable(source)
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


def is_batch(value: Any) -> bool:
    """Whether the training loop made the tensor, and may write into it after ``backward()``."""
    return isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter)


class Compilation:
    """One graph of Dynamo, compiled.

    Which of its inputs are parameters is known from the ``nn.Parameter`` objects that Dynamo
    calls it with.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        owner: DeferredGraphOwner,
        options: SplitOptions,
    ) -> None:
        self._owner = owner
        self._backend = backend_named(options.backend)
        self._frozen = frozen_parameters(example_inputs)
        self._split: SplitBackward | None = None
        roles = input_roles(input_sources(module), example_inputs, owner.name_of)
        self._names = {role.name: index for index, role in enumerate(roles)}
        self._part = Part(module, [role.name for role in roles if role.kind is Kind.PARAMETER])
        splitter = Splitter(
            compile=self._compile,
            prepare=partial(prepare_joint, backend=self._backend),
            give_up=self._part.give_up,
            infer=self._infer,
            decompositions=self._backend.decompositions,
        )
        self._run: Callable[..., Any]
        if any(map(is_dtensor, example_inputs)):
            # AOTAutograd puts every gradient of a DTensor together when the backward returns.
            self._part.give_up("AOTAutograd wants the gradients of DTensors from the backward")
            self._run = unsplit(module)
        else:
            self._run = compile_dynamo_graph(module, example_inputs, roles, splitter)
        owner.compiled(self._part)

    def __call__(self, *args: Any) -> Any:
        refuse_thawed(args, self._frozen)
        indices = self._split.parameters if self._split is not None else ()
        parameters = {index: args[index] for index in indices}
        token = self._owner.entered(self._part, [*parameters.values()])
        results = self._run(*args)
        if self._split is not None:
            batch = frozenset(index for index in self._split.lenders if is_batch(args[index]))
            self._split.watch(Call(parameters, token, batch), args, results)
        return results

    def _compile(self, aot: AotGraphs) -> tuple[Boxed, Boxed]:
        """F and I for AOTAutograd."""
        forward = compile_graph("forward", aot.forward, self._backend)
        hand_over(forward.strides, aot.backward_input)
        backward_input = compile_graph("backward_input", aot.backward_input, self._backend)
        hand_over(backward_input.strides, aot.graphs.backward_weight)
        backward = backward_input.call
        self._part.graphs = aot.graphs
        if aot.parameters and aot.graphs.backward_weight is not None:
            weight = WeightGraph(aot.graphs.backward_weight, self._backend)
            self._split = SplitBackward(aot, backward, weight, self._owner, self._names)
            backward = self._split
        return forward.call, backward

    def _infer(self, module: fx.GraphModule) -> Boxed:
        prepare_joint(module, self._backend)
        return compile_graph("forward", module, self._backend).call


_OPTIONS = ("backend", "max_pending")


class SplittingBackend:
    """A Dynamo backend that splits.

    Args:
        owner: collects what is deferred; where None it waits on the parameters.
        options: how graphs are split and run; of ``memory``, ``late_input`` and ``overlap``
            nothing is asked.
    """

    def __init__(
        self, owner: DeferredGraphOwner | None = None, options: SplitOptions | None = None
    ) -> None:
        self._owner = owner or PendingOnParameters(PendingBound())
        self._options = options or SplitOptions()

    def __deepcopy__(self, memo: dict[int, Any]) -> SplittingBackend:
        """Itself: it is its owner's. Lightning has ``torch.compile`` copy what it is given, and a
        copy of the owner would compile again, and be copied, without end.
        """
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph for Dynamo.

        Raises:
            ShardedError: FSDP manages a module that the graph is of.
        """
        for root in traced_modules(module):
            refuse_sharded(root)
        return Compilation(module, example_inputs, self._owner, self._options)


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that torch knows as ``"autosplit"``.

    Args:
        module: the graph.
        example_inputs: what Dynamo calls it with.
        options: some of ``{"backend": name, "max_pending": number}``: how the split graphs are
            run, and how many microbatches of each graph may wait for weight gradients, see
            ``autosplit.split``.

    Raises:
        SplitError: an option or a backend is unknown; lists the known ones.
    """
    chosen = dict(options or {})
    if unknown := chosen.keys() - set(_OPTIONS):
        known = ", ".join(map(repr, _OPTIONS))
        raise SplitError(f"unknown option {min(unknown)!r}; known options: {known}")
    owner = PendingOnParameters(PendingBound(chosen.pop("max_pending", 1)))
    return SplittingBackend(owner, SplitOptions(**chosen))(module, example_inputs)
