"""Microbatches that wait for W: their number and their memory."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosplit import SplitError, Stage, split
from autosplit.passes import MEMORY
from autosplit.passes.memory_policy import Memory
from tests.autograd.faces import Compiled
from tests.dynamo.breaking import TwoLayers
from tests.microbatches import Twins
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd
from tests.zoo import CASES, PlainParameters, SwiGLU

# --- ``max_pending``: how many microbatches wait for W, with gradients bit for bit ----------------


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that come and go.

    Attributes:
        peak: the most bytes that lived at a time, of those made meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        earlier = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_plain, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in earlier and id(storage) not in self._live:
                self._live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, id(storage), None)
                self.peak = max(self.peak, sum(self._live.values()))
        return result


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def forwards_first(model: Any, batches: Tensor) -> None:
    for loss in [model(batch).square().mean() for batch in batches]:
        loss.backward()


def one_by_one(model: Any, batches: Tensor) -> None:
    for batch in batches:
        model(batch).square().mean().backward()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


WHOLE, PARTS = "max_pending", "3 microbatch(es) had their weight gradients computed"


@pytest.mark.parametrize(
    ("order", "build", "limit", "said"),
    [
        (one_by_one, layers, 1, WHOLE),
        (forwards_first, layers, 1, WHOLE),
        (forwards_first, layers, 2, WHOLE),
        (one_by_one, layers, math.inf, None),
        (one_by_one, TwoLayers, 2, PARTS),
        (forwards_first, TwoLayers, 2, PARTS),
    ],
)
def test_bound_holds(
    order: Callable[..., None], build: Callable[[], nn.Module], limit: float, said: str | None
) -> None:
    batches = torch.randn(5, 4, 4)
    model = assert_alike(
        build(), lambda call, _: order(call, batches), max_pending=limit, pending=min(5, limit)
    )
    assert said is None or said in model.report()
    assert said is not None or WHOLE not in model.report()


@pytest.mark.parametrize(
    ("order", "build"), [(one_by_one, TwoLayers), (forwards_first, lambda: nn.Linear(4, 4))]
)
def test_backend(order: Callable[..., None], build: Callable[[], nn.Module]) -> None:
    batches = torch.randn(5, 4, 4)

    def drive(call: Any, model: nn.Module) -> None:
        order(call, batches)
        assert call is model or call.pending == 2

    assert_alike(build(), drive, face=partial(Compiled, max_pending=2))


def test_by_default_one_waits_and_none_during_the_next_forward() -> None:
    seen = []
    model = split(layers())
    for batch in torch.randn(3, 4, 4):
        loss = model(batch).square().mean()
        seen.append(model.pending)
        loss.backward()
        seen.append(model.pending)
    assert seen == [0, 1] * 3


def test_evaluation_leaves_what_waits() -> None:
    model = split(nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert model.pending == 1


def test_a_missing_microbatch_is_explained() -> None:
    model = split(nn.Linear(8, 8))
    one_by_one(model, torch.randn(3, 4, 8))
    with pytest.raises(
        SplitError, match="Because of max_pending=1, 2 microbatches were computed before; raise"
    ):
        model.backward_weight(microbatches=3)


@pytest.mark.parametrize("limit", [0, -1, True, math.nan, "1", None])
def test_no_bound(limit: Any) -> None:
    with pytest.raises(SplitError, match="max_pending must be at least 1"):
        split(nn.Linear(8, 8), max_pending=limit)


def test_failed_backward_does_not_end_the_bound() -> None:
    model = split(nn.Linear(8, 8))
    one_by_one(model, torch.randn(2, 4, 8))
    model.zero_grad()
    x = torch.randn(4, 8, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    model.zero_grad()
    one_by_one(model, torch.randn(4, 4, 8))
    assert model.pending == 1


def test_a_loop_that_accumulates_holds_what_it_holds_without_split() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    plain = nn.Sequential(*layers)
    mine, batches = split(copy.deepcopy(plain)), torch.randn(8, 256, 64)
    peaks = []
    for model in (mine, plain):
        one_by_one(model, batches[:1])  # tracing
        model.zero_grad()
        with LiveBytes() as kept:
            one_by_one(model, batches)
        peaks.append(kept.peak)
    assert peaks[0] <= 1.3 * peaks[1]


# --- whatever is done again, done early or left for later: gradients are those of autograd --------


NAMES = ["convolutions", "tied", "in_place", "plain_parameters", "frozen", "bfloat16"]

# Models of a test's size do nothing again under the settings that there are: calling an
# operator takes longer than all of its work.
AGAIN_AND_EARLY = Memory("again and early", recompute=100.0, waiting=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_split_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMORY, "balanced", AGAIN_AND_EARLY)
    case = CASES[name]
    batches = [(case.batch(),) for _ in range(2)]
    for (batch,) in batches:
        batch.requires_grad_(batch.is_floating_point())
    assert_equals_autograd(case.build(), batches, case.loss)


@pytest.mark.parametrize("memory", ["lean", 20_000])
def test_first_stage_with_norms_before_layers(memory: str | int) -> None:
    """A residual stream in which no input needs a gradient: nothing has to be in I."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(16), enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))
    batches = [(torch.randint(11, (2, 6)),) for _ in range(2)]
    assert_equals_autograd(model, batches, lambda y: y.square().mean(), memory=memory)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("transformer", "lean"), ("transformer", 4096), ("convolutions", 4096), ("repeated", "lean")],
)
def test_stage(name: str, memory: str | int) -> None:
    twins = Twins(name, memory=memory)
    twins.forward()
    twins.backward()
    assert memory == "lean" or twins.stage.deferred_bytes <= 3 * 4096
    twins.weights()
    twins.assert_alike()


def test_sums_of_a_dtype_take_early_gradients_too() -> None:
    model = SwiGLU()
    example = torch.randn(2, 4, 16, requires_grad=True)
    stage = Stage(model, [example], memory=0, grad_dtype=torch.float64)
    assert stage.functions.late_parameters == []
    for m in range(2):
        stage.forward(m, [torch.ones(2, 4, 16)])
        stage.backward_input(m, [torch.ones(2, 4, 16)])
        stage.backward_weight(m)
    assert {gradient.dtype for gradient in stage.gradients.values()} == {torch.float64}
    expected = 2 * torch.autograd.grad(model(torch.ones(2, 4, 16)).sum(), model.down.weight)[0]
    torch.testing.assert_close(stage.gradients["down.weight"], expected.double(), rtol=1e-6, atol=0)


def test_budget_bounds_what_a_microbatch_holds() -> None:
    x = torch.randn(2, 4, 16, requires_grad=True)
    most = _deferred_bytes(SwiGLU(), x, "balanced")
    some = _deferred_bytes(SwiGLU(), x, most - 100)
    assert 0 < some <= most - 100
    assert _deferred_bytes(SwiGLU(), x, some) == some
    assert _deferred_bytes(SwiGLU(), x, 10**9) > some


def test_nothing_waits_that_i_has_computed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
    split = assert_equals_autograd(model, [(torch.randn(4, 8),)] * 2, memory=10)
    split(torch.randn(4, 8)).sum().backward()
    assert (split.pending, split.pending_bytes) == (0, 0)


def test_budget_that_cannot_be_met() -> None:
    """The gradient of two of the parameters is the output's own, three floats."""
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(SplitError, match="least possible is 12 bytes for one microbatch") as caught:
        split(PlainParameters(), (x,), memory=11)
    assert any("memory=11 needs one graph" in note for note in caught.value.__notes__)
    assert split(PlainParameters(), (x,), memory=12).functions


def _deferred_bytes(model: nn.Module, x: torch.Tensor, memory: str | int) -> int:
    stage = Stage(model, [x], memory=memory)
    (y,) = stage.forward(0, [x.detach().clone()])
    stage.backward_input(0, [torch.ones_like(y)])
    return stage.deferred_bytes
