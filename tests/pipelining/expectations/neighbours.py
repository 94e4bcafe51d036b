"""One stage a rank, called as schedules call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleGPipe

from autosplit.errors import AutosplitError

from .bench import MICROBATCHES, ROWS, Bench, Training, case, over
from .layers import WIDTH, Counting


@case()
def outputs_are_kept_by_the_last_stage_only(bench: Bench) -> None:
    training = Training.of(2)
    (stage,) = bench.stages(training.model, bench.held(2))
    assert not stage.output_chunks
    training.step(over(ScheduleGPipe, [stage]))
    assert not stage.fwd_cache
    assert len(stage.output_chunks) == (MICROBATCHES if bench.rank == 1 else 0)
    stage.clear_runtime_states()
    assert not stage.output_chunks


def flattened(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook."""
    return output.flatten()


def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook."""
    return output.bfloat16()


REFUSED = {
    "rows": r"float64\[3, 8\] .* told to expect float64\[2, 8\]",
    "dtype": "must have the same dtype",  # in the module's own words
    "flattened": r"float64\[16\] .* told to expect float64\[2, 8\]",
    "rounded": r"bfloat16\[2, 8\] .* told to expect float64\[2, 8\]",
}


@case(*REFUSED)
def what_does_not_fit_is_refused(bench: Bench, what: str) -> None:
    """The first rank alone: it ends before anything is sent."""
    training = Training.of(2)
    (stage,) = bench.stages(training.model, bench.held(2))
    stage._runtime_validate = True  # as TORCH_DISTRIBUTED_DEBUG=DETAIL sets it
    built = over(ScheduleGPipe, [stage], loss_fn=None)
    training.step(built)
    if bench.rank == 1:
        return
    x = training.x
    if what == "rows":
        x = torch.randn(ROWS + MICROBATCHES, WIDTH, dtype=torch.float64)
    elif what == "dtype":
        x = x.int()
    else:
        hook = flattened if what == "flattened" else rounded
        stage.submod.register_forward_hook(hook)
    with pytest.raises((AutosplitError, RuntimeError), match=REFUSED[what]):
        built.step(x)


@case()
def finding_shapes_leaves_buffers_as_they_are(bench: Bench) -> None:
    training = Training(Counting(), Counting())
    (stage,) = bench.stages(training.model, bench.held(2))
    training.step(over(ScheduleGPipe, [stage]))
    assert stage.submod.count.item() == MICROBATCHES
