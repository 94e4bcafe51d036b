"""That the benchmark measures what it says; its timings are nobody's business here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.results import Results
from benchmarks.split import clock, memory, reference, steps
from benchmarks.split.contenders import Autograd, eager
from benchmarks.split.meter import levels
from benchmarks.split.models import SIZES, Subject, build
from benchmarks.split.page import PAGE

KIB = 1024

# Warnings that transformers' own code causes.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    first, second = (nn.Linear(256, 256, bias=False) for _ in range(2))
    perceptron = nn.Sequential(first, nn.ReLU(), second)
    return Subject("perceptron", perceptron, torch.randn(64, 256), torch.randn(64, 256))


class Scripted:
    """Holds a known number of KiB after each action, on top of a known peak."""

    def __init__(self, calls: list[str], name: str = "") -> None:
        self.calls = calls
        self.name = name
        self.saved: list[Tensor] = []
        self.grad: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(f"{self.name}F")
        self.saved = [allocate(100)]
        allocate(500)
        return x

    def backward_input(self, grad: Tensor) -> Tensor:
        self.calls.append(f"{self.name}I")
        self.saved = [allocate(30)]
        self.grad = {"weight": allocate(7)}
        return grad

    def backward_weight(self) -> None:
        self.calls.append(f"{self.name}W")
        self.saved = []

    def gradients(self) -> dict[str, Tensor]:
        return self.grad

    def clear(self) -> None:
        self.calls.append(f"{self.name} cleared")


def allocate(kib: int) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_levels_are_what_was_allocated() -> None:
    scripted = Subject("scripted", nn.Identity(), torch.zeros(256), torch.zeros(256))
    result = levels(Scripted([]), scripted)
    assert {action: level.held // KIB for action, level in result.items()} == {
        "F": 100,
        "I": 30,  # without the gradient
        "W": 0,
    }
    assert {action: level.peak // KIB for action, level in result.items()} == {
        "F": 601,  # with the input, which is received inside
        "I": 131,  # the gradient of the output, what F held, and what I makes of it
        "W": 37,
    }


def test_saved_bytes_of_autograd_and_the_floor(subject: Subject) -> None:
    tensor = 64 * 256 * 4
    # x, the hidden values (which relu saves as its result), and no weights.
    assert reference.autograd_saves(subject) == 2 * tensor
    # x and the hidden values, the gradient of the output and that of the first product.
    assert reference.floor(subject) == 4 * tensor


@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_contenders_agree_on_every_model(model: str) -> None:
    """Every one of them, on two microbatches, bit for bit."""
    subject = build(model, SIZES["tiny"][model])
    contenders, failed, differences = steps._prepare(subject, eager(subject))
    assert failed == {}
    assert set(differences.values()) == {0.0}
    for contender in contenders.values():
        clock.microbatch(contender, subject)
        clock.microbatch(contender, subject)
        results = {name: grad.clone() for name, grad in contender.gradients().items()}
        contender.clear()
        assert steps.difference(results, _twice(subject)) == 0.0


def _twice(subject: Subject) -> dict[str, Tensor]:
    """Gradients of two microbatches, summed by autograd."""
    plain = Autograd(subject.module)
    clock.microbatch(plain, subject)
    clock.microbatch(plain, subject)
    results = {name: grad.clone() for name, grad in plain.gradients().items()}
    plain.clear()
    return results


def test_missing_gradient_is_noticed(subject: Subject) -> None:
    expected = {"weight": torch.ones(2), "bias": torch.ones(2)}
    assert steps.difference({**expected, "bias": torch.tensor([1.0, 1.5])}, expected) == 0.5
    with pytest.raises(ValueError, match="no gradient of bias"):
        steps.difference({"weight": torch.ones(2)}, expected)


def test_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMORY", ("balanced", "lean"))
    words = "memory --models resnet --threads 1 --rounds 2 --size tiny --output"
    PAGE.main([*words.split(), str(tmp_path / "new")])
    result = Results.read(tmp_path / "new" / "results.json")
    assert list(result.parts) == ["memory"]
    text = (tmp_path / "new" / "README.md").read_text()
    assert text == PAGE.render(result)
    assert "| resnet" in text
    assert "benchmarks.split memory --models resnet --threads 1 --rounds 2 --size tiny" in text
    row = next(row for row in result.rows("memory") if row["way"] == "autosplit balanced")
    assert row["held"]["I"] <= 1.03 * row["floor"]
