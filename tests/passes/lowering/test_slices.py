"""The fused backward in slices computes what it computes whole, and runs each operator once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

from autosplit.passes import Kind
from autosplit.passes.graph import inputs, outputs
from autosplit.passes.lowering.slices import slices
from tests.passes.graphs import ops, split


@pytest.mark.parametrize("count", [1, 3, 8])
def test_slices(count: int) -> None:
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
    whole = split(nn.Sequential(*layers), torch.randn(4, 8).requires_grad_()).backward
    assert whole is not None
    parts = slices(whole, count)
    assert (count == 1) == (len(parts) == 1)
    arguments = {role: torch.randn(n.meta["val"].shape) for role, n in inputs(whole.graph).items()}
    expected = dict(zip(*_run(whole, arguments), strict=True))
    values: dict[Any, Any] = dict(arguments)
    for part in parts:
        assert outputs(part.graph, Kind.PARAMETER_GRAD)
        values |= zip(*_run(part, values), strict=True)
    for role, value in expected.items():
        assert torch.equal(values[role], value), role
    assert sum(map(ops, parts), Counter()) == ops(whole)


def test_every_slice_completes_gradients_though_one_is_much_larger_than_others() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 400)]
    whole = split(nn.Sequential(*layers), torch.randn(2, 3, 8, 8).requires_grad_()).backward
    assert whole is not None
    completed = [outputs(part.graph, Kind.PARAMETER_GRAD) for part in slices(whole, 8)]
    assert len(completed) > 1
    assert all(completed)


def _run(module: fx.GraphModule, values: Any) -> tuple[list[Any], list[Any]]:
    arguments = [values[role] for role in inputs(module.graph)]
    results = fx.Interpreter(module).run(*arguments, enable_io_processing=False)
    return [role for role, _ in outputs(module.graph)], results
