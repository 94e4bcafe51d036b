"""The harness itself: what it must notice, and what it must let pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from benchmarks.coverage.examine import Verdict, examine
from benchmarks.coverage.judge import differences, out_of_tolerance
from benchmarks.coverage.subject import Subject


class Small(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return torch.nn.functional.dropout(self.linear(x), 0.5) + self.mean


def small(build: Callable[[], nn.Module] = Small) -> Subject:
    return Subject("small", build, lambda: ((torch.randn(3, 4, requires_grad=True),), {}))


def test_right_gradients_are_equal() -> None:
    finding = examine(small())
    assert (finding.verdict, finding.detail, finding.in_parts) == (Verdict.EQUAL, "", False)


class Tampered:
    """Plain autograd under the face of a split module, with one thing wrong."""

    def __init__(self, model: nn.Module, tamper: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self.model = model
        self.tamper = tamper

    def __call__(self, x: Tensor) -> Tensor:
        return self.tamper(self.model, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def backward_weight(self) -> None:
        pass


def twice_the_weight_gradient(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    weight = model.linear.weight
    return output + (weight - weight.detach()).sum() * 1e-3


def no_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.detach())


def forgotten_buffer(model: nn.Module, x: Tensor) -> Tensor:
    earlier = model.mean.clone()
    output = model(x)
    model.mean.copy_(earlier)
    return output


def other_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + 1e-5


def other_structure(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [model(x)]


def drawn_twice(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    torch.rand(1)
    return output


def input_written(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    x.data.mul_(2.0)
    return output


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (twice_the_weight_gradient, r"gradient of linear.weight \[0\]: off by"),
        (no_input_gradient, r"gradient of input 0 \[0.0\]: None, expected torch.float32"),
        (forgotten_buffer, r"buffer mean \[0\]: off by"),
        (other_output, r"output 0 \[0.0\]: off by"),
        (other_structure, r"structure of the output \[0.0\]"),
        (drawn_twice, r"random generator after forward \[0.0\]: \d+ of"),
        (input_written, r"input 0 after \[0.0\]: off by"),
    ],
)
def test_wrong_results_are_found(tamper: Any, complaint: str) -> None:
    finding = examine(small(), lambda model: Tampered(model, tamper))
    assert finding.verdict is Verdict.WRONG
    assert re.search(complaint, finding.detail), finding.detail


def test_gradient_that_accumulates_wrongly_over_microbatches_is_noticed() -> None:
    """Right on one microbatch, wrong on two: the mean in the place of the sum."""

    class Averaging(autosplit.SplitModule):
        def backward_weight(self, microbatches: int | None = None) -> None:
            count = self.pending
            super().backward_weight(microbatches)
            if count:
                self.model.linear.weight.grad.div_(count)

    def averaging(model: nn.Module) -> Averaging:
        options = autosplit.SplitOptions()
        return Averaging(model, options, fullgraph=True, max_graphs=1, max_pending=2)

    finding = examine(small(), averaging)
    assert finding.verdict is Verdict.WRONG
    assert "gradient of linear.weight [0]: off by" in finding.detail


def test_typed_error_is_a_refusal_any_other_a_crash() -> None:
    def refuses(model: nn.Module) -> Any:
        raise SplitError("no, for this reason")

    def crashes(model: nn.Module) -> Any:
        raise KeyError("weight")

    refused, crashed = examine(small(), refuses), examine(small(), crashes)
    assert (refused.verdict, refused.detail) == (
        Verdict.REFUSED,
        "SplitError: no, for this reason",
    )
    assert crashed.verdict is Verdict.CRASHED
    assert crashed.detail.startswith("KeyError: 'weight' (at ")


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model never runs")


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(3)


@pytest.mark.parametrize(
    ("build", "why"),
    [(Fails, "ValueError: this model never runs"), (Constant, "no output requires a gradient")],
)
def test_no_backward_in_eager_is_listed_apart(build: Callable[[], nn.Module], why: str) -> None:
    finding = examine(small(build))
    assert (finding.verdict, finding.detail) == (Verdict.NO_BACKWARD, why)


def test_rounding_passes_and_more_than_rounding_does_not() -> None:
    wide = torch.tensor([1.0, 1e3], dtype=torch.float64)
    exact = {"output": wide, "gradient": wide}
    theirs = {"output": wide.float(), "gradient": torch.tensor([1.0, 1e3 + 1e-2])}  # off by 0.01
    near = {**theirs, "gradient": torch.tensor([1.0, 1e3 - 2e-2])}
    far = {**theirs, "gradient": torch.tensor([1.0, 1e3 + 0.2])}
    names = ["gradient"]
    assert differences(near, theirs) == names
    assert out_of_tolerance(names, near, theirs, exact) == []
    (line,) = out_of_tolerance(names, far, theirs, exact)
    assert line.startswith("gradient: off by 2.0")
    assert out_of_tolerance(names, near, theirs, None) != []  # rounding alone is far less
    elsewhere = {"output": wide + 100, "gradient": wide + 1}  # drew other random numbers
    assert out_of_tolerance(names, near, theirs, elsewhere) != []


def test_missing_values_and_nan() -> None:
    nan = {"a": torch.tensor([1.0, float("nan")])}
    assert differences(nan, {"a": nan["a"].clone()}) == []
    one = {"a": torch.tensor([1.0, 1.0])}
    assert out_of_tolerance(["a"], nan, one, None) == ["a: off by inf, allowed 1.91e-06"]
    assert differences({}, one) == ["a"]
    assert out_of_tolerance(["a"], {}, one, None) == ["a: None, expected torch.float32 [2]"]
    wide = {"a": one["a"].double()}
    assert out_of_tolerance(["a"], wide, one, None) == [
        "a: torch.float64 [2], expected torch.float32 [2]"
    ]
