"""DTensors outside of graphs, local tensors inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import STATE
from autosplit.runtime.activations.saved_tensors import State
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, local_tensor


class DTensorValues:
    """Unwraps DTensors that a module's graphs take, and wraps what comes of them.

    Args:
        shardings: role of what is a DTensor -> how it lies over ranks; of gradients, how they lie
            when they are made, which need not be how their parameter does.
    """

    def __init__(self, shardings: Mapping[Role, Sharding]) -> None:
        self._shardings = shardings
        self._state = [role.name for role in shardings if role.kind in STATE]
        self._kinds = {role.kind for role in shardings}

    def __bool__(self) -> bool:
        return bool(self._shardings)

    def local_state(self, state: State) -> State:
        """Parameters and buffers as graphs take them."""
        if not self._state:
            return state
        return {**state, **{name: local_tensor(state[name]) for name in self._state}}

    def local(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Values of a kind as graphs take them; those that are no tensors are left alone.

        Raises:
            SplitError: one that was a DTensor when the module was traced is none.
        """
        if kind not in self._kinds:
            return list(values)
        pairs = zip(names, values, strict=True)
        return [self._local(Role(kind, name), value) for name, value in pairs]

    def whole(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Values of a kind as the user gets them."""
        if kind not in self._kinds:
            return list(values)
        known = [self._shardings.get(Role(kind, name)) for name in names]
        return [
            value if lies is None or value is None else lies.whole(value)
            for value, lies in zip(values, known, strict=True)
        ]

    def _local(self, role: Role, value: Any) -> Any:
        lies = self._shardings.get(role)
        if lies is None or not isinstance(value, Tensor):
            return value
        if not is_dtensor(value):
            raise SplitError(
                f"the {role} was a DTensor ({lies}) when the module was traced, and is a plain "
                f"tensor {list(value.shape)} now; pass a DTensor"
            )
        return lies.local(value)


def local_tensors(values: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
    """Accumulators as graphs take them."""
    return None if values is None else [local_tensor(each) for each in values]
