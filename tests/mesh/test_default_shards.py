"""Stages along "dp_shard" that the trainer shards itself, over four Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autosplit.pipeline import PipelineTrainer
from autosplit.trainer.default_shards import group_names
from autosplit.trainer.plan import partition
from tests.kept_ranks import ranks
from tests.mesh.workers import (
    WIDTH,
    assert_refused,
    assert_round_trip,
    assert_step,
    by_hand,
    mesh_of,
    number_of,
    of_shares,
    share,
    share_of,
    trainer,
    uneven,
    whole,
)
from tests.zoo import Made

MESH = {"pp": 2, "dp_shard": 2}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WORDS = 32


# --- a whole model --------------------------------------------------------------------------------


class Words(nn.Module):
    """Blocks between an embedding and a head with the same weight; called by keywords, it computes
    its loss beside other outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.body = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.body["layers"]:
            x = x + block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


BLOCKS = "body.layers"


def tokens(replica: int, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(WORDS, (4, 8), generator=generator)
    return {"ids": ids, "labels": ids.flip(1)}


def _loss(output: Any, _: Any) -> Tensor:
    result: Tensor = output["loss"].float()
    return result


def of_fsdp(replica: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a replica's share, and the gradients of plain FSDP2 over two ranks."""
    mesh = mesh_of(dp_shard=2)
    torch.manual_seed(0)
    model = Words()
    for block in model.get_submodule(BLOCKS).children():
        fully_shard(block, mesh=mesh, **options)
    sharded: Any = fully_shard(model, mesh=mesh, **options)
    losses = []
    for microbatch in range(2):
        sharded.set_requires_gradient_sync(microbatch == 1)
        part = {name: item.chunk(2)[microbatch] for name, item in tokens(replica).items()}
        loss = _loss(model(**part), None)
        (loss / 2).backward()
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: whole(parameter.grad) for name, parameter in named}


def of_trainer(mesh: DeviceMesh, **options: Any) -> PipelineTrainer:
    torch.manual_seed(0)
    planning = {"costs": "estimate", "cut_at": [f"{BLOCKS}.1"]}
    example = {name: item[:2] for name, item in tokens(0).items()}
    options = {"microbatches": 2, "planning": planning, "example": example, **options}
    return trainer(mesh, Words(), loss_fn=_loss, **options)


@ranks(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_whole_model_is_that_of_fsdp() -> None:
    """Bit for bit, but for the sum of a weight that two stages have."""
    mesh = mesh_of(pp=1, dp_shard=2)
    sharding: dict[str, Any] = {"mp_policy": HALF, "reshard_after_forward": True}
    losses, gradients = of_fsdp(number_of(mesh), **sharding)
    batch = tokens(number_of(mesh)), ()
    with of_trainer(mesh, sharding=sharding) as engine:
        tied = {name for group in engine.shared_parameters for _, name in group}
        assert tied == {"head.weight", "embed.weight"}
        assert engine.forward_backward(batch).tolist() == losses
        for stage, module in engine.modules.items():
            for name, gradient in engine.gradients()[stage].items():
                assert isinstance(gradient, DTensor)
                if name in tied:
                    # FSDP2 adds the two parts in the dtype of the parameters.
                    torch.testing.assert_close(
                        whole(gradient), gradients[name], rtol=0.02, atol=1e-3
                    )
                else:
                    assert torch.equal(whole(gradient), gradients[name]), name
            groups = [n for n, m in module.named_modules() if isinstance(m, FSDPModule)]
            assert [n.rpartition(".")[2] for n in groups] == ["", str(stage)]
        engine.step(batch)
        for module in engine.modules.values():
            assert {type(p.data) for p in module.parameters()} == {DTensor}


# --- smaller models -------------------------------------------------------------------------------


def uneven_model() -> nn.Module:
    return nn.Sequential(uneven(0), uneven(1))


def of_cut(
    mesh: DeviceMesh | None, model: nn.Module | None = None, **options: Any
) -> PipelineTrainer:
    planning = {"costs": "estimate", "cut_at": ["1.0"]}
    example = torch.zeros(2, WIDTH)
    options = {"max_grad_norm": 1e9, "planning": planning, "example": example, **options}
    return trainer(mesh, model or uneven_model(), **options)


def with_number(index: int) -> nn.Module:
    """A stage with a parameter that is a number."""
    number = nn.Parameter(torch.tensor(1.5))
    return nn.Sequential(*uneven(index), Made(lambda m, x: x * m.number, number=number))


def part_sharded(mesh: DeviceMesh) -> Any:
    """Builds stages of which one module is sharded."""

    def build(index: int) -> nn.Module:
        module: Any = with_number(index)
        fully_shard(module[0], mesh=mesh["dp_shard"])
        return module  # type: ignore[no-any-return]

    return build


@ranks(4)
def test_stages_are_those_of_one_process() -> None:
    """Bit for bit: a model that the trainer cuts, within a limit; and stages of which the user has
    sharded a part, or none.
    """
    mesh = mesh_of(**MESH)
    losses, *rest = by_hand(uneven, 2, 2)
    expected = losses[number_of(mesh)], *rest
    sharding = {"reshard_after_forward": True, "groups": lambda name, _: name in ("0.0", "1.0")}
    model = uneven_model()
    with of_cut(mesh, model, sharding=sharding, memory_limit="1GiB") as engine:
        is_released = [p.is_meta for p in model.parameters()]
        assert is_released == [stage == engine.rank for stage in _stages(model)]
        assert_step(engine, share_of(mesh), expected, lambda stage, name: name)
        assert engine.evaluate(share_of(mesh)).tolist() == expected[0]
        groups = [n for m in engine.modules.values() for n, p in m.named_modules() if _is_fsdp(p)]
        assert groups == ["", f"{engine.rank}.0"]
    losses, *rest = by_hand(with_number, 2, 2)
    with trainer(mesh, part_sharded(mesh), max_grad_norm=1e9) as engine:
        assert_step(engine, share_of(mesh), (losses[number_of(mesh)], *rest))
        names = [name for m in engine.modules.values() for name, p in _plain(m)]
        assert names == ["3.number"]
    flat = mesh_of(dp_replicate=2, dp_shard=2)
    losses, *rest = by_hand(uneven, 1, 4)
    with trainer(flat, uneven, 1, max_grad_norm=1e9) as engine:
        expected = losses[number_of(flat)], *rest
        assert_step(engine, share_of(flat), expected, exact=lambda name: False)
        assert not any(_plain(module) for module in engine.modules.values())


def _stages(model: nn.Module) -> list[int]:
    """The stage of each parameter of a model of stages."""
    return [int(name[0]) for name, _ in model.named_parameters()]


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _plain(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if not isinstance(p.data, DTensor)]


def frozen(index: int) -> nn.Module:
    module = uneven(index)
    return module.requires_grad_(index > 0)


@ranks(4)
def test_frozen_stages_are_sharded_and_parts_of_sequences_share() -> None:
    mesh = mesh_of(**MESH)
    losses, gradients, norm = by_hand(frozen, 2, 2)
    expected = losses[number_of(mesh)], gradients, norm
    with trainer(mesh, frozen, max_grad_norm=1e9) as engine:
        assert engine.forward_backward(share_of(mesh)).tolist() == expected[0]
        for name, gradient in engine.gradients().get(1, {}).items():
            assert torch.equal(whole(gradient), gradients[f"1.{name}"])
        assert not any(_plain(module) for module in engine.modules.values())
    flat = mesh_of(dp_shard=2, cp=2)
    losses, *rest = by_hand(uneven, 1, 4)
    with trainer(flat, uneven, 1, max_grad_norm=1e9) as engine:
        expected = losses[number_of(flat)], *rest
        assert_step(engine, share_of(flat), expected, exact=lambda name: False)
        parameter: Any = engine.modules[0].get_parameter("0.0.weight")
        assert parameter.device_mesh.size() == 4


def tied(index: int) -> nn.Module:
    """A stage with a parameter that all stages share."""
    local = uneven(index)
    torch.manual_seed(7)
    return Made(
        lambda m, x: m.block(x) * m.tied, block=local, tied=nn.Parameter(torch.randn(WIDTH))
    )


@ranks(4)
def test_tied_shards_start_equal_and_stay_equal() -> None:
    """Their gradients are summed over stages, on one rank or several."""
    mesh, model = mesh_of(**MESH), nn.Sequential(*map(tied, range(4)))
    for part in model:
        part.tied = model[0].tied
    losses, gradients, norm = of_shares(model, map(share, range(2)), F.mse_loss)
    gradients |= {f"{stage}.tied": gradients["0.tied"] for stage in range(4)}
    expected = losses[number_of(mesh)], gradients, norm
    shared = [tuple((stage, "tied") for stage in range(4))]
    options: dict[str, Any] = {"shared_parameters": shared, "max_grad_norm": 1e9}
    with trainer(mesh, tied, 4, schedule="interleaved", **options) as engine:
        assert_step(engine, share_of(mesh), expected, exact=lambda name: False)
        engine.step(share_of(mesh))
        values = [whole(module.tied.detach()) for module in engine.modules.values()]
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, values)
    assert not torch.equal(values[0], tied(0).tied)
    assert all(torch.equal(values[0], value) for row in everywhere for value in row)


@ranks(2)
def test_replicas_have_the_same_cuts_where_each_has_other_costs() -> None:
    """Each replica has one rank with two stages, and finds another block to be the slow one."""
    mesh = mesh_of(pp=1, dp_replicate=2)
    plan = partition(uneven_model(), torch.zeros(2, WIDTH), stages=2, ranks=1, costs="estimate")
    costs = plan.arguments["costs"]
    slow = dist.get_rank() * (len(costs["blocks"]) - 1)
    blocks = [(float(at == slow), *block[1:]) for at, block in enumerate(costs["blocks"])]
    planning = {"costs": {**costs, "blocks": blocks}}
    losses, *rest = by_hand(uneven, 2, 2)
    with of_cut(mesh, planning=planning) as engine:
        expected = losses[number_of(mesh)], *rest
        assert_step(engine, share_of(mesh), expected, lambda stage, name: name)


@ranks(4)
def test_checkpoints_have_the_names_of_the_whole_model() -> None:
    """And load into stages that are cut at other places."""
    mesh = mesh_of(**MESH)
    planning = {"costs": "estimate", "cut_at": ["0.1", "1.0"]}
    assert_round_trip(
        lambda: of_cut(mesh),
        lambda: of_cut(None, ranks=1, stages=3, planning=planning),
        lambda step: share_of(mesh, step),
        lambda stage, name: name,
    )


@ranks(4)
def test_what_cannot_be_sharded_is_refused() -> None:
    mesh, turned = mesh_of(**MESH), mesh_of(dp_shard=2, dp_replicate=2)

    def built(build: Any, used: DeviceMesh | None = mesh, **options: Any) -> Any:
        return lambda: trainer(used, build, **options)

    def mixed(index: int) -> nn.Module:
        return nn.Sequential(nn.Sequential(uneven(0), uneven(0).bfloat16()))

    def sparse(index: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(4, WIDTH, sparse=True), uneven(index))

    plan = partition(uneven_model(), torch.zeros(2, WIDTH), stages=2, costs="estimate")
    none = mesh_of(pp=2, dp_replicate=2)
    assert_refused(
        [
            ("needs one dtype for the trained parameters of a group; stage", built(mixed)),
            ("cannot reduce the sparse gradients of 'Embedding'", built(sparse)),
            ("name 'dp_replicate' before 'dp_shard'", built(uneven, turned)),
            ("unknown option 'policy' in sharding", built(uneven, sharding={"policy": HALF})),
            ("has no effect without a mesh dimension 'dp_shard'",
             built(uneven, none, sharding={"mp_policy": HALF})),
            ("the stages of a plan have the dtypes of its capture",
             built(plan, sharding={"mp_policy": HALF}, stages=None)),
        ]
    )  # fmt: skip


def test_groups_are_entries_of_lists_that_alone_have_their_parameters() -> None:
    lists = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
    lists[2][0].weight = lists[1][1].weight
    model = nn.ModuleDict(
        {"layers": lists, "head": nn.Linear(2, 2), "act": nn.Sequential(nn.GELU())}
    )
    assert group_names(model) == ("layers.2.1", "layers.1.0", "layers.0")
    assert group_names(model, lambda name, part: name in ("head", "layers.0.1", "layers.1")) == (
        "head",
        "layers.0.1",
    )
