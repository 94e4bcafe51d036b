"""Refusal of inputs that a module writes into and that share memory with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.runtime.activations.saved_tensors import State

from .functions import SplitFunctions


def refuse_overlap(functions: SplitFunctions, leaves: Sequence[Any], state: State) -> None:
    """Raise SplitError where an input that the module writes into shares its storage with
    another input, a parameter or a buffer: the graph was captured as if it did not. One tensor
    that is several inputs was captured as one.
    """
    inputs = zip(functions.capture.inputs, leaves, strict=True)
    tensors = [pair for pair in inputs if isinstance(pair[1], Tensor)]
    owners: dict[int, dict[int, list[str]]] = {}
    for kind in (tensors, {id(t): (n, t) for n, t in state.items()}.values()):
        for name, tensor in kind:
            storage = tensor.untyped_storage().data_ptr()
            owners.setdefault(storage, {}).setdefault(id(tensor), []).append(name)
    for sharing in owners.values():
        names = [name for each in sharing.values() for name in each]
        written = [name for name in names if name in functions.updated_inputs]
        if written and len(sharing) > 1:
            others = [name for name in names if name != written[0]]
            raise SplitError(
                f"the module writes into {written[0]}, which shares its memory with "
                f"{', '.join(others)}; pass a clone"
            )
