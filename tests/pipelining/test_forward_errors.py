"""Errors that a stage's forward raises, as they come out of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from autosplit.errors import PipelineError, SplitError
from autosplit.pipelining import SplitPipelineStage

from .checks import large_values
from .programs import CPU, mean_square


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.check = nn.Linear(4, 4), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        built: Tensor = self.inner(x)
        return built


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def schedule_of(module: nn.Module) -> Schedule1F1B:
    stage = SplitPipelineStage(module, 0, 1, CPU, group=dist.new_group([0]))
    return Schedule1F1B(stage, 2, loss_fn=mean_square)


@pytest.mark.usefixtures("alone")
def test_an_assertion_about_values_is_in_the_graph() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(PipelineError, match=r"F of microbatch 0 of stage 0 .Checked. failed: l"):
        schedule_of(Checked(large_values)).step(x, target=x)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "step() got no inputs on the rank of stage 0 (Linear)"),
        (
            2,
            "too many positional arguments; step() got 2 positional argument(s), and",
        ),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_later_step_that_is_given_something_else(given: int, text: str) -> None:
    x = torch.randn(4, 4)
    schedule = schedule_of(nn.Linear(4, 4))
    schedule.step(x, target=x)
    with pytest.raises(PipelineError, match=re.escape(text)):
        schedule.step(*[x] * given, target=x)


@pytest.mark.usefixtures("alone")
def test_an_error_that_is_no_kernels_keeps_its_class() -> None:
    with pytest.raises(IndexError) as raised:
        schedule_of(nn.Embedding(3, 4)).step(torch.full((4,), 7), target=torch.randn(4, 4))
    assert raised.value.__notes__ == ["in F of microbatch 0 of stage 0 (Embedding)"]


@pytest.mark.usefixtures("alone")
def test_a_weight_gradient_needs_its_input_gradient() -> None:
    x, schedule = torch.randn(4, 4), schedule_of(nn.Linear(4, 4))
    schedule.step(x, target=x)
    schedule._stage.clear_runtime_states()
    with pytest.raises(SplitError, match="microbatch 0 has not run backward_input"):
        schedule._stage.backward_weight_one_chunk(0)
