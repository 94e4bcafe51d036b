"""F, I, W and B of a module with DTensors. The graphs compute with the DTensors' local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import STATE
from autosplit.runtime.residuals import State, StateRecord
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, local_tensor

from .accumulators import Accumulators
from .compiled_graph import GradientGraph
from .functions import ForwardResult, SplitFunctions


class DTensorFunctions(SplitFunctions):
    """``SplitFunctions`` whose graphs compute with the local tensors of DTensors.

    Arguments are unwrapped, and results are wrapped. A gradient keeps the placements with which it
    is computed; the parameter may have others.
    """

    def record_state(self, state: State) -> StateRecord:
        return super().record_state(self._local_state(state))

    def _local_state(self, state: State) -> State:
        sharded = [role.name for role in self.capture.shardings if role.kind in STATE]
        return {**state, **{name: local_tensor(state[name]) for name in sharded}}

    def _run_forward(
        self, state: State, leaves: list[Any], record: StateRecord | None
    ) -> ForwardResult:
        """F: unwraps state and leaves, and wraps outputs and updates."""
        state = self._local_state(state)
        leaves[:] = self._local(Kind.INPUT, self.capture.inputs, leaves)
        outputs, updates, saved = super()._run_forward(state, leaves, record)
        results = len(self.output_names) - len(self.updated_inputs)
        names = self.output_names
        returned = self._whole(Kind.OUTPUT, names[:results], outputs[:results])
        written = self._whole(Kind.UPDATE, names[results:], outputs[results:])
        updates = self._whole(Kind.UPDATE, self.updated_state, updates)
        return ForwardResult([*returned, *written], updates, saved)

    def _write(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    def _backward_pool(self, saved: list[Tensor], output_grads: list[Tensor | None]) -> list[Any]:
        output_grads[:] = self._local(Kind.TANGENT, self.output_names, output_grads)
        return super()._backward_pool(saved, output_grads)

    @property
    def _graph_class(self) -> Callable[..., GradientGraph]:
        return partial(_DTensorGraph, self.capture.shardings)

    def _whole(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        return _whole(self.capture.shardings, [Role(kind, name) for name in names], values)

    def _local(self, kind: Kind, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The local tensors of DTensors among values of a kind. Other values stay as they are.

        Raises:
            SplitError: a value was a DTensor when the module was captured, and is a tensor now.
        """
        pairs = zip(names, values, strict=True)
        return [self._local_value(Role(kind, name), value) for name, value in pairs]

    def _local_value(self, role: Role, value: Any) -> Any:
        sharding = self.capture.shardings.get(role)
        if sharding is None or not isinstance(value, Tensor):
            return value
        if not is_dtensor(value):
            raise SplitError(
                f"the {role} was a DTensor ({sharding}) when the module was traced, and is a plain "
                f"tensor {list(value.shape)} now; pass a DTensor"
            )
        return sharding.local(value)


class _DTensorGraph(GradientGraph):
    """A ``GradientGraph`` with DTensor gradients. A gradient is added into the local tensor of its
    sum, or wrapped as a DTensor.

    Args:
        shardings: maps the role of a DTensor to its sharding.
        args: positional arguments of ``GradientGraph``.
        kwargs: keyword arguments of ``GradientGraph``.
    """

    def __init__(self, shardings: Mapping[Role, Sharding], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shardings = shardings

    def run(
        self,
        pool: list[Any],
        gradients: Accumulators | None,
        dtype: torch.dtype | None,
        count: int = 1,
    ) -> tuple[list[Any], Sequence[Tensor]]:
        """Run the graph on local tensors, and wrap its results; see ``GradientGraph.run``."""
        into = gradients
        if gradients is not None:
            into = gradients._replace(tensors=[*map(local_tensor, gradients.tensors)])
        results, computed = super().run(pool, into, dtype, count)
        if gradients is None:
            roles = [Role(Kind.PARAMETER_GRAD, name) for name in self.parameters]
            computed = _whole(self._shardings, roles, computed)
        else:
            computed = gradients.tensors
        return _whole(self._shardings, self._results, results), computed


def _whole(
    shardings: Mapping[Role, Sharding], roles: Iterable[Role], values: Iterable[Any]
) -> list[Any]:
    """Wrap the local tensors of DTensors; other values stay as they are."""
    return [
        value if sharding is None or value is None else sharding.whole(value)
        for value, sharding in zip(values, map(shardings.get, roles), strict=True)
    ]
