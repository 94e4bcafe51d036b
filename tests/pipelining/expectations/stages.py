"""One stage, called as schedules call it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleGPipe

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.errors import AutosplitError

from .bench import ROWS, Bench, Training, case, ordered, over, sum_of_squares
from .layers import (
    WIDTH,
    Adding,
    EndsInView,
    Joining,
    Layer,
    OwnProduct,
    Shared,
    Three,
    TwoOutputsInside,
)

MODULES = (Layer, EndsInView, OwnProduct, TwoOutputsInside, Shared)
WHOLE = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


def chunks_of(training: Training, count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of microbatches."""
    return list(zip(training.x.chunk(count), training.target.chunk(count), strict=True))


def second_of_two(bench: Bench, module: nn.Module) -> tuple[Training, Any]:
    """The second stage of two of this rank, ready to be called."""
    training = Training(Layer(), module)
    stages = [bench.lone(layer, index, 2) for index, layer in enumerate(training.model.layers)]
    training.step(ordered(stages, {0: WHOLE}, 2, "compute_comms"))
    training.forget()
    stages[1].clear_runtime_states()
    return training, stages[1]


def expect(module: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """By plain autograd: the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)
    of_x, *of_parameters = torch.autograd.grad(sum_of_squares(module(x), target), (x, *parameters))
    return of_x, dict(zip(names, of_parameters, strict=True))


def equal(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """All of a module's gradients."""
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])


@case(*MODULES)
def a_full_backward(bench: Bench, kind: Any) -> None:
    training, stage = second_of_two(bench, kind())
    x, target = chunks_of(training, 2)[0]
    of_x, of_parameters = expect(stage.submod, x, target)
    stage.set_local_fwd_input(x, 0)
    loss = sum_of_squares(stage.forward_one_chunk(0, ()), target)
    stage.backward_one_chunk(0, loss=loss)
    torch.testing.assert_close(stage.get_local_bwd_output(0), (of_x,))
    equal(stage.submod, of_parameters)


@case(*MODULES)
@collecting_new_objects_only()
def the_inputs_first_and_the_weights_later(bench: Bench, kind: Any) -> None:
    training, stage = second_of_two(bench, kind())
    x, target = chunks_of(training, 2)[0]
    of_x, of_parameters = expect(stage.submod, x, target)
    stage.set_local_fwd_input(x, 0)
    output = stage.forward_one_chunk(0, ())
    stage.backward_one_chunk(0, loss=sum_of_squares(output, target), full_backward=False)
    torch.testing.assert_close(stage.get_local_bwd_output(0), (of_x,))
    del output
    gc.collect()
    assert all(each.grad is None for each in stage.submod.parameters())
    stage.backward_weight_one_chunk(0)
    equal(stage.submod, of_parameters)


@case()
def weights_of_one_microbatch_after_another(bench: Bench) -> None:
    training, stage = second_of_two(bench, Layer())
    total: dict[str, Tensor] = {}
    for x, target in chunks_of(training, 2) * 5:
        _, found = expect(stage.submod, x, target)
        total = {name: each + total.get(name, 0) for name, each in found.items()}
        stage.set_local_fwd_input(x, 0)
        loss = sum_of_squares(stage.forward_one_chunk(0, ()), target)
        stage.backward_one_chunk(0, loss=loss, full_backward=False)
        stage.backward_weight_one_chunk(0)
    equal(stage.submod, total)


@case()
def what_is_no_tensor_is_handed_on(bench: Bench) -> None:
    y = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    training = Training(Adding(), y=y)
    built = over(ScheduleGPipe, [bench.lone(training.model.layers[0])])
    out, _ = training.step(built, twice=True)
    torch.testing.assert_close(out, training.model.layers[0](training.x, y, twice=True))


@case("B", "I W")
def outputs_with_and_without_a_gradient(bench: Bench, kinds: str) -> None:
    torch.manual_seed(1)
    modules: Sequence[nn.Module] = (Three(), Joining())
    x, target = (torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(2))
    outputs = modules[0](x)
    sum_of_squares(modules[1](*outputs), target).backward()
    expected = [[each.grad for each in module.parameters()] for module in modules]
    for module in modules:
        module.zero_grad(set_to_none=True)
    stages = [bench.lone(module, index, 2) for index, module in enumerate(modules)]
    backwards = [
        f"{stage}{kind}{at}" for at in range(2) for stage in (1, 0) for kind in kinds.split()
    ]
    order = f"0F0 0F1 1F0 1F1 {' '.join(backwards)}"
    built = ordered(stages, {0: order}, 2, "compute_comms")
    built.step(x, target=target)
    for module, gradients in zip(modules, expected, strict=True):
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@case()
def a_weight_gradient_needs_its_input_gradient(bench: Bench) -> None:
    _, stage = second_of_two(bench, Layer())
    assert stage.has_backward
    with pytest.raises(AutosplitError, match="its I comes before its W"):
        stage.backward_weight_one_chunk(0)
