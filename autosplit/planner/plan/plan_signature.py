"""Plan signatures: the model and the microbatch inputs that a plan is valid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autosplit.errors import PlanError
from autosplit.torch_internals.pytree import tree_flatten

from .validation import check_types


@dataclass(frozen=True)
class Input:
    """A tensor that the model takes, of one microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        check_types(self)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class PlanSignature:
    """The model and the inputs of one microbatch that a plan is valid for.

    Attributes:
        model: its class, for messages.
        blocks: the names of its blocks in order.
        inputs: the tensors among its inputs.

    Raises:
        PlanError: a value of another type, or a model without blocks.
    """

    model: str
    blocks: tuple[str, ...]
    inputs: tuple[Input, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.blocks:
            raise PlanError("'blocks' must name at least one block of the model")

    def check(self, came: PlanSignature) -> None:
        """Refuse another model, or other inputs.

        Raises:
            PlanError: says what the plan was made for, and what came.
        """
        if self.blocks != came.blocks:
            raise PlanError(
                f"the plan was made for a {self.model} of {len(self.blocks)} blocks, but this "
                f"{came.model} has {len(came.blocks)}: {_difference(self.blocks, came.blocks)}; "
                "plan again for this model"
            )
        if self.inputs != came.inputs:
            raise PlanError(
                f"the plan was made for microbatches of {_listed(self.inputs)}, but came "
                f"{_listed(came.inputs)}: give inputs of that size, or plan again"
            )


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Input, ...]:
    """The tensors among a model's arguments."""
    named = [(f"args[{place}]", value) for place, value in enumerate(args)]
    named += list((kwargs or {}).items())
    found = []
    for name, value in named:
        leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        for place, leaf in enumerate(leaves):
            full = name if isinstance(value, Tensor) else f"{name}, tensor {place}"
            dtype = str(leaf.dtype).removeprefix("torch.")
            found.append(Input(full, tuple(leaf.shape), dtype))
    return tuple(found)


def _difference(made: Sequence[str], came: Sequence[str]) -> str:
    for place, (one, other) in enumerate(zip(made, came, strict=False)):
        if one != other:
            return f"block {place} was {one!r}, and is {other!r}"
    longer, what = (made, "has no") if len(made) > len(came) else (came, "has the further")
    return f"it {what} {longer[min(len(made), len(came))]!r}"


def _listed(inputs: Sequence[Input]) -> str:
    return ", ".join(map(str, inputs)) or "no tensors"
