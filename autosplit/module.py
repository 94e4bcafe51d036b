"""``SplitModule``: an ``nn.Module`` whose ``backward()`` runs I, and whose W runs later.

split_module(x)   SplitModule.forward       refuses transforms, computes W beyond max_pending
  inputs ──►      ModuleCall.of             the flattened inputs and their signature
  call ──►        Specializations.fitting   graphs whose guards hold, or a capture
  functions ──►   run_split                 one node of autograd's graph, whose backward is I
  leaves ──►      SplitFunctions.run        F
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from autosplit.autograd.delivery import Delivery, ShardedDelivery, ShardedQueue
from autosplit.autograd.function import WeightAnchor, hooks_text, run_split
from autosplit.autograd.module_proxy import ModuleProxy, ProxiedForward
from autosplit.autograd.pending import PendingQueue
from autosplit.autograd.pending_bound import PendingBound
from autosplit.dump import dump, graph_tables
from autosplit.dynamo.fallback import Fallback
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.input_overlap import refuse_overlap
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.specializations import ModuleCall, Specializations
from autosplit.torch_internals.autograd import in_transform, untraced
from autosplit.torch_internals.distributed import (
    data_parallel,
    fsdp_part,
    is_fsdp_managed,
    synchronises,
)
from autosplit.torch_internals.pytree import tree_unflatten

from .errors import (
    BackendError,
    CaptureError,
    FailingCallError,
    FirstCallError,
    RecursiveCallError,
    ShardedError,
    SplitError,
)

if TYPE_CHECKING:
    from autosplit.dynamo.partial_model import PartialModel
    from autosplit.sharded import ShardedModule

# Attributes that are not copied or pickled; a copy captures its own graphs.
_TRANSIENT = ("_fallback", "_graphs", "_queue", "_anchor", "_sharded")


class SplitModule(ModuleProxy):
    """A module that trains like its model, but whose ``backward()`` leaves weight gradients
    pending.

    ``autosplit.split`` creates it. Parameters, buffers, submodules and attributes are the model's;
    ``state_dict``, ``train()`` and ``to()`` act on the model. ``unsplit`` is the model itself.

    **Weight gradients.** After ``loss.backward()``, the weight gradients of that microbatch are
    pending, and each parameter's ``.grad`` is a lazy gradient. They are computed when

    - ``backward_weight()`` is called;
    - something reads a lazy gradient: gradient clipping, a ``GradScaler``, an optimizer's step;
    - more than ``max_pending`` microbatches are pending.

    Setting ``.grad`` to None, replacing it, or zeroing it drops the pending gradients of that
    parameter. Shape, dtype and device of a lazy gradient are known without a computation.

    In three cases ``backward()`` computes weight gradients, too: a parameter has a hook, because an
    optimizer may step in it (``report()`` names such parameters); parameters are computed
    (``torch.func.functional_call``); or ``DistributedDataParallel`` averages gradients, which it
    does outside of ``no_sync()``. ``torch.autograd.grad`` and ``backward(inputs=...)`` compute
    input gradients only; with parameters they raise ``SplitError``.

    An optimizer step compiled with ``fullgraph=True``, and code that reads a gradient's memory
    without torch, cannot trigger the computation: call ``backward_weight()`` first. If no input
    needs a gradient, ``backward()`` computes derivatives down to the earliest parameters.

    **Graphs.** A graph is captured for each combination of the structure, shapes, dtypes, devices
    and ``requires_grad`` of inputs, of the values of numbers and strings, and of everything else
    that the forward reads: attributes, globals, hooks, train or eval mode, grad mode, autocast. If
    any of that changes, the next call uses another graph that fits, or captures a new one. Beyond
    ``max_graphs``, the least recently used graph is dropped, with a warning. Under
    ``torch.no_grad()`` with backend "eager", the model itself runs. A call that fails only while it
    is captured runs by plain autograd, with a warning; ``report()`` counts such calls.

    **As a stand-in.** ``isinstance``, ``len()``, indexing, iteration, and ``inspect.signature`` of
    ``forward`` answer as for the model. A function that is assigned to ``forward`` of the split
    module wraps the split forward. ``torch.export`` and ``torch.jit.trace`` record the model. For
    ``torch.jit.script`` and ``torch.fx.symbolic_trace``, pass ``.unsplit``.

    Threads may share a split module. A copy, by ``copy`` or ``pickle``, captures its own graphs;
    pending gradients stay with the original.

    docs/limitations.md lists everything that differs from plain autograd.
    """

    _options: SplitOptions
    _max_graphs: int
    _bound: PendingBound
    _fullgraph: bool
    _graphs: Specializations
    _fallback: Fallback
    _queue: PendingQueue
    _anchor: WeightAnchor
    _sharded: ShardedModule | None

    def __init__(
        self,
        model: nn.Module,
        options: SplitOptions,
        *,
        fullgraph: bool,
        max_graphs: int,
        max_pending: float,
    ) -> None:
        super().__init__(model)
        if options.grad_dtype is not None:
            raise SplitError(
                f"grad_dtype={options.grad_dtype} has no effect in split, because autograd adds "
                "gradients into .grad: leave it out, or use autosplit.Stage"
            )
        self.__dict__["_options"] = options
        if not isinstance(max_graphs, int) or max_graphs < 1:
            raise SplitError(f"max_graphs must be at least 1, got {max_graphs!r}")
        self.__dict__["_fullgraph"] = fullgraph
        self.__dict__["_max_graphs"] = max_graphs
        self.__dict__["_bound"] = PendingBound(max_pending)
        self._attach()

    def _attach(self) -> None:
        """Drop all graphs and pending work, and find out whether the model is sharded now."""
        attributes = self.__dict__
        options, require_graph = attributes["_options"], attributes["_fullgraph"]
        attributes["_sharded"] = sharded = _sharded(self.unsplit)
        attributes["_bound"] = dataclasses.replace(attributes["_bound"], early=0)
        delivery: Delivery
        if sharded is None:
            delivery = Delivery()
            attributes["_queue"] = PendingQueue(delivery, attributes["_bound"])
        else:  # FSDP's hooks do not run inside of a model that is split graph by graph
            delivery = ShardedDelivery(sharded)
            attributes["_queue"], require_graph = ShardedQueue(delivery, attributes["_bound"]), True
        attributes["_fallback"] = Fallback(
            self.unsplit, options, require_graph, attributes["_queue"]
        )
        attributes["_graphs"] = Specializations(
            self.unsplit,
            options,
            limit=attributes["_max_graphs"],
            require_graph=require_graph,
            traced=attributes["_queue"].hide_lazy_gradients,
            sharding=sharded,
            values="any",
        )
        attributes["_anchor"] = WeightAnchor(attributes["_queue"], sharded)

    @ProxiedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, so that ``backward()`` of its outputs runs I.

        Raises:
            CaptureError: with ``fullgraph``, the model cannot be captured for these inputs.
            SplitError: with ``fullgraph``, the graph cannot be split; or the call is inside a
                ``torch.func`` transform.
            ShardedError: the model is sharded in a way that graphs cannot reproduce.
        """
        if in_transform():
            raise SplitError(
                "a split module was called inside a torch.func transform (vmap, grad, jvp, ...) or "
                "forward-mode differentiation, where weight gradients would silently be missing; "
                "transform the model itself instead: .unsplit of the split module"
            )
        if self._sharded is None and is_fsdp_managed(
            self.unsplit
        ):  # sharded since; no guard checks it
            self._attach()
        if self._queue.microbatches:
            self._queue.make_room()
        try:
            return self._call(args, kwargs)
        except ShardedError:
            if self._sharded is not None or fsdp_part(self.unsplit) is None:
                raise
        self._attach()  # fully_shard was called for a part since
        return self.forward(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward by a graph, graph by graph, or without one."""
        parallel = data_parallel()
        fused_backward = parallel is not None and synchronises()
        if parallel is not None:
            self._queue.delivery.has_observers = True
        if fused_backward:
            self.backward_weight()
        if not torch.is_grad_enabled() and self._options.backend == "eager" and not self._sharded:
            return self.unsplit(*args, **kwargs)  # the same bits, and no graph to capture
        fallback = self._fallback
        if fallback.partial is not None:
            return fallback.run_by_graphs(fallback.partial, args, kwargs)
        call, failing = ModuleCall.of(args, kwargs), None
        try:
            functions = self._graphs.fitting(call, called=True)
        except (BackendError, RecursiveCallError, ShardedError):
            raise
        except FailingCallError as error:
            failing = error
        except FirstCallError:  # it has side effects; later calls may have none
            self.backward_weight()
            return self.unsplit(*args, **kwargs)
        except (CaptureError, SplitError) as error:
            return fallback.run_by_graphs(fallback.split_by_graphs(error), args, kwargs)
        if failing is not None:  # outside of except, so that the user's error has no context
            return fallback.run_unsplit(failing, args, kwargs)
        return self._run(functions, call.leaves, parallel is not None, fused_backward)

    def _run(
        self,
        functions: SplitFunctions,
        leaves: list[Any],
        in_data_parallel: bool,
        fused_backward: bool,
    ) -> Any:
        """Run F of captured graphs as one node of autograd's graph.

        Args:
            functions: the graphs.
            leaves: the flattened inputs.
            in_data_parallel: whether data parallelism wraps the module.
            fused_backward: whether ``backward()`` computes weight gradients, too.
        """
        state = self._graphs.fitted_state()
        if functions.updated_inputs:
            refuse_overlap(functions, leaves, state)
        if functions.tangent_specs:
            outputs = run_split(
                self._anchor,
                functions,
                state,
                leaves,
                fused_backward,
                in_data_parallel=in_data_parallel,
            )
        else:
            with torch.no_grad():
                outputs = functions.run(state, list(leaves)).outputs
        capture = functions.capture
        for name in reversed(functions.updated_inputs):
            leaves[capture.inputs.index(name)].copy_(outputs.pop())
        for value in reversed(capture.values):
            value.set(self.unsplit, outputs.pop())
        spec = capture.output_spec
        return outputs[0] if spec.is_leaf() else tree_unflatten(outputs, spec)

    @untraced
    def backward_weight(self, microbatches: int | None = None) -> None:
        """W: compute pending weight gradients, and accumulate them into ``.grad``.

        Gradients are added one microbatch after the other, oldest first, with the bits of ordinary
        backwards. If a parameter was replaced since the forward, the old parameter gets the
        gradient, and the new one gets none.

        If a computation raises, the gradients of these microbatches are lost, and reading ``.grad``
        raises: call ``zero_grad()``, and start the step again.

        Args:
            microbatches: the number of microbatches, oldest ``backward()`` first; None: all.

        Raises:
            SplitError: fewer microbatches are pending than requested, or a deferred tensor was
                written in place since its ``backward()``.
        """
        self._queue.compute(microbatches)

    def discard(self) -> None:
        """Drop all pending weight gradients. ``.grad`` keeps gradients that were accumulated
        before, or that other losses have added since.
        """
        self._queue.discard_all()

    @property
    def pending(self) -> int:
        """The number of microbatches whose weight gradients are not computed yet."""
        return self._queue.pending_count

    @property
    def max_pending(self) -> float:
        """The number of microbatches that may be pending, see ``autosplit.split``; settable."""
        return self._bound.limit

    @max_pending.setter
    def max_pending(self, limit: float) -> None:
        self._bound.limit = PendingBound(limit).limit

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that the pending microbatches keep alive."""
        return self._queue.bytes

    @property
    def functions(self) -> tuple[SplitFunctions, ...]:
        """F, I, W and B of each captured graph, the most recently used last."""
        return self._graphs.captured

    def capture(self, *args: Any, **kwargs: Any) -> SplitFunctions:
        """Capture and compile the graph for inputs with these shapes and dtypes now, without
        running it.

        If the model's first call fills caches or builds submodules, the model is first called once,
        and the random generators are restored.

        Args:
            args: example positional inputs.
            kwargs: example keyword inputs.

        Returns:
            F, I, W and B of the graph.

        Raises:
            CaptureError: the model cannot be captured for these inputs.
            SplitError: the graph cannot be split.
        """
        return self._capture(args, kwargs, called=False)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, called: bool = True
    ) -> SplitFunctions:
        functions = self._graphs.fitting(ModuleCall.of(args, kwargs), called=called)
        functions.backward_graphs.compile_calls()
        return functions

    def report(self) -> str:
        """Tables of the latest graphs: operators, FLOPs and bytes of each graph, and the tensors at
        the boundary between I and W.

        For a model that is split graph by graph: the graphs, the graph breaks with reasons, and the
        share of the weight gradients' FLOPs that is deferred.

        Raises:
            SplitError: nothing has been captured yet.
        """
        partial = self._by_graphs
        if partial is not None:
            return partial.report()
        unsplit = self._fallback.unsplit_calls()
        if unsplit and not self._graphs.captured:
            return "\n\n".join(unsplit)
        hooks = hooks_text(self.unsplit.named_parameters())
        tables = graph_tables(self._graphs.latest, type(self.unsplit).__name__)
        static = [
            f"A graph is captured for each combination of input sizes: {reason}"
            for reason in self._graphs.static_because
        ]
        return "\n\n".join([tables, *self._bound.text(), *static, *hooks, *unsplit])

    def dump(self, folder: str | os.PathLike[str], *, fold_views: bool = False) -> None:
        """Write the latest graphs as readable, runnable Python, with tables of the boundaries.

        Args:
            folder: the folder for the files; created if it does not exist.
            fold_views: whether the call of a matrix product contains the views that only it reads.

        Raises:
            SplitError: nothing has been captured yet.
            OutputError: the folder cannot be written.
        """
        partial = self._by_graphs
        if partial is not None:
            partial.dump(folder, fold_views=fold_views)
        else:
            name = type(self.unsplit).__name__
            dump(self._graphs.latest, folder, name, fold_views=fold_views)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert the model, after computing pending gradients, which are moved and
        converted too.
        """
        self.backward_weight()
        return super()._apply(fn, recurse)

    @property
    def _by_graphs(self) -> PartialModel | None:
        """The model split graph by graph, if calls use it; otherwise None."""
        fallback = self._fallback
        return fallback.partial if fallback.is_in_use else None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()


def _sharded(model: nn.Module) -> ShardedModule | None:
    """The ``ShardedModule`` of a model that ``fully_shard`` has sharded, at least in part; or None.

    Raises:
        ShardedError: the model is sharded in a way that graphs cannot reproduce.
    """
    if fsdp_part(model) is None:
        return None
    from autosplit.sharded import ShardedModule

    return ShardedModule(model)
