"""Models of which ``parallelize_module`` has made DTensors train as in eager, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import autosplit
from autosplit.errors import DeferralWarning
from autosplit.passes.analysis.operators import is_start
from autosplit.passes.graph import calls
from tests.kept_ranks import ranks
from tests.pending import pending_of_compiled
from tests.zoo import Residual

MICROBATCHES, STEPS = 2, 2


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.size = nn.LayerNorm(width), width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.Sequential(Attention(), Residual())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """Activations between the products are sharded along the sequence."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Residual(), mesh, plan)


def prepared(mesh: DeviceMesh) -> nn.Module:
    """Inputs and outputs of whole blocks are laid out by torch's hooks."""
    plan = {
        "0": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(),
        "1": PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),)),
        "1.up": ColwiseParallel(),
        "1.down": RowwiseParallel(),
    }
    return parallelize_module(nn.Sequential(Residual(), Residual()), mesh, plan)


def language(mesh: DeviceMesh, *, tied: bool = False) -> nn.Module:
    """As torchtitan shards a language model. The logits stay sharded for the loss; where that is
    asked for, the output's weight is that of the embedding.
    """
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.0.norm": SequenceParallel(),
        "blocks.1.norm": SequenceParallel(),
        "blocks.1.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.1.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    plan |= {f"blocks.0.{n}": ColwiseParallel(input_layouts=Shard(1)) for n in "qkv"}
    plan["blocks.0.out"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(Language(), mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    return model


class Gathered(nn.Module):
    """A product with a weight of which each rank keeps a part, and gathers the whole to use it, on
    data of its own.
    """

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(width, width), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.redistribute(placements=[Replicate()])
        return nn.functional.linear(x, weight.to_local(grad_placements=[Partial("avg")])).relu()


def gathered(mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*(Gathered(mesh, 8) for _ in range(3)))


MODELS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "sequence parallel": sequence_parallel,
    "prepared": prepared,
    "language": language,
    "tied language": lambda mesh: language(mesh, tied=True),
    "gathered": gathered,
}


def _batches(name: str) -> list[Tensor]:
    torch.manual_seed(
        5 + (dist.get_rank() if name in ("sequence parallel", "prepared", "gathered") else 0)
    )
    if "language" in name:
        return [torch.randint(32, (2, 5)) for _ in range(MICROBATCHES)]
    length = 2 if name in ("sequence parallel", "prepared") else 4
    return [torch.randn(2, length, 8, requires_grad=True) for _ in range(MICROBATCHES)]


def _loss(output: Tensor, batch: Tensor) -> Tensor:
    if batch.is_floating_point():
        return output.square().mean()
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[:, :4].flatten())


def _values(tensors: Iterable[Any]) -> list[Any]:
    """Placements and this rank's values."""
    return [
        (str(tensor.placements), tensor._local_tensor.clone())
        if isinstance(tensor, DTensor)
        else tensor
        if tensor is None
        else tensor.detach().clone()
        for tensor in tensors
    ]


def train(model: nn.Module, name: str, weights: Callable[[], None] = lambda: None) -> list[Any]:
    """Losses, gradients of inputs and parameters, and parameters, of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    results: list[Any] = []
    for _ in range(STEPS):
        for batch in _batches(name):
            fed = batch if batch.is_floating_point() else batch[:, :4]
            with loss_parallel():
                loss = _loss(model(fed), batch)
                loss.backward()
            results += _values([loss, batch.grad])
        weights()
        results += _values(parameter.grad for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        results += _values(model.parameters())
    return results


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def whole(mesh: DeviceMesh, name: str, setting: dict[str, Any]) -> tuple[bool, dict[str, int]]:
    """Whether a split model trains as in eager, and how many collectives its graphs begin."""
    eager, model = _twins(mesh, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeferralWarning)
        split = autosplit.split(model, fullgraph=True, **setting)
        built = train(split, name, split.backward_weight)
    graphs = split.functions[-1].graphs.graphs()
    counts = {key: sum(map(is_start, calls(item.graph))) for key, item in graphs.items()}
    return same(train(eager, name), built), counts


def compiled(mesh: DeviceMesh, name: str) -> bool:
    """Whether a model under ``torch.compile(backend="autosplit")`` trains as in eager, and weight
    gradients wait.
    """
    eager, model = _twins(mesh, name)
    waited: list[int] = []
    forward = torch.compile(model, backend="autosplit")
    built = train(forward, name, lambda: waited.append(pending_of_compiled(model)))
    return same(train(eager, name), built) and all(waited)


def read_before_weights(mesh: DeviceMesh) -> list[Any]:
    """Return properties of a pending gradient of a sharded parameter, and norms."""
    eager, model = _twins(mesh, "gathered")
    split, (batch, *_) = autosplit.split(model), _batches("gathered")
    results = []
    for item in (eager, split):
        item(batch).square().mean().backward()
        weight = dict(item.named_parameters())["2.weight"]
        results.append((str(weight.grad.placements), weight.grad.to_local().sum().item()))
        norm = nn.utils.clip_grad_norm_(item.parameters(), 1e-3)
        results.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
    return [results[:2] == results[2:], results[0]]


def _twins(mesh: DeviceMesh, name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager, model = MODELS[name](mesh), MODELS[name](mesh)
    model.load_state_dict(eager.state_dict())
    return eager, model


WHOLE: dict[str, dict[str, Any]] = {
    "prepared": {"memory": "lean"},
    "tied language": {},
    "gathered": {"memory": "fast"},
}


# Reductions of input gradients are I's, those of weight gradients W's: so many in I, in W and in
# the whole backward.
STARTS = {"prepared": (3, 0, 3), "gathered": (0, 3, 3)}


def tensor_parallel() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("name", WHOLE)
@ranks(2)
def test_trains_as_in_eager(name: str) -> None:
    same, counts = whole(tensor_parallel(), name, WHOLE[name])
    assert same
    kinds = ("backward_input", "backward_weight", "backward")
    assert name not in STARTS or STARTS[name] == tuple(map(counts.__getitem__, kinds))


@ranks(2)
def test_i_hides_collectives() -> None:
    mesh = tensor_parallel()
    assert whole(mesh, "sequence parallel", {})[0]
    assert compiled(mesh, "sequence parallel")


@ranks(2)
def test_a_gradient_that_is_read_before_weights() -> None:
    same, message = read_before_weights(tensor_parallel())
    assert same, message
