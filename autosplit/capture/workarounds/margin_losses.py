"""Two losses that torch traces as something else than it runs (seen with torch 2.13).

Tracing takes them apart by Python decompositions that round differently from the kernels, and of
which one gives other gradients and has shape [1] for an unbatched input where the kernel has [].
Here Dynamo's graph calls the kernels that eager mode runs, below the key at which they are taken
apart, and so does its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import _reduction as _Reduction

from autosplit.errors import CaptureError

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]] | None
_EACH, _MEAN = 0, 1  # reduction="none", "mean"
_SEVERAL = aten.multilabel_margin_loss_forward.default


class _MultiMargin(torch.autograd.Function):
    """One right class for each row."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, p: Any, margin: Any, weight: Any, reduction: int
    ) -> Tensor:
        ctx.save_for_backward(scores, target, weight)
        ctx.options = p, margin, reduction
        loss: Tensor
        with torch._C._AutoDispatchBelowAutograd():
            loss = aten.multi_margin_loss.default(scores, target, p, margin, weight, reduction)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, target, weight = ctx.saved_tensors
        p, margin, reduction = ctx.options
        found = aten.multi_margin_loss_backward.default(
            grad, scores, target, p, margin, weight, reduction
        )
        return found, None, None, None, None, None


class _MultilabelMargin(torch.autograd.Function):
    """Several right classes for each row."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, reduction: int) -> Tensor:
        loss: Tensor
        with torch._C._AutoDispatchBelowAutograd():
            loss, is_target = aten.multilabel_margin_loss_forward.default(scores, target, reduction)
        ctx.save_for_backward(scores, target, is_target)
        ctx.reduction = reduction
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, target, is_target = ctx.saved_tensors
        found = aten.multilabel_margin_loss_backward.default(
            grad, scores, target, ctx.reduction, is_target
        )
        return found, None, None


_multi_margin_of: Callable[..., Any] = _MultiMargin.apply
_multilabel_margin_of: Callable[..., Any] = _MultilabelMargin.apply


def _multi_margin(
    scores: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    scores, weight = _cast(scores, scores), None if weight is None else _cast(weight, scores)
    return _multi_margin_of(scores, target, p, margin, weight, reduction)


def _cast(tensor: Tensor, scores: Tensor) -> Tensor:
    """As autocast hands it to these losses: above autograd, so that what is saved is cast too."""
    coarse = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if coarse and torch.is_autocast_enabled(scores.device.type) else tensor


def _multilabel_margin(scores: Tensor, target: Tensor, reduction: int = 1) -> Any:
    scores = _cast(scores, scores)
    if scores.ndim > 1:
        return _multilabel_margin_of(scores, target, reduction)
    # A batch of one is the same to the kernel, and has the shape that it is traced with.
    loss = _multilabel_margin_of(scores.unsqueeze(0), target.unsqueeze(0), reduction)
    return loss.squeeze(0) if reduction == _EACH else loss


def _multi_margin_of_text(
    input: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    number = _reduction(size_average, reduce, reduction)
    return _multi_margin(input, target, p, margin, weight, number)


def _multilabel_margin_of_text(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    return _multilabel_margin(input, target, _reduction(size_average, reduce, reduction))


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> int:
    if size_average is not None or reduce is not None:
        return _Reduction.legacy_get_enum(size_average, reduce, emit_warning=False)
    return _Reduction.get_enum(reduction)


_RUN: Mapping[Any, Callable[..., Any]] = {
    nn.functional.multi_margin_loss: _multi_margin_of_text,
    torch._C._nn.multi_margin_loss: _multi_margin,
    aten.multi_margin_loss.default: _multi_margin,
    nn.functional.multilabel_margin_loss: _multilabel_margin_of_text,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin,
    aten.multilabel_margin_loss.default: _multilabel_margin,
}


def trace_as_run(module: fx.GraphModule) -> None:
    """Have Dynamo's graph call the losses' kernels, in bodies of checkpoints too."""
    for node in _calls(module):
        node.target = _RUN[node.target]
        node.graph.owning_module.recompile()  # type: ignore[union-attr]


def right_decompositions(decompositions: Decompositions) -> Decompositions:
    """A backend's table, with a forward of the second loss in place of torch's, which counts what
    stands behind the -1 of a row as targets. The first loss's is right but for rounding.
    """
    if decompositions is None or _SEVERAL not in decompositions:
        return decompositions
    return {**decompositions, _SEVERAL: _multilabel_margin_forward}


def _multilabel_margin_forward(
    scores: Tensor, target: Tensor, reduction: int
) -> tuple[Tensor, Tensor]:
    """The loss of each row or of all, and which scores are those of targets; one row or several."""
    rows, labels = torch.atleast_2d(scores), torch.atleast_2d(target)
    classes = rows.shape[1]
    listed = (labels < 0).cumsum(1) == 0
    slots = torch.where(listed, labels, 0)
    is_class = slots.unsqueeze(2) == torch.arange(classes, device=rows.device)
    is_target = (is_class & listed.unsqueeze(2)).any(1)
    margins = (1 - rows.gather(1, slots).unsqueeze(2) + rows.unsqueeze(1)).clamp_min(0)
    counted = listed.unsqueeze(2) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / classes
    if reduction == _EACH:
        loss = losses.reshape(scores.shape[:-1])
    else:
        loss = losses.mean() if reduction == _MEAN else losses.sum()
    return loss, is_target.to(scores.dtype).reshape(target.shape)


def refuse_unbatched(module: fx.GraphModule) -> None:
    """Refuse to work on with the losses of one sample, which Dynamo has taken for shape [1].

    Raises:
        CaptureError: the graph does more with them than return them.
    """
    for node in _calls(module):
        if _RUN[node.target] not in (_multilabel_margin, _multilabel_margin_of_text):
            continue
        scores, loss = (
            each.meta.get("example_value", each.meta.get("val"))
            for each in (node.all_input_nodes[0], node)
        )
        used = any(user.op != "output" for user in node.users)
        if used and [getattr(each, "ndim", None) for each in (scores, loss)] == [1, 1]:
            raise CaptureError(
                "multilabel_margin_loss(reduction='none') of one sample has shape [], and torch "
                "traces it as [1]: give it a batch of one (unsqueeze(0)), or another reduction"
            )


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [
        node
        for graph in graphs
        for node in graph.nodes
        if node.op == "call_function" and node.target in _RUN
    ]
