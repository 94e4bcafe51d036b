"""Outputs of a stage's graph: ``Results`` maps them to the tensors that are sent to the next stage,
and ``LossBoundary`` connects the last stage's outputs with the loss function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autosplit.errors import CaptureError, PipelineError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.tensor_spec import TensorSpec
from autosplit.torch_internals.autograd import direct_apply, without_autocast
from autosplit.torch_internals.pipelining_stage import StageShapeError, StridedTensorMeta
from autosplit.torch_internals.pytree import TreeSpec, tree_unflatten

T = TypeVar("T")


class Results:
    """The outputs of one of a stage's graphs.

    Args:
        functions: F, I, W and B of the graph.

    Attributes:
        count: the number of leaves of the result, tensors or not.
        spec: the pytree structure of the result.
        differentiable: positions of the leaves that need a gradient.
        metas: metadata of the tensors in the form in which they are sent.
    """

    def __init__(self, functions: SplitFunctions) -> None:
        self._functions = functions
        self._names = functions.capture.outputs
        self.count = len(self._names)
        self.spec = functions.capture.output_spec
        specs = functions.specs_by_path
        self._tensors = [at for at, name in enumerate(self._names) if name in specs]
        self._specs = [_dense(specs[self._names[at]]) for at in self._tensors]
        tangents = functions.tangent_specs
        self.differentiable = [at for at in self._tensors if self._names[at] in tangents]
        self.metas = [
            StridedTensorMeta(spec.shape, spec.stride, spec.dtype, at in self.differentiable)
            for at, spec in zip(self._tensors, self._specs, strict=True)
        ]
        self._is_tensor = self.spec.is_leaf()
        # For each tensor, its position if it needs a gradient.
        self._gradients = [at if at in self.differentiable else None for at in self._tensors]

    @property
    def structure(self) -> TreeSpec | None:
        """The pytree structure of a result that is one argument of the next stage; None if the
        result's tensors are separate arguments.
        """
        flat = self.spec.is_leaf() or (
            self.spec.type in (tuple, list) and self.spec.num_children == self.spec.num_leaves
        )
        return None if flat else self.spec

    def refuse_objects(self, owner: str) -> None:
        """Refuse a result that torch's runtime cannot send to the next stage.

        Raises:
            CaptureError: names the first leaf that is not a tensor, or that is a complex tensor
                with a gradient, for which torch's runtime receives no gradient.
        """
        for at, name in enumerate(self._names):
            if at in self.differentiable and self._functions.specs_by_path[name].dtype.is_complex:
                raise CaptureError(
                    f"{owner} returns {name}, a complex tensor that needs a gradient, which "
                    "torch's runtime does not bring back. Return torch.view_as_real of it, and "
                    "let the next stage begin with torch.view_as_complex"
                )
            if at not in self._tensors:
                raise CaptureError(
                    f"{owner} returns {name}, which is not a tensor; a stage can return only "
                    "tensors to the next one. Omit it, or let the next stage compute it"
                )

    def refuse_other_shapes(self, owner: str, chunk: int, agreed: Results) -> None:
        """Refuse outputs of a microbatch whose shapes or dtypes differ from those agreed on with
        the next stage.

        Raises:
            StageShapeError: names the outputs and the agreed shapes.
        """
        if agreed is self:
            return
        now = [  # parameters may have been frozen since
            replace(meta, requires_grad=meta.requires_grad or expected.requires_grad)
            for meta, expected in zip(self.metas, agreed.metas, strict=False)
        ]
        if (agreed.metas, agreed.spec, len(now)) != (now, self.spec, len(self.metas)):
            raise StageShapeError(
                f"{owner}: microbatch {chunk} has the outputs {described(self.metas)}, but "
                f"the next stage expects {described(agreed.metas)}, as agreed at first. Call "
                "autosplit.pipelining.reset_shapes(schedule) on every rank before a step with "
                "batches of another size, and after changes of the module, such as training "
                "parameters that were frozen"
            )

    def inputs_given(self, flags: Sequence[bool] | None) -> list[bool]:
        """For each input of the graph, whether it gets a gradient.

        Args:
            flags: for each output tensor, whether it gets a gradient; None: all get one.
        """
        if flags is None:
            flags = [True] * len(self._tensors)
        return self._functions.dependence.inputs_given(self.arrived([f or None for f in flags]))

    def sent(self, outputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The output tensors in the form in which they are sent, dense in memory."""
        pairs = zip(self._tensors, self._specs, strict=True)
        return tuple([spec.conform(outputs[at].detach()) for at, spec in pairs])

    def filled(self, outputs: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """A result with ``tensors`` in place of its tensors."""
        leaves = list(outputs)
        for at, tensor in zip(self._tensors, tensors, strict=True):
            leaves[at] = tensor
        return self.unflatten(leaves)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """A result with these leaves."""
        return leaves[0] if self._is_tensor else tree_unflatten(leaves, self.spec)

    def arrived(self, grads: Sequence[T | None]) -> list[T | None]:
        """The received gradients in the order of the graph's outputs: result leaves, then changed
        inputs. None for an output without a gradient.
        """
        gradients: list[T | None] = [None] * len(self._functions.output_names)
        for at, grad in zip(self._gradients, grads, strict=False):
            if at is not None:
                gradients[at] = grad
        return gradients


def as_received(grad: Tensor | None, meta: Any, device: torch.device) -> Tensor:
    """A gradient with the strides of the tensor that was sent; zeros if ``grad`` is None."""
    if grad is not None and grad.stride() == meta.stride:
        return grad
    spec = TensorSpec(meta.shape, meta.stride, meta.dtype, device)
    return spec.zeros() if grad is None else spec.conform(grad)


def described(tensors: Sequence[Tensor | StridedTensorMeta]) -> str:
    """Dtypes and shapes of tensors, as text for errors."""
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        f"{'' if t.requires_grad else ' without gradient'}"
        for t in tensors
    )


def _dense(spec: TensorSpec) -> TensorSpec:
    """The spec, made contiguous if its elements have gaps or overlap."""
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
    """The outputs of one microbatch, as leaves of the autograd graph of the user's loss function.

    The outputs' ``grad_fn`` only stores their gradients. So the loss may write into the outputs in
    place, as into any module's outputs.

    Args:
        outputs: the outputs of the last stage.
        differentiable: positions of the outputs that need a gradient.
        leaf: a scalar that needs a gradient, and gets none.
    """

    def __init__(self, outputs: Sequence[Any], differentiable: Sequence[int], leaf: Tensor) -> None:
        self._places = differentiable
        self._grads: list[Tensor | None] = []
        self.outputs = list(outputs)
        inputs = [outputs[at] for at in differentiable]
        results = _store_gradients(self._grads, leaf, *inputs) if inputs else ()
        for at, output in zip(differentiable, results, strict=True):
            self.outputs[at] = output

    def compute_gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Run the backward of the loss; returns the gradients of the output tensors.

        The gradient of an output on which the loss does not depend is None. Parameters of the loss
        function get their gradients, too.

        Raises:
            PipelineError: the outputs need gradients, but the loss does not require a gradient.
        """
        gradients: list[Tensor | None] = [None] * len(self.outputs)
        if self._places and not loss.requires_grad:
            raise PipelineError(
                "the loss does not require grad, so nothing would be trained: loss_fn must compute "
                "it from the stage's output, without .detach(), .item(), NumPy or torch.no_grad()"
            )
        if loss.requires_grad:
            with without_autocast():
                torch.autograd.backward(loss)
            # The list is empty if the loss depends on no output.
            for at, grad in zip(self._places, self._grads, strict=False):
                gradients[at] = grad
        for at in self._places:  # outputs that the user gets have no graph
            if not self.outputs[at]._is_view():
                self.outputs[at].detach_()
        pairs = zip(gradients, self.outputs, strict=True)
        grads = [grad for grad, output in pairs if isinstance(output, Tensor)]
        self.outputs = []
        self._grads.clear()  # the loss keeps its graph, and so this list, until the step ends
        return grads


class _StoreGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], _: Tensor, *outputs: Tensor) -> Any:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.grads[:] = grads
        return (None, None, *(None for _ in grads))


_store_gradients = direct_apply(_StoreGradients)
