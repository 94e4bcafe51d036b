"""``Specializations``: the graphs of one module, captured for each kind of call.

A call has a signature, under which graphs are looked up before their guards are checked; what
sizes a capture leaves open is decided by those that came so far; graphs unused for longest are
dropped.
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

from autosplit.errors import (
    CaptureError,
    DeferralWarning,
    FirstCallError,
    RecursiveCallError,
    ShardedError,
    SplitError,
)
from autosplit.runtime.build import Dimensions, SplitOptions, trace, without_history
from autosplit.runtime.functions import SplitFunctions
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
    """Leaves of a call, and how they make it up: as ``tree_flatten((args, kwargs))`` does, in a
    tenth of its time where every argument is a tensor or a plain value.
    """
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    return tree_flatten((args, kwargs))


class CallSignature(NamedTuple):
    """The inputs of a call as a graph is specialised for them.

    Input structure; tensors' shape, strides, dtype, device and ``requires_grad``; numbers and
    strings by value; other objects by type, because guards look into them. Then grad mode and
    inference mode. Autocast, and what the graph read of the module itself, is for its guards.
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
        """The same without sizes and strides: what calls have in common that one graph may hold."""
        return self._replace(leaves=tuple(map(_without_sizes, self.leaves)))


def _leaf(leaf: Any) -> Hashable:
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
    found: Hashable = leaf
    return found


_LONGEST = 600  # characters of a reason
_SPECIAL = (0, 1)  # sizes that a graph is always captured for: they broadcast, or hold nothing


class OpenSizes:
    """Decides by the sizes that came so far, for the calls of one module.

    Args:
        options: how the graphs are run, which may be by a backend that needs all sizes.
    """

    def __init__(self, options: SplitOptions) -> None:
        # A budget is met for one combination of sizes, and Inductor assumes more about sizes while
        # it compiles, W and later variants behind the guards.
        self._holds = options.backend == "eager" and isinstance(options.memory, str)
        self._seen: dict[Hashable, list[set[int]]] = {}
        self._refused: dict[Hashable, str] = {}

    def capture(
        self,
        structure: Hashable,
        leaves: Sequence[Any],
        make: Callable[[Dimensions], SplitFunctions],
        fits: Callable[[SplitFunctions], bool],
    ) -> SplitFunctions:
        """Graphs for a call; where its sizes vary, ones for other sizes, too, if there are any.

        Args:
            structure: how the leaves make up the call.
            leaves: its inputs.
            make: captures with these sizes left open.
            fits: whether graphs fit the call.

        Raises:
            AutosplitError: what ``make`` raises with no size left open.
        """
        varying = self.of(structure, leaves)
        if varying:
            try:
                found = make(varying)
            except (FirstCallError, ShardedError):
                raise
            except Exception as error:  # torch's own too: a graph for these sizes may be there
                self._refuse(structure, f"{type(error).__name__}: {error}")
            else:
                if fits(found):
                    return found
                self._refuse(structure, "the graph does not fit the call it was captured for")
        return make({})

    def of(self, structure: Hashable, leaves: Sequence[Any]) -> Dimensions:
        """What to leave open in a capture for these inputs, whose sizes count as seen from now."""
        varying = {
            at: self._varying((structure, at, leaf.dim()), leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        if not self._holds or structure in self._refused:
            return {}
        return {at: dimensions for at, dimensions in varying.items() if dimensions}

    def _refuse(self, structure: Hashable, reason: str) -> None:
        """Leave nothing open in calls of this structure any more."""
        self._refused[structure] = " ".join(reason.split())[:_LONGEST]

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why nothing is left open in some calls."""
        return tuple(dict.fromkeys(self._refused.values()))

    def _varying(self, key: Hashable, leaf: Tensor) -> frozenset[int]:
        sizes = self._seen.setdefault(key, [set() for _ in leaf.shape])
        for known, size in zip(sizes, leaf.shape, strict=True):
            known.add(size)
        return frozenset(
            at for at, size in enumerate(leaf.shape) if size not in _SPECIAL and len(sizes[at]) > 1
        )


_MAX_SIZES = 1024  # combinations of sizes whose calls find their graph at once


class Specializations:
    """The graphs of a module by kind of call: captured, and looked up again.

    Several may share a signature, and their guards tell them apart; those that leave sizes open are
    found for other sizes, too. Several threads may ask at once; one of them captures.

    Args:
        model: what is captured.
        split: how it is split and its graphs are run.
        limit: how many graphs to keep; beyond it the one unused for longest is dropped.
        require_graph: whether nothing but a graph will do for a call either, see ``trace``.
        traced: what is around a capture, given the parameters.
        computed: whether inputs are what an earlier module hands over, see ``without_history``.
        sharding: has the model looked at as a plain one, to be captured and whenever guards are
            asked, and gathers parameters for its graphs; None where nothing is sharded.
        warned: whether nobody is to be told that most weight gradients cannot be deferred.

    Attributes:
        sharding: as given.
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
        # Of each kind of call those that were captured, newest first, each with its form for it.
        self._known: dict[CallSignature, list[tuple[SplitFunctions, SplitFunctions]]] = {}
        self._captured: dict[SplitFunctions, CallSignature] = {}  # longest unused first
        self._sizes = OpenSizes(split)
        self._first: set[CallSignature] = set()
        self._capturing = threading.RLock()
        self._busy = self._full = False
        self._warned = warned
        self._reader = StateReader(model)

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All that are kept, the latest used last."""
        return tuple(self._captured)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model; those that are sharded may be without memory."""
        if self.sharding is None:
            return self._reader.read()
        with self.sharding.standing_in():
            return self._reader.read()

    @property
    def static_because(self) -> tuple[str, ...]:
        """Why graphs for any size could not be captured where sizes vary."""
        return self._sizes.refusals

    @property
    def latest(self) -> SplitFunctions:
        """The latest used that has a backward; of all where none has one.

        Raises:
            SplitError: nothing has been captured yet.
        """
        captured = self.captured
        if not captured:
            raise SplitError(
                "nothing captured yet: call the module, capture(*inputs), or pass example "
                "inputs to autosplit.split(model, args)"
            )
        with_backward = [each for each in captured if each.has_backward]
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
        """The graph that fits the inputs and the model as they are now; captured if need be.

        Args:
            args: positional inputs.
            kwargs: keyword inputs.
            leaves: those of ``(args, kwargs)``, flattened.
            structure: how they make it up.
            called: whether they are those of a call that is to be run.

        Raises:
            FirstCallError: ``called``, and the call is to be run without a graph.
            CaptureError: the model cannot be traced for these inputs.
            SplitError: the graph cannot be split.
            BackendError: the backend cannot compile it.
        """
        signature = CallSignature.of(leaves, structure)
        if not _GUARDED.issuperset(map(type, leaves)) and any(map(_is_subclass, leaves)):
            # A parameter as an input: guards want the plain tensor that tracing saw.
            spec = tree_flatten((args, kwargs))[1]
            args, kwargs = tree_unflatten(without_history(leaves), spec)
        with self._capturing, nullcontext() if self.sharding is None else self.sharding.plain():
            for captured, functions in self._known.get(signature, ()):
                if captured.capture.guards.hold(args, kwargs):
                    self._note_used(captured)
                    return functions
            return self._resized(signature, args, kwargs, leaves) or self._capture_fitting(
                signature, args, kwargs, leaves, called
            )

    def _resized(
        self,
        signature: CallSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> SplitFunctions | None:
        """A graph of other sizes that fits, for those of these leaves."""
        for functions, known in reversed(self._captured.items()):
            if functions.capture.sizes is None or known.of_any_size != signature.of_any_size:
                continue
            if functions.capture.guards.hold(args, kwargs):
                self._note_used(functions)
                if len(self._known) >= _MAX_SIZES:
                    self._forget_other_sizes()
                resized = functions.at(leaves)
                self._know(signature, functions, resized)
                return resized
        return None

    def _capture_fitting(
        self,
        signature: CallSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        called: bool,
    ) -> SplitFunctions:
        if self._busy:  # only the thread that captures comes here meanwhile
            raise calls_itself(self._model)

        def fits(functions: SplitFunctions) -> bool:
            return functions.capture.guards.hold(args, kwargs)

        spec = tree_flatten((args, kwargs))[1]
        make = partial(self._capture, signature, leaves, spec, called)
        found = self._sizes.capture(signature.structure, leaves, make, fits)
        if not fits(found):
            raise CaptureError(
                f"the graph of {type(self._model).__name__} does not fit the very call it "
                "was captured for: its forward reads something that is different at "
                "every call. Pass that as a tensor or a number"
            )
        while len(self._captured) >= self._limit:
            del self._captured[next(iter(self._captured))]
            self._forget_other_sizes()
            self._warn_of_many()
        self._know(signature, found, found)
        self._captured[found] = signature
        return found

    def _know(
        self, signature: CallSignature, captured: SplitFunctions, functions: SplitFunctions
    ) -> None:
        """Look these graphs up for such calls, before any others."""
        self._known.setdefault(signature, []).insert(0, (captured, functions))

    def _note_used(self, functions: SplitFunctions) -> None:
        self._captured[functions] = self._captured.pop(functions)

    def _forget_other_sizes(self) -> None:
        """Look captured graphs up under the sizes that they were captured for, and no others."""
        self._known = {}
        for functions, signature in self._captured.items():
            self._know(signature, functions, functions)

    def _warn_of_many(self) -> None:
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
        examples = without_history(leaves, computed=self._computed, varying=varying)
        args, kwargs = tree_unflatten(examples, spec)
        self._busy = True
        try:
            # A second one of this kind is made here, and the graph runs after it.
            options: dict[str, Any] = {
                "called": called and signature not in self._first,
                "require_graph": self._require_graph or not called,
                "regions": True,
                "gathering": self.sharding and self.sharding.gathering,
            }
            name, known = type(self._model).__name__, len(self._captured)
            again = f", as none of its {known} graphs holds for this call" if known else ""
            with self._traced(self._model.parameters()), working(f"capturing {name}{again}"):
                made = trace(self._model, args, kwargs, self._split, **options)
        except FirstCallError:
            self._first.add(signature)
            raise
        finally:
            self._busy = False
        self._reader = StateReader(self._model)
        self._warn_of_little(made)
        return made

    def _warn_of_little(self, made: SplitFunctions) -> None:
        """Warn once where most weight gradients cannot be deferred."""
        if self._warned or not made.has_backward:
            return
        known = made.dependence.inseparable
        because = f"what makes that of {few(list(known), 2)} makes input gradients, too"
        share = made.dependence.deferred_share
        self._warned = DeferralWarning.issue(type(self._model).__name__, share, because)


def calls_itself(model: nn.Module) -> RecursiveCallError:
    """The error for a forward that calls the split module of its own model."""
    return RecursiveCallError(
        f"the forward of {type(model).__name__} calls the split module that is made of it, which "
        "calls the model: this would never end. To put something around the forward, set "
        "forward of the split module; on the model (.unsplit), call what was its forward before"
    )
