"""FSDP where parameters must be whole, or in a way that cannot be taken apart: refused, with advice
that works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autosplit
from autosplit.errors import ShardedError
from autosplit.pipeline import PipelineTrainer
from tests.ranks import ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x))


def _nested(model: nn.Module) -> nn.Module:
    fully_shard(model.block)
    return model


def _fsdp1(model: nn.Module, *, original: bool) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)


SHARDINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "both": lambda model: fully_shard(_nested(model)),
    "nested": _nested,
    "FSDP1": lambda model: _fsdp1(model, original=False),
    "FSDP1, original parameters": lambda model: _fsdp1(model, original=True),
}


def _x() -> Tensor:
    return torch.ones(3, 4)


def _train(module: nn.Module) -> None:
    module(_x()).sum().backward()
    autosplit.backward_weight(module)


def _sharded_later(shard: Callable[[nn.Module], nn.Module], **options: bool) -> None:
    split = autosplit.split(Model(), **options)
    split(_x()).sum().backward()
    split.backward_weight()
    shard(split.model)
    split(_x())


def _shard_the_split(shard: Callable[[nn.Module], nn.Module]) -> None:
    split = autosplit.split(Model(), _x())
    try:
        wrapped = shard(split)
    except autosplit.SplitError:  # from fully_shard, which has sharded it by then
        wrapped = split
    wrapped(_x())


def _pipeline(shard: Callable[[nn.Module], nn.Module]) -> None:
    stages = [shard(Model()), nn.Linear(2, 2)]
    with PipelineTrainer(
        stages, lambda y, _: y.sum(), lambda ps: torch.optim.SGD(ps, lr=0.1), microbatches=2
    ) as trainer:
        trainer.step((torch.ones(4, 4), torch.ones(4)))


Way = Callable[[Callable[[nn.Module], nn.Module]], object]

WAYS: dict[str, Way] = {
    "sharded later, in parts": lambda shard: _sharded_later(shard, dynamic=True),
    "in parts": lambda shard: autosplit.split(shard(Model()), dynamic=True),
    "compile": lambda shard: _train(torch.compile(shard(Model()), backend="autosplit")),
    "partition": lambda shard: autosplit.partition(
        shard(Model()), (_x(),), stages=2, microbatches=2, costs="estimate"
    ),
}
FSDP1: dict[str, Way] = {
    "Stage": lambda shard: autosplit.Stage(shard(Model()), [_x()]),
    "shard the split": _shard_the_split,
    "split": lambda shard: autosplit.split(shard(Model())),
    "sharded later": _sharded_later,
}


def _offloaded(model: nn.Module) -> nn.Module:
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _part_that_has_run() -> None:
    model = fully_shard(_nested(Model()))
    model(_x()).sum().backward()
    autosplit.split(model.block)(_x())


def _broken(model: nn.Module) -> nn.Module:
    model.forward = lambda x: model.last(model.block(x if x.sum() > 0 else -x))  # type: ignore
    return fully_shard(model)


OTHERS: dict[str, Way] = {
    "around the split": lambda _: _shard_the_split(SHARDINGS["both"]),
    "offloaded": lambda _: autosplit.split(_offloaded(Model())),
    "of a part": lambda _: autosplit.split(fully_shard(Model()).block)(_x()),
    "of a part that has run": lambda _: _part_that_has_run(),
    "graph breaks": lambda _: autosplit.split(_broken(Model()))(_x()),
}


def cases() -> Iterator[tuple[str, str, Way]]:
    for sharding in SHARDINGS:
        for way, use in (WAYS | FSDP1 if "FSDP1" in sharding else WAYS).items():
            yield sharding, way, use
    for way, use in OTHERS.items():
        yield "", way, use


_SAID = {
    "offloaded": "called for FSDPModel with an offload policy",
    "graph breaks": "test_fsdp.py",
    "in parts": "dynamic=True does not go with parameters that fully_shard has sharded",
    "sharded later, in parts": "dynamic=True does not go with",
}


@pytest.mark.parametrize(("sharding", "way"), [(s, w) for s, w, _ in cases()])
@ranks(2)
def test_refused_by_name(sharding: str, way: str) -> str:
    torch._dynamo.reset()
    use = (WAYS | FSDP1 | OTHERS)[way]
    said = "FSDP (fully_shard or FullyShardedDataParallel) manages"
    if "FSDP1" not in sharding:
        said = _SAID.get(way, said)
    try:
        use(SHARDINGS.get(sharding, _x))
    except Exception as error:
        kind = autosplit.CaptureError if way == "graph breaks" else ShardedError
        right = said in str(error) and (isinstance(error, kind) or way == "compile")
        return "" if right else f"{type(error).__name__}: {error}"
    return "it is not refused"


@ranks(2)
def test_refused_by_the_trainer() -> None:
    with pytest.raises(
        autosplit.AutosplitError, match=r"has no mesh with 'dp_shard': give it mesh"
    ):
        _pipeline(_nested)


@ranks(2)
def test_what_the_error_advises_instead() -> bool:
    return _advised() >= 1e-6


def _advised() -> float:
    """What the error advises instead: the largest difference to plain DistributedDataParallel."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    split = autosplit.split(model)
    x = torch.randn(3, 4) + dist.get_rank()
    for module in (DistributedDataParallel(plain), DistributedDataParallel(split)):
        module(x).square().sum().backward()
    split.backward_weight()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)
