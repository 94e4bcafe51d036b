"""``StepGuard``: an optimizer pre-step hook that computes pending weight gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.autograd.lazy.lazy_gradient_set import LazyGradients
from autosplit.torch_internals.tracing import untraced


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
