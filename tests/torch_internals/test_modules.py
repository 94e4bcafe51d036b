"""Private state of torch for modules, optimizers, trees and DTensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

import autosplit
from autosplit import Stage
from autosplit.errors import CaptureError, ShardedError
from autosplit.torch_internals.pytree import flatten_named
from autosplit.torch_internals.state import distinct_storage_bytes, preserve_modes, state_bytes
from tests.fake_ranks import fake_mesh
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import layered

# --- DTensors -------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh((2, 2), ("pp", "tp")) as result:
        yield result


def lying(mesh: DeviceMesh, placement: Placement, rows: int = 4) -> nn.Linear:
    """A layer whose weight is a DTensor."""
    layer = nn.Linear(4, rows, bias=False)
    local = torch.randn(rows, 4)[: rows if not placement.is_shard() else rows - rows // 2]
    shape, stride = torch.Size((rows, 4)), (4, 1)
    whole = DTensor.from_local(local, mesh, [placement], shape=shape, stride=stride)
    layer.weight = nn.Parameter(whole)
    return layer


def test_parameter_that_is_a_sum(mesh: DeviceMesh) -> None:
    with pytest.raises(ShardedError, match=r"weight is a DTensor .*partial sums.*tp: P.*redis"):
        autosplit.split(lying(mesh["tp"], Partial()), torch.randn(2, 4))


def test_uneven_shards(mesh: DeviceMesh) -> None:
    with pytest.raises(ShardedError, match=r"weight has 5 elements .* 2 ranks .* multiple of 2"):
        autosplit.split(lying(mesh["tp"], Shard(0), 5), torch.randn(2, 4))


def test_sharded_over_the_pipeline(mesh: DeviceMesh) -> None:
    layer = lying(mesh["pp"], Shard(0))
    with pytest.raises(ShardedError, match=r"weight is sharded over 'pp' .*mesh\['tp'\]"):
        Stage(layer, [torch.randn(2, 4)])


def test_stage_that_returns_a_dtensor(mesh: DeviceMesh) -> None:
    plan = ColwiseParallel(use_local_output=False)
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], plan)
    with pytest.raises(CaptureError, match=r"returns output, a DTensor .*use_local_output=True"):
        Stage(layer, [torch.randn(2, 4)])


# --- train/eval modes of modules, and bytes of storages -------------------------------------------


def run_for_evaluation(model: nn.Module) -> None:
    with preserve_modes([model]):
        model.eval()
        assert not any(part.training for part in model.modules())
        raise KeyError


def test_modes_of_submodules_are_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with pytest.raises(KeyError):
        run_for_evaluation(model)
    assert [part.training for part in model.modules()] == [True, True, False]


def test_views_share_their_storage() -> None:
    whole, other = torch.zeros(4, 2), torch.zeros(3)
    assert distinct_storage_bytes([whole[0], whole.t(), None, other[:1]]) == 4 * (4 * 2 + 3)


# --- what an optimizer keeps, before and behind its first step ------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
)
def test_the_first_step_makes_what_was_foretold(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    model = nn.Linear(300, 20)
    earlier = [parameter.clone() for parameter in model.parameters()]
    optimizer = make([*model.parameters()])
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(args))
    foretold = state_bytes(optimizer)
    assert not called
    for parameter, value in zip(model.parameters(), earlier, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) == foretold


def test_nothing_is_known_of_an_optimizer_that_fails() -> None:
    assert state_bytes(None) == 0
    assert state_bytes(torch.optim.SparseAdam([nn.Parameter(torch.zeros(3))])) == 0


# --- pytrees of classes that others registered, with keys and without -----------------------------


@dataclasses.dataclass
class Keyless:
    """As other libraries register their outputs: by flatten and unflatten alone."""

    sample: Any
    scale: Any


def register() -> None:
    if Keyless not in SUPPORTED_NODES:
        register_pytree_node(
            Keyless, lambda item: ([item.sample, item.scale], None), lambda v, _: Keyless(*v)
        )


def returning(model: Any, x: Tensor) -> Keyless:
    return Keyless(model.linear(x), {"factor": (x * 2, None)})


def taking(model: Any, given: Keyless) -> Tensor:
    return model.linear(given.sample) * given.scale


def test_names() -> None:
    register()
    assert flatten_named("x", None) == [("x", None)]
    assert flatten_named("x", ()) == []
    assert flatten_named("x", [1, {"a": (2,), "b": 3}]) == [
        ("x[0]", 1),
        ("x[1]['a'][0]", 2),
        ("x[1]['b']", 3),
    ]
    assert flatten_named("x", (Keyless(1, [2]),)) == [("x[0][0]", 1), ("x[0][1][0]", 2)]


def test_outputs_and_inputs_without_keys_are_in_one_graph() -> None:
    register()
    x = torch.randn(2, 4, requires_grad=True)
    split = assert_equals_autograd(layered(returning), [(x,)], fullgraph=True)
    assert split.functions[-1].output_names[0] == "output[0]"
    assert_equals_autograd(layered(taking), [(Keyless(x, torch.ones(4)),)], fullgraph=True)
