"""Orders that nobody would run, and weight gradients by a runner of one's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import autosplit
from autosplit.pipelining import dw_builder

from .bench import MICROBATCHES, Bench, Training, case, no_leaked_tensors, ordered, over

V = {
    0: "0F0 3F0 3B0 0B0",
    1: "1F0 2F0 2B0 1B0",
}
UNBALANCED = {
    0: "0F0 1F0 4F0 4B0 1B0 0B0",
    1: "2F0 3F0 3B0 2B0",
}
REORDERED = {
    0: "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
    1: "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
}
WITH_W = {
    0: "0F0 0F1 2F0 2F1 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
    1: "1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
}


@case("v", "unbalanced")
def any_stage_on_any_rank(bench: Bench, which: str) -> None:
    orders = V if which == "v" else UNBALANCED
    held = sorted({int(each[0]) for each in orders[bench.rank].split()})
    training = Training.of(1 + max(int(each[0]) for row in orders.values() for each in row.split()))
    training.run(ordered(bench.stages(training.model, held), orders, 1), held)


@case()
def backwards_behind_all_forwards(bench: Bench) -> None:
    training = Training.of(2)
    held = bench.held(2)
    built = ordered(bench.stages(training.model, held), REORDERED, 2, "compute_comms")
    with no_leaked_tensors():
        training.run(built, held)


@case()
def actions_that_reduce_nothing_divide_nothing(bench: Bench) -> None:
    training = Training.of(2)
    held = bench.held(2)
    built = ordered(bench.stages(training.model, held), REORDERED, 2, "compute_comms")
    built.scale_grads = True
    training.run(built, held)


@case()
def weights_here_and_there_over_four_steps(bench: Bench) -> None:
    training = Training.of(4)
    held = bench.held(4)
    built = ordered(bench.stages(training.model, held), WITH_W, 2)
    training.step(built)
    with no_leaked_tensors():
        for _ in range(3):
            training.step(built)
    training.check(held, times=4)


class Counted:
    """A builder of runners, and how many of them have run."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.count = 0

    def __call__(self) -> Any:
        return partial(self.run, self.builder())

    def run(self, runner: Any) -> None:
        self.count += 1
        runner()


@case(ScheduleGPipe, ScheduleInterleavedZeroBubble)
def every_microbatch_runs_its_weights(bench: Bench, schedule: Any) -> None:
    held = bench.held(2 if schedule is ScheduleGPipe else 4)
    training = Training.of(2 * len(held))
    split = {index: autosplit.split(training.model.layers[index]) for index in held}
    counts = {index: Counted(dw_builder(module)) for index, module in split.items()}
    stages = [
        PipelineStage(
            module,
            index,
            2 * len(held),
            torch.device("cpu"),
            group=bench.group,
            dw_builder=counts[index],
        )
        for index, module in split.items()
    ]
    training.run(over(schedule, stages), held, steps=1)
    assert {each.count for each in counts.values()} == {MICROBATCHES}
