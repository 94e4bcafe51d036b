"""``SplitModule``: an ``nn.Module`` whose ``backward()`` runs I and whose W is deferred."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from autosplit.autograd.delivery import Delivery, ShardedDelivery, ShardedQueue
from autosplit.autograd.function import WeightAnchor, hooks_text, run_split
from autosplit.autograd.module_proxy import ModuleProxy, ProxiedForward
from autosplit.autograd.pending import PendingBound, PendingQueue
from autosplit.dump import dump, report
from autosplit.dynamo.fallback import Fallback
from autosplit.passes import CollectiveCosts
from autosplit.runtime.build import SplitOptions
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.refusals import refuse_overlap
from autosplit.runtime.specializations import Specializations, flatten
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

# Not copied or pickled; a copy captures anew.
_TRANSIENT = ("_fallback", "_graphs", "_queue", "_anchor", "_sharded")


class SplitModule(ModuleProxy):
    """A module whose ``backward()`` stops at the input gradients.

    Calls, attributes, parameters, ``state_dict`` and ``train()``/``eval()`` are those of the model,
    which is ``unsplit``: the very same tensors under the same names, and an attribute that is set
    here is set there. After ``loss.backward()`` the weight gradients of that microbatch are
    pending, and ``.grad`` of each parameter holds a lazy gradient. Whatever first uses one
    (clipping, a scaler, an optimizer's step) has everything computed that is pending;
    ``backward_weight()`` is for choosing when. Where ``.grad`` is set to None or replaced, what
    was pending for it is dropped, with the last one of a microbatch its memory when the next
    forward starts. Where a
    hook waits for a parameter's gradient, ``backward()`` computes weight gradients too, as an
    optimizer may step in it; ``report()`` names such parameters. A step compiled with
    ``fullgraph=True`` cannot have gradients computed: call ``backward_weight()`` before it, and
    before what reads memory that ``.grad`` shares. Where no input needs a gradient, ``backward()``
    computes the derivatives down to the earliest parameters. ``torch.autograd.grad`` and
    ``backward(inputs=...)`` leave nothing pending: they ask for input gradients only; asked for
    parameters they raise ``SplitError`` (see docs/limitations.md). Parameters that are computed
    (``torch.func.functional_call``) get their gradients at once.

    A graph is captured for each combination of input structure, shapes, dtypes, devices and
    ``requires_grad``, of values of numbers and strings, and of everything else that the forward
    reads: attributes, globals, hooks, train/eval mode, grad mode, autocast. Whatever of that
    changes, the next call finds another graph that fits or captures one. At most ``max_graphs``
    are kept; beyond that the one unused for longest is dropped, with a warning. Under
    ``torch.no_grad()`` and backend "eager" the model itself runs.

    Inside ``DistributedDataParallel``, a forward outside ``no_sync()`` computes what is pending,
    and its ``backward()`` computes weight gradients too: ranks average them there, not where each
    happens to use them first.

    A call that fails where it is traced, though not otherwise, runs by plain autograd, with a
    warning; ``report()`` counts such calls.

    It can stand for the model where a library asks: ``isinstance`` and ``inspect.signature`` of
    ``forward`` give the model's answers, ``len()``, indices and iteration work where the model has
    them, and a ``forward`` that is set here is called here, around the split one. ``torch.export``
    and ``torch.jit.trace`` record the model, without split; for ``torch.jit.script`` and
    ``torch.fx.symbolic_trace`` give them ``.unsplit``.

    Several threads may call one split module. A copy, by ``copy`` or ``pickle``, captures its
    own graphs; what is pending stays with the original, as ``.grad`` does.
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
        *,
        backend: str = "eager",
        memory: str | int = "balanced",
        overlap: CollectiveCosts | None = None,
        fullgraph: bool = False,
        max_graphs: int = 64,
        max_pending: float = 1,
    ) -> None:
        super().__init__(model)
        self.__dict__["_options"] = SplitOptions(backend, memory, overlap=overlap)
        if not isinstance(max_graphs, int) or max_graphs < 1:
            raise SplitError(f"max_graphs must be at least 1, got {max_graphs!r}")
        self.__dict__["_fullgraph"] = fullgraph
        self.__dict__["_max_graphs"] = max_graphs
        self.__dict__["_bound"] = PendingBound(max_pending)
        self._attach()

    def _attach(self) -> None:
        """Start without graphs and pending work."""
        own = self.__dict__
        options, require_graph = own["_options"], own["_fullgraph"]
        own["_sharded"] = sharded = _sharded(self.unsplit)
        own["_bound"] = dataclasses.replace(own["_bound"], early=0)
        delivery: Delivery
        if sharded is None:
            delivery = Delivery()
            own["_queue"] = PendingQueue(delivery, own["_bound"])
        else:  # FSDP's hooks do not run inside of parts
            delivery = ShardedDelivery(sharded)
            own["_queue"], require_graph = ShardedQueue(delivery, own["_bound"]), True
        own["_fallback"] = Fallback(self.unsplit, options, require_graph, own["_queue"])
        own["_graphs"] = Specializations(
            self.unsplit,
            options,
            limit=own["_max_graphs"],
            require_graph=require_graph,
            traced=own["_queue"].hidden,
            sharding=sharded,
        )
        own["_anchor"] = WeightAnchor(own["_queue"], sharded)

    @ProxiedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            CaptureError: with ``fullgraph``, the model cannot be traced for these inputs.
            SplitError: the graph cannot be split, or the call is inside a ``torch.func``
                transform.
            ShardedError: the model is sharded in a way that cannot be taken apart.
        """
        if in_transform():
            raise SplitError(
                "a split module inside a torch.func transform (vmap, grad, jvp, ...) or "
                "forward-mode differentiation: its backward leaves out the weights, which these "
                "would not notice; transform the unsplit model, which is .unsplit of this one"
            )
        if self._sharded is None and is_fsdp_managed(self.unsplit):  # by now; no guard looks for it
            self._attach()
        if self._queue.microbatches:
            self._queue.make_room()
        try:
            return self._call(args, kwargs)
        except ShardedError:
            if self._sharded is not None or fsdp_part(self.unsplit) is None:
                raise
        self._attach()  # a part was sharded since
        return self.forward(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        leaves, structure = flatten(args, kwargs)
        failing = None
        try:
            functions = self._graphs.fitting(args, kwargs, leaves, structure, called=True)
        except (BackendError, RecursiveCallError, ShardedError):
            raise
        except FailingCallError as error:
            failing = error
        except FirstCallError:  # it has effects that later calls do not have, which may be captured
            self.backward_weight()
            return self.unsplit(*args, **kwargs)
        except (CaptureError, SplitError) as error:
            return fallback.run_by_graphs(fallback.split_by_graphs(error), args, kwargs)
        if failing is not None:  # here, so that the user's own error comes alone
            return fallback.run_unsplit(failing, args, kwargs)
        return self._run(functions, leaves, parallel, fused_backward)

    def _run(
        self, functions: SplitFunctions, leaves: list[Any], parallel: Any, fused_backward: bool
    ) -> Any:
        """F of a captured graph, as autograd sees it; with ``fused_backward`` its backward is I and
        W. ``parallel``: the data parallelism around it.
        """
        state = self._graphs.state()
        if functions.updated_inputs:
            refuse_overlap(functions, leaves, state)
        if functions.tangent_specs:
            outputs = run_split(
                self._anchor,
                functions,
                state,
                leaves,
                fused_backward,
                in_data_parallel=parallel is not None,
            )
        else:
            with torch.no_grad():
                outputs = functions.run(state, list(leaves)).outputs
        capture = functions.capture
        for name in reversed(functions.updated_inputs):
            leaves[capture.inputs.index(name)].copy_(outputs.pop())
        return tree_unflatten(outputs, capture.output_spec)

    @untraced
    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        They arrive as from an ordinary ``backward()``, of a time before any hook: gradients add up
        one microbatch after the other, bit for bit. A parameter that was replaced since
        the forward gets its gradient all the same; the new one none. Where this raises while it
        computes, the microbatches that were asked for are gone, and ``.grad`` raises when it is
        used: call ``zero_grad()`` and start the step again.

        Args:
            microbatches: how many, the oldest ``backward()`` first; all where None.

        Raises:
            SplitError: fewer than asked for are pending, or a deferred tensor was written in
                place since.
        """
        self._queue.compute(microbatches)

    def discard(self) -> None:
        """Forget what is pending, as if its ``backward()`` had not been: ``.grad`` of each
        parameter is what it was before, and holds what came from elsewhere meanwhile.
        """
        self._queue.discard()

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients have not been computed."""
        return self._queue.pending

    @property
    def max_pending(self) -> float:
        """How many microbatches may wait, see ``autosplit.split``; may be set."""
        return self._bound.limit

    @max_pending.setter
    def max_pending(self, limit: float) -> None:
        self._bound.limit = PendingBound(limit).limit

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches hold."""
        return self._queue.bytes

    @property
    def functions(self) -> tuple[SplitFunctions, ...]:
        """F, I, W and B of every graph that is kept, the latest used last."""
        return self._graphs.captured

    def capture(self, *args: Any, **kwargs: Any) -> SplitFunctions:
        """Capture and compile the graph for inputs like these now, without running anything;
        but where a first call fills caches or builds submodules, that call is made, with its
        random numbers put back.

        Raises:
            CaptureError: the model cannot be traced for these inputs.
            SplitError: the graph cannot be split.
        """
        return self._capture(args, kwargs, called=False)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, called: bool = True
    ) -> SplitFunctions:
        leaves, structure = flatten(args, kwargs)
        functions = self._graphs.fitting(args, kwargs, leaves, structure, called=called)
        functions.compile()
        return functions

    def report(self) -> str:
        """Tables: per graph ops, FLOPs, bytes; the boundary between I and W, tensor by tensor.

        For a model that is split in parts: which parts are, which are not and why, and what
        share of the weight gradients' FLOPs is deferred.

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
        tables = report(self._graphs.latest, type(self.unsplit).__name__)
        static = [
            f"A graph is captured for each combination of input sizes: {reason}"
            for reason in self._graphs.static_because
        ]
        return "\n\n".join([tables, *self._bound.text(), *static, *hooks, *unsplit])

    def dump(self, folder: str | os.PathLike[str]) -> None:
        """Write the latest graphs as readable, runnable code, with tables of the boundaries.

        Raises:
            SplitError: nothing has been captured yet.
            OutputError: the folder cannot be written.
        """
        partial = self._by_graphs
        if partial is not None:
            partial.dump(folder)
        else:
            dump(self._graphs.latest, folder, type(self.unsplit).__name__)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Gradients are moved and converted with their parameters, so they must be there."""
        self.backward_weight()
        return super()._apply(fn, recurse)

    @property
    def _by_graphs(self) -> PartialModel | None:
        """The model split graph by graph, where that is what reports are about."""
        fallback = self._fallback
        return fallback.partial if fallback.is_in_use else None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()


def _sharded(model: nn.Module) -> ShardedModule | None:
    """The model as ``fully_shard`` has sharded it, or a part of it.

    Raises:
        ShardedError: in a way that cannot be taken apart.
    """
    if fsdp_part(model) is None:
        return None
    from autosplit.sharded import ShardedModule

    return ShardedModule(model)
