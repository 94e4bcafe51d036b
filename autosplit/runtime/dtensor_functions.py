"""F, I, W and B of a module with DTensors, which its graphs take as local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import STATE
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor

from .functions import ForwardResult, SplitFunctions
from .gradient_accumulation import EXACT, Accumulation


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
        accumulation: Accumulation = EXACT,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        output_grads[:] = self._local(Kind.TANGENT, self.output_names, output_grads)
        into = _local_tensors(gradients)
        grads, deferred, early = super().backward_input(saved, output_grads, into, accumulation)
        grads = self._whole(Kind.INPUT_GRAD, self.capture.inputs, grads)
        return grads, deferred, self._made(self.early_parameters, early, gradients)

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> Sequence[Tensor]:
        found = super().backward_weight(deferred, _local_tensors(gradients), accumulation)
        return self._made(self.late_parameters, found, gradients)

    def backward_weight_together(
        self,
        deferred: Sequence[Residuals],
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> Sequence[Tensor]:
        if len(deferred) == 1:
            return self.backward_weight(deferred[0], gradients, accumulation)
        found = super().backward_weight_together(deferred, _local_tensors(gradients), accumulation)
        return self._made(self.late_parameters, found, gradients)

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        output_grads[:] = self._local(Kind.TANGENT, self.output_names, output_grads)
        into = _local_tensors(gradients)
        grads, found = super().backward(saved, output_grads, into, accumulation)
        grads = self._whole(Kind.INPUT_GRAD, self.capture.inputs, grads)
        return grads, self._made(self.parameter_names, found, gradients)

    def weight_slice(
        self,
        count: int,
        index: int,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        accumulation: Accumulation = EXACT,
    ) -> tuple[Sequence[Tensor], Residuals]:
        into, names = _local_tensors(gradients), self.sliced(count).parameter_names[index]
        found, left = super().weight_slice(count, index, deferred, into, accumulation)
        return self._made(names, found, gradients), left

    def _made(
        self, names: Sequence[str], found: Sequence[Tensor], into: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """Weight gradients as the user gets them: what they were added into, or new ones."""
        return self._whole(Kind.PARAMETER_GRAD, names, found) if into is None else into

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


def _local_tensors(values: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
    """Accumulators as graphs take them."""
    return None if values is None else [local_tensor(each) for each in values]
