"""A batch that one rank cannot take is refused by all, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import BatchError
from autosplit.pipeline.engine.first_error import AROUND
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline import workers
from tests.pipeline.training import batch_workers
from tests.ranks import Ranks

Found = list[dict[str, Any]]

FEWER = "the batch's inputs has 16 samples along dimension 0, but its targets has 4"
ODD = "the batch's inputs has shape [15, 6]: 15 samples along dimension 0 cannot be cut into 4"
ODD_TARGETS = "the batch's targets has shape [15, 6]: 15 samples along"
DIFFERENT = "the ranks were given different batches: "
# What the first rank says of it, and the last; of a shape that the trainer knows, too.
SAID: dict[str, tuple[str, str]] = {
    "targets of fewer samples": (FEWER, FEWER),
    "indivisible": (ODD, ODD),
    "of no samples": ("0 samples along dimension 0 cannot be cut",) * 2,
    "no pair": ("a batch is a pair (inputs, targets); got a tensor of shape [16, 6]",) * 2,
    "an array": ("found a ndarray: torch.from_numpy(array) makes a tensor of an array",) * 2,
    "nothing": ("takes the batch's inputs; got None", "takes the batch's targets; got None"),
    "indivisible, a part each": (ODD, ODD_TARGETS),
    "indivisible on the first": (ODD, f"rank 0 refuses its batch: {ODD}"),
    "indivisible on the last": (f"rank 1 refuses its batch: {ODD}", ODD),
    "no inputs": (
        "this rank holds a stage that takes the batch's inputs; got None",
        "rank 0 refuses its batch: this rank holds a stage that takes the batch's inputs; got None",
    ),
    "no targets": (
        "rank 1 refuses its batch: this rank holds a stage that takes the batch's targets; got",
        "this rank holds a stage that takes the batch's targets; got None",
    ),
}
COLD: dict[str, tuple[str, str]] = {
    "targets of fewer samples, a part each": (
        f"{DIFFERENT}inputs of 16 samples on rank 0 and targets of 4 samples on rank 1; give every",
    )
    * 2,
    "other samples": (
        f"{DIFFERENT}the inputs are float32[8, 6] on rank 0 and float32[16, 6] on rank 1; give",
    )
    * 2,
    "other targets": (
        f"{DIFFERENT}the targets are float32[16, 6] on rank 0 and float64[16, 6] on rank 1; give",
    )
    * 2,
    "more inputs": (
        f"{DIFFERENT}the inputs are float32[16, 6] on rank 0 and float32[16, 6], float32[16, 6] on",
    )
    * 2,
}
"""What ranks say only of shapes that they do not know."""


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> Found:
    return on_ranks(batch_workers.on_two_ranks, 2, timeout=90)


@pytest.mark.parametrize("name", [*SAID, *COLD])
def test_every_rank_refuses_a_batch(ranks: Found, name: str) -> None:
    for rank, found in enumerate(ranks):
        text = {**SAID, **COLD}[name][rank]
        first, later = found["any shape"]["said"][name]
        assert text in first
        assert text in later or name in COLD
        first, later = found["one shape"]["said"][name]
        assert text in first
        assert later, "static shapes"


@pytest.mark.parametrize("call", ["any shape", "one shape", *batch_workers.CALLS])
def test_nothing_has_run_and_the_trainer_goes_on(ranks: Found, call: str) -> None:
    for found in ranks:
        assert found[call]["ran"] == 0
        assert found[call]["phase"] == AROUND
        assert found[call]["same"]


@pytest.mark.parametrize("name", batch_workers.BY_EVERY_CALL)
@pytest.mark.parametrize("call", batch_workers.CALLS)
def test_every_call_refuses(ranks: Found, call: str, name: str) -> None:
    """Before its first step, and behind it."""
    for rank, found in enumerate(ranks):
        for text in found[call]["said"][name]:
            assert {**SAID, **COLD}[name][rank] in text


def test_ranks_that_do_not_wait_have_run(ranks: Found) -> None:
    """A step that does not wait for others cannot be refused by one that comes later."""
    (kind, first), (other, last) = (found["without waits"] for found in ranks)
    assert (kind, other) == ("RankError", "PipelineError")
    assert FEWER in last
    assert FEWER in first


@pytest.mark.parametrize("call", ["step", *batch_workers.CALLS])
def test_on_one_rank(call: str) -> None:
    found = batch_workers.refused(batch_workers.ALIKE, call, ranks=1)
    assert found.pop("said").keys() == batch_workers.ALIKE.keys()
    assert found == {"ran": 0, "phase": AROUND, "same": True}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = workers.block(0)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = self.block(x) * scale
        return made


def test_tensors_without_dimensions_go_whole_to_each_microbatch() -> None:
    scale, bias = torch.tensor(3.0), torch.tensor(0.5)

    def loss(output: Tensor, target: Tensor, shift: Tensor) -> Tensor:
        return (output - target + shift).square().mean()

    model = Scaled()
    x, y = batch_workers.X, batch_workers.Y
    expected = [loss(model(a, scale), b, bias) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    with PipelineTrainer(
        [Scaled()], lambda output, targets: loss(output, *targets), workers.sgd, microbatches=4
    ) as engine:
        found = engine.forward_backward(((x, scale), (y, bias)))
        assert torch.equal(found, torch.stack(expected).detach())
        torch.stack(expected).mean().backward()
        weight = engine.gradients()[0]["block.0.weight"]
        torch.testing.assert_close(weight, model.block[0].weight.grad)
        with pytest.raises(
            BatchError, match=r"inputs\[0\] has 16 .* its targets\[0\] has 4: every"
        ):
            engine.step(((x, scale), (y[:4], bias)))
