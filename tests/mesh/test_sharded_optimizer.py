"""Replicas that divide the optimizer's state among them (ZeRO-1), over four Gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.kept_ranks import ranks
from tests.mesh.workers import (
    REFERENCE,
    WIDTH,
    assert_refused,
    assert_round_trip,
    assert_skipped,
    block,
    mesh_of,
    share,
    trainer,
    whole,
)
from tests.zoo import Made

MESH = {"pp": 2, "dp_replicate": 2}
REPLICAS = {"pp": 1, "dp_replicate": 2}
ZERO1: dict[str, Any] = {"shard_optimizer": True}


def own_share(mesh: Any, step: int = 0) -> tuple[Tensor, Tensor]:
    return share(mesh.get_local_rank("dp_replicate"), step)


def uneven(index: int) -> nn.Sequential:
    """A stage with shapes that two ranks cannot divide, and a scalar."""
    torch.manual_seed(index)
    return nn.Sequential(
        nn.Linear(WIDTH, 5),
        nn.Tanh(),
        nn.Linear(5, WIDTH),
        Made(lambda m, x: x * m.scale, scale=nn.Parameter(torch.tensor(1.5))),
    )


def frozen(index: int) -> nn.Module:
    module = uneven(index)
    module[0].requires_grad_(False)
    return module


def tied(index: int) -> nn.Module:
    """A stage with a parameter that all stages share."""
    local = uneven(index)
    torch.manual_seed(7)
    return Made(
        lambda m, x: m.block(x) * m.tied, block=local, tied=nn.Parameter(torch.randn(WIDTH))
    )


def trained(
    mesh: Any, build: Any, stages: int, **options: Any
) -> tuple[list[Any], dict[str, Tensor], int]:
    """Losses, whole parameters and this rank's numbers of optimizer state after three steps."""
    if not callable(build):  # which the trainer would train further
        planning = {"costs": "estimate", "cut_at": ["1.0"]}
        build = uneven_model()
        options = {**options, "example": torch.zeros(2, WIDTH), "planning": planning}
    waits = options.pop("waits", True)
    with trainer(mesh, build, stages, **options) as engine:
        step = engine.step if waits else lambda batch: engine.step_async(batch).wait()
        losses = [step(own_share(mesh, at)).tolist() for at in range(3)]
        if build is tied:  # a capture of its own for each
            losses.append(engine.evaluate(own_share(mesh)).tolist())
        states: Any = engine.optimizer.state.values()
        sizes = [
            (value.to_local() if isinstance(value, DTensor) else value).numel()
            for state in states
            for value in state.values()
        ]
        named = [item for m in engine.modules.values() for item in m.named_parameters()]
        return losses, {name: whole(p.detach()) for name, p in named}, sum(sizes)


def uneven_model() -> nn.Module:
    return nn.Sequential(*map(uneven, range(2)))


@ranks(4)
def test_training_is_that_of_replicas() -> None:
    """Clipped, and of ranks of which several hold a copy of a parameter."""
    options = {"max_grad_norm": 1.0, "shared_parameters": [((0, "tied"), (1, "tied"))]}
    assert_trained_alike(mesh_of(**MESH), tied, 2, schedule="zb-h1", **options)


@ranks(2)
@pytest.mark.parametrize(
    ("build", "stages", "options"),
    [(frozen, 1, {"waits": False, "grad_dtype": torch.float64}), ("whole", 2, {})],
    ids=["frozen", "cut"],
)
def test_training_of_one_rank_a_pipeline_is_that_of_replicas(
    build: Any, stages: int, options: dict[str, Any]
) -> None:
    assert_trained_alike(mesh_of(**REPLICAS), build, stages, **options)


def assert_trained_alike(mesh: Any, build: Any, stages: int, **options: Any) -> None:
    """Bit for bit, with less optimizer state on each rank."""
    losses, parameters, size = trained(mesh, build, stages, **options)
    same_losses, same_parameters, smaller_size = trained(mesh, build, stages, **options, **ZERO1)
    assert same_losses == losses
    assert all(torch.equal(p, same_parameters[name]) for name, p in parameters.items())
    assert smaller_size < 0.7 * size


@ranks(2)
def test_checkpoints_load_under_any_number_of_replicas() -> None:
    mesh, line = mesh_of(**REPLICAS), mesh_of(pp=2)
    assert_round_trip(
        lambda: trainer(mesh, uneven, **ZERO1),
        lambda: trainer(build=uneven, ranks=1, **REFERENCE),
        lambda step: own_share(mesh, step),
        line=lambda: trainer(line, uneven),
    )


@ranks(2)
def test_a_step_with_an_infinite_gradient_moves_no_replica() -> None:
    mesh = mesh_of(**REPLICAS)
    with trainer(mesh, uneven, 1, nonfinite="skip", **ZERO1) as engine:
        assert_skipped(engine, own_share(mesh), bad=mesh.get_local_rank("dp_replicate") == 1)


@ranks(2)
def test_a_parameter_without_a_gradient_on_one_replica() -> None:
    """The other replica's gradient is reduced, also if this one has frozen the parameter; without
    one on any replica, there is none.
    """

    def branching(index: int) -> nn.Module:
        names = ("scale", "extra", "frozen", "unused")
        return Made(
            lambda m, x: x * m.scale * m.frozen + (m.extra if len(x) > 2 else 0),
            **{name: nn.Parameter(torch.ones(WIDTH)) for name in names},
        )

    mesh, gradients = mesh_of(**REPLICAS), []
    replica = mesh.get_local_rank("dp_replicate")
    x = torch.ones(2 + replica, WIDTH)
    for options in ({}, ZERO1):
        with trainer(mesh, branching, 1, **options) as engine:
            named = [item for m in engine.modules.values() for item in m.named_parameters()]
            dict(named)["frozen"].requires_grad_(replica == 0)
            engine.forward_backward(microbatches=[(x, x)])
            gradients.append({n: None if p.grad is None else whole(p.grad) for n, p in named})
    expected, actual = gradients
    assert actual.pop("unused") is expected.pop("unused") is None
    assert all(torch.equal(gradient, actual[name]) for name, gradient in expected.items())


@ranks(4)
def test_what_cannot_be_sharded_is_refused() -> None:
    mesh = mesh_of(**MESH)

    def built(mesh: Any, build: Callable[[int], nn.Module] = block, **options: Any) -> Any:
        return lambda: trainer(mesh, build, **ZERO1, **options)

    def mixed(index: int) -> nn.Module:
        return nn.Sequential(block(index), block(index).bfloat16())

    def sparse(index: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(4, WIDTH, sparse=True), block(index))

    def hooked(index: int) -> nn.Module:
        module = block(index)
        module[0].weight.register_hook(lambda gradient: 2 * gradient)
        return module

    def hook_after_building() -> None:
        with built(mesh)() as engine:
            for module in engine.modules.values():
                next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
            engine.step(own_share(mesh))

    assert_refused(
        [
            ("has a hook of register_hook, which would be lost", built(mesh, hooked)),
            ("has a hook of register_hook, and is sharded", hook_after_building),
            ("among replicas of the pipeline, and there are none: pass", built(None, stages=4)),
            ("cannot be combined with the mesh dimension 'dp_shard': call fully_shard",
             built(mesh_of(pp=1, dp_replicate=2, dp_shard=2))),
            ("and '1.0.weight' torch.bfloat16: convert the", built(mesh, mixed)),
            ("sparse gradients of '0': build it with sparse=False", built(mesh, sparse)),
            ("and stage_factory=ReferenceStage would build it", built(mesh, **REFERENCE)),
        ]
    )  # fmt: skip
