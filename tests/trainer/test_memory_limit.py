"""Memory limits as users reach them: the advice of refusals, and no leftovers."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.ranks.control import Control
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline.ledger import workers
from tests.pipeline.trainer_options import grouped
from tests.trainer import test_microbatch_lists as lists
from tests.trainer import test_sizes_of_cut_models as cut

SETTLED = 6  # steps


def least(error: PipelineError) -> int:
    return int(re.findall(r"memory_limit=(\d+)", str(error))[0])


@ranks(2)
def test_the_limit_that_a_refusal_advises_is_kept() -> None:
    """On stages whose kernels take memory for themselves."""

    def limited(limit: int) -> PipelineTrainer:
        return workers.trainer(block=workers.Convolutions, memory_limit=limit)

    with pytest.raises(PipelineError) as caught, limited(1024) as refused:
        refused.step(workers.batch())
    advised = least(caught.value)
    with limited(advised) as engine:
        for step in range(SETTLED):
            engine.record = "memory" if step == SETTLED - 1 else False
            engine.step(workers.batch())
        memory, report = engine.memory(), engine.report()
    kept = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
    assert max(kept) <= advised
    assert memory.limit_kept
    assert str(memory).endswith("memory_limit: kept")
    assert "memory_limit: kept" in report


@pytest.mark.parametrize("store", [5, "", b"/tmp"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(PipelineError, match="store must be a folder for offloaded"):
        workers.trainer(store=store, memory_limit="1GiB", ranks=1)


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
@ranks(2)
def test_lists_with_more_and_larger_microbatches_than_the_first_keep_the_limit(
    schedule: str,
) -> None:
    """With the bits of plain autograd. A list that does not fit is refused, and the trainer lives
    on.
    """
    options = {"schedule": schedule, "memory_limit": 45_000}
    steps = [[8, 8]] * 3 + [[30, 5, 13], [8] * 6, [120, 3], [5, 30, 3], [13, 5]]
    gather, plain = Control.gather, lists.Plain()
    with (
        lists.trainer(microbatches=2, **options) as engine,
        mock.patch.object(Control, "gather", autospec=True, side_effect=gather) as gathers,
    ):
        for step, lengths in enumerate(steps):
            pairs = lists.listed(lengths, step)
            if lengths == [13, 5]:  # other numbers of samples, too
                pairs = [(x.repeat(2, 1), y.repeat(2, 1)) for x, y in pairs]
            gathers.reset_mock()
            engine.record = "memory"
            if 120 in lengths:
                message = r"within 45,000 bytes.* microbatch 0, of the sizes \(2, 120\), keeps"
                with pytest.raises(BatchError, match=message):
                    engine.step(microbatches=pairs)
                continue
            losses = engine.step(microbatches=pairs)
            assert gathers.call_count == 0 or lengths != [5, 30, 3]
            assert engine.memory().limit_kept
            forwards = (a for a in engine.schedule.ranks[0] if a.kind is ActionKind.FORWARD)
            order = [a.microbatch for a in forwards] if step > 2 else [*range(len(pairs))]
            expected = plain.step([pairs[microbatch] for microbatch in order])
            assert torch.equal(losses[order], expected)
            lists.assert_parameters(engine, plain.modules)


@ranks(2)
def test_a_batch_of_more_rows_than_the_first_keeps_the_limit() -> None:
    """Also if the trainer cuts the model; the last microbatch is smaller."""
    x, y = (cut.tokens(32, 6, seed) for seed in range(2))
    plain = cut.Plain()
    with cut.trainer(memory_limit=60_000) as engine:
        for rows in (4, 4, 4, 11, 3):
            engine.record = "memory"
            pairs = [*zip(x[:rows].chunk(4), y[:rows].chunk(4), strict=True)]
            assert torch.equal(engine.step((x[:rows], y[:rows])), plain.step(pairs))
            assert engine.memory().limit_kept
        for _ in range(2):
            with pytest.raises(BatchError, match=r"memory_limit: .* of the sizes \(80, 24\),"):
                engine.step((x.repeat(10, 4), y.repeat(10, 4)))
        pairs = [*zip(x[:8].chunk(4), y[:8].chunk(4), strict=True)]
        assert torch.equal(engine.step((x[:8], y[:8])), plain.step(pairs))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_repeated_blocks_count_at_the_sizes_of_each_list() -> None:
    """Not at those for which they were captured."""
    with PipelineTrainer(
        [nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **grouped(microbatches=2, ranks=1, memory_limit="1GiB", record="memory"),
    ) as engine:
        for lengths in ([3, 9], [40, 5]):
            batches = [torch.ones(2, length, 8) for length in lengths]
            engine.step(microbatches=[*zip(batches, batches, strict=True)])
            memory = engine.memory()
            (predicted,), (recorded,) = memory.predicted, memory.peak_activations
            assert recorded <= predicted <= 1.2 * recorded


@ranks(4)
def test_replicas_find_one_schedule_for_lists_of_different_sizes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    mine, plain = dist.get_rank() // 2, lists.Plain()
    with lists.trainer(mesh=mesh, memory_limit=60_000) as engine:
        for step in range(6):
            rows = [lists.listed([5, 9 + 4 * step][: 2 - step % 2], step), lists.listed([3] * 5)]
            if step == 4:
                rows = [rows[1], lists.listed([300])]
                with pytest.raises(BatchError, match=r"microbatch 0, of the sizes \(2, 300\)"):
                    engine.step(microbatches=rows[mine])
                continue
            engine.record = "memory"
            engine.step(microbatches=rows[mine])
            assert engine.memory().limit_kept
            plain.step([*rows[0], *rows[1]])
            for index, module in engine.modules.items():
                for name, parameter in module.named_parameters():
                    torch.testing.assert_close(parameter, plain.modules[index].get_parameter(name))
