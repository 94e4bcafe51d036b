"""Models that are captured whole although their first call is not like the others, or their graph
holds what torch makes trouble with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.errors import AutosplitError, CaptureError
from autosplit.planner import WholeModel, meta_model
from autosplit.planner.cutting import cut
from tests.planner.whole_models import run_modules
from tests.zoo import Made


class Classifier(nn.Module):
    """Decides in its first call what its labels are, as image classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.problem: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.problem is None:
            self.problem = "one of three"
        output: Tensor = self.last(self.drop(self.norm(self.first(x).relu())))
        return output.softmax(-1) if self.problem == "one of three" else output


def test_attributes_that_the_first_call_sets_are_set_before_the_capture() -> None:
    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(4, 8)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn = torch.get_rng_state()
    whole = WholeModel.capture(model, x)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    split = cut(whole, [len(whole.blocks) - 1])
    torch.manual_seed(1)
    result = run_modules(split, [split.build(0), split.build(1)], [x])
    torch.manual_seed(1)
    assert torch.equal(result, model(x))
    assert torch.equal(result.sum(-1), torch.ones(4)) or result.sum(-1).allclose(torch.ones(4))


class Counter(Classifier):
    """Changes in every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_state_that_every_call_changes_is_refused_after_one_call() -> None:
    model = Counter()
    with pytest.raises(CaptureError, match="changes Python state, self"):
        WholeModel.capture(model, torch.randn(4, 8))
    assert model.calls == 1


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (
            torch.compile,
            r"a model to cut: .* compiled by torch.compile, .*\._orig_mod of this one",
        ),
        (autosplit.split, r"a model to cut: the module is split already; pass its \.unsplit"),
        (nn.Module.requires_grad_, None),
        (lambda model: model.requires_grad_(False), "no parameter of Linear requires a gradient"),
    ],
    ids=["compiled", "split", "trained", "frozen"],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_cause(
    prepare: Callable[[nn.Module], nn.Module], text: str | None
) -> None:
    model = prepare(nn.Linear(8, 8))
    with contextlib.nullcontext() if text is None else pytest.raises(AutosplitError, match=text):
        WholeModel.capture(model, torch.randn(4, 8))


def test_without_values_there_is_no_first_call() -> None:
    with pytest.raises(CaptureError, match="call the model once before you split it"):
        WholeModel.capture(meta_model(Classifier), torch.randn(4, 8))


def permuted() -> nn.Module:
    """The value at the cut is transposed, and dropout draws in the order of its strides."""
    return Made(
        lambda m, x: m.last(nn.functional.dropout(m.first(x).transpose(1, 2), 0.5)),
        first=nn.Linear(8, 8),
        last=nn.Conv1d(8, 3, 1),
    )


def test_values_at_a_cut_keep_their_strides() -> None:
    """Messages are contiguous: what a stage is given is made so here."""
    torch.manual_seed(0)
    model, x = permuted(), torch.randn(2, 5, 8)
    whole = WholeModel.capture(model, x)
    place = next(at for at, node in enumerate(whole.line.body) if "dropout" in node.name)
    node = whole.line.body[place - 1]
    assert not whole.line.value(node).is_contiguous()
    whole = WholeModel(model, (x,), {}, whole.line, [place], training=True)
    split = cut(whole, [next(i for i, b in enumerate(whole.blocks) if b.first == place)])
    torch.manual_seed(1)
    (sent,) = split.build(0)(x)
    assert sent.is_contiguous()
    result = split.build(1)(sent.contiguous())
    torch.manual_seed(1)
    assert torch.equal(result, model(x))
