"""Before an optimizer steps, what is pending for its parameters is computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autosplit.torch_internals.tracing import untraced

from .lazy_gradient_set import LazyGradients


class Waiting(Protocol):
    """Whoever has weight gradients pending."""

    lazies: LazyGradients

    @property
    def pending(self) -> int:
        """How many microbatches."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that they are for."""

    def compute(self) -> None:
        """Compute them."""


class StepGuard:
    """Stands before every optimizer's ``step()``: computes what is pending for its parameters,
    before a compiled step, or kernels in C++, could meet a lazy gradient.

    torch keeps such hooks in one global list; this one is there from the first ``stand`` on
    and goes when its owner is collected.
    """

    def __init__(self, owner: Waiting) -> None:
        self._owner = weakref.ref(owner)
        self._stands = False

    def stand(self) -> None:
        """Be there from now on."""
        owner = self._owner()
        if not self._stands and owner is not None:
            self._stands = True
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
        owner.lazies.reclaim()
