"""Every schedule of torch's over two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    FORWARD,
    OVERLAP_F_B,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    _wait_batch_p2p,
)

from .bench import MICROBATCHES, Bench, Training, case, no_leaked_tensors, over, stages_of
from .layers import Adding, Layer, WithKeyword

SINGLE = (ScheduleGPipe, Schedule1F1B)
LOOPED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


def held_by(bench: Bench, schedule: Any) -> list[int]:
    """The stages of this rank, of as many as the schedule wants."""
    if schedule in V_SHAPED:
        return [bench.rank, 3 - bench.rank]
    return bench.held(4 if schedule in LOOPED else 2)


def made(bench: Bench, schedule: Any, **options: Any) -> tuple[Training, Any, list[int]]:
    """Training, the schedule and what this rank holds."""
    held = held_by(bench, schedule)
    training = Training.of(2 * len(held))
    return training, over(schedule, bench.stages(training.model, held), **options), held


@case()
def forward_only_again_and_again(bench: Bench) -> None:
    training = Training.of(2)
    (index,) = held = bench.held(2)
    built = over(_ScheduleForwardOnly, bench.stages(training.model, held), loss_fn=None)
    x, expected = training.x, training.x
    for _ in range(3):
        expected = training.model(expected).detach()
        if index == 0:
            built.step(x)
            x = torch.empty_like(x)
            dist.recv(x, group=bench.group, group_src=1)
        else:
            dist.send(built.step(), group=bench.group, group_dst=0)
    if index == 0:
        torch.testing.assert_close(x, expected)


@case(ScheduleGPipe, ScheduleInterleaved1F1B)
def evaluation_has_losses_and_no_gradients(bench: Bench, schedule: Any) -> None:
    training, built, held = made(bench, schedule)
    with torch.set_grad_enabled(bench.rank == 1):  # with and without
        found = training.evaluate(built)
    training.check_result(built, found)
    assert all(each.grad is None for each in training.model.parameters())
    assert len(found[1]) == (MICROBATCHES if held[-1] == 2 * len(held) - 1 else 0)


@case(Schedule1F1B, ScheduleInterleavedZeroBubble)
def no_outputs_unless_asked_for(bench: Bench, schedule: Any) -> None:
    training, built, held = made(bench, schedule)
    out, losses = training.step(built, return_outputs=False)
    assert out is None
    assert len(losses) == (MICROBATCHES if held[-1] == 2 * len(held) - 1 else 0)
    training.check(held)


@case(Schedule1F1B)
def many_steps(bench: Bench, schedule: Any) -> None:
    training, built, held = made(bench, schedule)
    for _ in range(8):
        found = training.step(built)
    training.check_result(built, found)
    training.check(held, times=8)


@case(ScheduleGPipe)
def keywords_are_cut_into_microbatches(bench: Bench, schedule: Any) -> None:
    y = torch.randn(8, 8, dtype=torch.float64)
    training = Training(Adding(), Layer(), y=y)
    held = bench.held(2)
    training.run(over(schedule, bench.stages(training.model, held)), held)


@case()
def what_torch_has_traced(bench: Bench) -> None:
    training = Training.of(2)
    parts = {"layers.1": SplitPoint.BEGINNING}
    traced = pipeline(training.model, mb_args=(training.x[:2],), split_spec=parts)
    module = traced.get_stage_module(bench.rank)
    built = over(ScheduleGPipe, [bench.stage(module, bench.rank, 2)])
    training.check_result(built, training.step(built))
    expected = training.expected[bench.rank]
    found = dict(module.named_parameters())
    assert len(found) == len(expected)
    for name, parameter in found.items():
        local = name.removeprefix(f"layers.{bench.rank}.")
        torch.testing.assert_close(parameter.grad, expected[local])


@case("inferred", "given")
def shapes(bench: Bench, which: str) -> None:
    for schedule in SINGLE:
        training = Training.of(2)
        (index,) = held = bench.held(2)
        options: dict[str, Any] = {}
        if which == "given":
            part = training.x[:2]
            options = {"input_args": (part,), "output_args": training.model.layers[index](part)}
        training.run(over(schedule, bench.stages(training.model, held, **options)), held)


@case("forward")
def without_a_loss_there_is_no_backward(bench: Bench, _: str) -> None:
    training = Training.of(2)
    held = bench.held(2)
    built = over(ScheduleGPipe, bench.stages(training.model, held), loss_fn=None)
    out, losses = training.step(built)
    assert not losses
    if bench.rank == 1:
        torch.testing.assert_close(out, training.out)


@case(*LOOPED)
def several_stages_a_rank(bench: Bench, schedule: Any) -> None:
    training, built, held = made(bench, schedule)
    training.step(built)
    with no_leaked_tensors():
        training.run(built, held)


@case(*V_SHAPED)
def v_shaped(bench: Bench, schedule: Any) -> None:
    training, built, held = made(bench, schedule)
    training.run(built, held)


@case(ScheduleInterleavedZeroBubble, ScheduleInterleaved1F1B)
def a_keyword_that_is_not_used(bench: Bench, schedule: Any) -> None:
    training = Training(*(WithKeyword() for _ in range(4)), unused=torch.ones(MICROBATCHES, 1))
    held = bench.held(4)
    training.run(over(schedule, bench.stages(training.model, held)), held)


@case()
def custom_functions_drive_a_stage(bench: Bench) -> None:
    training, built, held = made(bench, ScheduleDualPipeV)
    forwards: list[tuple[int, int]] = []
    overlaps: list[str] = []
    stages = {stage.stage_index: stage for stage in stages_of(built)}

    def forward(action: Any, context: Any) -> None:
        stage, at = stages[action.stage_index], action.microbatch_index
        forwards.append((action.stage_index, at))
        if not stage.is_first and action.stage_index - 1 not in stages:
            _wait_batch_p2p(built.fwd_recv_ops.pop((action.stage_index, at)))
        output = stage.forward_one_chunk(at, context.arg_mbs[at], context.kwarg_mbs[at])
        built._maybe_compute_loss(stage, output, context.target_mbs, at)
        if action.stage_index + 1 in stages:
            stages[action.stage_index + 1].set_local_fwd_input(output, at)

    def overlap(action: Any, context: Any) -> None:
        ahead, back = action.sub_actions
        overlaps.append(str(action))
        forward(ahead, context)
        stage, at = stages[back.stage_index], back.microbatch_index
        if not stage.is_last and back.stage_index + 1 not in stages:
            _wait_batch_p2p(built.bwd_recv_ops.pop((back.stage_index, at)))
        built.backward_counter[back.stage_index] += 1
        last = built.backward_counter[back.stage_index] == MICROBATCHES
        stage.backward_one_chunk(
            at, loss=built._maybe_get_loss(stage, at), full_backward=True, last_backward=last
        )
        if back.stage_index - 1 in stages:
            gradients = stage.get_local_bwd_output(at)
            stages[back.stage_index - 1].set_local_bwd_input(gradients, at)

    built.register_custom_function(FORWARD, forward)
    built.register_custom_function(OVERLAP_F_B, overlap)
    training.run(built, held, steps=2)
    assert len(forwards) == 2 * MICROBATCHES * len(held)
    assert {index for index, _ in forwards} == set(held)
    assert overlaps


def a_mean(output: Tensor, target: Tensor) -> Tensor:
    """Over the microbatch."""
    return (output - target).square().mean()


@case(Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleDualPipeV)
def gradients_of_a_mean_are_scaled(bench: Bench, schedule: Any) -> None:
    held = held_by(bench, schedule)
    training = Training.of(2 * len(held), loss_fn=a_mean)
    stages = bench.stages(training.model, held)
    built = over(schedule, stages, loss_fn=a_mean, scale_grads=True)
    training.step(built)
    training.check(held)
