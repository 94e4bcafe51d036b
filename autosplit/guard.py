"""Refuse what would lose weight gradients that are still pending: an optimizer's step, freezing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import SplitError
from .listing import few


class Waiting(Protocol):
    """Whoever has weight gradients pending."""

    @property
    def pending(self) -> int:
        """How many microbatches."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that they are for."""


def refuse_frozen(waiting: Iterable[tuple[str, Tensor]]) -> None:
    """Stand before a delivery: autograd drops the gradient of what does not require one.

    Args:
        waiting: name -> parameter that has a gradient coming.

    Raises:
        SplitError: one of them was frozen meanwhile.
    """
    frozen = [name for name, parameter in waiting if not parameter.requires_grad]
    if frozen:
        raise SplitError(
            f"requires_grad of {few(frozen)} was switched off between the forward and "
            "backward_weight(), whose gradient would be lost; call backward_weight() before "
            "freezing, and start this step again"
        )


class StepGuard:
    """Stands before every optimizer's ``step()``, and refuses while something is pending.

    torch keeps such hooks in one global list; this one is there from the first ``stand`` on
    and goes when its owner is collected.
    """

    def __init__(
        self, owner: Waiting, advice: str = "backward_weight() on the split module"
    ) -> None:
        """``advice`` is what to call, for the message."""
        self._owner = weakref.ref(owner)
        self._advice = advice
        self._stands = False

    def stand(self) -> None:
        """Be there from now on."""
        owner = self._owner()
        if not self._stands and owner is not None:
            self._stands = True
            handle = register_optimizer_step_pre_hook(self._check)
            weakref.finalize(owner, handle.remove)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = self._owner()
        if owner is None or not owner.pending:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        waiting = [name for name, parameter in owner.named_parameters() if id(parameter) in stepped]
        if waiting:
            raise SplitError(
                f"optimizer.step() while {owner.pending} microbatch(es) of weight gradients are "
                f"pending for {few(waiting)}; call {self._advice} first"
            )
