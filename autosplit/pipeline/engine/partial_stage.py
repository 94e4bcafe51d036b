"""``PartialStage``: a pipeline stage that cannot be captured in one graph, such as a stage with
graph breaks; and ``AutogradStage``, which has no graphs at all.

F    the module under autograd, graph by graph; each microbatch has its own autograd graph
I    gradients of the inputs, and of parameters that code outside of graphs reads
W    weight gradients that the graphs have deferred
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autosplit.autograd.delivery import Delivery, microbatch_gradients
from autosplit.autograd.pending import PendingQueue, PendingWork
from autosplit.autograd.pending_bound import PendingBound
from autosplit.capture.diagnosis import named_module
from autosplit.dynamo.fallback import Fallback, snapshot
from autosplit.errors import (
    CaptureError,
    DeferralWarning,
    PipelineError,
    PythonStateError,
    SplitError,
)
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.engine.own_loss import WithOwnLoss
from autosplit.pipeline.engine.stage_protocols import flat_outputs
from autosplit.runtime.gradient_accumulation import GradientSums
from autosplit.runtime.options import SplitOptions
from autosplit.torch_internals.autograd import (
    UncachedLeaves,
    WithoutAutograd,
    call_accumulate_hooks,
    leaves_before,
    without_autocast,
    without_hooks,
)
from autosplit.torch_internals.state import versions

T = TypeVar("T")


class _AutogradGraph(NamedTuple):
    """Inputs and outputs of one microbatch's autograd graph, the stage's own loss last if it has
    one; None for tensors that need no gradient.
    """

    inputs: Sequence[GradientEdge | None]
    outputs: Sequence[GradientEdge | None]


class _DeferredGradients(NamedTuple):
    """Weight gradients that I of a microbatch leaves for W.

    Attributes:
        works: W of each graph that ran.
        addends: maps a parameter to the gradient from code outside of graphs, to be added to the
            gradients of ``works``.
    """

    works: Sequence[PendingWork]
    addends: Mapping[str, Tensor]


class PartialStage:
    """F, I, W and B of a pipeline stage that runs as several graphs, with Python between them; see
    ``TrainableStage``.

    Weight gradients are summed inside the stage until ``publish``, as in ``autosplit.Stage``. The
    forward also runs once when the stage is built, on a copy of the module, because the outputs'
    shapes cannot be inferred.

    Args:
        module: the module of the stage.
        args: example inputs; those with ``requires_grad`` get a gradient.
        index: position in the pipeline.
        options: how the graphs are split.
        error: why one graph cannot contain the module.

    Attributes:
        waiting_hooks: as in ``autosplit.Stage``.
        check_outputs: a function that is called with the outputs of each forward, and the names of
            the parts of the loss among them; None: outputs are not checked.
        output_specs: (shape, dtype, whether it needs a gradient) of each output, for the latest
            examples.
        part_names: names of the parts of the loss in the outputs.
        written_buffers: names of the buffers that the forward of the examples wrote.

    Raises:
        CaptureError: ``error``, if the forward of the examples fails or returns nothing, or an
            option needs one graph.
        PythonStateError: the forward leaves a tensor that needs a gradient in an attribute.
        PipelineError: the module returns neither a tensor nor a tuple of tensors; or it reads a
            trained parameter that it does not have.
    """

    waiting_hooks: list[Tensor] | None = None
    check_outputs: Callable[[Sequence[TensorMeta], Sequence[str]], None] | None = None
    part_names: tuple[str, ...] | None = None

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Tensor],
        *,
        index: int,
        options: SplitOptions,
        error: CaptureError,
    ) -> None:
        self._set_module(module, index, options.grad_dtype)
        self._error = error
        self._fallback = Fallback(module, options, False, self._works)
        self._parts = self._fallback.split_by_graphs(error)
        self._parts.has_warned = True
        self._anchor = self._parts.anchor.leaf
        self._attributes = {*_computed_attributes(module)}
        self._examples = [*map(_signature, args)]
        self._needs_grad = [arg.requires_grad for arg in args]
        self.prepare(args)
        warnings.warn(
            f"stage {index} ({type(named_module(module)).__name__}) runs as several graphs. "
            "Results are right; I computes weight gradients of code outside of the graphs. One "
            f"graph is not enough because {error.because}",
            DeferralWarning,
            stacklevel=2,
        )

    def _set_module(self, module: nn.Module, index: int, dtype: torch.dtype | None) -> None:
        """Set the module, and begin without microbatches and without gradients."""
        self.index, self._module = index, module
        holders = (part for part in module.modules() if isinstance(part, WithOwnLoss))
        self._own_loss = next(holders, None)
        self._works = _CollectedWorks(Delivery(), PendingBound(math.inf))
        self._root, self._leaves = torch.zeros((), requires_grad=True), UncachedLeaves()
        self._sums = GradientSums(f"stage {index}", dtype)
        self._graphs: dict[int, _AutogradGraph] = {}
        self._deferred: dict[int, _DeferredGradients] = {}

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Maps the name of a parameter to the sum of its gradients over microbatches."""
        return self._sums.tensors

    def accepts(self, args: Sequence[Tensor]) -> bool:
        """Whether ``forward`` accepts these inputs, not considering their sizes."""
        return [*map(_signature, args)] == self._examples

    def prepare(self, args: Sequence[Tensor]) -> None:
        """Run a copy of the module on inputs of these sizes, to find the shapes of its outputs."""
        module, restore = _copied(self._module)
        buffers = dict(module.named_buffers())
        old_versions = versions(buffers.values())
        try:
            with torch.enable_grad():
                result = module(*self._enter(args)[0])
        except Exception as failure:
            raise self._error from failure
        finally:
            restore()
        self._check_attributes(module)
        if result is None:
            raise self._error
        outputs, self.part_names = flat_outputs(self.index, result)
        parameters = set(map(id, module.parameters()))
        for leaf in leaves_before([output.grad_fn for output in outputs]):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in parameters:
                raise self._untrained(leaf)
        self.output_specs = [(out.shape, out.dtype, out.requires_grad) for out in outputs]
        pairs = zip(buffers, old_versions, versions(buffers.values()), strict=True)
        self.written_buffers = {name for name, old, new in pairs if old != new}

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Run F, and return the outputs; empties ``inputs``.

        Raises:
            SplitError: the microbatch has already run its forward.
            PythonStateError: the forward leaves a tensor that needs a gradient in an attribute.
        """
        if microbatch in self._graphs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} has run its forward already: run its "
                "backward first, or use another number"
            )
        with torch.enable_grad():
            args, entries = self._enter(inputs)
            inputs.clear()
            result, own_loss = self._run(args)
        self._check_attributes(self._module)
        outputs, names = flat_outputs(self.index, result, self.part_names)
        if self.check_outputs is not None:
            metas = [TensorMeta(out.shape, out.dtype, out.requires_grad) for out in outputs]
            with torch.enable_grad():
                self.check_outputs(metas, names)
        ends = [
            get_gradient_edge(end) if end is not None and end.requires_grad else None
            for end in (*outputs, own_loss)
        ]
        self._graphs[microbatch] = _AutogradGraph(entries, ends)
        return [output.detach() for output in outputs]

    def _run(self, args: tuple[Tensor, ...]) -> tuple[Any, Tensor | None]:
        """Run the module, and return (its result, its own loss, if it has one)."""
        holder = self._own_loss
        if holder is None:
            return self._call(args), None
        holder.is_root = True
        try:
            return self._call(args), holder.take_root()
        finally:
            holder.is_root = False

    def _call(self, args: tuple[Tensor, ...]) -> Any:
        return self._fallback.run_by_graphs(self._parts, args, {})

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run I, and return the input gradients; empties ``output_grads``.

        Raises:
            SplitError: the microbatch has not run its forward.
        """
        graph = self._take(self._graphs, microbatch, "forward")
        holder = self._own_loss
        output_grads.append(None if holder is None else holder.gradient.clone())
        trained = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        places = [at for at, entry in enumerate(graph.inputs) if entry is not None]
        wanted = [*(graph.inputs[at] for at in places), *trained.values()]
        gradients = self._gradients(graph.outputs, output_grads, wanted, [*trained.values()])
        input_grads: list[Tensor | None] = [None] * len(graph.inputs)
        for at in places:
            input_grads[at] = next(gradients)
        weights = {
            name: grad for name, grad in zip(trained, gradients, strict=True) if grad is not None
        }
        works = self._works.take()
        late = {id(parameter) for work in works for parameter in work.parameters}
        addends = {
            name: weights.pop(name)
            for name in trained
            if name in weights and id(trained[name]) in late
        }
        self._add(weights)
        self._deferred[microbatch] = _DeferredGradients(works, addends)
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """Run W, and add the weight gradients to the sums of the stage.

        Raises:
            SplitError: the microbatch has not run its I; or a deferred tensor was written in place
                since I.
            PipelineError: a graph reads a trained tensor that is no parameter of the module.
        """
        works, addends = self._take(self._deferred, microbatch, "backward_input")
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        with WithoutAutograd():
            weights = {}
            for at, (parameter, grad, _) in microbatch_gradients(works).items():
                if at not in names:
                    raise self._untrained(parameter)
                weights[names[at]] = grad
            self._add(weights | {name: weights[name] + grad for name, grad in addends.items()})

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """Run I, then W, as ``backward_input`` and ``backward_weight`` do."""
        input_grads = self.backward_input(microbatch, output_grads)
        self.backward_weight(microbatch)
        return input_grads

    def publish(self) -> None:
        """Add the sums to the parameters' ``.grad``, drop the sums, and call the hooks of
        ``register_post_accumulate_grad_hook``.

        Raises:
            SplitError: a microbatch has not run its W.
        """
        if self._deferred:
            raise SplitError(
                f"stage {self.index}: weight gradients of microbatch {min(self._deferred)} are "
                "pending: call backward_weight() for every pending microbatch first"
            )
        hooked = self._sums.add_to_parameters()
        if self.waiting_hooks is None:
            call_accumulate_hooks(hooked)
        else:
            self.waiting_hooks += hooked

    def _enter(
        self, inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[GradientEdge | None]]:
        """Return (inputs as tensors of a new autograd graph, edges of that graph at which the
        inputs' gradients arrive).
        """
        args = tuple(
            _enter(self._root, tensor) if needs_grad else tensor.detach()
            for tensor, needs_grad in zip(inputs, self._needs_grad, strict=True)
        )
        return args, [get_gradient_edge(arg) if arg.requires_grad else None for arg in args]

    def _gradients(
        self,
        outputs: Sequence[GradientEdge | None],
        output_grads: list[Tensor | None],
        wanted: Sequence[Any],
        parameters: Sequence[Tensor],
    ) -> Iterator[Tensor | None]:
        """Run the backward. Yield the gradients of ``wanted``, then the gradients of ``parameters``
        from code outside of graphs.
        """
        ends = zip(outputs, output_grads, strict=True)
        pairs = [(end, grad) for end, grad in ends if end is not None and grad is not None]
        output_grads.clear()
        if not pairs:
            return iter([None] * len(wanted))
        roots, grads = zip(*pairs, strict=True)
        has_hooks = self._leaves.among(parameters).has_hooks()
        # The sums call hooks, with the whole gradient of a microbatch.
        muted = without_hooks(parameters) if has_hooks else contextlib.nullcontext()
        with muted, without_autocast():
            # Graphs queue their W only if the backward reaches the anchor.
            *results, _ = torch.autograd.grad(
                roots, [*wanted, self._anchor], grads, allow_unused=True
            )
        return iter(results)

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of one microbatch to the sums."""
        names = [*gradients]
        self._sums.set_parameters(names, [*map(self._module.get_parameter, names)])
        with torch.no_grad():
            self._sums.add_gradients(names, [*gradients.values()], borrowed=names)

    def _take(self, microbatches: dict[int, T], microbatch: int, call: str) -> T:
        """Remove and return the state that ``call`` has left for a microbatch."""
        if microbatch not in microbatches:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} has not run {call}, or its result "
                f"was used already: call {call}() for it first"
            )
        return microbatches.pop(microbatch)

    def _untrained(self, leaf: Tensor) -> PipelineError:
        """The error for a trained tensor that is no parameter of the stage's module."""
        return PipelineError(
            f"stage {self.index} ({type(named_module(self._module)).__name__}) or its loss_fn "
            f"reads a trained tensor, {TensorMeta.of(leaf)}, that no optimizer of "
            "the trainer updates, because it is no parameter of the stage's module: move it into "
            "the module, which returns it with its output, or freeze it (requires_grad_(False))\n"
            f"  One graph is not enough because {self._error.because}"
        )

    def _check_attributes(self, module: nn.Module) -> None:
        """Refuse an attribute with a tensor of a microbatch's autograd graph. A loss that reads the
        attribute would pass no gradient back through it.
        """
        for name in _computed_attributes(module):
            if name not in self._attributes:
                if isinstance(self._error, PythonStateError):
                    raise self._error
                raise PythonStateError(
                    f"stage {self.index} ({type(named_module(module)).__name__}) runs as "
                    "several graphs, and its forward leaves a tensor that needs a gradient in "
                    f"{name!r}, where the gradients of other stages would not reach it. Name a "
                    "loss in StageOptions(aux_losses=); else return the tensor, or detach() it"
                )


class AutogradStage(PartialStage):
    """A module under plain autograd as a stage, with which split stages are compared. I is the
    whole backward, and W computes nothing.

    Args:
        module: the stage's module.
        index: the stage's index in the pipeline.
        dtype: the dtype in which gradients are summed; None for the dtype of each gradient.
    """

    def __init__(self, module: nn.Module, index: int, dtype: torch.dtype | None) -> None:
        self._set_module(module, index, dtype)
        self._anchor = self._root

    def _call(self, args: tuple[Tensor, ...]) -> Any:
        return self._module(*args)

    def _enter(self, inputs: Sequence[Tensor]) -> Any:
        self._needs_grad = [t.is_floating_point() or t.is_complex() for t in inputs]
        return super()._enter(inputs)

    def _check_attributes(self, module: nn.Module) -> None:
        """Accept tensors in attributes, as split stages do."""


class _Entry(torch.autograd.Function):
    """Autograd function that makes an input of a new autograd graph. A forward may write into this
    input, and the graph does not keep the tensor from which it was made.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


_enter: Callable[[Tensor, Tensor], Tensor] = _Entry.apply


class _CollectedWorks(PendingQueue):
    """Queue that collects W of the graphs in one backward, without lazy gradients in ``.grad``."""

    def add(self, microbatch: Hashable, work: PendingWork, *, moved: bool = False) -> None:
        self.microbatches.setdefault(microbatch, []).append(work)

    def compute(self, microbatches: int | None = None, *, leave: float = 0) -> int:
        """Compute nothing, because the stage runs W."""
        return 0

    def take(self) -> list[PendingWork]:
        """Remove and return all works."""
        works = self.works()
        self.microbatches.clear()
        return works


def _copied(module: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    """Return (a copy of a module, a function without effect). If the module cannot be copied,
    return (the module, a function that restores its buffers and the random generators).
    """
    try:
        return copy.deepcopy(module), lambda: None
    except Exception:  # any object in a module may refuse
        return module, snapshot(module)


def _computed_attributes(module: nn.Module) -> Iterator[str]:
    """Names of the attributes that hold a tensor with a ``grad_fn``."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"{path}.{name}" if path else name


def _signature(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad
