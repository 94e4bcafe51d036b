"""A batch that one rank refuses is an error on all ranks, before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import BatchError, PipelineError
from autosplit.ranks.first_error import OUTSIDE_CALLS
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.pipeline.trainer_options import grouped
from tests.pipeline.workers import data, trainer
from tests.zoo import Made

X, Y = data(16)
FEWER = "the batch's inputs has 16 samples along dimension 0 on rank 0, but its targets has 4 samp"
DIFFERENT = "ranks have different batches: "
NOTHING = "a stage of this rank uses the batch's inputs; got None"

# By name: the batch of each rank, or of all; and the error on each rank, or on all.
BATCHES: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "of no samples": (((X[:0], Y[:0]),), ("0 samples along dimension 0 cannot be cut",)),
    "no pair": ((X,), ("a batch is a pair (inputs, targets); got a tensor of shape [16, 6]",)),
    "an array": (
        ((X.cpu().numpy(), Y),),
        ("got a ndarray: torch.from_numpy(array) makes a tensor",),
    ),
    "nothing": ((None,), (NOTHING, "uses the batch's targets; got None")),
    "no inputs": (((None, Y), (X, Y)), (NOTHING, f"rank 0 refuses its batch: {NOTHING}")),
}
COLD: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "targets of fewer samples": (((X, Y[:4]),), (FEWER,)),
    "fewer targets, a part each": (((X, None), (None, Y[:4])), (FEWER,)),
    "other samples": (
        ((X[:8], Y[:8]), (X, Y)),
        (f"{DIFFERENT}inputs is float32[8, 6] on rank 0 and float32[16, 6] on rank 1; pass",),
    ),
    "other targets": (
        ((X, Y), (X, Y.double())),
        (f"{DIFFERENT}targets is float32[16, 6] on rank 0 and float64[16, 6] on rank 1; pas",),
    ),
}
"""Batches that are refused only while their shapes are new: ranks compare no others."""

SOME = ("of no samples", "other samples")


class Counting(nn.Module):
    """A block that counts its forwards, also those of its copies."""

    def __init__(self, index: int, calls: Iterator[int]) -> None:
        super().__init__()
        self.block = workers.block(index)
        self.calls = calls

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        return self

    def forward(self, x: Tensor) -> Tensor:
        next(self.calls)
        return self.block(x)


def called(engine: PipelineTrainer, call: str, batch: Any) -> None:
    more = [lambda output, target: 0.0] if call == "measure" else []
    result = getattr(engine, call)(batch, *more)
    if call == "step_async":
        result.wait()


def refused(names: Any, call: str = "step", *, ranks: int = 2, static: bool = False) -> None:
    """Check that batches are refused before the first step of a trainer, and after each later one.

    No forward may run, and all steps must equal those of a trainer without refused batches.
    """
    rank = dist.get_rank() if ranks > 1 else 0
    calls, losses = itertools.count(), []

    def refuse(engine: PipelineTrainer, name: str, later: bool) -> None:
        """Pass one batch, and check that it is refused and that no forward has run."""
        inputs, message = {**BATCHES, **COLD}[name]
        earlier = next(calls)
        with pytest.raises(BatchError) as caught:
            called(engine, call, inputs[rank % len(inputs)])
        assert next(calls) == earlier + 1
        # After a step, the error of a static shape is another one.
        assert message[rank % len(message)] in str(caught.value) or (
            later and (static or name in COLD)
        )

    limit = {"memory_limit": "1GiB"} if static else {}
    with trainer(lambda index: Counting(index, calls), ranks=ranks, **limit) as engine:
        for name in names:
            refuse(engine, name, later=False)
        assert engine._groups.activity.phase == OUTSIDE_CALLS
        for name in names:
            losses.append(engine.step((X, Y)))
            refuse(engine, name, later=True)
        losses.append(engine.step((X, Y)))
        evaluated = engine.evaluate((X, Y))
    with trainer(ranks=ranks) as engine:
        assert all(torch.equal(loss, engine.step((X, Y))) for loss in losses)
        assert torch.equal(evaluated, engine.evaluate((X, Y)))


@pytest.mark.parametrize("static", [False, True])
@ranks(2)
def test_every_rank_refuses_a_batch(static: bool) -> None:
    refused([*BATCHES, *COLD], static=static)


@pytest.mark.parametrize(
    "call", ["forward_backward", "evaluate", "measure", "step_async", "predict_memory"]
)
@ranks(2)
def test_every_call_refuses(call: str) -> None:
    refused(SOME, call)


def test_on_one_rank() -> None:
    refused(["targets of fewer samples", "of no samples", "an array"], ranks=1)


@ranks(2)
def test_ranks_that_do_not_wait_have_run() -> None:
    """A step that does not wait for others cannot be refused by one that comes later."""
    with trainer() as engine:
        engine.step_async((X, Y)).wait()
        batch = (X, Y if engine.rank == 0 else Y[:4])
        with pytest.raises(
            PipelineError, match="batch of another shape than the other ranks"
        ) as seen:
            engine.step_async(batch).wait()
        assert type(seen.value).__name__ == ("PipelineError" if engine.rank else "RankError")


@ranks(2)
def test_a_cut_model_refuses_inputs_that_it_cannot_take() -> None:
    """They are refused from the first step on, and inputs may have names."""
    options = {"example": {"input": torch.zeros(4, 6)}, "stages": 2, "microbatches": 2}
    options |= grouped(planning={"costs": "estimate"}, timeout=60.0)
    model = nn.Sequential(workers.block(0), workers.block(1))
    with PipelineTrainer(
        model,
        nn.functional.mse_loss,
        workers.sgd,
        **options,
    ) as engine:
        message = r"sizes \[8, 5\], and the model was cut for \[4, 6\]: Sequential"
        for call in (engine.step, engine.evaluate):
            with pytest.raises(BatchError, match=message):
                call(input=X[:, :5], target=Y)
        result = engine.step(input=X[:8], target=Y[:8])
        with pytest.raises(BatchError, match=message):
            engine.step(input=X[:, :5], target=Y)
        assert result.shape == engine.step(({"input": X[:8]}, Y[:8])).shape
        engine.evaluate(input=X[:8], target=Y[:8])
        microbatches = [({"input": x}, Y[: len(x)]) for x in (X[:4], X[:3, :5])]
        for call in (engine.step, engine.evaluate):
            with pytest.raises(BatchError, match=r"sizes \[3, 5\]"):
                call(microbatches=microbatches)
        assert result.shape == engine.evaluate(input=X[:8], target=Y[:8]).shape


def scaled() -> nn.Module:
    return Made(lambda m, x, scale: m.block(x) * scale, block=workers.block(0))


def test_tensors_without_dimensions_go_whole_to_each_microbatch() -> None:
    """Losses and gradients equal those of a loop over microbatches in one process."""
    scale, bias = torch.tensor(3.0), torch.tensor(0.5)

    def loss(output: Tensor, target: Tensor, shift: Tensor) -> Tensor:
        return (output - target + shift).square().mean()

    model = scaled()
    expected = [loss(model(a, scale), b, bias) for a, b in zip(X.chunk(4), Y.chunk(4), strict=True)]
    with PipelineTrainer(
        [scaled()], lambda output, targets: loss(output, *targets), workers.sgd, microbatches=4
    ) as engine:
        result = engine.forward_backward(((X, scale), (Y, bias)))
        assert torch.equal(result, torch.stack(expected).detach())
        torch.stack(expected).mean().backward()
        weight = engine.gradients()[0]["block.0.weight"]
        torch.testing.assert_close(weight, model.block[0].weight.grad)


def test_the_loss_gets_a_target_or_a_tuple_as_in_the_batch() -> None:
    """A target alone and a target in a tuple may be mixed in one trainer."""

    def loss(output: Tensor, target: Any) -> Tensor:
        result = target if isinstance(target, Tensor) else 2.0 * target[0]
        return (output - result).square().mean()

    with PipelineTrainer([workers.block(0)], loss, workers.sgd, microbatches=4) as engine:
        whole = engine.evaluate((X, 2.0 * Y))
        assert torch.equal(engine.evaluate((X, (Y,))), whole)
        assert torch.equal(engine.forward_backward((X, 2.0 * Y)), whole)
        assert torch.equal(engine.forward_backward((X, (Y,))), whole)
