from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autosplit
from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.passes import Kind, Rates, Role, SplitGraphs, memory_setting, run
from autosplit.passes.analysis.collective_order import exposed_time
from autosplit.passes.analysis.operator_cost import duration, flops, graph_flops, value_bytes
from autosplit.passes.analysis.operators import is_start, is_wait, start_of
from autosplit.passes.graph import calls, outputs
from autosplit.passes.lowering.buffers import LiveBytes, reusable_operands
from benchmarks.mesh.collectives import least_exposed
from tests.fake_ranks import fake_mesh
from tests.passes.graphs import copied, joint_of


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


PRODUCT = 2.0 * 4 * 64 * 64 * 128  # FLOPs of a product for a weight gradient on one of two ranks
DELAYS = (0.05, 0.5, 2.0)


def linked(delay: float) -> Rates:
    """A link on which a collective takes ``delay`` times as long as that product."""
    return Rates(flops=PRODUCT, bytes=1e9, call=1e-4, exchanged=float("inf"), start=delay)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as made:
        yield made


@pytest.fixture(scope="module")
def splits(mesh: DeviceMesh) -> dict[str | Rates, SplitGraphs]:
    """A sequence-parallel model of three blocks, split in several ways."""
    joint = joint_of(model(mesh), torch.randn(4, 32, 64, requires_grad=True))
    made = {}
    for overlap in ("none", "collectives", *map(linked, DELAYS)):
        copy = copied(joint)
        made[overlap] = run(copy, memory=memory_setting("balanced", overlap=overlap))
    return made


@pytest.fixture(scope="module")
def graphs(splits: dict[str | Rates, SplitGraphs]) -> tuple[SplitGraphs, SplitGraphs]:
    """Without overlap and with it."""
    return splits["none"], splits["collectives"]


@pytest.fixture(scope="module")
def by_delay(splits: dict[str | Rates, SplitGraphs]) -> dict[float, SplitGraphs]:
    """By rates at which collectives take so long."""
    return {delay: splits[linked(delay)] for delay in DELAYS}


def model(mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, object] = {}
    for at in "012":
        plan |= {
            f"{at}.norm": SequenceParallel(),
            f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(nn.Sequential(*(Mlp(64, 256) for _ in range(3))), mesh, plan)


def starts(module: fx.GraphModule | None) -> list[str]:
    assert module is not None
    return [node.name for node in calls(module.graph) if is_start(node)]


def products_under_way(module: fx.GraphModule | None) -> int:
    """How many matrix products run between a collective's start and its wait."""
    assert module is not None
    under_way, found = 0, 0
    for node in calls(module.graph):
        under_way += is_start(node) - is_wait(node)
        found += bool(flops(node)) and under_way > 0
    return found


def test_weight_gradients_run_while_collectives_are_under_way(
    graphs: tuple[SplitGraphs, SplitGraphs],
) -> None:
    plain, moved = graphs
    assert products_under_way(plain.backward) == products_under_way(plain.backward_input) == 0
    # All but the first collective, which every weight gradient waits for, have one.
    assert products_under_way(moved.backward) >= 5
    assert products_under_way(moved.backward_input) >= 5
    assert outputs(plain.backward_input.graph, Kind.PARAMETER_GRAD) == []
    early = [role.name for role, _ in outputs(moved.backward_input.graph, Kind.PARAMETER_GRAD)]
    assert "1.up.weight" in early
    for name in ("backward", "backward_input"):
        before, after = getattr(plain, name), getattr(moved, name)
        assert exposed_time(calls(after.graph)) < exposed_time(calls(before.graph)) / 2


def test_ranks_begin_collectives_in_one_order(graphs: tuple[SplitGraphs, SplitGraphs]) -> None:
    plain, moved = graphs
    assert starts(plain.backward) == starts(moved.backward) == starts(moved.backward_input)


def test_memory_grows_by_one_collective_at_most(graphs: tuple[SplitGraphs, SplitGraphs]) -> None:
    """Over that of an I that leaves all weight gradients to W, whose operands it hands on."""
    plain, moved = graphs
    assert plain.backward is not None
    assert moved.backward is not None
    begun = [node for node in calls(plain.backward.graph) if is_start(node)]
    largest = max(
        sum(value_bytes(each.meta["val"]) for each in (node, *node.all_input_nodes))
        for node in begun
    )
    for name in ("backward", "backward_input"):
        before, after = (LiveBytes(getattr(each, name)).peak() for each in graphs)
        assert after <= before + largest


@pytest.mark.parametrize("delay", DELAYS[1:])
def test_i_hides_what_can_be_hidden_over_a_link_that_is_known(
    delay: float, by_delay: dict[float, SplitGraphs], graphs: tuple[SplitGraphs, SplitGraphs]
) -> None:
    rates, made = linked(delay), by_delay[delay]
    assert made.backward is not None
    nodes = list(calls(made.backward.graph))
    least = least_exposed(nodes, {node: duration(node, rates) for node in nodes}, delay)
    known, estimated, none = (
        exposed_time(calls(each.backward_input.graph), rates=rates)  # type: ignore[union-attr]
        for each in (made, graphs[1], graphs[0])
    )
    assert none - known >= 0.9 * (none - least)
    assert estimated - known >= (1.0 if delay > 1 else 0.0)


def test_i_takes_only_what_fills_its_waits(by_delay: dict[float, SplitGraphs]) -> None:
    left = []
    for made in by_delay.values():
        assert made.backward_weight is not None
        left.append(graph_flops(made.backward_weight.graph) / (6 * PRODUCT))
    assert left[0] == 1.0
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[1] < 1.0


def test_collectives_begin_in_one_order_whatever_the_link(
    by_delay: dict[float, SplitGraphs], graphs: tuple[SplitGraphs, SplitGraphs]
) -> None:
    for made in by_delay.values():
        assert starts(made.backward_input) == starts(graphs[0].backward_input)
        assert starts(made.backward_weight) == starts(graphs[0].backward_weight)


def test_weight_gradients_of_repeated_blocks_fill_waits_around_them(mesh: DeviceMesh) -> None:
    """Blocks without collectives are graphs that are called; as a whole, W of one fills a wait."""
    delay, width = 3.0, 64
    costs = CollectiveCosts(Link(delay), DeviceSpeed(PRODUCT / 2, float("inf")))
    plan: dict[str, object] = {f"{at}.up": ColwiseParallel() for at in (1, 3, 5)}
    plan |= {f"{at}.down": RowwiseParallel() for at in (1, 3, 5)}
    stack = nn.Sequential(*(Mlp(width, width + width * (at % 2)) for at in range(6)))
    parallelize_module(stack, mesh, plan)
    x = torch.randn(4, 32, width, requires_grad=True)
    none, known = (
        autosplit.split(stack, (x,), overlap=each, memory="fast").functions[0].graphs
        for each in ("none", costs)
    )
    assert none.backward is not None
    nodes = list(calls(none.backward.graph))
    least = least_exposed(nodes, {node: duration(node, costs.rates) for node in nodes}, delay)
    waits = [
        exposed_time(calls(each.backward_input.graph), rates=costs.rates)  # type: ignore[union-attr]
        for each in (none, known)
    ]
    assert waits[0] - waits[1] >= 0.9 * (waits[0] - least)


def test_model_without_collectives_is_left_alone() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    plain, moved = (autosplit.split(module, x, overlap=each) for each in ("none", "collectives"))
    for name, graph in plain.functions[0].graphs.graphs().items():
        other = moved.functions[0].graphs.graphs()[name]
        assert [node.name for node in graph.graph.nodes] == [n.name for n in other.graph.nodes]


def test_operand_of_a_collective_is_not_written_over_before_its_wait() -> None:
    ops = torch.ops._c10d_functional
    graph = fx.Graph()
    value = torch.empty(4)
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    begun = graph.call_function(ops.all_gather_into_tensor.default, (made, 2, "0"))
    risky = graph.call_function(torch.ops.aten.mul.Tensor, (made, x))
    waited = graph.call_function(ops.wait_tensor.default, (begun,))
    graph.output([risky, waited]).meta["roles"] = [Role(Kind.OUTPUT, each) for each in "ab"]
    for node in (x, made, risky):
        node.meta["val"] = value
    begun.meta["val"] = waited.meta["val"] = torch.empty(8)
    assert start_of(waited) is begun
    assert risky not in reusable_operands(graph)
    risky.append(waited)
    waited.append(risky)  # behind the wait it may
    assert risky in reusable_operands(graph)
