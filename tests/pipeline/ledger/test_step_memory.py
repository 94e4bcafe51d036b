"""Memory of ranks in a step: measured by the allocator, predicted from graphs and schedule."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.torch_internals.allocations import HostAllocations
from tests.kept_ranks import Ranks
from tests.pipeline.ledger import workers
from tests.pipeline.reference_stage import ReferenceStage
from tests.zoo import Residual

LOSSES = 4 * workers.MICROBATCHES  # bytes, of which graphs know nothing once they are with the user
FLOAT = 4
SCALARS = 64  # bytes: losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_backward": False},
        {"schedule": "zb-v", "stages": 4},
        {"memory": "lean"},
        {"schedule": "gpipe", "weights": "2bp"},
        {"block": workers.Convolutions},
        {"schedule": workers.running_again()},
        {"schedule": workers.running_again(), "block": workers.Convolutions},
        # Running F again needs more memory than F saves.
        {"schedule": workers.running_again(), "block": partial(nn.Linear, 32, 32)},
        {"grad_dtype": torch.float64, "split_backward": False},
        {"grad_dtype": torch.bfloat16, "memory": "lean"},
        # Gradients of so many bytes are added inside of the graph.
        {"grad_dtype": torch.float64, "block": partial(Residual, workers.WIDTH, 2**13)},
    ],
    ids=lambda options: ", ".join(map(str, options)),
)
def test_on_one_rank_each_action_is_predicted_to_the_byte(options: dict[str, object]) -> None:
    """Which action is the peak depends on the processor's kernels, so all of them are compared."""
    with workers.recorded_step(ranks=1, **options) as engine:
        memory, predicted = engine.memory(), workers.predicted_levels(engine)
    measured = {band.during: band.activations for band in memory.bands[0] if band.during}
    assert predicted == measured
    assert memory.predicted == memory.peak_activations == (max(measured.values()),)
    assert memory.left(0) == 0


def test_sums_of_another_dtype_are_predicted() -> None:
    usual, wide = (workers.recorded(ranks=1, grad_dtype=dtype) for dtype in (None, torch.float64))
    gradients = 2 * sum(p.numel() for p in workers.block().parameters()) * FLOAT
    assert wide.fixed[0] == usual.fixed[0] + gradients


def test_bands_are_what_is_fixed_and_what_is_not() -> None:
    result = workers.recorded(ranks=1)
    (bands,), (fixed,) = result.bands, result.fixed
    by_action = {band.during: band for band in bands if band.during}
    parameters = 2 * sum(p.numel() for p in workers.block().parameters()) * FLOAT
    batch = 2 * workers.batch()[0].numel() * FLOAT
    steps = 2 * len([*workers.block().parameters()]) * FLOAT  # AdamW counts for each parameter
    assert bands[0].fixed == 3 * parameters + steps
    assert bands[-1].fixed == fixed == 4 * parameters + steps
    assert bands[0].activations == batch
    assert max(band.activations for band in bands) == result.peak_activations[0]
    assert by_action["0F0"].activations < by_action["1F0"].activations
    assert all(band.activations >= batch for band in bands)
    assert [band.start for band in bands] == sorted(band.start for band in bands)


def test_two_ranks_hear_the_same_and_hold_what_was_predicted(on_ranks: Ranks) -> None:
    result, other = on_ranks(workers.recorded, 2, timeout=120.0)
    assert result == other
    assert len(result.bands) == len(result.fixed) == 2
    for measured, predicted in zip(result.peak_activations, result.predicted, strict=True):
        assert predicted is not None
        assert predicted == measured


def test_a_frozen_stage_holds_what_it_sends_and_is_predicted_too(on_ranks: Ranks) -> None:
    """Nothing comes back that would tell that it has arrived."""
    result, _ = on_ranks(partial(workers.recorded, frozen=0), 2, timeout=120.0)
    for measured, predicted in zip(result.peak_activations, result.predicted, strict=True):
        assert predicted is not None
        assert abs(predicted - measured) <= SCALARS


def test_after_30_steps_every_band_is_as_it_was(on_ranks: Ranks) -> None:
    early, late = on_ranks(workers.early_and_late, 2, (30,), timeout=120.0)[0]
    for rank in range(2):
        for ours, theirs in zip(early.bands[rank], late.bands[rank], strict=True):
            assert replace(ours, start=0.0, end=0.0) == replace(theirs, start=0.0, end=0.0)
        assert late.left(rank) == early.left(rank)


def test_steps_give_back_all_that_they_take() -> None:
    with workers.trainer(ranks=1) as engine:
        engine.step(workers.batch())
        engine.step(workers.batch())
        gc.collect()
        with HostAllocations() as allocations:
            for _ in range(20):
                allocations.mark()
                engine.step(workers.batch())
    assert {stretch.end for stretch in allocations.stretches()} == {0}


def test_a_leak_shows() -> None:
    kept: list[torch.Tensor] = []
    result = workers.recorded(ranks=1, stage_factory=workers.leaking(kept, 3))
    assert result.left(0) == 3 * 2 * workers.MICROBATCHES


def test_nothing_is_predicted_of_a_stage_of_which_nothing_is_known() -> None:
    result = workers.recorded(ranks=1, stage_factory=ReferenceStage)
    assert result.predicted == (None,)
    assert result.peak_activations[0] > 0


def test_memory_must_be_recorded_and_record_is_checked() -> None:
    with workers.trainer(ranks=1, record=True) as engine:
        engine.step(workers.batch())
        with pytest.raises(PipelineError, match=r"record must be False, True .*'memory' .*'bytes'"):
            engine.record = "bytes"  # type: ignore[assignment]
        engine.record = "memory"
        engine.step(workers.batch())
        assert engine.timeline().spans
        engine.record = False
        engine.step(workers.batch())
        with pytest.raises(PipelineError, match="set record='memory' before a step, then call"):
            engine.memory()


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_tells() -> None:
    result = workers.recorded(ranks=1, device="cuda")
    (measured,), (predicted,) = result.peak_activations, result.predicted
    assert predicted is not None
    assert predicted <= measured <= 1.5 * predicted  # pieces of 512 bytes


def test_losses_keep_no_more_memory_than_their_own() -> None:
    result = workers.recorded(ranks=1, loss_fn=torch.nn.functional.mse_loss)
    waits = [band for band in result.bands[0] if not band.during]
    assert waits[-2].activations - waits[0].activations <= LOSSES
