"""Workspace of kernels, measured on tensors made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.autograd import profiler
from torch.fx.experimental.proxy_tensor import make_fx

from autosplit.pipeline.ledger.call_memory import KernelWorkspace
from autosplit.torch_internals import TORCH

CPU = torch.device("cpu")
FLOAT, DOUBLE = 4, 8


def _graph(function: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    built: fx.GraphModule = make_fx(lambda *args: function(*args), tracing_mode="fake")(*args)
    return built


def _found(module: fx.GraphModule) -> dict[str, int]:
    return {node.name: size for node, size in KernelWorkspace(CPU).of_graph(module.graph).items()}


def test_measuring_draws_no_random_numbers() -> None:
    module = _graph(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(64))
    earlier = torch.get_rng_state()
    KernelWorkspace(CPU).of_graph(module.graph)
    assert torch.equal(torch.get_rng_state(), earlier)


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch.cholesky is gone")
def test_operators_that_refuse_made_up_values_have_no_known_workspace() -> None:
    def function(x: Tensor, at: Tensor) -> Tensor:
        return torch.nn.functional.nll_loss(x, at) + (x.t() @ x)[0, 0] + x.cholesky().sum()

    module = _graph(function, torch.eye(8), torch.zeros(8, dtype=torch.int64))
    assert "cholesky" not in _found(module)


def test_beside_another_profiler_nothing_is_known_and_later_it_is() -> None:
    module = _graph(lambda x, y: x + y, torch.ones(16, 16), torch.ones(16, 16).double())
    workspace = KernelWorkspace(CPU)
    with profiler.profile():
        assert not workspace.measurable
        assert workspace.of_graph(module.graph) == {}
    assert [*workspace.of_graph(module.graph).values()] == [16 * 16 * DOUBLE]


def test_operators_of_a_batch_of_no_samples_can_be_measured() -> None:
    module = _graph(lambda x, w: x @ w, torch.ones(0, 4), torch.ones(4, 4))
    assert _found(module) == {}
