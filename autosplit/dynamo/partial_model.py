"""``PartialModel``: a model that is split graph by graph, and its report.

It supports models with graph breaks, branches on data, or code that Dynamo cannot trace. The model
runs under ``torch.compile``. Every graph of Dynamo is split, and the code between graphs runs as
ordinary Python with ordinary autograd. Dynamo decides on recompilation, guards and symbolic shapes.
"""

from __future__ import annotations

import os
import pathlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from autosplit.autograd.function import WeightAnchor, hooks_text
from autosplit.autograd.pending import PendingQueue
from autosplit.capture.dynamo_graph import compile_model
from autosplit.dump import dump
from autosplit.dynamo.backend import DynamoGraph, SplittingBackend
from autosplit.dynamo.pending_weights import ForwardCall
from autosplit.errors import DeferralWarning, SplitError
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.specializations import calls_itself
from autosplit.text.figures import few, short_source
from autosplit.torch_internals.autograd import LeavesCache, has_gradient_hooks
from autosplit.torch_internals.distributed import data_parallel, synchronises
from autosplit.torch_internals.dynamo import BreakReason, BreakWatch
from autosplit.torch_internals.pytree import tree_flatten


def _graph_table(partial: PartialModel) -> str:
    rows = [
        [
            index,
            part.lines,
            few(part.parameters, 4),
            partial.calls[part],
            f"{part.weight_flops[0] / 1e9:.3f}",
            part.state,
        ]
        for index, part in enumerate(partial.parts)
    ]
    headers = ["graph", "lines", "parameters", "calls", "W GFLOPs", "state"]
    return _table(rows, headers) if rows else "(no graph)"


def _ordinary_table(partial: PartialModel) -> str:
    names = {parameter: name for name, parameter in partial.named_parameters()}
    rows = [[names[parameter], parameter.numel()] for parameter in partial.ordinary_parameters]
    return _table(rows, ["parameter", "elements"]) if rows else ""


def _share_line(partial: PartialModel) -> str:
    share = partial.deferred_share
    if share is None:
        return "No call needed a gradient yet."
    deferred, ordinary = len(partial.deferred_parameters), len(partial.ordinary_parameters)
    count = f"{deferred} of {deferred + ordinary}"
    elements = f"{100 * share:.1f} % of the weight gradients' elements"
    return f"Deferred: the gradients of {count} parameters, {elements}."


def _table(rows: Sequence[Sequence[object]], headers: list[str]) -> str:
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True)


class PartialModel:
    """A model split graph by graph, of a ``SplitModule``.

    Args:
        model: the model; it keeps its parameters and its Python side effects.
        options: options for splitting and running graphs, all with ``memory="balanced"``.
        reason: why the model cannot be captured in one graph, for the report.
        because: ``reason`` in one line, for a warning.
        queue: the queue of pending microbatches, which may already hold some.

    Attributes:
        has_warned: whether the warning that few weight gradients can be deferred was given.
    """

    def __init__(
        self,
        model: nn.Module,
        options: SplitOptions,
        reason: str,
        because: str,
        queue: PendingQueue,
    ) -> None:
        self._model = model
        self.reason = reason
        self._because = because
        # torch keeps backends and compiled code until the process ends, so refer to self weakly.
        backend = SplittingBackend(weakref.proxy(self), options)
        self._compiled = compile_model(model, backend)
        self._parts: list[DynamoGraph] = []
        self._breaks: dict[BreakReason, None] = {}
        self._seen: ForwardCall | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._running = threading.local()
        self._latest = ForwardCall()
        self._queue = queue
        self.anchor = WeightAnchor(self._queue, leaves=LeavesCache(model.parameters))
        self.has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            FailingCallError: the forward calls the split module itself.
        """
        if getattr(self._running, "microbatch", None) is not None:
            raise calls_itself(self._model)
        counts, watch = (len(self._parts), len(self._breaks)), BreakWatch()
        fused_backward = synchronises() or has_gradient_hooks([*self._model.parameters()])
        if fused_backward:
            self._queue.compute()
        in_data_parallel = data_parallel() is not None
        microbatch = self._latest = self._running.microbatch = ForwardCall(
            fused_backward, in_data_parallel
        )
        try:
            traced = self._model.parameters() if self._queue.pending_count else ()
            with self._queue.hide_lazy_gradients(traced):
                result = self._compiled(*args, **kwargs)
        finally:
            self._running.microbatch = None
            self._breaks |= dict.fromkeys(watch.reasons())
        if _is_differentiable(result):
            self._seen = microbatch
            if (len(self._parts), len(self._breaks)) != counts:
                self._warn_of_little()
        return result

    def _warn_of_little(self) -> None:
        """Warn once if most weight gradients cannot be deferred."""
        share = self.deferred_share
        if share is None or self.has_warned:
            return
        breaks = [f"{short_source(b.line)}: {b.reason}" for b in self._breaks if b.line]
        given_up = [part.reason for part in self._parts if part.reason]
        lineless = [b.reason for b in self._breaks]
        reasons = [self._because, *breaks, *given_up, *lineless, "no graph holds them"]
        because = next(filter(None, reasons))
        self.has_warned = DeferralWarning.issue(type(self._model).__name__, share, because)

    @property
    def parts(self) -> tuple[DynamoGraph, ...]:
        """The compiled graphs, oldest first."""
        return tuple(self._parts)

    @property
    def breaks(self) -> tuple[BreakReason, ...]:
        """Lines at which Dynamo ended a graph, with reasons, in the order of their discovery."""
        return tuple(self._breaks)

    @property
    def calls(self) -> Counter[DynamoGraph]:
        """Number of runs of each graph in the latest forward call that required a gradient."""
        return Counter() if self._seen is None else self._seen.calls

    @property
    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients W computes: the trained inputs of graphs in the latest
        forward.
        """
        seen = self._seen
        return [] if seen is None or seen.fused_backward else [*seen.deferred]

    @property
    def ordinary_parameters(self) -> list[nn.Parameter]:
        """The trained parameters whose gradients an ordinary backward computes: all but
        ``deferred_parameters``.
        """
        if self._seen is None:
            return []
        late = set(self.deferred_parameters)
        return [p for p in self._model.parameters() if p.requires_grad and p not in late]

    @property
    def deferred_share(self) -> float | None:
        """Share of weight gradients, in elements, that W computes; None if no parameter is
        trained.
        """
        late = sum(parameter.numel() for parameter in self.deferred_parameters)
        total = late + sum(parameter.numel() for parameter in self.ordinary_parameters)
        return late / total if total else None

    def report(self) -> str:
        """Report with tables of graphs and graph breaks, the parameters outside of graphs, and the
        share of weight gradients that is deferred.

        Raises:
            SplitError: the model has not been called yet.
        """
        if not self._parts and not self._breaks and self._seen is None:
            raise SplitError(
                "nothing captured yet: call the module, which is split graph by graph; "
                + self.reason
            )
        count = sum(part.is_split for part in self._parts)
        sections = [
            f"{type(self._model).__name__} is split graph by graph: Dynamo found "
            f"{len(self._parts)}, {count} of them split.",
            self.reason,
            _graph_table(self),
        ]
        if self._breaks:
            rows = [[short_source(b.line), b.reason] for b in self._breaks]
            sections.append("Where graphs end:\n\n" + _table(rows, ["line", "because"]))
        if ordinary := _ordinary_table(self):
            sections.append("Gradients from an ordinary backward:\n\n" + ordinary)
        sections += [_share_line(self), *hooks_text(self.named_parameters())]
        return "\n\n".join([*sections, *self._queue.bound.text()])

    def dump(self, folder: str | os.PathLike[str], *, fold_views: bool = False) -> None:
        """Write the split graphs as runnable Python code, with tables of the boundaries.

        Args:
            folder: gets a subfolder for each graph of Dynamo.
            fold_views: whether the call of a matrix product contains the views that only it reads.

        Raises:
            OutputError: the folder cannot be written.
        """
        for index, part in enumerate(self._parts):
            if part.functions is not None and part.functions.has_backward:
                place = pathlib.Path(folder) / f"part{index}"
                dump(part.functions, place, part.lines, fold_views=fold_views)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()

    def name_of(self, parameter: nn.Parameter) -> str | None:
        if parameter not in self._names:
            self._names = {tensor: name for name, tensor in self.named_parameters()}
        return self._names.get(parameter)

    def add_graph(self, part: DynamoGraph) -> None:
        self._parts.append(part)

    def enter_graph(self, part: DynamoGraph, parameters: Sequence[Any]) -> ForwardCall:
        """Return the running forward call. For a recomputation in a backward, it is the latest
        forward call.
        """
        call: ForwardCall = getattr(self._running, "microbatch", None) or self._latest
        call.calls[part] += 1
        call.deferred |= dict.fromkeys(parameters)
        return call


def _is_differentiable(tree: Any) -> bool:
    """Whether any tensor in a pytree has a ``grad_fn``."""
    leaves, _ = tree_flatten(tree)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves)
