"""Two losses whose tracing torch gets wrong, against what eager mode runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._decomp import decomposition_table

import autosplit
import autosplit.capture.joint_graph as capturing
from autosplit.capture.workarounds.operators import right_decompositions
from autosplit.errors import CaptureError

aten = torch.ops.aten
SEVERAL = aten.multilabel_margin_loss_forward.default
LABELS = torch.tensor(
    [[1, 3, -1, 0, 0], [0, -1, 0, 0, 0], [4, 3, 2, 1, 0], [2, -1, 1, 1, 1], [-1, 0, 0, 0, 0]]
)
SINGLE = torch.tensor([1, 0, 4, 2, 3])


class Model(nn.Module):
    """Scores of a layer and their loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(5, 5), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.linear(x), target)


CASES: dict[str, tuple[nn.Module, tuple[int, ...], Tensor]] = {
    **{
        f"labels {r}": (nn.MultiLabelMarginLoss(reduction=r), (5, 5), LABELS)
        for r in ("mean", "sum", "none")
    },
    **{
        f"one row {r}": (nn.MultiLabelMarginLoss(reduction=r), (5,), LABELS[0])
        for r in ("mean", "sum", "none")
    },
    **{
        f"single {r}": (nn.MultiMarginLoss(reduction=r), (5, 5), SINGLE)
        for r in ("mean", "sum", "none")
    },
    "single one row": (nn.MultiMarginLoss(reduction="none"), (5,), SINGLE[:1]),
    "single weighted": (nn.MultiMarginLoss(2, 0.5, torch.rand(5)), (5, 5), SINGLE),
}


def _both(
    mine: Any, twin: nn.Module, parameters: nn.Module, shape: tuple[int, ...], target: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Losses and gradients of two microbatches, ours beside eager's."""
    pairs = []
    for seed in range(2):
        x = torch.randn(
            shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
        )
        found, expected = mine(x, target), twin(x, target)
        found.sum().backward()
        expected.sum().backward()
        pairs.append((found.detach(), expected.detach()))
    autosplit.backward_weight(parameters)
    ours = [p.grad for p in parameters.parameters()]
    theirs = [p.grad for p in twin.parameters()]
    return pairs + list(zip(ours, theirs, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_eagers_bit_for_bit(name: str) -> None:
    loss, shape, target = CASES[name]
    model = Model(copy.deepcopy(loss))
    split = autosplit.split(model, fullgraph=True)
    for mine, theirs in _both(split, copy.deepcopy(model), split, shape, target):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["labels mean", "single mean"])
def test_under_torch_compile(name: str) -> None:
    """Its gradients counted what stands behind the -1 of a row as targets."""
    loss, shape, target = CASES[name]
    model = Model(copy.deepcopy(loss))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="autosplit")
    for mine, theirs in _both(compiled, twin, model, shape, target):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["labels mean", "single mean"])
def test_under_autocast(name: str) -> None:
    loss, shape, target = CASES[name]
    model = Model(copy.deepcopy(loss))
    twin, split = copy.deepcopy(model), autosplit.split(model, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = _both(split, twin, split, shape, target)
    for mine, theirs in found:
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


def test_tables_of_torch_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries were taken out of them at every capture, under the feet of other threads."""
    seen = []
    original = capturing._trace

    def looks(*args: Any) -> Any:
        kernels = aten.multi_margin_loss.default.py_kernels
        seen.append(SEVERAL in decomposition_table and DispatchKey.Autograd in kernels)
        return original(*args)

    monkeypatch.setattr(capturing, "_trace", looks)
    model = Model(nn.MultiMarginLoss())
    autosplit.split(model, (torch.randn(5, 5), SINGLE), fullgraph=True)
    assert seen == [True]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("labels", "one row"))])
def test_the_decomposition_for_compilers(name: str) -> None:
    """It is right but for rounding; torch's own counts more targets."""
    loss, shape, target = CASES[name]
    table = right_decompositions({SEVERAL: decomposition_table[SEVERAL]})
    assert table is not None
    scores = torch.randn(
        shape, generator=torch.Generator(torch.get_default_device()).manual_seed(0)
    )
    number = ("none", "mean", "sum").index(loss.reduction)
    found, expected = table[SEVERAL](scores, target, number), SEVERAL(scores, target, number)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert right_decompositions(None) is None
    assert right_decompositions({}) == {}


def test_compiled_by_inductor() -> None:
    loss, shape, target = CASES["labels mean"]
    model = Model(copy.deepcopy(loss))
    split = autosplit.split(model, backend="inductor", fullgraph=True)
    for mine, theirs in _both(split, copy.deepcopy(model), split, shape, target):
        torch.testing.assert_close(mine, theirs)


class LooksAtShape(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.multilabel_margin_loss(x, target, reduction="none")
        return 2 * loss.view(loss.shape)


def test_one_row_whose_shape_is_looked_at() -> None:
    """Dynamo takes it for [1]: no graph is made of it, and it runs as it is."""
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(CaptureError, match=r"has shape \[\], and torch traces it as \[1\]"):
        autosplit.split(LooksAtShape(), (x, LABELS[0]), fullgraph=True)
    split, expected = autosplit.split(LooksAtShape()), LooksAtShape()(x, LABELS[0])
    found = split(x, LABELS[0])
    assert found.shape == expected.shape == ()
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (found, expected)))
