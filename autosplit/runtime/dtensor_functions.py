"""F, I, W and B of a module with DTensors, which its graphs take as local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import STATE
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor

from .compiled_graph import GradientGraph
from .functions import ForwardResult, SplitFunctions


class DTensorFunctions(SplitFunctions):
    """Unwraps DTensors that the graphs take, and wraps what comes of them; gradients as they lie
    over ranks when they are made, which need not be how their parameter does.
    """

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        lying = [role.name for role in self.capture.shardings if role.kind in STATE]
        state = {**state, **{name: local_tensor(state[name]) for name in lying}}
        leaves[:] = self._local(Kind.INPUT, self.capture.inputs, leaves)
        outputs, updates, saved = super().forward(state, leaves)
        results = len(self.output_names) - len(self.updated_inputs)
        names = self.output_names
        returned = self._whole(Kind.OUTPUT, names[:results], outputs[:results])
        written = self._whole(Kind.UPDATE, names[results:], outputs[results:])
        updates = self._whole(Kind.UPDATE, self.updated_state, updates)
        return ForwardResult([*returned, *written], updates, saved)

    def backward_input(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        self._lay_open(output_grads)
        grads, deferred, early = super().backward_input(
            saved, output_grads, _sums(gradients), dtype
        )
        early = self._gradients(self._input, early, gradients)
        return self._whole(Kind.INPUT_GRAD, self.capture.inputs, grads), deferred, early

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        made = super().backward_weight(deferred, _sums(gradients), dtype)
        return self._gradients(self._weight, made, gradients)

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        self._lay_open(output_grads)
        grads, made = super().backward(saved, output_grads, _sums(gradients), dtype)
        made = self._gradients(self._weight if self._passes_on else self._unsplit, made, gradients)
        return self._whole(Kind.INPUT_GRAD, self.capture.inputs, grads), made

    def _lay_open(self, output_grads: list[Tensor | None]) -> None:
        output_grads[:] = self._local(Kind.TANGENT, self.output_names, output_grads)

    def _gradients(
        self, graph: GradientGraph, made: Sequence[Tensor], into: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """Weight gradients as the user gets them: what they were added into, or new ones."""
        return self._whole(Kind.PARAMETER_GRAD, graph.parameters, made) if into is None else into

    def _whole(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Values of a kind as the user gets them."""
        known = [self.capture.shardings.get(Role(kind, name)) for name in names]
        return [
            value if lies is None or value is None else lies.whole(value)
            for value, lies in zip(values, known, strict=True)
        ]

    def _local(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Values of a kind as graphs take them; those that are no tensors are left alone.

        Raises:
            SplitError: one that was a DTensor when the module was traced is none.
        """
        pairs = zip(names, values, strict=True)
        return [self._local_value(Role(kind, name), value) for name, value in pairs]

    def _local_value(self, role: Role, value: Any) -> Any:
        lies = self.capture.shardings.get(role)
        if lies is None or not isinstance(value, Tensor):
            return value
        if not is_dtensor(value):
            raise SplitError(
                f"the {role} was a DTensor ({lies}) when the module was traced, and is a plain "
                f"tensor {list(value.shape)} now; pass a DTensor"
            )
        return lies.local(value)


def _sums(gradients: Sequence[Tensor] | None) -> list[Tensor] | None:
    """What this rank has of what is added into."""
    return None if gradients is None else [local_tensor(each) for each in gradients]
