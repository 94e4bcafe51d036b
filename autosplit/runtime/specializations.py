"""``Specializations``: the captured graphs of one module, looked up for each call.

    call ──► signature ──► graphs of that signature ──► guards hold? ──► run
                │ none                                     │ none hold
                └──► graphs with open sizes ───────────────┴──► capture

A size is left open in a capture if earlier calls had other sizes there. Beyond a limit, the graph
that was unused for longest is dropped.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.capture.diagnosis import named_module
from autosplit.errors import (
    CaptureError,
    DeferralWarning,
    FirstCallError,
    RecursiveCallError,
    ShardedError,
    SplitError,
)
from autosplit.runtime.build import Dimensions, trace, without_history
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import few
from autosplit.text.progress import working
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten
from autosplit.torch_internals.state import StateReader

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = {Tensor, nn.Parameter, *_VALUES}
_GUARDED = {Tensor, *_VALUES}


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """The leaves of a call and their structure, like ``tree_flatten((args, kwargs))``.

    It takes a tenth of that time if every argument is a tensor or a plain value.
    """
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    return tree_flatten((args, kwargs))


class CallSignature(NamedTuple):
    """The key under which graphs for a call are looked up.

    Guards check everything else that a graph depends on: autocast, the contents of objects, and the
    state of the module that its forward reads.

    Attributes:
        structure: the structure of the inputs.
        leaves: for tensors, shape, strides, dtype, device and ``requires_grad``; for numbers and
            strings, type and value; for other objects, the type.
        modes: grad mode and inference mode.
    """

    structure: Hashable
    leaves: tuple[Hashable, ...]
    modes: tuple[bool, bool]

    @classmethod
    def of(cls, leaves: Iterable[Any], structure: Hashable) -> CallSignature:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(structure, tuple(map(_leaf, leaves)), modes)

    @property
    def of_any_size(self) -> CallSignature:
        """The signature without sizes and strides: calls that share it may share a graph."""
        return self._replace(leaves=tuple(map(_without_sizes, self.leaves)))


def _leaf(leaf: Any) -> Hashable:
    """The part of a signature for one leaf."""
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return (leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad)
    kind: Any = type(leaf)
    # 1, 1.0 and True are equal but trace to different graphs, and so do 0.0 and -0.0.
    value = repr(leaf) if isinstance(leaf, (float, complex)) else leaf
    return (kind, value) if isinstance(leaf, _VALUES) else kind


def _is_subclass(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and type(leaf) is not Tensor


def _without_sizes(leaf: Any) -> Hashable:
    if isinstance(leaf, tuple) and isinstance(leaf[0], torch.Size):
        shape, _, *rest = leaf
        return (len(shape), *rest)
    unsized: Hashable = leaf
    return unsized


_LONGEST = 600  # characters of a reason
_SPECIAL = (0, 1)  # sizes that are never left open: dimensions without elements, or that broadcast


class OpenSizes:
    """Decides which sizes a capture leaves open, by the sizes of earlier calls of one module.

    Args:
        options: how the module is split. All sizes are fixed with a compiling backend, and with a
            memory budget.
    """

    def __init__(self, options: SplitOptions) -> None:
        # A budget is met for one combination of sizes. Inductor adds assumptions about sizes while
        # it compiles, for W and later variants after the guards are frozen.
        self._can_leave_open = options.backend == "eager" and isinstance(options.memory, str)
        self._seen: dict[Hashable, list[set[int]]] = {}
        self._refused: dict[Hashable, str] = {}

    def capture_graphs(
        self,
        structure: Hashable,
        leaves: Sequence[Any],
        make: Callable[[Dimensions], SplitFunctions],
        fits: Callable[[SplitFunctions], bool],
    ) -> SplitFunctions:
        """Capture graphs for a call, with varying sizes left open if that succeeds.

        Args:
            structure: the structure of the call's inputs.
            leaves: its flattened inputs.
            make: captures with these sizes left open.
            fits: whether the guards of graphs hold for the call.

        Raises:
            AutosplitError: any error that ``make`` raises if no size is left open.
        """
        varying = self.of(structure, leaves)
        if varying:
            try:
                functions = make(varying)
            except (FirstCallError, ShardedError):
                raise
            except Exception as error:  # also torch's own: a graph with fixed sizes may succeed
                self._refuse(structure, f"{type(error).__name__}: {error}")
            else:
                if fits(functions):
                    return functions
                self._refuse(structure, "the graph does not fit the call it was captured for")
        return make({})

    def of(self, structure: Hashable, leaves: Sequence[Any]) -> Dimensions:
        """Record the sizes of these inputs, and return the dimensions to leave open for them."""
        varying = {
            at: self._varying((structure, at, leaf.dim()), leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        if not self._can_leave_open or structure in self._refused:
            return {}
        return {at: dimensions for at, dimensions in varying.items() if dimensions}

    def _refuse(self, structure: Hashable, reason: str) -> None:
        """Leave no sizes open in later calls of this structure."""
        self._refused[structure] = " ".join(reason.split())[:_LONGEST]

    @property
    def refusals(self) -> tuple[str, ...]:
        """The reasons why no sizes are left open for some structures."""
        return tuple(dict.fromkeys(self._refused.values()))

    def _varying(self, key: Hashable, leaf: Tensor) -> frozenset[int]:
        """Record a leaf's sizes, and return its dimensions with more than one size so far."""
        sizes = self._seen.setdefault(key, [set() for _ in leaf.shape])
        for sizes_so_far, size in zip(sizes, leaf.shape, strict=True):
            sizes_so_far.add(size)
        return frozenset(
            at for at, size in enumerate(leaf.shape) if size not in _SPECIAL and len(sizes[at]) > 1
        )


_MAX_SIZES = 1024  # signatures under which graphs of other sizes are remembered


class Specializations:
    """The graphs of a module, captured and looked up by signature and guards.

    Several graphs may share a signature; their guards decide between them. Threads may call
    ``fitting`` at once; one of them captures.

    Args:
        model: the module.
        split: how it is split, and how its graphs run.
        limit: the number of graphs that are kept.
        require_graph: whether a call may not run without a graph, see ``trace``.
        traced: returns a context for a capture, from the model's parameters.
        computed: whether the inputs are outputs of an earlier module, see ``without_history``.
        sharding: presents a sharded model as a plain one to captures and guards, and gathers its
            parameters for graphs; None for a model that is not sharded.
        warned: whether to suppress the warning that most weight gradients cannot be deferred.

    Attributes:
        sharding: the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        split: SplitOptions,
        *,
        limit: int = 64,
        require_graph: bool = True,
        traced: Callable[[Iterable[Tensor]], AbstractContextManager[Any]] = nullcontext,
        computed: bool = False,
        sharding: ShardedModule | None = None,
        warned: bool = False,
    ) -> None:
        self._model, self._split, self._computed = model, split, computed
        self._limit, self._require_graph, self._traced = limit, require_graph, traced
        self.sharding = sharding
        # Signature -> captured functions, newest first, each with its form for those sizes.
        self._by_signature: dict[CallSignature, list[tuple[SplitFunctions, SplitFunctions]]] = {}
        self._captured: dict[SplitFunctions, CallSignature] = {}  # least recently used first
        self._sizes = OpenSizes(split)
        self._first: set[CallSignature] = set()
        self._capturing = threading.RLock()
        self._busy = self._full = False
        self._warned = warned
        self._reader = StateReader(model)

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """The functions of all graphs that are kept, the most recently used last."""
        return tuple(self._captured)

    def state(self) -> dict[str, Tensor]:
        """The model's parameters and buffers by name; sharded ones may have no memory."""
        if self.sharding is None:
            return self._reader.read()
        with self.sharding.with_gathered_parameters():
            return self._reader.read()

    @property
    def static_because(self) -> tuple[str, ...]:
        """The reasons why varying sizes could not be left open."""
        return self._sizes.refusals

    @property
    def latest(self) -> SplitFunctions:
        """The most recently used functions with a backward; without one, if none has a backward.

        Raises:
            SplitError: nothing has been captured yet.
        """
        captured = self.captured
        if not captured:
            raise SplitError(
                "nothing captured yet: call the module, capture(*inputs), or pass example "
                "inputs to autosplit.split(model, args)"
            )
        with_backward = [functions for functions in captured if functions.has_backward]
        return (with_backward or captured)[-1]

    def fitting(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        structure: Hashable,
        *,
        called: bool = False,
    ) -> SplitFunctions:
        """The graphs whose guards hold for the inputs and the model now; captured if there are
        none.

        Args:
            args: positional inputs.
            kwargs: keyword inputs.
            leaves: the flattened ``(args, kwargs)``, from ``flatten``.
            structure: their structure, from ``flatten``.
            called: whether the caller runs the model on these inputs next.

        Raises:
            FirstCallError: ``called``, and this call must run without a graph.
            CaptureError: the model cannot be captured for these inputs.
            SplitError: the graph cannot be split.
            BackendError: the backend cannot compile it.
        """
        signature = CallSignature.of(leaves, structure)
        if not _GUARDED.issuperset(map(type, leaves)) and any(map(_is_subclass, leaves)):
            # An input that is a parameter: guards expect the plain tensor of the capture.
            spec = tree_flatten((args, kwargs))[1]
            args, kwargs = tree_unflatten(without_history(leaves), spec)
        with self._capturing, nullcontext() if self.sharding is None else self.sharding.plain():
            for captured, functions in self._by_signature.get(signature, ()):
                if captured.capture.guards.hold(args, kwargs):
                    self._note_used(captured)
                    return functions
            return self._resized(signature, args, kwargs, leaves) or self._capture_for(
                signature, args, kwargs, leaves, called
            )

    def _resized(
        self,
        signature: CallSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> SplitFunctions | None:
        """Graphs with open sizes whose guards hold, for the sizes of these leaves."""
        for functions, captured in reversed(self._captured.items()):
            if functions.capture.sizes is None or captured.of_any_size != signature.of_any_size:
                continue
            if functions.capture.guards.hold(args, kwargs):
                self._note_used(functions)
                if len(self._by_signature) >= _MAX_SIZES:
                    self._forget_other_sizes()
                resized = functions.for_sizes(leaves)
                self._remember(signature, functions, resized)
                return resized
        return None

    def _capture_for(
        self,
        signature: CallSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        called: bool,
    ) -> SplitFunctions:
        """Capture graphs for this call, and drop old ones beyond the limit."""
        if self._busy:  # the lock admits only the capturing thread itself
            raise calls_itself(self._model)

        def fits(functions: SplitFunctions) -> bool:
            return functions.capture.guards.hold(args, kwargs)

        spec = tree_flatten((args, kwargs))[1]
        make = partial(self._capture, signature, leaves, spec, called)
        functions = self._sizes.capture_graphs(signature.structure, leaves, make, fits)
        if not fits(functions):
            raise CaptureError(
                f"the graph of {type(self._model).__name__} does not fit the call that it was "
                "captured for, because its forward reads a value that differs at every call. Pass "
                "that value as a tensor or a number"
            )
        while len(self._captured) >= self._limit:
            del self._captured[next(iter(self._captured))]
            self._forget_other_sizes()
            self._warn_of_limit()
        self._remember(signature, functions, functions)
        self._captured[functions] = signature
        return functions

    def _remember(
        self, signature: CallSignature, captured: SplitFunctions, functions: SplitFunctions
    ) -> None:
        """Look these graphs up first for calls with this signature."""
        self._by_signature.setdefault(signature, []).insert(0, (captured, functions))

    def _note_used(self, functions: SplitFunctions) -> None:
        self._captured[functions] = self._captured.pop(functions)

    def _forget_other_sizes(self) -> None:
        """Keep only the signatures for which graphs were captured."""
        self._by_signature = {}
        for functions, signature in self._captured.items():
            self._remember(signature, functions, functions)

    def _warn_of_limit(self) -> None:
        """Warn once that graphs are dropped."""
        if not self._full:
            self._full = True
            warnings.warn(
                f"{type(self._model).__name__} needed more than {self._limit} graphs; from now on "
                "the one unused for longest is dropped, and captured again if it is needed again, "
                "which takes seconds. Pad inputs to fewer shapes, pass numbers that vary as "
                "tensors, or raise max_graphs of autosplit.split",
                stacklevel=3,
            )

    def _capture(
        self,
        signature: CallSignature,
        leaves: Sequence[Any],
        spec: TreeSpec,
        called: bool,
        varying: Dimensions,
    ) -> SplitFunctions:
        """Capture the model with these sizes left open."""
        examples = without_history(leaves, computed=self._computed, varying=varying)
        args, kwargs = tree_unflatten(examples, spec)
        self._busy = True
        try:
            # The caller runs the first call of a kind without a graph; the second is captured.
            options: dict[str, Any] = {
                "called": called and signature not in self._first,
                "require_graph": self._require_graph or not called,
                "regions": True,
                "gathering": self.sharding and self.sharding.gathering,
            }
            name, count = type(named_module(self._model)).__name__, len(self._captured)
            again = f", as none of its {count} graphs holds for this call" if count else ""
            with self._traced(self._model.parameters()), working(f"capturing {name}{again}"):
                functions = trace(self._model, args, kwargs, self._split, **options)
        except FirstCallError:
            self._first.add(signature)
            raise
        finally:
            self._busy = False
        self._reader = StateReader(self._model)
        self._warn_if_few_deferrable(functions)
        return functions

    def _warn_if_few_deferrable(self, functions: SplitFunctions) -> None:
        """Warn once if most weight gradients cannot be deferred."""
        if self._warned or not functions.has_backward:
            return
        names = few(list(functions.dependence.inseparable), 2)
        because = (
            f"the operators that compute the gradients of {names} compute input gradients, too"
        )
        share = functions.dependence.deferred_share
        self._warned = DeferralWarning.issue(type(self._model).__name__, share, because)


def calls_itself(model: nn.Module) -> RecursiveCallError:
    """The error for a forward that calls the split module of its own model."""
    return RecursiveCallError(
        f"the forward of {type(model).__name__} calls the split module that is made of it, and the "
        "split module calls the forward: this would never end. To wrap the forward, assign to "
        "forward of the split module; or, on the model (.unsplit), call its original forward"
    )
