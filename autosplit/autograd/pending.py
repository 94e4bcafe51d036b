"""``PendingWork``: W of one backward through one graph. ``PendingQueue``: queues such work and runs
it.

    backward()      add(): queue the work and install lazy gradients in .grad
    first use       compute(): run W of the queue, oldest microbatch first
    afterwards      real gradients replace the lazy ones
    .grad cleared   the pending work of that parameter is dropped

Split modules, models that are split graph by graph and compiled models all use this queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.errors import DeferralWarning
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.text.figures import few
from autosplit.torch_internals.autograd import at_end_of_backward, current_backward, untraced
from autosplit.torch_internals.state import any_referenced, distinct_storage_bytes

from .lazy_gradient import _SLOT_LOCK, GradientSlot, LazyGradient, pending_slot
from .pending_bound import PendingBound

if TYPE_CHECKING:
    from .delivery import Delivery


@dataclasses.dataclass(slots=True, eq=False)
class PendingWork:
    """Pending W of one backward through one graph.

    Attributes:
        graph: F, I and W of the graph.
        deferred: the tensors that I saved for W.
        state: parameters and buffers of the forward, by name. Parameters that were freed after the
            forward may be missing.
        skipped: names of parameters without a gradient: no output with a gradient depends on them,
            or their gradient was dropped.
        early: weight gradients that I computed, in the order of ``graph.early_parameters``.
        owner: maps a gathered parameter, which the forward read, to the sharded parameter, which
            gets the gradient. None for a module without sharded parameters.
        writes: version counter of each sharded parameter when the forward ran.
        leaves: the parameters of ``graph.parameter_names``, in order; None: they are looked up in
            ``state``.
        slots: the slots of the parameters, once the work is queued.
    """

    graph: SplitFunctions
    deferred: Residuals
    state: State
    skipped: AbstractSet[str] = frozenset()
    early: Sequence[Tensor] = ()
    owner: Callable[[Tensor], Tensor] | None = None
    writes: Sequence[int] = ()
    leaves: Sequence[Tensor] | None = None
    slots: Sequence[GradientSlot] = ()
    _names: dict[int, list[str]] | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that the work keeps alive, without parameters and buffers."""
        return (*self.deferred.tensors, *self.early)

    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """(name, parameter that the forward read) for each parameter whose gradient W computes."""
        named = [
            (n, self.state.get(n)) for n in self.graph.parameter_names if n not in self.skipped
        ]
        return [(name, leaf) for name, leaf in named if leaf is not None]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """(name, parameter that gets the gradient) for each gradient that W computes."""
        owner = self.owner
        return [(n, leaf if owner is None else owner(leaf)) for n, leaf in self.named_leaves()]

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that get a gradient."""
        if self.leaves is not None and not self.skipped:  # the common case
            return self.leaves
        return [parameter for _, parameter in self.named_parameters()]

    def compute_gradients(self) -> Sequence[Tensor]:
        """Run W.

        Returns:
            gradients in the order of ``graph.parameter_names``, including skipped parameters.
            Gradients marked in ``graph.borrowed`` may share memory.
        """
        graph = self.graph
        late = graph.backward_weight(self.deferred)
        if not graph.early_parameters:
            return late
        gradients = dict(zip(graph.early_parameters, self.early, strict=True))
        gradients |= zip(graph.late_parameters, late, strict=True)
        return [gradients[name] for name in graph.parameter_names]

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of parameters, passed as their ``id``."""
        # ``zero_()`` drops one parameter after another, so names are looked up by ``id``.
        if self._names is None:
            self._names = {}
            for name, parameter in self.named_parameters():
                self._names.setdefault(id(parameter), []).append(name)
        skipped = self.skipped if isinstance(self.skipped, set) else {*self.skipped}
        for key in parameters:
            skipped.update(self._names.pop(key, ()))
        self.skipped = skipped

    @property
    def is_empty(self) -> bool:
        """Whether, after a ``drop``, W would compute nothing."""
        return not (self._names or self.graph.sums)


def _sums_text(sums: Sequence[str]) -> str:
    return (
        f"the backward adds into {few(sums, 3)}: backward_weight() and optimizer steps make these "
        "additions, as they compute weight gradients. Call backward_weight() before you read, "
        "clear or reduce such a sum in another way"
    )


_GRAD = attrgetter("grad")
_PLAIN = {Tensor}
_FEW = 64


def _is_sum(grad: Tensor | None) -> bool:
    """Whether a ``.grad`` is a sum of gradients that are computed already."""
    return grad is not None and type(grad) is not LazyGradient


class PendingQueue:
    """The queue of microbatches between I and W, oldest first. While a parameter has a gradient in
    the queue, its ``.grad`` is a lazy gradient.

    Several threads may add to and compute the same queue.

    Args:
        delivery: runs W and accumulates the gradients.
        bound: limits the number of pending microbatches.

    Attributes:
        delivery: as passed.
        bound: as passed.
        microbatches: maps a microbatch to its pending work. Some work may be for gradients that
            were dropped; ``sweep`` removes it.
        thread: the thread that is running W; None if no thread is.
        computed: the slots whose pending parts that thread computes.
        shares: whether this queue may exchange work with other queues.
    """

    shares = True

    def __init__(self, delivery: Delivery, bound: PendingBound) -> None:
        self.delivery = delivery
        self.bound = bound
        self._computing = threading.RLock()
        self.thread: int | None = None
        self.computed: Sequence[GradientSlot] = ()
        self.microbatches: dict[Hashable, list[PendingWork]] = {}
        self._has_step_hook = self._has_warned = False
        # Whether anything refers to a sum that a lazy gradient has replaced in ``.grad``. That sum
        # must have its final value at the end of the backward.
        self._sum_is_referenced = False
        self._slots: dict[int, GradientSlot] = {}
        self._limit = _FEW
        self._latest: tuple[Sequence[Tensor] | None, Sequence[GradientSlot]] = None, ()
        self._keepers: list[weakref.ref[Tensor]] = []
        self._mark = f"_autosplit_pending_{id(self)}"

    def __del__(self) -> None:
        """Keep pending gradients usable when Python frees the model and this queue.

        From now on, each reference to a gradient or a parameter keeps the queue alive.
        """
        if not self.microbatches:
            return
        works = chain.from_iterable(self.microbatches.values())
        for parameter in {id(p): p for work in works for p in work.parameters}.values():
            slot = self._slots.get(id(parameter))
            if slot is not None and slot.armed:
                slot.revive(parameter)
                self._keep_alive_with(parameter)
        self._register_step_hook()

    @property
    def pending_count(self) -> int:
        """Number of pending microbatches."""
        if self.microbatches:
            self.sweep()
        return len(self.microbatches)

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches keep alive."""
        self.sweep()
        return distinct_storage_bytes(t for work in self.works() for t in work.tensors)

    def works(self) -> list[PendingWork]:
        """All pending work, oldest first."""
        with _SLOT_LOCK:
            return [work for works in self.microbatches.values() for work in works]

    def parameters(self) -> list[Tensor]:
        """The parameters with a gradient that is pending or being computed."""
        with _SLOT_LOCK:
            parameters = [slot.parameter() for slot in self._slots.values() if slot.armed]
        return [parameter for parameter in parameters if parameter is not None]

    def add(self, microbatch: Hashable, work: PendingWork, *, moved: bool = False) -> None:
        """Queue work, after earlier work of the same microbatch.

        If another queue holds a pending gradient of one of the parameters, the work goes to that
        queue.

        Args:
            microbatch: the microbatch of the work.
            work: W of one backward through one graph.
            moved: whether another queue has passed the work on to this one.
        """
        while True:
            with _SLOT_LOCK:
                blocking = self._install_lazy_gradients(work)
                if blocking is None:
                    self.microbatches.setdefault(microbatch, []).append(work)
                    sum_is_referenced, self._sum_is_referenced = self._sum_is_referenced, False
                    break
            other = blocking.queue
            if other is not self and self.shares and other.shares and not moved:
                other.add(microbatch, work, moved=True)
                return
            blocking.compute()
        if not self._has_step_hook:
            self._register_step_hook()
        if work.graph.sums and not self._has_warned:
            self._has_warned = True
            warnings.warn(_sums_text(work.graph.sums), DeferralWarning, stacklevel=2)
        if sum_is_referenced:  # it may be read at any time after the backward
            at_end_of_backward(self.compute)
        elif len(self.microbatches) > self.bound.limit:
            at_end_of_backward(lambda: self._compute_down_to(self.bound.limit))

    def _install_lazy_gradients(self, work: PendingWork) -> GradientSlot | None:
        """Put lazy gradients into ``.grad`` of the parameters of the work.

        Returns:
            None on success. Otherwise a slot that the caller must compute before it tries again.
            The slot's lazy gradient is referenced elsewhere but no longer in ``.grad``, or another
            queue holds the slot's pending part.
        """
        parameters = work.parameters
        if not parameters:
            return None
        grads = [*map(_GRAD, parameters)]
        is_plain = _PLAIN.issuperset(map(type, grads))
        if not self._sum_is_referenced:
            self._sum_is_referenced = any_referenced(grads if is_plain else filter(_is_sum, grads))
        if parameters is not self._latest[0]:
            new_slots = [self._slot(parameter) for parameter in parameters]
            # Do not keep slots of a compiled model: it has a new list of parameters each time.
            self._latest = work.leaves if parameters is work.leaves else None, new_slots
        work.slots = slots = self._latest[1]
        for slot, parameter, grad in zip(slots, parameters, grads, strict=True):
            if slot.armed:
                if parameter.grad is slot.lazy or slot.hidden:
                    continue
                self.sweep()
                if slot.armed:
                    return slot
            if not is_plain and type(grad) is LazyGradient:
                target = pending_slot(grad)
                if target is not None:
                    return target[0]
                grad, self._sum_is_referenced = grad.value(), True  # its value is the real one
            slot.grad, slot.armed = grad, True
            try:
                parameter.grad = slot.new_lazy(parameter) if slot.lazy is None else slot.lazy
            except RuntimeError:  # the parameter's shape, dtype or device changed
                parameter.grad = slot.new_lazy(parameter)
        self._keep_alive_with(parameters[-1])
        return None

    def _slot(self, parameter: Tensor) -> GradientSlot:
        slot = self._slots.get(id(parameter))
        if slot is None or slot.parameter() is not parameter:
            if len(self._slots) >= self._limit:
                entries = self._slots.items()
                self._slots = {k: entry for k, entry in entries if entry.parameter() is not None}
                self._limit = 2 * len(self._slots) + _FEW
            slot = self._slots[id(parameter)] = GradientSlot(self, parameter)
        return slot

    def _keep_alive_with(self, parameter: Tensor) -> None:
        """Keep the queue alive as long as the parameter, until nothing is pending."""
        if self._mark not in parameter.__dict__:
            parameter.__dict__[self._mark] = _QueueReference(self)
            self._keepers.append(weakref.ref(parameter))

    def _release(self) -> None:
        """Remove the queue from the parameters that keep it alive."""
        for reference in self._keepers:
            parameter = reference()
            if parameter is not None:
                parameter.__dict__.pop(self._mark, None)
        self._keepers.clear()

    def _register_step_hook(self) -> None:
        """Compute pending gradients of an optimizer's parameters before its ``step()``.

        Compiled code and kernels in C++ cannot use a lazy gradient. torch keeps hooks on all
        optimizers in one global list; the queue's hook is removed when the queue is freed.
        """
        self._has_step_hook, reference = True, weakref.ref(self)

        @untraced
        def compute(optimizer: Optimizer) -> None:
            queue = reference()
            if queue is not None:
                stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
                sums = any(work.graph.sums for work in queue.works())
                if sums or not stepped.isdisjoint(map(id, queue.parameters())):
                    queue.compute()

        def step_hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            queue = None if torch.compiler.is_dynamo_compiling() else reference()
            if queue is None or queue.thread or queue.microbatches:
                compute(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(step_hook).remove)

    def make_room(self) -> None:
        """Before a forward, compute the oldest microbatches, so that the backward of this forward
        does not exceed the limit.
        """
        if self.microbatches and torch.is_grad_enabled() and current_backward() < 0:
            self._compute_down_to(self.bound.limit - 1)

    def _compute_down_to(self, waiting: float) -> None:
        """Compute the oldest microbatches until ``waiting`` are pending.

        Do nothing if a thread is computing.
        """
        if self.thread is None and self.pending_count > waiting:
            self.bound.early += self.compute(leave=waiting)

    def compute(self, microbatches: int | None = None, *, leave: float = 0) -> int:
        """Compute the oldest microbatches, and accumulate their gradients into ``.grad``.

        Waits for another thread that computes. If the computation fails, every use of a lost
        ``.grad`` raises. The method never waits for autograd's engine, so the engine's threads may
        call it.

        Args:
            microbatches: number of microbatches; None for all but ``leave``.
            leave: number of latest microbatches to leave pending, if ``microbatches`` is None.

        Returns:
            the number of microbatches that were computed.

        Raises:
            SplitError: fewer microbatches than requested are pending, or their computation failed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.compute(microbatches, leave=leave)
        with self._computing:
            if self.thread is not None:  # this thread computes further up in the stack
                return 0
            with _SLOT_LOCK:
                slots = self.computed = self._live_slots()
                keys = [*self.microbatches]
                if microbatches is None:
                    count = int(max(0, len(keys) - leave))
                else:
                    count = self.bound.check_request(microbatches, len(keys))
                microbatch_works = [self.microbatches.pop(key) for key in keys[:count]]
                self.thread = threading.get_ident()
            failure = None
            try:
                self.delivery.deliver(microbatch_works, slots)
            except BaseException as error:
                failure = error
                raise
            finally:
                with _SLOT_LOCK:
                    self.thread = None
                    self._finish(slots, failure)
        self.delivery.notify_observers(microbatch_works)
        return len(microbatch_works)

    def _finish(self, slots: Iterable[GradientSlot], failure: BaseException | None) -> None:
        """End a computation: replace the lazy gradients that it completed by the real ones.

        Args:
            slots: the slots that had a pending part when the computation began.
            failure: the error that ended the computation; None if it succeeded.
        """
        self.computed = ()
        if failure is not None:
            for slot in slots:
                slot.failure = failure
        if self.microbatches:
            waiting = {id(p) for work in self.works() for p in work.parameters}
            slots = [slot for slot in slots if slot.key not in waiting]
        else:
            self._release()
        GradientSlot.resolve(slots)

    @contextlib.contextmanager
    def hide_lazy_gradients(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context in which lazy gradients are removed from ``.grad``, for a trace of the
        parameters.
        """
        with _SLOT_LOCK:
            pairs = [(slot, leaf) for leaf in parameters if (slot := GradientSlot.of(leaf))]
            for slot, parameter in pairs:
                slot.hidden, parameter.grad = True, None
        try:
            yield
        finally:
            with _SLOT_LOCK:
                for slot, parameter in pairs:
                    slot.hidden = False
                    if slot.armed and parameter.grad is None:  # else another thread computed it
                        parameter.grad = slot.lazy

    def discard_all(self) -> None:
        """Drop all pending work, and restore every ``.grad`` to the value before its pending
        part.
        """
        with self._computing, _SLOT_LOCK:
            self.microbatches.clear()
            for slot in self._live_slots():
                slot.drop(slot.parameter())
            self._release()

    def sweep(self) -> None:
        """Drop pending work for lazy gradients that were freed."""
        with _SLOT_LOCK:
            self._live_slots()

    def _live_slots(self) -> list[GradientSlot]:
        """Drop pending work for lazy gradients that were freed.

        Returns:
            the slots of the other lazy gradients.
        """
        armed = [slot for slot in self._slots.values() if slot.armed]
        present = [
            slot
            for slot in armed  # the common case, without a call
            if ((parameter := slot.parameter()) is not None and parameter.grad is slot.lazy)
            or slot.is_present()
        ]
        if len(present) < len(armed):
            gone = [slot for slot in armed if not slot.is_present()]
            for slot in gone:
                slot.drop()
            self.drop({slot.key for slot in gone})
        return present

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the pending gradients of parameters, passed as their ``id``."""
        works = self.works()
        for work in works:
            work.drop(parameters)
        if empty := [work for work in works if work.is_empty]:
            self.remove(empty)

    def remove(self, works: Collection[PendingWork]) -> None:
        """Remove work from the queue, without running it."""
        with _SLOT_LOCK:
            for key, queued in [*self.microbatches.items()]:
                left = [work for work in queued if work not in works]
                if left:
                    self.microbatches[key] = left
                else:
                    del self.microbatches[key]
            if not self.microbatches:
                self._release()


class _QueueReference:
    """Attribute of a parameter that keeps a queue alive after the queue's module was freed."""

    def __init__(self, queue: PendingQueue) -> None:
        self.queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty OrderedDict: a copy of a parameter has no pending gradient."""
        return OrderedDict, ()
