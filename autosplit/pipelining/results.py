"""A graph's outputs as a pipeline stage hands them on: what is sent, and what comes back for it.

The last stage's outputs as the loss function sees them, and the gradients that it gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autosplit.errors import CaptureError, PipelineError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import TensorSpec
from autosplit.torch_internals.autograd import without_autocast
from autosplit.torch_internals.pipelining_stage import StageShapeError, TensorMeta
from autosplit.torch_internals.pytree import TreeSpec

T = TypeVar("T")


class Results:
    """Outputs of one graph of a stage.

    Args:
        functions: the graph.

    Attributes:
        count: how many leaves the result has, others than tensors too.
        spec: how they make it up.
        structure: the same, where a next stage cannot take the tensors as its arguments.
        differentiable: places of those that need a gradient.
        metas: the tensors as they are handed on.
    """

    def __init__(self, functions: SplitFunctions) -> None:
        self._functions = functions
        self._names = functions.capture.outputs
        self.count = len(self._names)
        self.spec = functions.capture.output_spec
        specs = functions.output_specs
        self._tensors = [at for at, name in enumerate(self._names) if name in specs]
        self._specs = [_dense(specs[self._names[at]]) for at in self._tensors]
        tangents = functions.tangent_specs
        self.differentiable = [at for at in self._tensors if self._names[at] in tangents]
        self.metas = [
            TensorMeta(spec.shape, spec.stride, spec.dtype, at in self.differentiable)
            for at, spec in zip(self._tensors, self._specs, strict=True)
        ]

    @property
    def structure(self) -> TreeSpec | None:
        flat = self.spec.is_leaf() or (
            self.spec.type in (tuple, list) and self.spec.num_children == self.spec.num_leaves
        )
        return None if flat else self.spec

    def refuse_objects(self, owner: str) -> None:
        """Refuse a result that torch's runtime cannot hand on: one that holds other things than
        tensors, or complex tensors that need a gradient, for which it receives none.

        Raises:
            CaptureError: names the first.
        """
        for at, name in enumerate(self._names):
            if at in self.differentiable and self._functions.output_specs[name].dtype.is_complex:
                raise CaptureError(
                    f"{owner} returns {name}, a complex tensor that needs a gradient, which "
                    "torch's runtime does not bring back. Return torch.view_as_real of it, and "
                    "let the next stage begin with torch.view_as_complex"
                )
            if at not in self._tensors:
                raise CaptureError(
                    f"{owner} returns {name}, which is not a tensor; a stage hands only tensors to "
                    "the next one. Leave it out, or let the next stage compute it"
                )

    def refuse_other_shapes(self, owner: str, chunk: int, agreed: Results) -> None:
        """Refuse outputs of a microbatch that are not what the next stage was told.

        Raises:
            StageShapeError: says what was agreed and what came.
        """
        if agreed is self:
            return
        now = [
            replace(meta, requires_grad=meta.requires_grad or before.requires_grad)
            for meta, before in zip(self.metas, agreed.metas, strict=False)
        ]  # they may have been frozen
        if (agreed.metas, agreed.spec, len(now)) != (now, self.spec, len(self.metas)):
            raise StageShapeError(
                f"{owner}: microbatch {chunk} has the outputs {described(self.metas)}, but "
                f"the next stage was told to expect {described(agreed.metas)} at first. "
                "Call autosplit.pipelining.reset_shapes(schedule) on every rank before a step with "
                "batches of another size, and where the module itself was changed, such as by "
                "training parameters that were frozen"
            )

    def inputs_given(self, come: Sequence[bool] | None) -> list[bool]:
        """For each of the graph's inputs whether it gets a gradient, where these tensors get one;
        None for all.
        """
        if come is None:
            come = [True] * len(self._tensors)
        return self._functions.dependence.inputs_given(self.arrived([c or None for c in come]))

    def sent(self, outputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors as they are sent: in runs of memory."""
        pairs = zip(self._tensors, self._specs, strict=True)
        return tuple([spec.conform(outputs[at].detach()) for at, spec in pairs])

    def filled(self, outputs: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs with these tensors."""
        if len(tensors) == len(outputs):
            return list(tensors)
        found = list(outputs)
        for at, tensor in zip(self._tensors, tensors, strict=True):
            found[at] = tensor
        return found

    def arrived(self, grads: Sequence[T | None]) -> list[T | None]:
        """A gradient for each leaf and each changed input, of those that came for the tensors."""
        found: list[T | None] = [None] * len(self._functions.output_names)
        for at, grad in zip(self._tensors, grads, strict=False):
            if at in self.differentiable:
                found[at] = grad
        return found


def as_received(grad: Tensor | None, meta: Any, device: torch.device) -> Tensor:
    """A gradient as what it is the gradient of lay in memory; zeros where there is none."""
    spec = TensorSpec(meta.shape, meta.stride, meta.dtype, device)
    return spec.zeros() if grad is None else spec.conform(grad)


def described(tensors: Sequence[Tensor | TensorMeta]) -> str:
    """Tensors' dtypes and shapes, for messages."""
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        f"{'' if t.requires_grad else ' without gradient'}"
        for t in tensors
    )


def _dense(spec: TensorSpec) -> TensorSpec:
    """The spec, contiguous where its elements leave holes or overlap."""
    expected = 1
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            blank = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            return TensorSpec(spec.shape, blank.stride(), spec.dtype, spec.device)
        expected *= size
    return spec


class LossBoundary:
    """Outputs of one microbatch that a loss is computed of, with a gradient function that only
    takes their gradients down: the loss may write into them, as into what a module returns.

    Args:
        outputs: of the last stage.
        differentiable: places of those that need a gradient.
    """

    def __init__(self, outputs: Sequence[Any], differentiable: Sequence[int]) -> None:
        self._places = differentiable
        self._grads: list[Tensor | None] = []
        self.outputs = list(outputs)
        with torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True)
            taken = [outputs[at] for at in differentiable]
            made = _Taken.apply(self._grads, leaf, *taken) if taken else ()  # type: ignore[no-untyped-call]
        for at, output in zip(differentiable, made, strict=True):
            self.outputs[at] = output

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Go back through the loss: gradients of the outputs that are tensors, None for those that
        it does not depend on. What else it depends on, such as parameters of its own, gets its
        gradient too.

        Raises:
            PipelineError: the outputs need a gradient, and the loss has none.
        """
        found: list[Tensor | None] = [None] * len(self.outputs)
        if self._places and not loss.requires_grad:
            raise PipelineError(
                "the loss does not require grad, so nothing would be trained: loss_fn must compute "
                "it from the stage's output, without .detach(), .item(), NumPy or torch.no_grad()"
            )
        if loss.requires_grad:
            with without_autocast():
                torch.autograd.backward(loss)
            # Empty where it depends on none of them.
            for at, grad in zip(self._places, self._grads, strict=False):
                found[at] = grad
        for at in self._places:  # whoever asked for the outputs gets no graph with them
            if not self.outputs[at]._is_view():
                self.outputs[at].detach_()
        pairs = zip(found, self.outputs, strict=True)
        grads = [grad for grad, output in pairs if isinstance(output, Tensor)]
        self.outputs = []
        self._grads.clear()  # the loss holds its graph, and this with it, until the step ends
        return grads


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], _: Tensor, *outputs: Tensor) -> Any:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.grads[:] = grads
        return (None, None, *(None for _ in grads))
