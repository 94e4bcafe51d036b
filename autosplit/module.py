"""SplitModule: the autograd face. ``loss.backward()`` runs I, ``backward_weight()`` runs W."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from autosplit.autograd.deferred_backward import DeferredBackward
from autosplit.autograd.delivery import Delivery
from autosplit.autograd.function import WeightAnchor, run_forward, run_split
from autosplit.autograd.module_proxy import ModuleProxy, ProxiedForward
from autosplit.autograd.parameter_hooks import hooks_text
from autosplit.autograd.pending_queue import PendingQueue, checked
from autosplit.backends.compiled_graph import check_backend
from autosplit.dump.dump import dump
from autosplit.dump.tables import report
from autosplit.runtime.build import check_memory
from autosplit.runtime.call_signature import CallFlattening
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.input_overlap import refuse_overlap
from autosplit.runtime.specialization import Specializations
from autosplit.torch_internals.backward_task import in_transform
from autosplit.torch_internals.ddp_reducer import refuse_sharded, synchronises
from autosplit.torch_internals.distributed import is_fsdp_managed
from autosplit.torch_internals.pytree import tree_unflatten
from autosplit.torch_internals.tracing import untraced

from .errors import (
    AutosplitError,
    BackendError,
    CaptureError,
    FailingCallError,
    FirstCallError,
    RecursiveCallError,
    ShardedError,
    SplitError,
)

if TYPE_CHECKING:
    from autosplit.dynamo.partial_model import Partial

# Gone when a split module is copied or pickled; a copy captures anew.
_TRANSIENT = (
    "_doubt",
    "_eager",
    "_flatten",
    "_graphs",
    "_partial",
    "_queue",
    "_root",
    "_tries_again",
)


class SplitModule(ModuleProxy):
    """A module whose ``backward()`` stops at the input gradients.

    Calls, attributes, parameters, ``state_dict`` and ``train()``/``eval()`` are those of
    ``model``: the very same tensors under the same names, and an attribute that is set here is
    set there. After ``loss.backward()`` the weight gradients of that microbatch are pending, and
    ``.grad`` of each parameter holds a lazy gradient. Whatever first uses one (clipping, a
    scaler, an optimizer's step) has everything computed that is pending; ``backward_weight()``
    is for choosing when. Where ``.grad`` is set to None, zeroed or replaced, what was pending for
    it is dropped, and with the last one of a microbatch its memory. Where a hook waits for a
    parameter's gradient, ``backward()`` computes weight gradients too, as an optimizer may step in
    it; ``report()`` names such parameters. A step compiled with ``fullgraph=True`` cannot have
    gradients computed: call ``backward_weight()`` before it, and before what reads memory that
    ``.grad`` shares. Where no
    input needs a gradient, ``backward()`` computes the derivatives down to the earliest parameters.
    ``torch.autograd.grad`` and ``backward(inputs=...)`` leave nothing pending: they ask for input
    gradients only; asked for parameters they raise ``SplitError`` (see docs/limitations.md).
    Parameters that are computed (``torch.func.functional_call``) get their gradients at once.

    A graph is captured for each combination of input structure, shapes, dtypes, devices and
    ``requires_grad``, of values of numbers and strings, and of everything else that the forward
    reads: attributes, globals, hooks, train/eval mode, grad mode, autocast. Whatever of that
    changes, the next call finds another graph that fits or captures one. At most ``max_graphs``
    are kept; beyond that the one unused for longest is dropped, with a warning.

    Inside ``DistributedDataParallel``, a forward outside ``no_sync()`` computes what is pending,
    and its ``backward()`` computes weight gradients too: ranks average them there, not where each
    happens to use them first.

    A call that fails where it is traced, though not otherwise, runs by plain autograd, with a
    warning; ``report()`` counts such calls.

    It can stand for the model where a library asks: ``isinstance`` and ``inspect.signature`` of
    ``forward`` give the model's answers, ``len()``, indices and iteration work where the model has
    them, and a ``forward`` that is set here is called here, around the split one. ``torch.export``
    and ``torch.jit.trace`` record the model, without split; for ``torch.jit.script`` and
    ``torch.fx.symbolic_trace`` give them ``.model``.

    Several threads may call one split module. A copy, by ``copy`` or ``pickle``, captures its
    own graphs; what is pending stays with the original, as ``.grad`` does.
    """

    _backend: str
    _memory: str | int
    _accumulation: Accumulation
    _max_graphs: int
    _graphs: Specializations
    _fullgraph: bool
    _dynamic: bool
    _eager: dict[str, int]
    _partial: Partial | None
    _queue: PendingQueue[DeferredBackward]
    _tries_again: bool
    _doubt: AutosplitError | None
    _flatten: CallFlattening
    _root: WeightAnchor

    def __init__(
        self,
        model: nn.Module,
        *,
        backend: str = "eager",
        memory: str | int = "balanced",
        accumulation: str = "exact",
        fullgraph: bool = False,
        dynamic: bool = False,
        max_graphs: int = 64,
    ) -> None:
        super().__init__(model)
        check_backend(backend)
        check_memory(memory)
        if max_graphs < 1:
            raise SplitError(f"max_graphs must be at least 1, got {max_graphs}")
        if dynamic and (fullgraph or memory != "balanced"):
            raise SplitError(
                "dynamic=True splits graph by graph, as torch.compile finds them; it goes with "
                "neither fullgraph=True nor a memory setting of your own"
            )
        self.__dict__["_backend"] = backend
        self.__dict__["_memory"] = memory
        self.__dict__["_accumulation"] = Accumulation(accumulation)
        self.__dict__["_fullgraph"] = fullgraph
        self.__dict__["_dynamic"] = dynamic
        self.__dict__["_max_graphs"] = max_graphs
        self._attach()

    def _attach(self) -> None:
        """Start without graphs and pending work."""
        own = self.__dict__
        limit = own["_max_graphs"]
        insist = own["_fullgraph"]
        own["_flatten"] = CallFlattening()
        own["_eager"] = {}
        own["_partial"] = self._by_graphs("dynamic=True") if own["_dynamic"] else None
        own["_tries_again"] = False  # whether a call in parts, or as it was, is not to be the rule
        own["_doubt"] = None  # why it is in parts, until the first call in parts was looked at
        deliver = Delivery(own["_accumulation"])
        own["_queue"] = PendingQueue(deliver.all)
        options = own["_backend"], own["_memory"], limit, insist
        own["_graphs"] = Specializations(self.model, *options, own["_queue"].hidden)
        own["_root"] = WeightAnchor(own["_queue"], deliver)
        # Parameters hold what is pending for them, also when this is gone, and may go with it only
        # if no node of autograd's holds them.
        weakref.finalize(self, deliver.forget)

    @ProxiedForward
    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            CaptureError: with ``fullgraph``, the model cannot be traced for these inputs.
            SplitError: the graph cannot be split, or the call is inside a ``torch.func``
                transform.
            ShardedError: FSDP manages the model or a part of it.
        """
        if in_transform():
            raise SplitError(
                "a split module inside a torch.func transform (vmap, grad, jvp, ...) or "
                "forward-mode differentiation: its backward leaves out the weights, which these "
                "would not notice; transform the unsplit model, which is .model of this one"
            )
        if is_fsdp_managed(self.model):  # by now; guards of graphs do not look for it
            refuse_sharded(self.model)
        together = synchronises()
        if together:
            self.backward_weight()
        if self._partial is not None and not self._tries_again:
            return self._in_parts(self._partial, args, kwargs)
        leaves, structure = self._flatten(args, kwargs)
        failing = None
        try:
            functions = self._graphs.fitting(args, kwargs, leaves, structure, called=True)
        except (BackendError, RecursiveCallError, ShardedError):
            raise
        except FailingCallError as error:
            failing = error
        except FirstCallError as error:
            return self._as_it_is(error, args, kwargs)
        except (CaptureError, SplitError) as error:
            return self._in_parts(self._give_up(error), args, kwargs)
        if failing is not None:  # here, so that the user's own error comes alone
            return self._eagerly(failing, args, kwargs)
        state = self._graphs.state()
        if functions.updated_inputs:
            refuse_overlap(functions, leaves, state)
        if functions.tangent_specs:
            if not together and self._root.deliver.leaves(functions, state).has_hooks():
                together = True  # hooks fire in backward(): an optimizer may step in one
                self.backward_weight()
            outputs = run_split(self._root, functions, state, leaves, together)
        else:
            with torch.no_grad():
                outputs = run_forward(functions, state, list(leaves)).outputs
        for name in reversed(functions.updated_inputs):
            leaves[functions.capture.inputs.index(name)].copy_(outputs.pop())
        return tree_unflatten(outputs, functions.capture.output_spec)

    def _eagerly(self, error: FailingCallError, args: Any, kwargs: Any) -> Any:
        """The call by plain autograd: where that fails too, with the user's own error."""
        if self._fullgraph:
            raise error
        result = self.model(*args, **kwargs)
        if not self._eager:
            warnings.warn(
                f"{type(self.model).__name__} runs calls like this one unsplit, by plain autograd, "
                f"as they fail where they are traced. report() says so too. {error}",
                stacklevel=3,
            )
        self._eager[str(error)] = self._eager.get(str(error), 0) + 1
        return result

    @untraced
    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        They arrive as from an ordinary ``backward()``: hooks on parameters fire, and gradients
        add up one microbatch after the other, bit for bit unless another ``accumulation`` than
        ``"exact"`` lets W round differently. A parameter that was replaced since
        the forward gets its gradient all the same; the new one none. Where this raises while it
        computes, the microbatches that were asked for are gone, and ``.grad`` raises when it is
        used: call ``zero_grad()`` and start the step again.

        Args:
            microbatches: how many, the oldest ``backward()`` first; all where None.

        Raises:
            SplitError: fewer than asked for are pending; something that W needs was written in
                place since; or another thread computes them, and this is
                inside a ``backward()``.
        """
        partial = self._partial
        if microbatches is None:
            self._queue.compute()
            if partial is not None:
                partial.backward_weight()
            return
        # What whole graphs left is older: once in parts, always in parts.
        whole = self._queue.pending
        count = checked(microbatches, self.pending)
        if whole:
            self._queue.compute(min(count, whole))
        if partial is not None and count > whole:
            partial.backward_weight(count - whole)

    def discard(self) -> None:
        """Forget what is pending, as if its ``backward()`` had not been: ``.grad`` of each
        parameter is what it was before, and holds what came from elsewhere meanwhile.
        """
        self._queue.discard()
        if self._partial is not None:
            self._partial.discard()

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients have not been computed."""
        return self._queue.pending + (self._partial.pending if self._partial else 0)

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches hold."""
        return self._queue.bytes + (self._partial.pending_bytes if self._partial else 0)

    @property
    def functions(self) -> tuple[SplitFunctions, ...]:
        """F, I, W and B of every graph that is kept, oldest first."""
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
        leaves, structure = self._flatten(args, kwargs)
        functions = self._graphs.fitting(args, kwargs, leaves, structure, called=called)
        if self._accumulation.exact:
            functions.compile()
        else:  # a second microbatch's W adds into the first's gradients
            functions.compile(("backward_input", *["backward_weight"] * 2), self._accumulation)
        return functions

    def report(self) -> str:
        """Tables: per graph ops, FLOPs, bytes; the boundary between I and W, tensor by tensor.

        For a model that is split in parts: which parts are, which are not and why, and what
        share of the weight gradients' FLOPs is deferred.

        Raises:
            SplitError: nothing has been captured yet.
        """
        if self._partial is not None and self._is_in_parts:
            return self._partial.report()
        name = type(self.model).__name__
        unsplit = [
            f"{count} call(s) of {name} ran unsplit, by plain autograd: {reason}"
            for reason, count in self._eager.items()
        ]
        if unsplit and not self._graphs.captured:
            return "\n\n".join(unsplit)
        hooks = hooks_text(self.model.named_parameters())
        return "\n\n".join([report(self._graphs.latest, name), *hooks, *unsplit])

    def dump(self, folder: str | os.PathLike[str]) -> None:
        """Write the latest graphs as readable, runnable code, with boundary and drawing.

        Raises:
            SplitError: nothing has been captured yet.
            OutputError: the folder cannot be written.
        """
        if self._partial is not None and self._is_in_parts:
            self._partial.dump(folder)
        else:
            dump(self._graphs.latest, folder, type(self.model).__name__)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Gradients are moved and converted with their parameters, so they must be there."""
        self.backward_weight()
        return super()._apply(fn, recurse)

    def _as_it_is(self, error: AutosplitError, args: Any, kwargs: Any) -> Any:
        """One call without graphs, for what it does that later ones do not."""
        partial = self.__dict__["_partial"] = self._partial or self._by_graphs(str(error))
        self.__dict__["_tries_again"] = True
        return partial.as_it_is(args, kwargs)

    @property
    def _is_in_parts(self) -> bool:
        return not (self._tries_again and self.functions)

    def _give_up(self, error: AutosplitError) -> Partial:
        """From now on graph by graph, where whole-graph capture is not insisted on."""
        if self._fullgraph:
            raise error
        if self._memory != "balanced":
            error.add_note(
                f"memory={self._memory!r} needs one graph; in parts a model is split as 'balanced'"
            )
            raise error
        if self._partial is None:
            because = error.because if isinstance(error, CaptureError) else str(error)
            self.__dict__["_partial"] = self._by_graphs(str(error), because)
            self.__dict__["_doubt"] = error
        self.__dict__["_tries_again"] = False
        partial: Partial = self.__dict__["_partial"]
        return partial

    def _in_parts(self, partial: Partial, args: Any, kwargs: Any) -> Any:
        """The forward graph by graph. If a first one fails, that says nothing about later ones;
        if it leaves the model changed, a whole graph may hold the next.
        """
        doubt = self._doubt
        if doubt is None:
            return partial(*args, **kwargs)
        from autosplit.capture.joint_graph import AttributeSnapshot, PythonStateError

        before = AttributeSnapshot(self.model)
        try:
            result = partial(*args, **kwargs)
        except Exception:
            self.__dict__["_partial"] = None
            raise
        self.__dict__["_doubt"] = None
        outside = isinstance(doubt, PythonStateError) and not doubt.inside
        self.__dict__["_tries_again"] = outside or before.differs
        return result

    def _by_graphs(self, reason: str, because: str = "") -> Partial:
        from autosplit.dynamo.partial_model import Partial  # Dynamo takes over a second to import

        return Partial(self.model, self._backend, reason, because)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()
