"""Weight gradients run while collectives are under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autosplit
from autosplit.passes import CollectiveCosts, Kind, SplitGraphs, memory_setting, run
from autosplit.passes.analysis.operator_cost import duration, flops
from autosplit.passes.analysis.operators import is_start, is_wait
from autosplit.passes.graph import calls, outputs
from autosplit.passes.partition.collectives import ListSchedule
from tests.fake_ranks import fake_mesh
from tests.passes.graphs import copied, joint_of
from tests.zoo import Residual


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as engine:
        yield engine


@pytest.fixture(scope="module")
def joint(mesh: DeviceMesh) -> fx.GraphModule:
    """The joint graph of a sequence-parallel model of three blocks."""
    return joint_of(model(mesh), torch.randn(4, 32, 64, requires_grad=True))


@pytest.fixture(scope="module")
def graphs(joint: fx.GraphModule) -> SplitGraphs:
    return run(copied(joint))


def model(mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, object] = {}
    for at in "012":
        plan |= {
            f"{at}.norm": SequenceParallel(),
            f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(nn.Sequential(*(Residual(64, 256) for _ in range(3))), mesh, plan)


def starts(module: fx.GraphModule | None) -> list[str]:
    assert module is not None
    return [node.name for node in calls(module.graph) if is_start(node)]


def products_under_way(module: fx.GraphModule | None) -> int:
    """How many matrix products run between a collective's start and its wait."""
    assert module is not None
    under_way, result = 0, 0
    for node in calls(module.graph):
        under_way += is_start(node) - is_wait(node)
        result += bool(flops(node)) and under_way > 0
    return result


def waits_with_products(module: fx.GraphModule | None) -> int:
    """How many waits have a matrix product between the start before them and themselves."""
    assert module is not None
    begun = products = False
    result = 0
    for node in calls(module.graph):
        if is_start(node):
            begun, products = True, False
        elif is_wait(node):
            result += begun and products
            begun = False
        else:
            products |= bool(flops(node))
    return result


def early(graphs: SplitGraphs) -> list[str]:
    """Parameters whose gradients I computes."""
    assert graphs.backward_input is not None
    return [role.name for role, _ in outputs(graphs.backward_input.graph, Kind.PARAMETER_GRAD)]


def test_weight_gradients_run_while_collectives_are_under_way(graphs: SplitGraphs) -> None:
    # All but the first collective, which every weight gradient waits for, have one.
    assert products_under_way(graphs.joint) == 0
    assert products_under_way(graphs.backward) >= 5
    assert products_under_way(graphs.backward_input) >= 5
    assert "1.up.weight" in early(graphs)


def test_ranks_begin_collectives_in_the_order_of_the_graph(graphs: SplitGraphs) -> None:
    traced = starts(graphs.joint)
    for module in (graphs.backward, graphs.backward_input):
        mine = starts(module)
        assert mine == [name for name in traced if name in mine]
    assert starts(graphs.backward) == starts(graphs.backward_input)


def test_a_schedule_has_all_operators_behind_what_they_read(graphs: SplitGraphs) -> None:
    assert graphs.backward is not None
    nodes = list(calls(graphs.backward.graph))
    order, filling = ListSchedule(nodes, CollectiveCosts(), room=0.0).run()
    places = {node: at for at, node in enumerate(order)}
    assert {*order} == {*nodes}
    assert all(places[e] < places[n] for n in nodes for e in n.all_input_nodes if e in places)
    assert all(places[node] < places[wait] for node, wait in filling.items())
    assert filling


def test_i_takes_what_fills_its_waits(joint: fx.GraphModule) -> None:
    """None over a link that takes no time, and all that come before the last over a slow one."""
    results = []
    for start in (0.0, 1e6, 1e9):
        setting = memory_setting("balanced", collectives=CollectiveCosts(start, 0.0))
        built = run(copied(joint), memory=setting)
        results.append({name for name in early(built) if name.endswith("weight")})
    assert not any("up" in name or "down" in name for name in results[0])
    assert results[0] < results[1] < results[2]


def test_a_product_that_hardly_fits_is_kept_for_the_next_wait(joint: fx.GraphModule) -> None:
    """Costs that are a little high would else have two fill one wait and none the next."""
    product = next(duration(node) for node in calls(joint.graph) if flops(node))
    for factor in (0.9, 1.0, 1.3):
        costs = CollectiveCosts(factor * product, 0.0)
        built = run(copied(joint), memory=memory_setting("balanced", collectives=costs))
        assert waits_with_products(built.backward_input) == len(starts(built.backward_input)) - 1


def test_weight_gradients_of_repeated_blocks_fill_waits_around_them(mesh: DeviceMesh) -> None:
    """Blocks without collectives are graphs that are called; as a whole, W of one fills a wait."""
    plan: dict[str, object] = {f"{at}.up": ColwiseParallel() for at in (1, 3)}
    plan |= {f"{at}.down": RowwiseParallel() for at in (1, 3)}
    stack = nn.Sequential(*(Residual(64, 64 + 64 * (at % 2)) for at in range(4)))
    parallelize_module(stack, mesh, plan)
    x = torch.randn(4, 32, 64, requires_grad=True)
    functions = autosplit.split(stack, (x,), memory="fast").functions[0]
    assert any(name.startswith("2.") for name in early(functions.graphs))
