"""Predicted memory of a W of several microbatches beside the allocator's."""

from __future__ import annotations

import torch
from torch import nn

from autosplit import Stage
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import StageBytes
from autosplit.pipeline.schedule.schedule import ActionKind
from benchmarks.peak import peak_bytes

COUNT, ROWS = 4, 32


def test_copies_of_factors_count() -> None:
    stage = Stage(
        nn.Sequential(nn.Linear(512, 768, bias=False), nn.Tanh(), nn.Linear(768, 256, bias=False)),
        [torch.randn(ROWS, 512)],
        accumulation="auto",
    )
    inputs = [torch.randn(ROWS, 512) for _ in range(COUNT)]
    grads = [torch.randn(ROWS, 256) for _ in range(COUNT)]

    def run_to_weights() -> None:
        for at, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            stage.forward(at, [x])
            stage.backward_input(at, [grad])

    run_to_weights()
    stage.backward_weight(*range(COUNT))  # the sums exist from now on
    run_to_weights()
    measured = peak_bytes(lambda: stage.backward_weight(*range(COUNT)))
    calls = CallMemory(torch.device("cpu"))
    kept = calls.of_call(stage.functions, "backward_weight", adds=True, count=COUNT)
    assert kept.peak([]) == measured  # peak_bytes does not see that earlier tensors are freed
    kinds = {ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
    size = StageBytes(stage.functions, calls, {}, kinds)
    assert 0 < size.joined_weight(COUNT) + size.memory.workspace[2] <= measured
