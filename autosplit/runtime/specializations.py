"""``Specializations``: the captured graphs of one module, looked up for each call.

    call ──► signature ──► graphs of that signature ──► guards hold? ──► run
                │ none                                     │ none hold
                └──► graphs with open sizes ───────────────┴──► capture

A size is left open in a capture if it differed in earlier calls. If there are more graphs than a
limit, the least recently used one is dropped.

Between the microbatches of a step a module does not change. So a stage first looks up a module's
graphs in ``steady``, without checking guards.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
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
    SplitError,
)
from autosplit.runtime.build import Dimensions, Values, trace, without_history
from autosplit.runtime.call_cache import MAX_CALLS
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.input_overlap import aliases
from autosplit.runtime.open_sizes import OpenSizes
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.residuals import State, StateRecord
from autosplit.text.figures import few
from autosplit.text.progress import working
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten
from autosplit.torch_internals.state import StateReader

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = {Tensor, nn.Parameter, *_VALUES}
_GUARDED = {Tensor, *_VALUES}
_NOTHING = nullcontext()


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

    @property
    def of_any_size(self) -> CallSignature:
        """The signature without sizes and strides; calls with equal ones may share a graph with
        open sizes.
        """
        return self._replace(leaves=tuple(map(_without_sizes, self.leaves)))


class ModuleCall(NamedTuple):
    """The inputs of one call of a module, flattened once.

    Attributes:
        args: positional inputs.
        kwargs: keyword inputs.
        leaves: the flattened ``(args, kwargs)``.
        signature: the key under which graphs for the call are looked up.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    signature: CallSignature

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_gradients: bool = True
    ) -> ModuleCall:
        """The call of a module with these inputs, in the present grad mode.

        Flattening takes a tenth of the time of ``tree_flatten`` if every input is a tensor or a
        plain value.

        Args:
            args: positional inputs.
            kwargs: keyword inputs.
            with_gradients: whether the module may be captured with a backward. False: the call
                counts as one without grad mode.
        """
        leaves: list[Any] = [*args, *kwargs.values()]
        structure: Hashable = (len(args), *kwargs)
        if not _LEAVES.issuperset(map(type, leaves)):
            leaves, structure = tree_flatten((args, kwargs))
        modes = with_gradients and torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        signature = CallSignature(structure, tuple(map(_leaf, leaves)), modes)
        return cls(args, kwargs, leaves, signature)

    @property
    def spec(self) -> TreeSpec:
        """The structure of ``(args, kwargs)``, for ``tree_unflatten``."""
        return tree_flatten((self.args, self.kwargs))[1]

    def as_plain_tensors(self) -> ModuleCall:
        """The call with plain tensors in place of parameters and other subclasses."""
        args, kwargs = tree_unflatten(without_history(self.leaves), self.spec)
        return self._replace(args=args, kwargs=kwargs)


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


class BoundGraphs(NamedTuple):
    """The graphs for a call, and the state with which they run.

    Attributes:
        functions: F, I, W and B.
        state: the module's parameters and buffers by name.
        record: the parameters and buffers that the backward reads; None if each F must record them,
            because they may differ between microbatches.
    """

    functions: SplitFunctions
    state: State
    record: StateRecord | None


class Specializations:
    """The graphs of a module, captured and looked up by signature and guards.

    Several graphs may share a signature; their guards decide between them. Threads may call
    ``fitting`` at once; one of them captures.

    Args:
        model: the module.
        split: how the module is split, and how its graphs run.
        limit: the number of graphs that are kept.
        require_graph: whether every call must run as a graph, see ``trace``.
        traced: a function from the model's parameters to a context in which captures run.
        computed: whether the inputs are outputs of an earlier module, see ``without_history``.
        sharding: presents a sharded model as a plain one to captures and guards, and gathers its
            parameters for graphs; None for a model that is not sharded.
        warned: whether the warning that most weight gradients cannot be deferred was given before,
            and is not repeated.
        values: which tensors of ``Capture.values`` the caller sets on the modules, see ``trace``.

    Attributes:
        sharding: the argument ``sharding``.
        steady: maps the key of a call to its graphs and state, valid without a check of guards. The
            caller must clear it before a look-up if the module may have changed since the last
            call.
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
        values: Values = "none",
    ) -> None:
        self._model, self._split, self._computed = model, split, computed
        self._limit, self._require_graph, self._traced = limit, require_graph, traced
        self.sharding = sharding
        # Signature -> captured functions, newest first, each with its form for those sizes.
        self._by_signature: dict[CallSignature, list[tuple[SplitFunctions, SplitFunctions]]] = {}
        self._captured: dict[SplitFunctions, CallSignature] = {}  # least recently used first
        self._sizes, self._values = OpenSizes(split), values
        self._first: set[CallSignature] = set()
        self._capturing = threading.RLock()
        self._busy = self._full = False
        self._warned = warned
        self._reader = StateReader(model)
        self.steady: dict[Hashable, BoundGraphs] = {}
        self._writes_state = False  # whether any graph writes into a parameter or buffer
        self._aliased: State | None = None  # the last state that had ``_aliases``
        self._aliases: frozenset[tuple[str, ...]] = frozenset()

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """The functions of all graphs that are kept, the most recently used last."""
        return tuple(self._captured)

    def state(self) -> State:
        """The model's parameters and buffers by name; sharded ones may have no memory. The same
        object as before, if no tensor was added, removed or replaced.
        """
        if self.sharding is None or not self.sharding.groups:
            return self._reader.read()
        with self.sharding.with_gathered_parameters():
            return self._reader.read()

    def fitted_state(self) -> State:
        """The state for which ``fitting`` found graphs. A sharded model is read again."""
        is_sharded = self.sharding is not None and self.sharding.groups
        return self.state() if is_sharded or self._aliased is None else self._aliased

    def bind(self, key: Hashable, functions: SplitFunctions) -> BoundGraphs:
        """Return the graphs with the state that ``fitting`` has read, and remember them in
        ``steady``.

        Graphs whose guards read numbers are not remembered if any graph writes into state, because
        the numbers may be values of that state. Parameters of a sharded module are gathered for
        each call.

        Args:
            key: the key of the call; None: guards read more than the key shows, so nothing is
                remembered.
            functions: the graphs, whose guards hold.
        """
        state, writes = self.fitted_state(), self._writes_state
        is_sharded = self.sharding is not None and self.sharding.groups
        record = None if is_sharded or writes else functions.record_state(state)
        bound = BoundGraphs(functions, state, record)
        changes = writes and functions.capture.guards.read_numbers
        if key is not None and not (is_sharded or changes):
            self.steady[key] = bound
        return bound

    @property
    def static_because(self) -> tuple[str, ...]:
        """The reasons why sizes that vary between calls became constants of the graphs."""
        return self._sizes.refusals

    @property
    def latest(self) -> SplitFunctions:
        """The most recently used functions that have a backward; if none has one, the most recently
        used functions.

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

    def fitting(self, call: ModuleCall, *, called: bool = False) -> SplitFunctions:
        """The graphs whose guards hold for these inputs and the model's present state. If there are
        none, graphs are captured.

        Args:
            call: the inputs.
            called: whether the caller is about to run the model on these inputs.

        Raises:
            FirstCallError: ``called``, and this call must run without a graph.
            CaptureError: the model cannot be captured for these inputs.
            SplitError: the graph cannot be split.
            BackendError: the backend cannot compile it.
        """
        if not _GUARDED.issuperset(map(type, call.leaves)) and any(map(_is_subclass, call.leaves)):
            # An input that is a parameter: guards expect the plain tensor of the capture.
            call = call.as_plain_tensors()
        sharding = self.sharding
        plain = _NOTHING if sharding is None or not sharding.groups else sharding.plain()
        with self._capturing, plain:
            self._forget_other_aliases()
            for captured, functions in self._by_signature.get(call.signature, ()):
                if captured.capture.guards.hold(call.args, call.kwargs):
                    self._note_used(captured)
                    return functions
            return self._resized(call) or self._capture_for(call, called)

    def _forget_other_aliases(self) -> None:
        """Forget all graphs if other parameters or buffers are one tensor, or share memory, than
        when the graphs were captured. No guard checks that: weights may have been tied since.

        Memory counts only if a graph writes into state.
        """
        if self._busy or not self._captured or (self.sharding and self.sharding.groups):
            return
        state = self._reader.read()
        if state is self._aliased:
            return
        if aliases(state, in_memory=self._writes_state) == self._aliases:
            self._aliased = state
            return
        self._captured, self._by_signature = {}, {}
        self.steady.clear()

    def _resized(self, call: ModuleCall) -> SplitFunctions | None:
        """Graphs with open sizes whose guards hold, specialized for the sizes of this call; None if
        no guards hold.
        """
        for functions, captured in reversed(self._captured.items()):
            if (
                functions.capture.sizes is None
                or captured.of_any_size != call.signature.of_any_size
            ):
                continue
            if functions.capture.guards.hold(call.args, call.kwargs):
                self._note_used(functions)
                if len(self._by_signature) >= MAX_CALLS:
                    self._forget_other_sizes()
                resized = functions.for_sizes(call.leaves)
                self._remember(call.signature, functions, resized)
                return resized
        return None

    def _capture_for(self, call: ModuleCall, called: bool) -> SplitFunctions:
        """Capture graphs for this call, and drop old ones beyond the limit."""
        if self._busy:  # the lock admits only the capturing thread itself
            raise calls_itself(self._model)

        def fits(functions: SplitFunctions) -> bool:
            return functions.capture.guards.hold(call.args, call.kwargs)

        make = partial(self._capture, call, called)
        functions = self._sizes.capture_graphs(call.signature.structure, call.leaves, make, fits)
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
        self._remember(call.signature, functions, functions)
        self._captured[functions] = call.signature
        self._writes_state = any(captured.updated_state for captured in self._captured)
        self._aliased = self._reader.read()
        self._aliases = aliases(self._aliased, in_memory=self._writes_state)
        return functions

    def _remember(
        self, signature: CallSignature, captured: SplitFunctions, functions: SplitFunctions
    ) -> None:
        """Record these graphs as the first whose guards later calls with this signature check."""
        self._by_signature.setdefault(signature, []).insert(0, (captured, functions))

    def _note_used(self, functions: SplitFunctions) -> None:
        if functions is not next(reversed(self._captured)):
            self._captured[functions] = self._captured.pop(functions)

    def _forget_other_sizes(self) -> None:
        """Forget the signatures of calls that ran a graph captured for other sizes."""
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

    def _capture(self, call: ModuleCall, called: bool, varying: Dimensions) -> SplitFunctions:
        """Capture the model with the sizes of the dimensions ``varying`` left open."""
        examples = without_history(call.leaves, computed=self._computed, varying=varying)
        args, kwargs = tree_unflatten(examples, call.spec)
        self._busy = True
        try:
            # The caller runs the first call of a kind without a graph; the second is captured.
            options: dict[str, Any] = {
                "called": called and call.signature not in self._first,
                "has_run": called and call.signature in self._first,
                "require_graph": self._require_graph or not called,
                "regions": True,
                "values": self._values,
                "gathering": self.sharding and self.sharding.gathering,
            }
            name, count = type(named_module(self._model)).__name__, len(self._captured)
            again = f", as none of its {count} graphs holds for this call" if count else ""
            with self._traced(self._model.parameters()), working(f"capturing {name}{again}"):
                functions = trace(self._model, args, kwargs, self._split, **options)
        except FirstCallError:
            self._first.add(call.signature)
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
    """The error for a model whose forward calls the split module of the same model."""
    return RecursiveCallError(
        f"the forward of {type(model).__name__} was replaced by a function that calls the split "
        "module, which calls this forward again, without end. Assign the wrapper to the forward of "
        "the split module, or let the wrapper call the model's original forward"
    )
