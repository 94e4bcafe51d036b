"""Split modules in torch's own stages: told how to run W, and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import autosplit
from autosplit.errors import PipelineError
from autosplit.pipelining import dw_builder
from tests.kept_ranks import ranks

from .programs import Program, block


def _stage(told: bool) -> Any:
    def make(part: nn.Module, at: int, count: int, device: torch.device) -> PipelineStage:
        module = autosplit.split(part)
        options: dict[str, Any] = {"dw_builder": dw_builder(module)} if told else {}
        return PipelineStage(module, at, count, device, **options)

    return make


@pytest.mark.parametrize(
    ("name", "told", "scaled"),
    [
        ("ScheduleGPipe", False, True),
        ("Schedule1F1B", True, False),
        ("ScheduleInterleavedZeroBubble", True, True),
    ],
)
@ranks(2)
def test_gradients_are_those_of_plain_autograd(name: str, told: bool, scaled: bool) -> list[str]:
    """Without being told, where the schedule does not split; where it does, it is refused
    (tests/autograd/test_trainers.py). After two steps, of which the second one counts.
    """
    program = Program(
        [block() for _ in range(2)],
        name,
        args=[torch.randn(8, 4)],
        target=torch.randn(8, 4),
        schedule_options={"scale_grads": scaled},
        stage=_stage(told),
    )
    for _ in range(2):
        for part in [*program.parts, *program.plain]:
            part.zero_grad()
        program.step()
        program.plain_step()
    return program.differences()


def test_each_runner_computes_one_microbatch() -> None:
    module = autosplit.split(nn.Linear(4, 4))
    build = dw_builder(module)
    for _ in range(3):
        module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    build()()
    assert module.pending == 2
    build()()
    build()()
    assert module.pending == 0
    build()()  # a frozen module has nothing


def test_it_takes_split_modules() -> None:
    with pytest.raises(PipelineError, match=r"takes the split module of a stage, got Linear\. Spl"):
        dw_builder(nn.Linear(4, 4))  # type: ignore[arg-type]
