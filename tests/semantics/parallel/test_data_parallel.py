"""DistributedDataParallel around a split module, and FSDP, by what it may be split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import autosplit
from autosplit.errors import ShardedError, SplitError
from autosplit.pipeline import PipelineTrainer
from tests.autograd.faces import Compiled
from tests.kept_ranks import ranks
from tests.semantics.against_autograd import assert_same
from tests.zoo import mlp

# --- DistributedDataParallel around a split module: a backward that synchronises is a whole one ---


class Broken(nn.Sequential):
    """No single graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[1](self[0](x))
        torch._dynamo.graph_break()
        return self[2](h)


class Sometimes(nn.Sequential):
    """Uses its last layer for some inputs only."""

    def forward(self, x: Tensor, last: bool = True) -> Tensor:
        h = self[1](self[0](x))
        return self[2](h) if last else h


def models(kind: type[nn.Sequential] = nn.Sequential) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, copy.deepcopy(model)


PATTERNS = ("every microbatch", "all at once", "no_sync, weights inside", "no_sync, weights late")


WRAPPED = ("whole", "parts", "compiled")


@pytest.mark.parametrize("way", WRAPPED)
@ranks(2)
def test_same_as_without_splitting(way: str) -> dict[str, list[float]]:
    torch._dynamo.reset()
    return {pattern: result for pattern, result in errors(way).items() if max(result) >= 1e-6}


def errors(way: str) -> dict[str, list[float]]:
    """Difference of every gradient from plain DistributedDataParallel, after two steps of each
    pattern, one pattern after the other.
    """
    model, plain = models(nn.Sequential if way == "whole" else Broken)
    split = Compiled(model, 1) if way == "compiled" else autosplit.split(model)
    wrapped = DistributedDataParallel(split.module if way == "compiled" else split)
    reference = DistributedDataParallel(plain)
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(4)]
    results = {}
    for pattern in PATTERNS:
        for module in (wrapped, reference):
            module.zero_grad()
            for _ in range(2):
                _step(pattern, module, batches, split)
        grads = zip(model.parameters(), plain.parameters(), strict=True)
        results[pattern] = [(mine.grad - other.grad).abs().max().item() for mine, other in grads]
    return results


def _step(pattern: str, module: nn.Module, batches: list[Tensor], split: Any) -> None:
    count = 3 if pattern.startswith("no_sync") else 0
    if count:
        with module.no_sync():
            for batch in batches[:count]:
                module(batch).square().mean().backward()
            if pattern == "no_sync, weights inside":
                split.backward_weight()
    for batch in batches[count:]:
        module(batch).square().mean().backward()
        if pattern == "every microbatch":
            split.backward_weight()
    assert split.pending == 0
    split.backward_weight()


@pytest.mark.parametrize("way", WRAPPED)
@ranks(2)
def test_a_first_backward_of_a_static_graph_is_not_inside_of_no_sync(way: str) -> bool:
    torch._dynamo.reset()
    model, _ = models(nn.Sequential if way == "whole" else Broken)
    split = Compiled(model, 1).module if way == "compiled" else autosplit.split(model)
    wrapped = DistributedDataParallel(split, static_graph=True)
    batch = torch.ones(3, 4)
    with wrapped.no_sync(), pytest.raises(SplitError, match="run the first forward and backward"):
        wrapped(batch)
    for context in (nullcontext, wrapped.no_sync):
        with context():
            wrapped(batch).square().mean().backward()
    return model[0].weight.grad is None


@pytest.mark.parametrize("option", ["broadcast_buffers", "find_unused_parameters", "static_graph"])
@ranks(2)
def test_weights_that_wait_when_the_reducer_reads_them_are_averaged_too(option: str) -> list[float]:
    """Of a backward inside of ``no_sync()``, between a forward outside of it and its backward."""
    model, plain = models()
    wrapped = DistributedDataParallel(autosplit.split(model), **{option: True})
    wrapped(torch.ones(3, 4)).square().mean().backward()
    wrapped.zero_grad()
    first, second = (torch.ones(3, 4) * (2 * step + dist.get_rank()) for step in range(2))
    loss = wrapped(first).square().mean()
    with wrapped.no_sync():
        wrapped(second).square().mean().backward()
    loss.backward()
    for batch in (first, second):
        plain(batch).square().mean().backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    errors = [(mine.grad - both.grad / 2).abs().max().item() for mine, both in pairs]
    return [error for error in errors if error >= 1e-6]


class Two(nn.Sequential):
    """Returns the outputs of two layers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self[1](self[0](x))
        return h, self[2](h)


@pytest.mark.parametrize("option", ["", "find_unused_parameters"])
@ranks(2)
def test_hooks_are_called_on_ranks_with_a_gradient(option: str) -> list[float]:
    """Only the loss of the second rank uses the last layer."""
    model, plain = models(Two)
    options = {option: True} if option else {}
    wrapped = DistributedDataParallel(autosplit.split(model), **options)
    calls: list[Any] = []
    for step in range(2):
        wrapped.zero_grad()
        plain.zero_grad()
        for module, under in ((wrapped, model), (plain, plain)):
            if not step:
                under[2].weight.register_hook(lambda g: calls.append(g is None))
                under[2].bias.register_post_accumulate_grad_hook(
                    lambda p: calls.append(p.grad is None)
                )
            module(torch.ones(3, 4) + step)[dist.get_rank()].square().mean().backward()
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    errors = [(mine.grad - both.grad / 2).abs().max().item() for mine, both in pairs]
    assert calls == [False] * 8 * dist.get_rank()
    return [error for error in errors if error >= 1e-6]


OPTIONS = (
    "",
    "find_unused_parameters",
    "static_graph",
    "static_graph, then no_sync",
    "gradient_as_bucket_view",
)


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_same_under_every_option(option: str) -> list[float]:
    """Also where a parameter is unused in a step, and without a call that computes weights."""
    return [difference for difference in differences(option) if difference >= 1e-6]


def differences(option: str) -> list[float]:
    """Of every parameter after three steps of AdamW, one call of ours nowhere: no
    ``backward_weight()``. One rank alone looks at gradients before all of them meet elsewhere.
    """
    model, plain = models(Sometimes)
    options = {option.partition(",")[0]: True} if option else {}
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(3)]
    trained = []
    for module in (autosplit.split(model), plain):
        wrapped = DistributedDataParallel(module, **options)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            last = option != "find_unused_parameters" or step == 1
            # The first step of a static graph is the one that torch records.
            if not option.startswith("static_graph") or ("no_sync" in option and step):
                with wrapped.no_sync():
                    wrapped(batches[0], last).square().mean().backward()
            loss = wrapped(batches[step], last).square().mean()
            loss.backward()
            if dist.get_rank() == 0:
                assert model[0].weight.grad is None or model[0].weight.grad.norm() > 0
            dist.all_reduce(loss.detach())
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
        trained.append([parameter.detach() for parameter in wrapped.parameters()])
    return [(a - b).abs().max().item() for a, b in zip(*trained, strict=True)]


class Wide(nn.Module):
    """Layers of a MiB each, repeated and not, of which some calls leave out the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 512), nn.Linear(512, 512)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512)) for _ in range(3)))

    def forward(self, x: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        h = self.blocks(self.first(x).relu())
        return h, self.last(h.relu()) if last else h.detach()


class Products(TorchDispatchMode):
    """Notes each product in ``events``."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_buckets_are_reduced_while_gradients_are_computed(option: str) -> list[str]:
    """In steps that use all layers or, where unused parameters are found, also not the last."""
    torch.manual_seed(0)
    model = Wide()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {option.partition(",")[0]: True} if option else {}
    problems: list[str] = []
    events: list[str] = []

    split, reference = (
        DistributedDataParallel(module, bucket_cap_mb=1, **options)
        for module in (autosplit.split(model), plain)
    )
    split.register_comm_hook(
        None,
        lambda _, bucket: events.append("bucket") or allreduce_hook(dist.group.WORLD, bucket),
    )
    for step, batch in enumerate(torch.randn(4, 3, 8) + dist.get_rank()):
        last = option != "find_unused_parameters" or step != 2
        for module in (split, reference):
            module.zero_grad()
            with module.no_sync() if "no_sync" in option and step else nullcontext():
                _loss(module, batch, last).backward()
            events.clear()
            loss = _loss(module, batch, last)
            with Products(events):
                loss.backward()
            if module is split and (step or "static_graph" not in option):  # torch records it
                counts = events[: events.index("bucket")].count("product"), events.count("product")
                problems += [f"{step}: {counts}"] if counts[0] > counts[1] - 2 else []
        gradients = ([p.grad for p in module.parameters()] for module in (model, plain))
        assert_same(f"gradients of step {step}", *gradients)
    return problems


def _loss(module: nn.Module, batch: Tensor, last: bool) -> Tensor:
    hidden, output = module(batch, last)
    return hidden.square().mean() + output.square().mean()


# --- FSDP that cannot be taken apart: refused, with advice that works -----------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = mlp(4)
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


def _sharded_later(shard: Callable[[nn.Module], nn.Module]) -> None:
    split = autosplit.split(Model())
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


CASES = [
    *(("both", way) for way in WAYS),
    *(("FSDP1", way) for way in WAYS | FSDP1),
    *(("nested", "partition"), ("FSDP1, original parameters", "split")),
    *(("", way) for way in OTHERS),
]


_SAID = {
    "offloaded": "called for FSDPModel with an offload policy",
    "graph breaks": "test_data_parallel.py",
}


@pytest.mark.parametrize(("sharding", "way"), CASES)
@ranks(2)
def test_refused_by_name(sharding: str, way: str) -> str:
    torch._dynamo.reset()
    use = (WAYS | FSDP1 | OTHERS)[way]
    message = "FSDP (fully_shard or FullyShardedDataParallel) manages"
    if "FSDP1" not in sharding:
        message = _SAID.get(way, message)
    try:
        use(SHARDINGS.get(sharding, _x))
    except Exception as error:
        kind = autosplit.CaptureError if way == "graph breaks" else ShardedError
        right = message in str(error) and (isinstance(error, kind) or way == "compile")
        return "" if right else f"{type(error).__name__}: {error}"
    return "it is not refused"


@ranks(2)
def test_refused_by_the_trainer() -> None:
    with pytest.raises(autosplit.AutosplitError, match=r"has no mesh with 'dp_shard': pass mesh"):
        _pipeline(_nested)
