"""Pipelines whose stages are sharded, over four Gloo processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from autosplit.errors import BatchError
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.trainer import tuning
from benchmarks.mesh.gathers import GatheredBytes
from tests.kept_ranks import ranks
from tests.mesh.workers import (
    REFERENCE,
    WIDTH,
    M,
    assert_refused,
    assert_round_trip,
    assert_skipped,
    assert_step,
    by_hand,
    gradients_of,
    mesh_of,
    number_of,
    scale,
    share,
    share_of,
    trainer,
    uneven,
)

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(
    mesh: DeviceMesh, build: Callable[[int], nn.Module] = uneven, /, **options: Any
) -> Callable[[int], nn.Module]:
    """Builds stages in two groups each."""
    names = ("dp_replicate", "dp_shard", "fsdp")
    along = tuple(name for name in mesh.mesh_dim_names or () if name in names)

    def stage(index: int) -> nn.Module:
        module: Any = build(index)
        fully_shard(module[0], mesh=mesh[along], **options)
        built: nn.Module = fully_shard(module, mesh=mesh[along], **options)
        return built

    return stage


@contextlib.contextmanager
def collectives() -> Iterator[Counter[str]]:
    """How many all-gathers and reduce-scatters of FSDP's start inside."""
    results: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for kind in (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter):

            def called(*args: Any, kind: Any = kind, run: Any = kind.__call__, **more: Any) -> Any:
                results[kind.__name__] += 1
                return run(*args, **more)

            stack.enter_context(mock.patch.object(kind, "__call__", called))
        yield results


MESH = {"pp": 2, "dp_shard": 2}
PARAMETERS_UNREAD = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
KEPT, FREED = ({"reshard_after_forward": each} for each in (False, True))


@ranks(4)
@pytest.mark.parametrize(
    ("sizes", "stages", "sharding", "options"),
    [
        ({"dp_shard": 2, "pp": 2}, 2, KEPT, {"split_backward": False}),
        (MESH, 4, FREED, {"schedule": "zb-v", "memory": "lean"}),
        (MESH, 2, KEPT, {"memory_limit": "1GiB"}),
    ],
    ids=["fused", "zb-v", "limit"],
)
def test_a_step_is_that_of_one_process(
    sizes: dict[str, int], stages: int, sharding: Any, options: dict[str, Any]
) -> None:
    """Bit for bit that of autograd, which averages the shares of two, with one reduction for each
    parameter group; also where parameters cannot be divided.
    """
    mesh = mesh_of(**sizes)
    losses, *rest = by_hand(uneven, stages, 2)
    expected = losses[number_of(mesh)], *rest
    with trainer(mesh, sharded(mesh, **sharding), stages, max_grad_norm=1e9, **options) as engine:
        with collectives() as counted:
            assert_step(engine, share_of(mesh), expected)
        assert engine.evaluate(share_of(mesh)).tolist() == expected[0]
        report = engine.verify(share_of(mesh))
        assert (report.plain, report.bits_equal) == (False, True)
        engine.record = True
        engine.forward_backward(share_of(mesh))
        kinds = {span.action.kind for span in engine.timeline().spans}
        assert {ActionKind.UNSHARD, ActionKind.REDUCE_GRAD} <= kinds
        groups = 2 * len(engine.modules)
        local = [p for module in engine.modules.values() for p in module.parameters()]
        assert len(gradients_of(engine)) == len(local)
    assert counted["DefaultReduceScatter"] == groups
    # Both groups of a stage are gathered to be captured, and again before a search within a limit;
    # then once, or for each call that reads them: I of the first stage does nothing, W of other
    # stages needs no parameters.
    calls = len(engine.modules)
    if sharding == FREED:
        row = engine.schedule.ranks[engine.rank]
        calls = sum(a.kind is not PARAMETERS_UNREAD[a.stage > 0] for a in row)
    captures = 2 if "memory_limit" in options else 1
    assert counted["DefaultAllGather"] == captures * groups + 2 * calls


@ranks(4)
def test_the_search_knows_the_measured_collectives() -> None:
    mesh, searched = mesh_of(**MESH), mock.Mock(wraps=tuning.search)
    with (
        mock.patch.object(tuning, "search", searched),
        trainer(mesh, sharded(mesh, **FREED), schedule="auto") as engine,
    ):
        for _ in range(tuning.MEASURED + 2):
            engine.step(share_of(mesh))
    for part in searched.call_args.args[0].collectives:
        assert min(part.gather, part.reduction) > 0.0
        assert (part.parts, part.regathers) == (2, True)


@ranks(4)
def test_another_name_and_copies_of_shards() -> None:
    """Over a mesh of the same ranks whose dimension is called otherwise; and where four numbers are
    added in some order.
    """
    for mesh, other in (
        (mesh_of(**MESH), mesh_of(pp=2, fsdp=2)),
        (flat := mesh_of(dp_replicate=2, dp_shard=2), flat),
    ):
        stages, shares = (1, 4) if mesh is flat else (2, 2)
        losses, *rest = by_hand(uneven, stages, shares)
        with trainer(mesh, sharded(other), stages, max_grad_norm=1e9) as engine:
            expected = losses[number_of(mesh)], *rest
            assert_step(engine, share_of(mesh), expected, exact=lambda _, m=mesh: m is not flat)


def _in_float32(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)  # torch 2.11 has no loss of two dtypes


ALONG = {"dp_shard": 2}


@ranks(2)
def test_half_precision() -> None:
    """Microbatches' gradients of bfloat16 are added up, and reduced, in float32."""
    mesh, model = mesh_of(**ALONG), nn.Sequential(uneven(0)).bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for replica in range(2):
        local = {name: torch.zeros_like(total) for name, total in sums.items()}
        for x, y in zip(*(item.chunk(M) for item in share(replica)), strict=True):
            model.zero_grad()
            (_in_float32(model(x.bfloat16()), y) / M).backward()
            for name, p in model.named_parameters():
                local[name] += p.grad
        for name, total in local.items():
            sums[name] += total / 2
    with trainer(mesh, sharded(mesh, mp_policy=HALF), 1, loss_fn=_in_float32) as engine:
        losses = engine.forward_backward(share_of(mesh))
        assert torch.equal(engine.evaluate(share_of(mesh)), losses)
        for name, gradient in gradients_of(engine).items():
            assert torch.equal(gradient, sums[name]), name


def _copy(module: nn.Module) -> nn.Module:
    built = uneven(0)
    built.load_state_dict(module.state_dict())
    return built


@ranks(2)
def test_clipped_training() -> None:
    """Three steps, of which two are taken early, held against one process."""

    def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    mesh, model = mesh_of(**ALONG), nn.Sequential(uneven(0))
    optimizer = slow(list(model.parameters()))
    for _ in range(3):
        _, gradients, norm = by_hand(lambda i: _copy(model[i]), 1, 2)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.5, torch.tensor(norm))
        optimizer.step()
    options: dict[str, Any] = {"max_grad_norm": 0.5, "nonfinite": "skip"}
    with trainer(mesh, sharded(mesh), 1, optimizer_fn=slow, **options) as engine:
        assert_skipped(engine, share_of(mesh), bad=number_of(mesh) == 0)
        for step in (engine.step_async, engine.step_async, engine.step):
            step(share_of(mesh))
        assert engine.grad_norm == pytest.approx(norm, rel=1e-12)
        for at, module in engine.modules.items():
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.full_tensor(), model.get_parameter(f"{at}.{name}"))


@ranks(2)
def test_sharded_stages_between_steps() -> None:
    """Steps accumulate; buffers; parameters are freed between steps; what is not a
    number on one rank is none on all; and the modules can be used without the trainer, too.
    """
    mesh = mesh_of(**ALONG)
    local = share_of(mesh)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "nonfinite": "ignore"}
    with trainer(mesh, sharded(mesh), 1, **options) as engine:
        engine.forward_backward(local)
        once = gradients_of(engine)
        engine.forward_backward(local)
        assert all(torch.equal(item, 2 * once[k]) for k, item in gradients_of(engine).items())
        modules = dict(engine.modules)
        data = [p.data for module in modules.values() for p in module.parameters()]
        assert {type(item).__name__ for item in data} == {"DTensor"}
        engine.step(local)
        more = tuple(torch.cat([tensor, tensor[:M]]) for tensor in local)
        assert engine.forward_backward(more).equal(engine.evaluate(more))
        engine.forward_backward((local[0] * float("nan"), local[1]) if number_of(mesh) else local)
        assert str(engine.grad_norm) == "nan"
        assert all(gradient.isnan().any() for gradient in gradients_of(engine).values())
    for module in modules.values():
        assert module(local[0]).shape == local[0].shape


@ranks(2)
def test_checkpoints() -> None:
    """They are taken up by the same mesh bit for bit, and by one process, and back."""
    mesh = mesh_of(**ALONG)
    assert_round_trip(
        lambda: trainer(mesh, sharded(mesh), 1),
        lambda: trainer(build=uneven, stages=1, ranks=1, **REFERENCE),
        lambda step: share_of(mesh, step),
    )


class NoNaN(nn.Module):
    """Fails where there is one, in its graph, too."""

    def forward(self, x: Tensor) -> Tensor:
        beyond = x.isnan().any() * WIDTH
        return x.index_select(-1, torch.arange(WIDTH) + beyond)


@ranks(2)
@pytest.mark.parametrize("sharding", [KEPT, FREED], ids=["kept", "freed"])
def test_shares_of_other_numbers_of_microbatches(sharding: Any) -> None:
    """Refused where ranks would gather parameters together for each microbatch, which never ends;
    the next step may follow.
    """
    mesh = mesh_of(**ALONG)
    inputs, targets = share_of(mesh)
    pairs = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    with trainer(mesh, sharded(mesh, **sharding), 1) as engine:
        engine.step(microbatches=pairs)
        shorter = pairs[: 3 + number_of(mesh)]
        if sharding == FREED:
            with pytest.raises(BatchError, match="pass 3, 4 microbatches, but they gather"):
                engine.step(microbatches=shorter)
        else:
            assert len(engine.step(microbatches=shorter)) == len(shorter)
        assert len(engine.step(microbatches=pairs)) == len(pairs)


@ranks(4)
def test_refusals() -> None:
    mesh, pairs = mesh_of(**MESH), mesh_of(pp=2, dp_replicate=2)
    local = share_of(mesh)

    def built(build: Any, made: DeviceMesh | None = mesh, **options: Any) -> Any:
        return lambda: trainer(made, build, **options)

    def ran(build: Any, batch: Any = local, **options: Any) -> Any:
        def act() -> None:
            with trainer(mesh, build, **options) as engine:
                engine.step(batch)

        return act

    def wrongly(part: DeviceMesh | None) -> Any:
        return lambda index: fully_shard(uneven(index), mesh=part)

    def partly(index: int) -> nn.Module:
        module: Any = uneven(index)
        return fully_shard(module, mesh=mesh["dp_shard"], ignored_params={module[2].scale})

    def failing(index: int) -> nn.Module:
        return nn.Sequential(scale(), *[NoNaN()] * index)

    def unreduced(index: int) -> nn.Module:
        module: Any = sharded(mesh)(index)
        module.set_requires_gradient_sync(False)
        built: nn.Module = module
        return built

    strange = tuple(tensor.clone() for tensor in local)
    if number_of(mesh):
        strange[0][2] = float("nan")  # of microbatch 1
    no_mesh = "and PipelineTrainer has no mesh with 'dp_shard': pass mesh=init_device"
    along = "along the trainer's mesh these ranks are ["
    assert_refused(
        [
            ("parameter '2.scale' of stage", built(partly)),
            ("is not sharded: call fully_shard(module, mesh=mesh['dp_shard'])", built(partly)),
            (along, built(wrongly(mesh["pp"]))),
            (f"are sharded over the ranks [0, 1, 2, 3]; {along}", built(wrongly(None))),
            (no_mesh, built(wrongly(pairs["dp_replicate"]), pairs)),
            (no_mesh, built(wrongly(None), None, stages=4)),
            (
                "the reduction of gradients is switched off for stage",
                ran(unreduced),
            ),
            (
                "and stage_factory=ReferenceStage would build it: only autosplit.Stage",
                ran(sharded(mesh), **REFERENCE),
            ),
            (
                "rank 3 failed in 1F1: RuntimeError: INDICES element is out of DATA bounds",
                ran(sharded(mesh, failing), strange),
            ),
        ]
    )


@ranks(4)
def test_blocks_are_gathered_two_calls_ahead() -> None:
    """With the bits of a process, and two blocks gathered at most, of which a forward's last two
    stay for the backward. The predicted memory has two of a stage's four blocks.
    """
    mesh = mesh_of(**MESH)

    def blocks(index: int) -> nn.Module:
        torch.manual_seed(index)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*layers)

    def stage(index: int) -> nn.Module:
        module: Any = blocks(index)
        for layer in module:
            fully_shard(layer, mesh=mesh["dp_shard"])
        return cast("nn.Module", fully_shard(module, mesh=mesh["dp_shard"]))

    def whole(index: int) -> nn.Module:
        module: Any = blocks(index)
        return cast("nn.Module", fully_shard(module, mesh=mesh["dp_shard"]))

    losses, *rest = by_hand(blocks, 2, 2)
    expected = losses[number_of(mesh)], *rest
    gathered = GatheredBytes()
    counted: Counter[str] = Counter()
    with trainer(mesh, stage, max_grad_norm=1e9, record="memory") as engine:
        for is_captured in (False, True, True):
            engine.optimizer.zero_grad()
            with (
                gathered.counted() if is_captured else contextlib.nullcontext(),
                collectives() as n,
            ):
                assert_step(engine, share_of(mesh), expected)
            counted += n if is_captured else Counter()
        memory = engine.memory()
    block = 4 * (WIDTH * WIDTH + WIDTH)
    assert gathered.most == 2 * block
    # Blocks are read 7 * M and 8 * M times: stage 0 has no gradient of its input. After 3 and 7
    # forwards or backwards, the next begins with the last two blocks; after 2, with the last.
    expected_gathers = {0: 7 * M - 3 * 2 - 2, 1: 8 * M - 7 * 2}[mesh.get_local_rank("pp")]
    assert counted["DefaultAllGather"] == 2 * expected_gathers
    for predicted, fixed, bands in zip(memory.predicted, memory.fixed, memory.bands, strict=True):
        # By how much depends on when messages arrive.
        assert max(band.fixed + band.activations for band in bands) <= (predicted or 0) + fixed
    with trainer(mesh, whole) as engine:
        of_whole = engine.predict_memory(share_of(mesh)).predicted
    assert of_whole == tuple((predicted or 0) + 2 * block for predicted in memory.predicted)
