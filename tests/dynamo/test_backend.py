"""``torch.compile(model, backend=\"autosplit\")``, with collectives in its graphs, too."""

from __future__ import annotations

import ast
import copy
import pathlib
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import autosplit
from autosplit import SplitError, SplitOptions
from autosplit.dynamo.backend import backend
from autosplit.dynamo.pending_weights import backward_weight, pending_queues
from autosplit.torch_internals import TORCH
from tests.dynamo.breaking import TwoLayers
from tests.pending import pending_of_compiled
from tests.zoo import layered

# --- ``torch.compile(model, backend="autosplit")`` ------------------------------------------------


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, **options)


library = torch.library.Library("autosplit_backend_tests", "FRAGMENT")
library.define("add_(Tensor(a!) out, Tensor x) -> Tensor(a!)")
library.impl("add_", lambda out, x: out.add_(x), "CompositeExplicitAutograd")


class Positions(nn.Module):
    """Positions by the number of rows, then a block whose dropout the backward draws again."""

    def __init__(self, aliased: bool = False) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.aliased = aliased

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(x.shape[0]))
        y = checkpoint(lambda z: F.dropout(self.inner(z).tanh()), x, use_reentrant=False)
        if self.aliased:  # AOTAutograd refuses operators that return their argument
            y = y * torch.ops.autosplit_backend_tests.add_(torch.zeros(4), x.detach().sum())
        return y


@pytest.mark.parametrize("aliased", [False, True], ids=["split", "unsplit"])
def test_checkpoints_draw_again_what_they_drew(aliased: bool) -> None:
    """Dynamo traces this once more for the sizes; a graph that cannot be split is run as Python."""
    model = Positions(aliased)
    same = copy.deepcopy(model)
    forward = compiled(model, dynamic=True)
    for rows in (4, 6):
        results = []
        for network, call in ((same, same), (model, forward)):
            torch.manual_seed(rows)
            call(torch.ones(rows, 4)).square().sum().backward()
            results.append(([p.grad.clone() for p in network.parameters()], torch.get_rng_state()))
        (expected, drawn), (grads, state) = results
        assert all(map(torch.equal, grads, expected))
        assert torch.equal(state, drawn)


def test_graphs_are_dumped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPLIT_DUMP", str(tmp_path))
    compiled(TwoLayers())(torch.ones(2, 4))
    assert [*tmp_path.glob("00_*/*split_backward.backward_weight.py")]


def test_weight_gradients_wait() -> None:
    model = TwoLayers()
    forward = compiled(model, options={"max_pending": 3})
    assert pending_of_compiled(model) == 0
    for _ in range(3):
        forward(torch.randn(3, 4)).sum().backward()
    assert pending_of_compiled(model) == 3
    assert all(queue.bytes > 0 for queue in pending_queues(model))
    backward_weight(model, microbatches=1)
    assert pending_of_compiled(model) == 2
    backward_weight(forward)  # the compiled model will do
    assert pending_of_compiled(model) == 0


def test_thawed_parameters_are_noticed() -> None:
    model = TwoLayers()
    model.a.weight.requires_grad_(False)
    forward = compiled(model)
    forward(torch.ones(3, 4)).sum().backward()
    model.a.weight.requires_grad_(True)
    if TORCH < (2, 12):
        with pytest.raises(SplitError, match=r"was frozen .*_for_guards"):
            forward(torch.ones(3, 4))
    else:
        forward(torch.ones(3, 4)).sum().backward()
        backward_weight(model)
        expected = torch.autograd.grad(model(torch.ones(3, 4)).sum(), model.a.weight)
        assert torch.equal(model.a.weight.grad, expected[0])


def test_graphs_without_anything_to_defer() -> None:
    frozen = TwoLayers().requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    compiled(frozen)(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(frozen(x).sum(), x)[0])
    assert pending_of_compiled(frozen) == 0
    with torch.no_grad():
        assert not compiled(TwoLayers())(x).requires_grad
    plain = torch.compile(lambda y: y.sin() * 2, backend=backend)
    plain(x).sum().backward()


def test_tensor_that_is_no_parameter_gets_its_gradient_at_once() -> None:
    tensor = torch.ones(4, requires_grad=True)
    model = layered(lambda m, x: m.linear(x * m.tensor), tensor=tensor)
    compiled(model)(torch.randn(3, 4)).sum().backward()
    assert model.tensor.grad is not None
    assert pending_of_compiled(model) == 1


def test_guard_goes_with_the_model() -> None:
    model = nn.Linear(4, 4)
    compiled(model)(torch.randn(3, 4)).sum().backward()
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    del model
    torch._dynamo.reset()
    torch.optim.SGD([weight], lr=0.1).step()


def test_nothing_pending() -> None:
    model = nn.Linear(4, 4)
    backward_weight(model)
    with pytest.raises(
        SplitError, match=r"microbatches=1\), but microbatches pending: 0; call loss\.backward\(\)"
    ):
        backward_weight(model, microbatches=1)
    with pytest.raises(SplitError, match="expected a module or parameters, got a str"):
        backward_weight(["weight"])  # type: ignore[list-item]


def test_compiled_autograd_is_refused() -> None:
    """It writes into ``.grad`` itself, and what is deferred would be lost."""
    model = nn.Linear(4, 4)
    for forward in (compiled(model), autosplit.split(model)):
        output = forward(torch.randn(3, 4, requires_grad=True)).sum()
        with (
            torch._dynamo.compiled_autograd._enable(lambda graph: graph),
            pytest.raises(SplitError, match="compiled autograd would lose"),
        ):
            output.backward()


def test_options() -> None:
    x = torch.randn(3, 4)
    model = nn.Linear(4, 4)
    compiled(model, options={"backend": "eager"})(x).sum().backward()
    backward_weight(model)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="unknown option 'speed'; known options: 'back"):
        compiled(model, options={"speed": "high"})(x)
    with pytest.raises(BackendCompilerFailed, match="unknown backend 'fast'; known backends:"):
        compiled(model, options={"backend": "fast"})(x)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_mode_is_refused_with_advice_for_torch_compile(mode: str) -> None:
    """``torch.compile(backend="inductor")`` would be torch's own compiler, which does not split."""
    advice = r"under torch\.compile, .*use options=(\{'backend': 'inductor', 'mode': '[^']*'\})"
    with pytest.raises(BackendCompilerFailed, match=advice) as raised:
        compiled(nn.Linear(4, 4), mode=mode)(torch.ones(3, 4))
    options = re.search(advice, str(raised.value))
    assert options
    assert SplitOptions(**ast.literal_eval(options[1])).mode == "max-autotune"


def test_name_is_registered() -> None:
    result = entry_points(group="torch_dynamo_backends", name="autosplit")
    if not result:
        pytest.skip("installed before the entry point was added; install again")
    model = nn.Linear(4, 4)
    torch.compile(model, backend="autosplit")(torch.randn(3, 4)).sum().backward()
    assert pending_of_compiled(model) == 1
