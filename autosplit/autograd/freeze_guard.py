"""Refuse what would lose weight gradients that are still pending: freezing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.text.names import few


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
