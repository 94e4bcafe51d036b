"""Stages of a cut model at other sizes than the example's, beside the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.planner import WholeModel, cut
from tests.planner.whole_models import (
    Case,
    checkpointed,
    llama,
    loss_of,
    mixed,
    run_modules,
    tensors_of,
    unet,
)
from tests.zoo import Made


def pooled() -> Case:
    """Each convolution halves the sizes, so that no later stage sees those of the image."""
    convolutions = [nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)]
    layers = [layer for conv in convolutions for layer in (conv, nn.ReLU())]
    head = Made(lambda m, x: m.linear(x.flatten(2).mean(2)) / x.shape[-1], linear=nn.Linear(4, 2))
    return Case(nn.Sequential(*layers, head), (torch.randn(2, 3, 16, 16),))


def resized(case: Case, shape: Sequence[int]) -> Case:
    """The case with inputs of another shape."""
    if case.args:
        return Case(case.model, (torch.randn(*shape),))
    inputs = {
        name: torch.ones(*shape, dtype=torch.long)
        if name == "attention_mask"
        else torch.randint(50, tuple(shape))
        for name in case.kwargs
    }
    return Case(case.model, (), inputs)


IMAGES = [(2, 3, 24, 24), (3, 3, 16, 24), (4, 3, 40, 24), (2, 3, 16, 16)]
ROWS = [(4, 8), (7, 8), (1, 8)]


def small_llama() -> Case:
    return llama(1)


@pytest.mark.parametrize(
    ("make", "shapes", "training"),
    [
        (small_llama, [(2, 12), (3, 9), (5, 31), (2, 8)], True),
        (unet, IMAGES, True),
        (pooled, IMAGES, True),
        (mixed, ROWS, True),
        (mixed, ROWS, False),  # computes something else
        (checkpointed, ROWS, True),
    ],
)
def test_stages_have_the_bits_of_the_model_at_every_size(
    make: Callable[[], Case], shapes: list[tuple[int, ...]], training: bool
) -> None:
    torch.manual_seed(0)
    case = make()
    whole = WholeModel.capture(case.model, case.args, case.kwargs)
    count = len(whole.blocks)
    partition = cut(whole, sorted({count // 3, 2 * count // 3} - {0}))
    modules = [partition.build(index).train(training) for index in range(partition.stages)]
    case.model.train(training)
    captured = set[int]()
    for shape in shapes:
        batch = resized(case, shape)
        for module in modules:
            module.take_sizes([[(*t.shape,) for t in batch.tensors()]], training=training)
            captured.add(len([*module._graphs_in(training)]))
        results = []
        for call in (
            lambda batch=batch: run_modules(partition, modules, batch.tensors()),
            lambda batch=batch: case.model(*batch.args, **batch.kwargs),
        ):
            case.model.zero_grad()
            torch.manual_seed(1)
            result = call()
            if training:
                loss_of(result).backward()
            gradients = {name: p.grad for name, p in case.model.named_parameters()}
            results.append((tensors_of(result), gradients))
        (outputs, gradients), (expected, expected_gradients) = results
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other), shape
        for name, gradient in expected_gradients.items():
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)
    assert max(captured) <= 4  # the example's; one varying size, two; samples of one


def test_a_size_that_follows_from_no_received_tensor_is_refused() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        flat = module.first(x).flatten(0, 1)
        return module.second(flat).view(*x.shape[:2], 4)

    model = Made(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    whole, firsts = WholeModel.capture(model, (torch.randn(2, 3, 4),)).divided(["second"])
    stage = cut(whole, firsts).build(1)
    with pytest.raises(PlanError, match=r"sizes \[5, 7, 4\].*a stage reads the size"):
        stage.take_sizes([[(5, 7, 4)]], training=True)
    assert stage(torch.randn(6, 4)).shape == (2, 3, 4)
