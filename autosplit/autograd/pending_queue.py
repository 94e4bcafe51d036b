"""``PendingQueue``: microbatches whose weight gradients are pending, oldest first.

``StepGuard``: an optimizer pre-step hook that computes pending weight gradients.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.autograd.lazy.gradient_slot import GradientSlot
from autosplit.autograd.lazy.lazy_gradient_set import LazyGradients
from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import at_end_of_backward, current_backward
from autosplit.torch_internals.state import distinct_storage_bytes
from autosplit.torch_internals.tracing import untraced

from .pending_work import PendingWork


class PendingGradients(Protocol):
    """A queue of pending weight gradients."""

    lazies: LazyGradients

    @property
    def pending(self) -> int:
        """Number of pending microbatches."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that they are for."""

    def compute(self) -> None:
        """Compute them."""


class StepGuard:
    """Computes what is pending for an optimizer's parameters before its ``step()``, in which
    compiled code, or kernels in C++, could meet a lazy gradient.

    torch keeps such hooks in one global list; this one is there from the first ``install()`` on
    and goes when its owner is collected.
    """

    def __init__(self, owner: PendingGradients) -> None:
        self._owner = weakref.ref(owner)
        self._installed = False

    def install(self) -> None:
        """Register the hook, once."""
        owner = self._owner()
        if not self._installed and owner is not None:
            self._installed = True
            handle = register_optimizer_step_pre_hook(self._compute)
            weakref.finalize(owner, handle.remove)

    @untraced
    def _compute(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = self._owner()
        if owner is None:
            return
        if owner.pending:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(parameter) in stepped for _, parameter in owner.named_parameters()):
                owner.compute()


W = TypeVar("W", bound=PendingWork)


@dataclass
class PendingBound:
    """How many microbatches may wait for W.

    Attributes:
        limit: the number; ``math.inf`` for no bound.
        given: whether the caller chose it, who then says when W runs. Where nobody did, a W that
            writes more than gradients runs at the end of its backward: no lazy gradient stands
            before what it writes.
        early: how many had W computed because of it.

    Raises:
        SplitError: the limit is less than 1 or no number.
    """

    limit: float = 1
    given: bool = False
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


class PendingQueue(Generic[W]):
    """Microbatches between I and W, behind lazy gradients. Several threads may add and compute.

    Args:
        deliver: computes the gradients of microbatches, in their order, and adds them to ``.grad``.
        bound: how many may wait.

    Attributes:
        bound: as given.
    """

    def __init__(
        self, deliver: Callable[[Iterable[Sequence[W]]], None], bound: PendingBound
    ) -> None:
        self._deliver = deliver
        self.bound = bound
        self._lock = threading.RLock()  # never held while anything is computed
        self._computing = threading.RLock()
        self._microbatches: dict[Hashable, list[W]] = {}
        self._guard = StepGuard(self)
        self.lazies = LazyGradients(self)

    @property
    def pending(self) -> int:
        """Number of pending microbatches."""
        if self._microbatches:
            self.sweep()
        return len(self._microbatches)

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that they hold."""
        self.sweep()
        return distinct_storage_bytes(t for each in self.works() for t in each.tensors)

    def works(self) -> list[W]:
        """All pending work, oldest first."""
        with self._lock:
            return [each for works in self._microbatches.values() for each in works]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that gradients are pending for."""
        named = {id(p): (name, p) for each in self.works() for name, p in each.named_parameters()}
        yield from named.values()

    def add(self, microbatch: Hashable, work: W) -> None:
        """Queue work, after earlier work of this microbatch."""
        while True:
            with self._lock:
                blocking = self.lazies.promise(work.parameters, dense=work.dense)
                if blocking is None:
                    self._microbatches.setdefault(microbatch, []).append(work)
                    self._guard.install()
                    held, self.lazies.held = self.lazies.held, False
                    break
            blocking.compute()
        if held or (work.due and not self.bound.given):  # read without asking us
            at_end_of_backward(self.compute)
        elif len(self._microbatches) > self.bound.limit:
            at_end_of_backward(lambda: self._leave(self.bound.limit))

    def make_room(self) -> None:
        """Before a forward: compute the oldest microbatches, so that its own may wait."""
        if self._microbatches and torch.is_grad_enabled() and current_backward() < 0:
            self._leave(self.bound.limit - 1)

    def _leave(self, waiting: float) -> None:
        """Compute the oldest microbatches until so many wait, unless another thread computes."""
        if self._computing.acquire(blocking=False):
            try:
                excess = self.pending - waiting
                if excess > 0:
                    self.compute(int(excess))
                    self.bound.early += int(excess)
            finally:
                self._computing.release()

    def compute(self, microbatches: int | None = None) -> None:
        """Compute the oldest microbatches, all where None, and accumulate them into ``.grad``.

        Raises:
            SplitError: fewer than asked for are pending; they cannot be computed; or another
                thread is at it, and waiting for it from inside a ``backward()`` could block both.
        """
        with self.computing():
            with self._lock:
                lifted = self.lazies.lift()
                try:
                    taken = self._take(microbatches)
                except SplitError:
                    self.lazies.settle(lifted)
                    raise
            with self.settling(lifted):
                self._deliver(taken)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock on computation: one thread computes at a time."""
        if not self._computing.acquire(blocking=current_backward() < 0):
            raise SplitError(
                "a pending weight gradient is used inside a backward() while another thread "
                "computes it; call backward_weight() before the threads part"
            )
        try:
            with torch.inference_mode(False):
                yield
        finally:
            self._computing.release()

    @contextlib.contextmanager
    def settling(self, lifted: list[GradientSlot]) -> Iterator[None]:
        """Settle lifted slots at the end; where their computation fails, ``.grad`` raises."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._lock:
                self.lazies.settle(lifted, failure)

    @contextlib.contextmanager
    def hidden(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Take lazy gradients out of ``.grad`` while parameters are traced."""
        with self._lock:
            self.lazies.hide(parameters)
        try:
            yield
        finally:
            with self._lock:
                self.lazies.show()

    def compute_for(self, parameter: Tensor) -> None:
        """Compute everything: hooks and sums then see microbatches in their order."""
        self.compute()

    def waiting(self) -> set[int]:
        """The parameters (their ``id``) that something is pending for."""
        return {id(parameter) for work in self.works() for parameter in work.parameters}

    def discard(self) -> None:
        """Forget all pending work and restore every ``.grad``."""
        with self._lock:
            self._microbatches.clear()
            self.lazies.discard()

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""
        with self._lock:
            self.lazies.sweep()

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the pending gradients of these parameters (their ``id``)."""
        with self._lock:
            self.lazies.drop(parameters)

    def forget(self, works: Collection[object]) -> None:
        """Remove work of which no gradient is wanted any more."""
        with self._lock:
            for key, queued in [*self._microbatches.items()]:
                left = [each for each in queued if each not in works or each.due]
                if left:
                    self._microbatches[key] = left
                else:
                    del self._microbatches[key]

    def _take(self, microbatches: int | None) -> list[list[W]]:
        """The oldest microbatches, all where None; they are not pending any more.

        Raises:
            SplitError: fewer than asked for are pending.
        """
        keys = list(self._microbatches)
        count = len(keys) if microbatches is None else checked(microbatches, len(keys), self.bound)
        return [self._microbatches.pop(key) for key in keys[:count]]


def checked(microbatches: int, pending: int, bound: PendingBound) -> int:
    """Validate a number of microbatches to compute.

    Args:
        microbatches: how many are asked for.
        pending: how many there are.
        bound: how many may wait.

    Raises:
        SplitError: fewer are pending.
    """
    if not 1 <= microbatches <= pending:
        ask = f"ask for 1 to {pending}, or for all, without a number"
        if not pending:
            ask = (
                "call loss.backward() first (each is one pending microbatch); without a number, "
                "backward_weight() computes what there is"
            )
        if bound.early:
            ask += f". max_pending={bound.limit} had {bound.early} computed before; raise it"
        raise SplitError(f"backward_weight(microbatches={microbatches}): {pending} pending; {ask}")
    return microbatches
