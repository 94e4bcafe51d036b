"""A pipeline in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from autosplit.errors import AutosplitError

from .bench import Bench, Training, case, no_leaked_tensors, ordered, over
from .layers import Layer

ANY = (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
ZERO_BUBBLE = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)


def towards(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the microbatch."""
    return F.cross_entropy(output, target.softmax(1))


@case(*ANY)
def one_stage_alone(bench: Bench, schedule: Any) -> None:
    training = Training.of(1, loss_fn=towards)
    built = over(
        schedule,
        [bench.lone(training.model.layers[0])],
        2,
        loss_fn=towards,
        scale_grads=True,
    )
    for _ in range(2):
        training.forget()
        out, losses = training.step(built)
    torch.testing.assert_close(out, training.out)
    torch.testing.assert_close(torch.stack(losses).mean(), training.loss)
    training.check([0])


@case()
def a_module_exchanged_before_the_first_step(bench: Bench) -> None:
    """As torchtitan does once it has parallelised it."""
    training = Training.of(2)
    stages = [bench.lone(Layer(), index, 2) for index in range(2)]
    for stage, layer in zip(stages, training.model.layers, strict=True):
        stage.submod = layer
    training.run(over(ScheduleInterleaved1F1B, stages), [0, 1])


@case(Schedule1F1B, ScheduleInterleavedZeroBubble)
def evaluation_and_then_training(bench: Bench, schedule: Any) -> None:
    training = Training.of(1)
    built = over(schedule, [bench.lone(training.model.layers[0])])
    for _ in range(2):
        training.check_result(built, training.evaluate(built))
    assert all(each.grad is None for each in training.model.parameters())
    for _ in range(2):
        training.check_result(built, training.step(built))
    training.check([0], times=2)


@case()
def neighbours_on_one_rank_hand_tensors_over(bench: Bench) -> None:
    training = Training.of(2)
    stages = [bench.lone(layer, index, 2) for index, layer in enumerate(training.model.layers)]
    orders = {0: "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"}
    built = ordered(stages, orders, 2, "compute_comms")
    training.step(built)
    with no_leaked_tensors():
        training.run(built, [0, 1])


@case()
def weights_apart_from_inputs(bench: Bench) -> None:
    training = Training.of(1)
    stages = [bench.lone(training.model.layers[0])]
    built = ordered(stages, {0: "0F0 0F1 0I0 0I1 0W0 0W1"}, 2, "compute_comms")
    training.step(built)
    with no_leaked_tensors():
        training.run(built, [0])


@case(*ZERO_BUBBLE)
def zero_bubble_refuses_what_torch_has_compiled(bench: Bench, schedule: Any) -> None:
    with pytest.raises((RuntimeError, AutosplitError)):
        over(schedule, [bench.lone(torch.compile(Layer()))], 2)


@case(ScheduleZBVZeroBubble)
def zero_bubble_takes_ours_with_inductor(bench: Bench, schedule: Any) -> None:
    stages = [bench.lone(Layer(), index, 2, backend="inductor") for index in range(2)]
    assert stages == over(schedule, stages, 2)._stages
