"""``PendingWork``: W of one backward through one graph, not run yet, and the queue of it.

Every face has the same: split modules, models that are split graph by graph, and compiled ones
queue pending work in a ``PendingQueue``, behind lazy gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import (
    at_end_of_backward,
    current_backward,
    untraced,
    without_autocast,
)
from autosplit.torch_internals.state import distinct_storage_bytes

from .lazy_gradient import NOTING, GradientSlot
from .lazy_gradients import LazyGradients

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
        backward: number of the backward in autograd's engine; later ones have higher numbers.
        early: weight gradients that I made, in the order of ``graph.early_parameters``.
        owner: of what the forward read as a parameter, the parameter that has its gradient in the
            end: the sharded one of a gathered one; None where each is its own.
        writes: how often each sharded parameter was written when the forward ran.
        sequence: of the graph's call; a backward runs higher ones first.
    """

    graph: SplitFunctions
    deferred: Residuals
    state: State
    skipped: frozenset[str] = frozenset()
    backward: int = -1
    early: Sequence[Tensor] = ()
    owner: Callable[[Tensor], Tensor] | None = None
    writes: Sequence[int] = ()
    sequence: int = 0

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
        own = self.owner
        return [(n, leaf if own is None else own(leaf)) for n, leaf in self.named_leaves()]

    @property
    def parameters(self) -> list[Tensor]:
        """The same without their names."""
        if not self.skipped and self.owner is None and type(self.state) is dict:  # as a rule
            return [self.state[name] for name in self.graph.parameter_names]
        return [parameter for _, parameter in self.named_parameters()]

    def named_gradients(self) -> dict[str, Tensor]:
        """Run W. Gradients by name, skipped ones too, each a tensor of its own.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        with without_autocast():
            gradients = self.gradients()
        borrowed = self.graph.dependence.borrowed
        named = zip(self.graph.parameter_names, gradients, strict=True)
        return {name: grad.clone() if name in borrowed else grad for name, grad in named}

    def gradients(self) -> Sequence[Tensor]:
        """Run W. Gradients in the order of ``graph.parameter_names``, skipped ones too, of which
        those that are ``graph.borrowed`` may share memory.
        """
        graph = self.graph
        late = graph.backward_weight(self.deferred)
        if not graph.early_parameters:
            return late
        found = dict(zip(graph.early_parameters, self.early, strict=True))
        found |= zip(graph.late_parameters, late, strict=True)
        return [found[name] for name in graph.parameter_names]

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of these parameters (their ``id``)."""
        found = [name for name, each in self.named_parameters() if id(each) in parameters]
        self.skipped = self.skipped.union(found)


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
        if isinstance(self.limit, bool) or not self.limit >= 1:
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
        if not 1 <= microbatches <= pending:
            ask = f"ask for 1 to {pending}, or for all, without a number"
            if not pending:
                ask = (
                    "call loss.backward() first (each is one pending microbatch); without a "
                    "number, backward_weight() computes what there is"
                )
            if self.early:
                ask += f". max_pending={self.limit} had {self.early} computed before; raise it"
            raise SplitError(
                f"backward_weight(microbatches={microbatches}): {pending} pending; {ask}"
            )
        return microbatches


class PendingQueue:
    """Microbatches between I and W, oldest first, behind lazy gradients. Several threads may add
    and compute.

    Args:
        deliver: computes.
        bound: how many may wait.

    Attributes:
        deliver: as given.
        bound: as given.
        microbatches: what ``backward()`` left of each; some of it may not be wanted any more.
        thread: which thread computes; None where none does.
    """

    def __init__(self, deliver: Delivery, bound: PendingBound) -> None:
        self.deliver = deliver
        self.bound = bound
        self._computing = threading.RLock()
        self.thread: int | None = None
        self.microbatches: dict[Hashable, list[PendingWork]] = {}
        self._guarded = False
        self.lazies = LazyGradients(self)

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
        return distinct_storage_bytes(t for each in self.works() for t in each.tensors)

    def works(self) -> list[PendingWork]:
        """All pending work, oldest first."""
        with NOTING:
            return [each for works in self.microbatches.values() for each in works]

    def parameters(self) -> list[Tensor]:
        """The parameters that gradients are pending for, or being computed."""
        with NOTING:
            return self.lazies.parameters()

    def add(self, microbatch: Hashable, work: PendingWork) -> None:
        """Queue work, after earlier work of this microbatch."""
        while True:
            with NOTING:
                blocking = self.lazies.promise(work.parameters)
                if blocking is None:
                    self.microbatches.setdefault(microbatch, []).append(work)
                    if not self._guarded:
                        self._guard()
                    held, self.lazies.held = self.lazies.held, False
                    break
            blocking.compute()
        if held:  # read without asking us
            at_end_of_backward(self.compute)
        elif len(self.microbatches) > self.bound.limit:
            at_end_of_backward(lambda: self._leave(self.bound.limit))

    def _guard(self) -> None:
        """Compute what is pending for an optimizer's parameters before its ``step()``, in which
        compiled code, or kernels in C++, could meet a lazy gradient.

        torch keeps such hooks in one global list; this one goes when the queue is collected.
        """
        self._guarded, reference = True, weakref.ref(self)

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
            self._leave(self.bound.limit - 1)

    def _leave(self, waiting: float) -> None:
        """Compute the oldest microbatches until so many wait, unless another thread computes."""
        if self.thread is None and self.pending > waiting:
            self.bound.early += self.compute(leave=waiting)

    def compute(self, microbatches: int | None = None, *, leave: float = 0) -> int:
        """Compute the oldest microbatches, and accumulate them into ``.grad``; behind another
        thread that is at it.

        Args:
            microbatches: how many; None: all,
            leave: but for the latest ones, so many.

        Returns:
            how many.

        Raises:
            SplitError: fewer than asked for are pending; or they cannot be computed.
        """
        return compute_pending([self], lambda: self._take(microbatches, leave), self.deliver)

    def enter(self) -> int | None:
        """Begin to compute, one thread at a time.

        Returns:
            what is given back to ``leave``.
        """
        self._computing.acquire()
        before, self.thread = self.thread, threading.get_ident()
        return before

    def leave(self, before: int | None) -> None:
        """Have computed."""
        self.thread = before
        self._computing.release()

    @contextlib.contextmanager
    def hidden(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Take lazy gradients out of ``.grad`` while parameters are traced."""
        with NOTING:
            found = [(slot, each) for each in parameters if (slot := GradientSlot.of(each))]
            for slot, parameter in found:
                slot.hidden, parameter.grad = True, None
        try:
            yield
        finally:
            with NOTING:
                for slot, parameter in found:
                    slot.hidden = False
                    if slot.armed and parameter.grad is None:  # else another thread computed it
                        parameter.grad = slot.lazy

    def compute_for(self, parameter: Tensor, sources: Iterable[PendingQueue]) -> None:
        """Compute everything: hooks and sums then see microbatches in their order."""
        self.compute()

    def waiting(self) -> set[int]:
        """The parameters (their ``id``) that something is pending for."""
        return {id(parameter) for work in self.works() for parameter in work.parameters}

    def discard(self) -> None:
        """Forget all pending work and restore every ``.grad``."""
        with self._computing, NOTING:
            self.microbatches.clear()
            self.lazies.discard()

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""
        with NOTING:
            self.lazies.sweep()

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the pending gradients of these parameters (their ``id``)."""
        with NOTING:
            self.lazies.drop(parameters)

    def forget(self, works: Collection[PendingWork]) -> None:
        """Remove work of which no gradient is wanted any more."""
        with NOTING:
            for key, queued in [*self.microbatches.items()]:
                left = [each for each in queued if each not in works]
                if left:
                    self.microbatches[key] = left
                else:
                    del self.microbatches[key]

    def _take(self, microbatches: int | None, leave: float) -> list[list[PendingWork]]:
        """The oldest microbatches; they are not pending any more.

        Raises:
            SplitError: fewer than asked for are pending.
        """
        keys = list(self.microbatches)
        return [
            self.microbatches.pop(key)
            for key in keys[: self.bound.count(microbatches, leave, len(keys))]
        ]


def compute_pending(
    queues: Sequence[PendingQueue], take: Callable[[], list[list[PendingWork]]], deliver: Delivery
) -> int:
    """Compute microbatches of some queues, one thread at a time. Where that fails, ``.grad`` raises
    when it is used.

    Nothing in here waits for autograd's engine, so that whoever waits for this may be one of its
    threads.

    Args:
        queues: in which they may wait.
        take: removes them from there.
        deliver: computes.

    Returns:
        how many.

    Raises:
        SplitError: fewer than asked for are pending; or they cannot be computed.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return compute_pending(queues, take, deliver)
    # In one order, or two threads wait for each other.
    entered = [(queue, queue.enter()) for queue in sorted(queues, key=id)]
    begun: list[tuple[PendingQueue, list[GradientSlot]]] = []
    started, failure = False, None
    try:
        with NOTING:
            begun += [(queue, queue.lazies.begin()) for queue in queues]
            taken = take()
        started = True
        deliver(taken, {slot.key: slot for _, slots in begun for slot in slots})
    except BaseException as error:
        failure = error if started else None
        raise
    finally:
        try:
            with NOTING:
                for queue, slots in begun:
                    queue.lazies.settle(slots, failure)
        finally:
            for queue, before in entered:
                queue.leave(before)
    deliver.announce(taken)
    return len(taken)
