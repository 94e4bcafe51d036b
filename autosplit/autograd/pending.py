"""``PendingWork``: W of one backward through one graph, not run yet, and the queue of it.

Every face has the same: split modules, models that are split graph by graph, and compiled ones
queue pending work in a ``PendingQueue``, behind lazy gradients: it installs them in ``.grad``,
replaces them by real ones, and drops what is pending for those that are neither there nor anywhere
else any more, as ``.grad`` was cleared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import (
    any_referenced,
    at_end_of_backward,
    current_backward,
    untraced,
)
from autosplit.torch_internals.state import distinct_storage_bytes

from .lazy_gradient import _SLOT_LOCK, GradientSlot, LazyGradient, pending_slot

if TYPE_CHECKING:
    from .delivery import Delivery


@dataclasses.dataclass(slots=True, eq=False)
class PendingWork:
    """Pending W of one backward through one graph.

    Attributes:
        graph: what runs W.
        deferred: residuals of I.
        state: parameters and buffers as they were in the forward; of parameters that are gone
            since it may have none.
        skipped: parameters that get no gradient: no output that depends on them took part, or
            the gradient was dropped.
        early: weight gradients that I made, in the order of ``graph.early_parameters``.
        owner: of what the forward read as a parameter, the parameter that has its gradient in the
            end: the sharded one of a gathered one; None where each is its own.
        writes: how often each sharded parameter was written when the forward ran.
        leaves: the parameters of ``graph.parameter_names``, where nothing is more to be known.
        slots: theirs, once this is queued.
    """

    graph: SplitFunctions
    deferred: Residuals
    state: State
    skipped: frozenset[str] = frozenset()
    early: Sequence[Tensor] = ()
    owner: Callable[[Tensor], Tensor] | None = None
    writes: Sequence[int] = ()
    leaves: Sequence[Tensor] | None = None
    slots: Sequence[GradientSlot] = ()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that it keeps alive, parameters and buffers left out."""
        return (*self.deferred.tensors, *self.early)

    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """The leaves that W's gradients are of: those of the forward, wherever they are now."""
        named = [
            (n, self.state.get(n)) for n in self.graph.parameter_names if n not in self.skipped
        ]
        return [(name, leaf) for name, leaf in named if leaf is not None]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters that get a gradient."""
        owner = self.owner
        return [(n, leaf if owner is None else owner(leaf)) for n, leaf in self.named_leaves()]

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The same without their names."""
        if self.leaves is not None and not self.skipped:  # as a rule
            return self.leaves
        return [parameter for _, parameter in self.named_parameters()]

    def gradients(self) -> Sequence[Tensor]:
        """Run W. Gradients in the order of ``graph.parameter_names``, skipped ones too, of which
        those that are ``graph.borrowed`` may share memory.
        """
        graph = self.graph
        late = graph.backward_weight(self.deferred)
        if not graph.early_parameters:
            return late
        gradients = dict(zip(graph.early_parameters, self.early, strict=True))
        gradients |= zip(graph.late_parameters, late, strict=True)
        return [gradients[name] for name in graph.parameter_names]

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of these parameters (their ``id``)."""
        names = [name for name, parameter in self.named_parameters() if id(parameter) in parameters]
        self.skipped = self.skipped.union(names)


@dataclasses.dataclass
class PendingBound:
    """How many microbatches may wait for W.

    Attributes:
        limit: the number; ``math.inf`` for no bound.
        early: how many had W computed because of it.

    Raises:
        SplitError: the limit is less than 1 or no number.
    """

    limit: float = 1
    early: int = 0

    def __post_init__(self) -> None:
        if type(self.limit) not in (int, float) or not self.limit >= 1:
            raise SplitError(
                f"max_pending must be at least 1, or math.inf for no bound; got {self.limit!r}"
            )

    def text(self) -> list[str]:
        """For a report."""
        if not self.early:
            return []
        return [
            f"{self.early} microbatch(es) had their weight gradients computed by the next forward, "
            f"because {self.limit} may wait; max_pending= lets more."
        ]

    def count(self, microbatches: int | None, leave: float, pending: int) -> int:
        """How many microbatches to compute, of those that are pending.

        Args:
            microbatches: how many are asked for; None: all,
            leave: but for so many.
            pending: so many are.

        Raises:
            SplitError: fewer than asked for are pending.
        """
        if microbatches is None:
            return int(max(0, pending - leave))
        if not isinstance(microbatches, int) or not 1 <= microbatches <= pending:
            ask = f"ask for 1 to {pending}, or for all, without a number"
            if not pending:
                ask = (
                    "call loss.backward() first (each is one pending microbatch); without a "
                    "number, backward_weight() computes what there is"
                )
            if self.early:
                ask += f". max_pending={self.limit} had {self.early} computed before; raise it"
            raise SplitError(
                f"backward_weight(microbatches={microbatches!r}): {pending} pending; {ask}"
            )
        return microbatches


_GRAD = attrgetter("grad")
_FEW = 64


class PendingQueue:
    """Microbatches between I and W, oldest first, behind lazy gradients. Several threads may add
    and compute.

    Args:
        delivery: computes.
        bound: how many may wait.

    Attributes:
        delivery: as passed.
        bound: as passed.
        microbatches: what ``backward()`` left of each; some of it may not be wanted any more.
        thread: which thread computes; None where none does.
        shares: whether work of other queues may be here, and the other way round.
    """

    shares = True

    def __init__(self, delivery: Delivery, bound: PendingBound) -> None:
        self.delivery = delivery
        self.bound = bound
        self._computing = threading.RLock()
        self.thread: int | None = None
        self.microbatches: dict[Hashable, list[PendingWork]] = {}
        self._has_step_hook = False
        # Whether somebody refers to a sum whose place a lazy gradient has taken: it is to be right
        # when the backward is over.
        self._sum_is_referenced = False
        self._slots: dict[int, GradientSlot] = {}
        self._limit = _FEW
        self._latest: tuple[Sequence[Tensor] | None, Sequence[GradientSlot]] = None, ()
        self._keepers: list[weakref.ref[Tensor]] = []
        self._mark = f"_autosplit_pending_{id(self)}"

    def __del__(self) -> None:
        """Let gradients outlive the model: Python frees it together with its parameters and this
        queue, which whoever holds a gradient, or a parameter, keeps from now on.
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
    def pending(self) -> int:
        """Number of pending microbatches."""
        if self.microbatches:
            self.sweep()
        return len(self.microbatches)

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that they hold."""
        self.sweep()
        return distinct_storage_bytes(t for work in self.works() for t in work.tensors)

    def works(self) -> list[PendingWork]:
        """All pending work, oldest first."""
        with _SLOT_LOCK:
            return [work for works in self.microbatches.values() for work in works]

    def parameters(self) -> list[Tensor]:
        """The parameters that gradients are pending for, or being computed."""
        with _SLOT_LOCK:
            parameters = [slot.parameter() for slot in self._slots.values() if slot.armed]
        return [parameter for parameter in parameters if parameter is not None]

    def add(self, microbatch: Hashable, work: PendingWork, *, moved: bool = False) -> None:
        """Queue work, after earlier work of this microbatch; where a gradient of a parameter that
        it has is pending in another queue, there. ``moved``: whether it comes from another queue.
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
        if sum_is_referenced:  # read without asking us
            at_end_of_backward(self.compute)
        elif len(self.microbatches) > self.bound.limit:
            at_end_of_backward(lambda: self._compute_down_to(self.bound.limit))

    def _install_lazy_gradients(self, work: PendingWork) -> GradientSlot | None:
        """Put lazy gradients into ``.grad`` of the parameters of some work.

        Returns:
            None; or a slot to be computed first, and then promise again: a gradient that was
            pending before is referenced elsewhere, and not in its ``.grad``, or it is pending in
            another queue.
        """
        parameters = work.parameters
        if not parameters:
            return None
        if not self._sum_is_referenced:
            sums = [
                g for g in map(_GRAD, parameters) if g is not None and type(g) is not LazyGradient
            ]
            self._sum_is_referenced = any_referenced(sums)
            del sums
        if parameters is not self._latest[0]:
            new_slots = [self._slot(parameter) for parameter in parameters]
            # Those of a compiled model, which has a new list each time, are not to be kept alive.
            self._latest = work.leaves if parameters is work.leaves else None, new_slots
        work.slots = slots = self._latest[1]
        for slot, parameter in zip(slots, parameters, strict=True):
            grad = parameter.grad
            if slot.armed:
                if grad is slot.lazy or slot.hidden:
                    continue
                self.sweep()
                if slot.armed:
                    return slot
            if type(grad) is LazyGradient:
                target = pending_slot(grad)
                if target is not None:
                    return target[0]
                grad, self._sum_is_referenced = grad.value(), True  # it stands for a real one
            slot.grad, slot.armed = grad, True
            try:
                parameter.grad = slot.new_lazy(parameter) if slot.lazy is None else slot.lazy
            except RuntimeError:  # the parameter has another shape, dtype or device by now
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
        """Let this live at least as long as the parameter, until nothing is pending."""
        if self._mark not in parameter.__dict__:
            parameter.__dict__[self._mark] = _QueueReference(self)
            self._keepers.append(weakref.ref(parameter))

    def _release(self) -> None:
        """Have no parameter keep this any more."""
        for reference in self._keepers:
            parameter = reference()
            if parameter is not None:
                parameter.__dict__.pop(self._mark, None)
        self._keepers.clear()

    def _register_step_hook(self) -> None:
        """Compute what is pending for an optimizer's parameters before its ``step()``, in which
        compiled code, or kernels in C++, could meet a lazy gradient.

        torch keeps such hooks in one global list; this one goes when the queue is collected.
        """
        self._has_step_hook, reference = True, weakref.ref(self)

        @untraced
        def compute(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            queue = reference()
            if queue is not None and (queue.thread or queue.pending):
                stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if not stepped.isdisjoint(map(id, queue.parameters())):
                    queue.compute()

        weakref.finalize(self, register_optimizer_step_pre_hook(compute).remove)

    def make_room(self) -> None:
        """Before a forward: compute the oldest microbatches, so that its own may wait."""
        if self.microbatches and torch.is_grad_enabled() and current_backward() < 0:
            self._compute_down_to(self.bound.limit - 1)

    def _compute_down_to(self, waiting: float) -> None:
        """Compute the oldest microbatches until so many wait, unless another thread computes."""
        if self.thread is None and self.pending > waiting:
            self.bound.early += self.compute(leave=waiting)

    def compute(self, microbatches: int | None = None, *, leave: float = 0) -> int:
        """Compute the oldest microbatches, and accumulate them into ``.grad``; behind another
        thread that is at it. Where that fails, ``.grad`` raises when it is used.

        Nothing in here waits for autograd's engine, so that whoever waits for this may be one of
        its threads.

        Args:
            microbatches: how many; None: all,
            leave: but for the latest ones, so many.

        Returns:
            how many.

        Raises:
            SplitError: fewer than asked for are pending; or they cannot be computed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.compute(microbatches, leave=leave)
        with self._computing:
            if self.thread is not None:  # by this thread, further out
                return 0
            with _SLOT_LOCK:
                begun = self._live_slots()
                keys = [*self.microbatches]
                count = self.bound.count(microbatches, leave, len(keys))
                microbatch_works = [self.microbatches.pop(key) for key in keys[:count]]
                for slot in begun:
                    slot.computing = True
                self.thread = threading.get_ident()
            failure = None
            try:
                self.delivery.deliver(microbatch_works, begun)
            except BaseException as error:
                failure = error
                raise
            finally:
                with _SLOT_LOCK:
                    self.thread = None
                    self._finish(begun, failure)
        self.delivery.announce(microbatch_works)
        return len(microbatch_works)

    def _finish(self, begun: Iterable[GradientSlot], failure: BaseException | None) -> None:
        """End a computation: what was pending when it began has been computed, or not."""
        works = self.works() if self.microbatches else ()
        waiting = {id(parameter) for work in works for parameter in work.parameters}
        for slot in begun:
            slot.computing = False
            if failure is not None:
                slot.failure = failure
        GradientSlot.resolve(s for s in begun if s.failure is None and s.key not in waiting)
        if not self.microbatches:
            self._release()

    @contextlib.contextmanager
    def hidden(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Take lazy gradients out of ``.grad`` while parameters are traced."""
        with _SLOT_LOCK:
            pairs = [(slot, each) for each in parameters if (slot := GradientSlot.of(each))]
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

    def discard(self) -> None:
        """Forget all pending work and restore every ``.grad``."""
        with self._computing, _SLOT_LOCK:
            self.microbatches.clear()
            for slot in self._live_slots():
                slot.drop(slot.parameter())
            self._release()

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""
        with _SLOT_LOCK:
            self._live_slots()

    def _live_slots(self) -> list[GradientSlot]:
        """Drop what is pending for every lazy gradient that was freed.

        Returns:
            The slots of the others.
        """
        armed = [slot for slot in self._slots.values() if slot.armed]
        present = [
            slot
            for slot in armed  # as a rule without a call
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
        """Drop the pending gradients of these parameters (their ``id``)."""
        works = self.works()
        for work in works:
            work.drop(parameters)
        self.forget([work for work in works if not work.parameters])

    def forget(self, works: Collection[PendingWork]) -> None:
        """Remove work of which no gradient is wanted any more."""
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
    """Attribute of a parameter: the queue that it keeps alive, which may outlive its module."""

    def __init__(self, queue: PendingQueue) -> None:
        self.queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter has no gradient; this is what any unpickler may load."""
        return OrderedDict, ()
