"""accumulation="concatenated" in a trainer: W next to each other are one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autosplit
from autosplit.errors import PipelineError
from autosplit.passes import manager
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.executor import join_adjacent_weights
from autosplit.pipeline.engine.stages import compile_stages
from autosplit.pipeline.schedule.action import Action, ActionKind, JoinedWeights, numbered
from autosplit.pipeline.schedule.routes import needs_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Span, median_durations
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.runtime.functions import SplitFunctions
from tests.pipeline.trainer_options import grouped
from tests.ranks import ranks

W = ActionKind.BACKWARD_WEIGHT
Found = tuple[list[str], float]


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
    """The loss of a step, each microbatch by itself (BatchNorm)."""
    pairs = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
    return torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pairs]).mean()


def differences(mine: Mapping[int, Mapping[str, Tensor]], model: nn.Sequential) -> float:
    """The greatest distance of a gradient from autograd's, over the norm of its stage's."""
    worst = 0.0
    for stage, grads in mine.items():
        expected = {n: p.grad for n, p in model[stage].named_parameters() if p.grad is not None}
        assert grads.keys() == expected.keys()
        scale = sum(float(each.to_dense().double().norm() ** 2) for each in expected.values())
        for name, grad in grads.items():
            gap = grad.to_dense().double() - expected[name].to_dense().double()
            worst = max(worst, float(gap.norm()) / scale**0.5)
    return worst


def joined_row(engine: PipelineTrainer) -> list[str]:
    """What this rank ran, as its timeline has it."""
    return [str(s.action) for s in engine.timeline().spans if s.rank == engine.rank]


def trained(modules: Sequence[nn.Module], *, steps: int = 2, **options: Any) -> Found:
    """What this rank ran, and how far its gradients are from autograd's, added up over steps."""
    twin = nn.Sequential(*copy.deepcopy(modules))
    given = {"ranks": 1, "accumulation": "concatenated", **options}
    with PipelineTrainer(
        modules,
        nn.functional.mse_loss,
        sgd,
        microbatches=4,
        **grouped(record=True, **given),
    ) as engine:
        for step in range(steps):
            inputs, targets = batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(options.get("autocast"))):
                loss = mean_loss(twin, inputs, targets, 4)
            loss.backward()
            engine.forward_backward((inputs, targets))
        return joined_row(engine), differences(engine.gradients(), twin)


def _with_tied() -> list[nn.Module]:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return [nn.Sequential(first, nn.Tanh()), second]


def _weights(text: str) -> list[Action]:
    return [Action.parse(each) for each in text.split()]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3,), "3"),
        ((0, 1), "0,1"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4), "0,2,4"),
        ((0, 1, 2, 5, 7, 8), "0-2,5,7,8"),
        ((2, 1), "2,1"),
    ],
)
def test_text_of_several_microbatches(numbers: tuple[int, ...], text: str) -> None:
    assert numbered(numbers) == text
    assert str(JoinedWeights.of([Action(5, W, each) for each in numbers])) == f"5W{text}"


def test_one_w_is_itself_and_several_need_all_their_inputs() -> None:
    one = Action(0, W, 3)
    assert JoinedWeights.of([one]) is one
    several = JoinedWeights.of(_weights("1W0 1W2"))
    assert several.microbatches == (0, 2)
    assert list(map(str, needs_of(several, 3))) == ["1I0", "1I2"]


class _Joins:
    joins_weights = True

    def weight_calls(self, microbatches: Any) -> Any:
        raise NotImplementedError

    def backward_weight(self, microbatch: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0I0 0W0 0I1 0W1", "0I0 0W0 0I1 0W1"),
        ("0I0 0I1 0W0 0W1 0I2 0W2", "0I0 0I1 0W0,1 0I2 0W2"),
        ("1W0 0W0 1W1 0W1 1W2", "1W0-2 0W0,1"),  # nothing waits in between
        ("2W0 2W1 0W0 2W2 0W1", "2W0 2W1 0W0,1 2W2"),  # stage 2 joins none
    ],
)
def test_which_weights_stand_next_to_each_other(row: str, expected: str) -> None:
    stages = {0: _Joins(), 1: _Joins(), 2: object()}
    assert " ".join(map(str, join_adjacent_weights(_weights(row), stages))) == expected


def test_a_call_for_several_counts_for_each() -> None:
    several = JoinedWeights.of(_weights("0W0 0W1 0W2"))
    spans = (
        Span(0, Action.parse("0F0"), 0.0, 1.0),
        Span(0, several, 2.0, 5.0),
        Span(0, Action.parse("0W3"), 5.0, 7.0),
    )
    assert median_durations([spans])[0, W] == 1.0  # of 1, 1, 1 and 2


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.LayerNorm(6))


class _Tokens(nn.Module):
    """Token ids, among them the same ones in several microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table((x > 0).long() + (x > 1).long()).mean(1))


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "tied, norms": lambda: [_Tied(), _normed()],
    "sparse": lambda: [_Tokens(), _linear()],
    "all frozen": lambda: [_linear().requires_grad_(False), _linear()],
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd_but_for_the_order_of_sums(name: str) -> None:
    torch.manual_seed(0)
    modules = MODELS[name]()
    row, worst = trained(modules, schedule="gpipe", weights="2bp")
    assert worst < 1e-5
    assert "1W0-3" in row
    assert ("0W0-3" in row) is (name != "all frozen")


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "memory": "lean"},
        {"schedule": "naive", "weights": "2bp", "grad_dtype": torch.float64},
        {"schedule": "gpipe", "autocast": torch.bfloat16},
    ],
)
def test_other_options_beside_it(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    bf16 = options.get("autocast") is not None
    _, worst = trained([_linear(), _normed()], **options)
    assert worst < (4 * 2**-8 if bf16 else 1e-5)


def test_hooks_see_every_microbatch_and_the_timeline_says_so() -> None:
    torch.manual_seed(0)
    model, seen = _linear(), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm()))
    row, worst = trained([model], schedule="gpipe", weights="2bp", steps=1)
    assert worst < 1e-5
    assert len(seen) == 4, "one for each microbatch"
    assert [text for text in row if "W" in text] == ["0W0", "0W1", "0W2", "0W3"]


def test_a_fault_names_all_microbatches_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("bad weather")

    monkeypatch.setattr(SplitFunctions, "backward_weight_together", fail)
    with pytest.raises(PipelineError, match=r"^rank 0 failed in 0W0-3: ValueError: bad weather$"):
        trained([_linear()], schedule="gpipe", weights="2bp")


def test_what_has_nothing_to_join_is_refused() -> None:
    options: dict[str, Any] = {"schedule": "gpipe", "split_backward": False}
    with pytest.raises(PipelineError, match="has no W: use accumulation='fused'"):
        trained([_linear(), _linear()], **options)
    trained([_linear(), _linear()], accumulation="fused", **options)  # as it says


@ranks(2)
def test_tied_over_ranks() -> None:
    torch.manual_seed(0)
    row, worst = trained(_with_tied(), ranks=None, schedule="gpipe", weights="2bp")
    assert worst < 1e-5
    assert any("W0-3" in text for text in row)


def test_what_an_accumulating_schedule_compiles_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled within a step, where other ranks would wait for it."""
    made: list[int] = []
    original = manager.concatenate_microbatches

    def noted(module: fx.GraphModule, count: int) -> Any:
        made.append(count)
        return original(module, count)

    monkeypatch.setattr(manager, "concatenate_microbatches", noted)
    row = build("gpipe", 1, 3, weights="2bp").ranks
    mine = Schedule("mine", 1, 3, row, (0,), True)
    stage = autosplit.Stage(_linear(), [torch.randn(2, 6)], accumulation="concatenated")
    compile_stages({0: stage}, mine)
    assert made == [3]
