"""``Specializations``: the whole graphs of one module, captured for each kind of call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autosplit.errors import (
    CaptureError,
    DeferralWarning,
    FirstCallError,
    RecursiveCallError,
    SplitError,
)
from autosplit.runtime.build import trace, without_history
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.figures import few
from autosplit.torch_internals.pytree import tree_unflatten
from autosplit.torch_internals.state import StateReader

from .call_signature import CallSignature, CallStructure
from .open_sizes import Dimensions, OpenSizes
from .specialization_cache import SpecializationCache

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule
    from autosplit.sharded.stage_sharding import StageSharding


class Specializations:
    """Captures a module for each kind of call, and looks captured graphs up again.

    Several threads may ask at once; one of them captures.

    Args:
        model: what is captured.
        split: how it is split and its graphs are run.
        limit: how many graphs to keep.
        insist: whether nothing but a graph will do for a call either, see ``tracing.trace``.
        traced: what is around a capture, given the parameters.
        computed: whether inputs are what an earlier module hands over, see ``without_history``.
        sharding: has the model looked at as a plain one, to be captured and whenever guards are
            asked, and gathers parameters for its graphs; None where nothing is sharded.
        dynamic: which sizes captures leave open, see ``OpenSizes``.

    Attributes:
        state: reads the model's parameters and buffers, those of its latest capture.
    """

    def __init__(
        self,
        model: nn.Module,
        split: SplitOptions,
        limit: int,
        insist: bool,
        traced: Callable[[Iterable[Tensor]], AbstractContextManager[None]],
        *,
        computed: bool = False,
        sharding: ShardedModule | StageSharding | None = None,
        dynamic: bool | None = None,
    ) -> None:
        self._model = model
        self._computed = computed
        self._split = split
        self._graphs = SpecializationCache(type(model).__name__, limit)
        self._insist = insist
        self._traced = traced
        self._sharding = sharding
        self._view = nullcontext if sharding is None else sharding.plain
        self._sizes = OpenSizes(split, dynamic)
        self._first: set[CallSignature] = set()
        self._capturing = threading.RLock()
        self._busy = False
        self._warned = False
        self.state = StateReader(model)

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All that are kept, oldest first."""
        return self._graphs.captured

    @property
    def static_because(self) -> tuple[str, ...]:
        """Why graphs for any size could not be captured where sizes vary."""
        return self._sizes.refusals

    @property
    def latest(self) -> SplitFunctions:
        """The newest that has a backward; the newest of all where none has one.

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
        leaves: list[Any],
        structure: CallStructure,
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
        if not all(type(leaf) is Tensor or not isinstance(leaf, Tensor) for leaf in leaves):
            # A parameter as an input: guards want the plain tensor that tracing saw.
            args, kwargs = tree_unflatten(without_history(leaves), structure.spec)

        def fits(functions: SplitFunctions) -> bool:
            return functions.fits_budget(leaves) and functions.capture.guards.hold(args, kwargs)

        with self._capturing, self._view():
            found = self._graphs.find(signature, fits, leaves)
            if found is None:
                found = self._capture_fitting(signature, leaves, structure, called, fits)
                self._graphs.add(signature, found)
        return found

    def _capture_fitting(
        self,
        signature: CallSignature,
        leaves: list[Any],
        structure: CallStructure,
        called: bool,
        fits: Callable[[SplitFunctions], bool],
    ) -> SplitFunctions:
        if self._busy:  # only the thread that captures comes here meanwhile
            raise calls_itself(self._model)
        make = partial(self._capture, signature, leaves, structure, called)
        found = self._sizes.capture(structure, leaves, make, fits)
        if not fits(found):
            raise CaptureError(
                f"the graph of {type(self._model).__name__} does not fit the very call it "
                "was captured for: its forward reads something that is different at "
                "every call. Pass that as a tensor or a number"
            )
        return found

    def _capture(
        self,
        signature: CallSignature,
        leaves: list[Any],
        structure: CallStructure,
        called: bool,
        varying: Dimensions,
    ) -> SplitFunctions:
        examples = without_history(leaves, computed=self._computed, varying=varying)
        args, kwargs = tree_unflatten(examples, structure.spec)
        self._busy = True
        try:
            # A second one of this kind is made here, and the graph runs after it.
            options: dict[str, Any] = {
                "called": called and signature not in self._first,
                "insist": self._insist or not called,
                "by_value": True,
                "regions": True,
                "gathering": self._sharding and self._sharding.gathering,
            }
            with self._traced(self._model.parameters()):
                made = trace(self._model, args, kwargs, self._split, **options)
        except FirstCallError:
            self._first.add(signature)
            raise
        finally:
            self._busy = False
        self.state = StateReader(self._model)
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
