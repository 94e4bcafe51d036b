"""How weight gradients of several microbatches are added up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import SplitError, Stage
from autosplit.runtime import gradient_accumulation
from autosplit.runtime.gradient_accumulation import GradientSums
from tests.microbatches import run_microbatches
from tests.zoo import Made


def test_publish_keeps_float32_where_the_parameter_takes_it() -> None:
    model = nn.Linear(3, 2).bfloat16()
    model.weight.grad_dtype = torch.float32
    stage = Stage(model, [torch.randn(4, 3).bfloat16()], grad_dtype=torch.float32)
    run_microbatches(
        stage,
        [torch.randn(4, 3).bfloat16() for _ in range(2)],
        [torch.randn(4, 2).bfloat16() for _ in range(2)],
    )
    total = stage.gradients["weight"]
    stage.publish()
    assert model.weight.grad is total
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (torch.float32, torch.bfloat16)


def test_parameter_replaced_between_two_microbatches() -> None:
    model = nn.Linear(3, 2)
    stage = Stage(model, [torch.randn(4, 3)], index=2)
    stage.forward(0, [torch.randn(4, 3)])
    stage.backward(0, [torch.randn(4, 2)])
    model.weight = nn.Parameter(torch.randn(2, 3))
    stage.forward(1, [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="stage 2: parameter weight was replaced between two"):
        stage.backward(1, [torch.randn(4, 2)])


def test_gradient_that_holds_more_than_itself_is_copied() -> None:
    """It is a slice of the output's gradient times two, which must not stay alive with it."""

    sliced = Made(lambda m, x: torch.cat([m.part, x]) * 2.0, part=nn.Parameter(torch.randn(2)))
    stage = Stage(sliced, [torch.randn(1000)])
    run_microbatches(stage, [torch.randn(1000)], [torch.ones(1002)])
    gradient = stage.gradients["part"]
    assert gradient.tolist() == [2.0, 2.0]
    assert gradient.untyped_storage().nbytes() == 8


def test_hooks_are_searched_again_only_after_one_was_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, searched, seen = nn.Linear(3, 2), [], []
    stage = Stage(model, [torch.randn(4, 3)])
    waits = gradient_accumulation.waits_for_gradient
    monkeypatch.setattr(
        gradient_accumulation, "waits_for_gradient", lambda p: searched.append(p) or waits(p)
    )

    def step() -> None:
        stage.forward(0, [torch.randn(4, 3)])
        stage.backward(0, [torch.ones(4, 2)])
        stage.publish()

    for _ in range(3):
        step()
    assert len(searched) == 2
    model.bias.register_post_accumulate_grad_hook(seen.append)
    step()
    assert len(seen) == 1
    assert len(searched) == 4


def test_gradients_are_added_where_some_are_there_already() -> None:
    model = nn.Linear(3, 2)
    stage = Stage(model, [torch.randn(4, 3)])
    model.bias.grad = torch.ones(2)
    stage.forward(0, [torch.ones(4, 3)])
    stage.backward(0, [torch.ones(4, 2)])
    stage.publish()
    assert model.bias.grad.tolist() == [5, 5]
    assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0))
    assert not stage.gradients


def test_the_sums_of_one_parameter_under_two_names_are_added() -> None:
    sums, parameter = GradientSums("stage 0"), nn.Parameter(torch.zeros(2))
    sums.set_parameters(["encoder", "decoder"], [parameter, parameter])
    sums.add_gradients(["encoder", "decoder"], [torch.ones(2), torch.full((2,), 2.0)], ())
    sums.add_to_parameters()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 3]
