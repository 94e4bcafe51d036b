"""What weight gradients hide in models that torch.compile runs, and in models split in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.dynamo.partial_model import Partial
from autosplit.mesh.costs import Overlap
from autosplit.passes.analysis.operator_cost import flops
from autosplit.passes.analysis.operators import is_start, is_wait
from autosplit.passes.graph import calls
from autosplit.runtime.split_options import SplitOptions
from tests.fake_ranks import fake_mesh


def products_under_way(overlap: Overlap) -> int:
    """How many matrix products the backward runs while collectives are under way."""
    layers = [nn.Linear(*sizes) for sizes in ((8, 16), (16, 8)) * 2]
    with fake_mesh() as mesh:
        plan = {str(at): (ColwiseParallel, RowwiseParallel)[at % 2]() for at in range(4)}
        torch._dynamo.reset()
        model = parallelize_module(nn.Sequential(*layers), mesh, plan)
        partial = Partial(model, SplitOptions(overlap=overlap))
        partial(torch.randn(4, 8, requires_grad=True))
        (part,) = partial._parts
    assert part.graphs is not None
    assert part.graphs.backward is not None
    under_way, found = 0, 0
    for node in calls(part.graphs.backward.graph):
        under_way += is_start(node) - is_wait(node)
        found += bool(flops(node)) and under_way > 0
    return found


SLOW = CollectiveCosts(Link(1.0), DeviceSpeed(1e12, 1e11))


@pytest.mark.parametrize(
    ("overlap", "some"), [("none", False), ("collectives", True), (SLOW, True)]
)
def test_products_run_while_collectives_are_under_way(overlap: Overlap, some: bool) -> None:
    assert (products_under_way(overlap) > 0) is some
