"""Inputs that a module writes into must not share memory with anything else it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .errors import SplitError
from .functions import SplitFunctions
from .handover import State


def refuse_overlap(functions: SplitFunctions, leaves: Sequence[Any], state: State) -> None:
    """Raise SplitError where an input that the module writes into shares its storage with
    another input, a parameter or a buffer: the graph was captured as if it did not.
    """
    names = functions.capture.inputs
    tensors = [(n, leaf) for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    owners: dict[int, list[str]] = {}
    for name, tensor in (*tensors, *{id(t): (n, t) for n, t in state.items()}.values()):
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for sharing in owners.values():
        written = [name for name in sharing if name in functions.updated_inputs]
        if written and len(sharing) > 1:
            others = [name for name in sharing if name != written[0]]
            raise SplitError(
                f"the module writes into {written[0]}, which shares its memory with "
                f"{', '.join(others)}; pass a clone"
            )
