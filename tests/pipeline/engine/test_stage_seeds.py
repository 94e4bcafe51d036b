"""Random numbers of stages depend on the seed, the stage and the microbatch only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.passes.analysis.operators import may_draw
from autosplit.pipeline import PipelineTrainer, build
from autosplit.pipeline.engine import stage_seeds
from tests.kept_ranks import ranks
from tests.mesh.workers import common_folder, mesh_of, same
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.trainer.moving import recomputing

WIDTH, M = 8, 4


class Scale(nn.Module):
    """Has a parameter, and changes nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def kept(output: Tensor, _: object) -> Tensor:
    """The share of the output that no dropout took."""
    return (output != 0).float().mean() + 0 * output.sum()


def dropping(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def silent(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def trainer(
    model: Any,
    stages: int | None = 4,
    microbatches: int = M,
    loss_fn: Any = F.mse_loss,
    **more: Any,
) -> PipelineTrainer:
    options = grouped(**{"timeout": 60.0, **more})
    return PipelineTrainer(
        model, loss_fn, torch.optim.SGD, stages=stages, microbatches=microbatches, **options
    )


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, WIDTH)


def results(model: Any = dropping, **options: Any) -> dict[str, Any]:
    """Of a run after ``torch.manual_seed(3)``; and the next number of the rank's generator."""
    torch.manual_seed(3)
    with trainer(model, **options) as engine:
        losses = [engine.step(batch()) for _ in range(2)]
        losses += [engine.step_async(batch()).wait(), engine.evaluate(batch())]
        return {"losses": torch.stack(losses), "next": torch.rand(3), "modules": engine.modules}


@ranks(2)
def test_stages_draw_apart() -> None:
    """As in one process: two halves drop a quarter, not the same half twice."""
    torch.manual_seed(0)
    modules = [nn.Sequential(Scale(), nn.Dropout(0.5)) for _ in range(2)]
    ones = torch.ones(2 * M, 2048)
    with trainer(modules, None, loss_fn=kept) as engine:
        first, second = engine.step((ones, ones)), engine.step((ones, ones))
    assert abs(first.mean() - 0.25) < 0.02
    assert len({*first.tolist(), *second.tolist()}) > M  # microbatches and steps apart, too


PLACED: dict[str, dict[str, Any]] = {
    "interleaved": {"schedule": "interleaved"},
    "fused": {"schedule": "interleaved", "split_backward": False},
    "moved": {"schedule": recomputing(build("zb-v", 4, M, ranks=2))},
    "replaced": {"schedule": "interleaved", "stage_factory": ReferenceStage},
}


@ranks(2)
def test_any_placement_and_order_draws_the_same() -> None:
    """And starts the same. Ranks' generators stand alike afterwards, whichever stages they ran."""
    expected = results(ranks=1, stage_factory=ReferenceStage)
    for name, options in PLACED.items():
        result = results(**options)
        assert torch.equal(result["losses"], expected["losses"]), name
        assert torch.equal(result["next"], expected["next"]), name
        for index, module in result["modules"].items():
            assert same(module.state_dict(), expected["modules"][index].state_dict()), name


@ranks(2)
def test_replicas_draw_apart() -> None:
    mesh = mesh_of(dp_replicate=2)
    torch.manual_seed(0)
    modules = [nn.Sequential(Scale(), nn.Dropout(0.5))]
    ones = torch.ones(2 * M, 2048)
    with trainer(modules, None, loss_fn=kept, mesh=mesh) as engine:
        losses = engine.step((ones, ones))
    both = [torch.empty_like(losses) for _ in range(2)]
    dist.all_gather(both, losses)
    assert not torch.equal(*both)


@ranks(2)
def test_a_run_goes_on_on_fewer_ranks() -> None:
    """Bit for bit, dropout and all that the ranks draw themselves included."""
    folder = common_folder()
    torch.manual_seed(3)
    with trainer(dropping, schedule="interleaved") as engine:
        engine.step(batch())
        save_checkpoint(engine, folder, names=_name)
        expected, drawn = engine.step(batch()), torch.rand(3)
    torch.manual_seed(99)
    with trainer(dropping, ranks=1) as engine:
        assert load_checkpoint(engine, folder, names=_name).generators == "continued"
        assert torch.equal(engine.step(batch()), expected)
        assert torch.equal(torch.rand(3), drawn)


def _name(stage: int, own: str) -> str:
    return f"{stage}.{own}"


def test_a_seed_before_a_step_is_that_of_the_step() -> None:
    for seeds, equal in (((7, 7), True), ((7, 8), False)):
        with trainer([Drops(), Drops()], None, ranks=1) as engine:
            losses, evaluated = [], []
            for seed in seeds:
                torch.manual_seed(seed)
                losses.append(engine.forward_backward(batch()))
                torch.manual_seed(seed)
                evaluated.append(engine.evaluate(batch()))
        assert torch.equal(*losses) == torch.equal(*evaluated) == equal


class Drops(nn.Linear):
    """Drops in evaluation, too."""

    rate = 0.5

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.rate)


def test_generators_move_where_stages_draw_only() -> None:
    """As those of one process: data that is drawn between steps is as without a trainer."""
    for model, steps in ((silent, 0), (dropping, 2)):
        torch.manual_seed(3)
        modules = [model(index) for index in range(2)]
        torch.manual_seed(4)
        with trainer(modules, None, ranks=1) as engine:
            for _ in range(2):
                engine.step(batch())
                engine.evaluate(batch())
        result = torch.rand(3)
        torch.manual_seed(4)
        torch.empty(steps, dtype=torch.int64).random_()
        assert torch.equal(result, torch.rand(3))


def test_one_rank_draws_no_number_that_no_stage_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], stage_seeds.draw_number
    with trainer([silent(0), silent(1)], None, ranks=1) as engine:
        engine.step(batch())
        monkeypatch.setattr(stage_seeds, "draw_number", lambda: drawn.append(1) or draw())
        engine.step(batch())
    assert not drawn


def test_a_rate_that_is_raised_later_draws_anew_in_each_step() -> None:
    """Though nobody knew that the stages draw when the step began."""
    modules = [Drops(), Drops()]
    for module in modules:
        module.rate = 0.0
    with trainer(modules, None, ranks=1) as engine:
        engine.step(batch())
        for module in modules:
            module.rate = 0.5
        state = [engine.forward_backward(batch()) for _ in range(4)]
    assert len({tuple(item.tolist()) for item in state}) == 4


def test_operators_that_may_draw() -> None:
    def node(op: Any, *given: Any) -> torch.fx.Node:
        return torch.fx.Graph().call_function(op, given)

    assert may_draw(node(torch.ops.aten.rand.default, [2]))
    assert may_draw(node(torch.ops.quantized.add.default))  # a namespace that we do not know
    assert may_draw(node(torch.ops.higher_order.cond))
    assert not may_draw(node(torch.ops.aten.mm.default))
    assert not may_draw(node(torch.sym_max, 1, 2))


# --- how stages start -----------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_stages_that_start_alike_are_named(copied: bool) -> None:
    def seeded(index: int) -> nn.Module:
        torch.manual_seed(1 if index != 1 else 2)
        return silent(index)

    message = (
        r"stages 0, 2, 3 start with equal weights: was each built after the same torch\.manual"
    )
    with (
        pytest.warns(UserWarning, match=message),
        trainer(
            [seeded(at) for at in range(4)] if copied else seeded, None if copied else 4, ranks=1
        ),
    ):
        pass


def test_constants_and_ties_are_no_stages_that_start_alike() -> None:
    tied = nn.Parameter(torch.randn(WIDTH))

    def normed(index: int) -> nn.Module:
        module = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
        module[0].weight = tied
        return module

    with trainer([normed(at) for at in range(2)], None, ranks=1):
        pass


def test_a_second_trainer_starts_otherwise() -> None:
    torch.manual_seed(0)
    sums = []
    for _ in range(2):
        with trainer(silent, ranks=1) as engine:
            sums += [m[0].weight.sum().item() for m in engine.modules.values()]
    assert len({*sums}) == 8
