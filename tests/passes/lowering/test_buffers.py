"""Memory that graphs write over: of the forward, of operands that die, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autosplit.passes import Kind, Role, SplitGraphs, run
from autosplit.passes.analysis.operators import start_of
from autosplit.passes.graph import calls, outputs
from autosplit.passes.lowering.buffer_writes import written_buffer
from autosplit.passes.lowering.buffers import donatable, reusable_operands
from tests.passes.graphs import joint_of
from tests.semantics.against_autograd import assert_equals_autograd, one_by_one
from tests.zoo import Made

# A backward may overwrite values that the forward saved and that nobody else can reach.


def between(finish: Callable[[Tensor], object]) -> nn.Module:
    """``tanh`` is saved for its own gradient; ``finish`` says who else gets it."""
    return Made(lambda m, x: finish(torch.tanh(x * m.scale)), scale=nn.Parameter(torch.ones(4)))


def graphs_of(module: nn.Module) -> SplitGraphs:
    x = torch.randn(3, 4, requires_grad=True)
    return run(joint_of(module, x), memory="fast")


def saved_from(graphs: SplitGraphs, operator: str) -> Role:
    pairs = outputs(graphs.forward.graph, Kind.SAVED)
    (role,) = [role for role, node in pairs if operator in str(node.target)]
    return role


@pytest.mark.parametrize(
    "finish",
    [lambda y: (y, y.sin()), lambda y: (y.view(12), y.sin()), lambda y: (y[0], y.sin())],
    ids=["output", "view", "part"],
)
def test_a_saved_value_that_is_an_output_is_not_donated(finish: Callable[[Tensor], object]) -> None:
    graphs = graphs_of(between(finish))
    assert saved_from(graphs, "tanh") not in donatable(graphs.forward.graph)


# --- reuse: results are written over operands that die in them, and over nothing else -------------


def forward_of(function: Callable[[Tensor, Tensor], object]) -> fx.GraphModule:
    """F, without gradients: nothing is saved."""
    return run(
        joint_of(Made(lambda _, *args: function(*args)), torch.randn(4, 4), torch.randn(4, 4))
    ).forward


def reused(function: Callable[[Tensor, Tensor], object]) -> list[tuple[str, int]]:
    return [
        (str(node.target).split(".")[1], position)
        for node, position in reusable_operands(forward_of(function).graph).items()
    ]


def test_operand_that_dies() -> None:
    assert reused(lambda x, y: (x @ y) + x) == [("add", 0)]
    assert reused(lambda x, y: x + (x @ y)) == [("add", 1)]
    assert reused(lambda x, y: x - (x @ y)) == []  # would write the wrong way round
    assert reused(lambda x, y: (x @ y).exp().neg()) == [("exp", 0), ("neg", 0)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,  # the caller's
        lambda x, y: (h := x @ y, h + x),  # returned
        lambda x, y: (h := x @ y, (h + x) @ h)[1],  # read afterwards
        lambda x, y: (v := (h := x @ y).t(), (h + x) @ v)[1],  # read afterwards as a view
        lambda x, y: (h := x @ y, h + h.t())[1],  # read in the same operator as a view
        lambda x, y: (x @ y)[0] + x[0],  # would keep all of it alive
        lambda x, y: (x @ y)[:1] + x,  # smaller than the result
        lambda x, y: x + (x @ y).t(),  # lies otherwise in memory
        lambda x, y: (x > y) + x,  # of another type
        lambda x, y: x.max(1).values + x[0],  # not known to be memory of its own
    ],
)
def test_operand_that_must_live(function: Callable[[Tensor, Tensor], object]) -> None:
    assert [item for item in reused(function) if item[0] == "add"] == []


def test_sizes_that_vary_are_not_asked() -> None:
    """A comparison of symbolic sizes would make the graph fit one size only."""
    module = make_fx(lambda x, y: [(x @ y) + x], tracing_mode="symbolic")(
        torch.randn(4, 5), torch.randn(5, 5)
    )
    module.graph.output_node().meta["roles"] = [Role(Kind.OUTPUT, "output")]
    (product,) = [node for node in calls(module.graph) if "mm" in str(node.target)]
    assert reusable_operands(module.graph) == {}
    assert product.meta["val"].fake_mode.shape_env.guards == []


# Updates of buffers.


def normed(norms: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), norm) for norm in norms))


def through(m: Made, x: Tensor) -> Tensor:
    return m.blocks(x)


def reading_before(m: Made, x: Tensor) -> Tensor:
    earlier = m.blocks[0][1].running_mean * 2
    return through(m, x) * earlier


def reading_between(m: Made, x: Tensor) -> Tensor:
    return through(m, x) * m.blocks[0][1].running_var


def returning(m: Made, x: Tensor) -> tuple[Tensor, Tensor]:
    return through(m, x), m.blocks[1][1].running_mean.clone()


def counting(m: Made, x: Tensor) -> Tensor:
    old = m.count.clone()
    m.count.mul_(3)
    return through(m, x) * old * m.count


@pytest.mark.parametrize(
    ("forward", "shared"),
    [
        *((forward, False) for forward in (through, reading_before, reading_between)),
        *((forward, False) for forward in (returning, counting)),
        *((forward, True) for forward in (through, reading_between, counting)),
    ],
)
def test_a_buffer_is_read_before_it_is_written(
    forward: Callable[[Made, Tensor], object], shared: bool
) -> None:
    norms = [nn.BatchNorm1d(3)] * 2 if shared else [nn.BatchNorm1d(3) for _ in range(2)]
    model = Made(forward, blocks=normed(norms), count=nn.Buffer(torch.ones(3)))
    # Running statistics are written behind autograd's back: with all forwards before all
    # backwards, plain autograd multiplies with those of the last.
    assert_equals_autograd(model, [(torch.randn(5, 3),) for _ in range(2)], orders=[one_by_one])


@pytest.mark.parametrize(
    ("forward", "count"), [(through, 6), (reading_before, 4), (returning, 4), (counting, 6)]
)
def test_buffers_that_are_read_are_not_written_in_f(
    forward: Callable[[Made, Tensor], object], count: int
) -> None:
    norms = [nn.BatchNorm1d(3) for _ in range(2)]
    model = Made(forward, blocks=normed(norms), count=nn.Buffer(torch.ones(3)))
    graph = run(joint_of(model, torch.randn(5, 3, requires_grad=True))).forward.graph
    updates = [value for _, value in outputs(graph, Kind.UPDATE)]
    assert sum(written_buffer(value) is not None for value in updates) == count


def test_operand_of_a_collective_is_not_written_over_before_its_wait() -> None:
    ops = torch.ops._c10d_functional
    graph = fx.Graph()
    value = torch.empty(4)
    x = graph.placeholder("x")
    built = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    begun = graph.call_function(ops.all_gather_into_tensor.default, (built, 2, "0"))
    risky = graph.call_function(torch.ops.aten.mul.Tensor, (built, x))
    waited = graph.call_function(ops.wait_tensor.default, (begun,))
    graph.output([risky, waited]).meta["roles"] = [Role(Kind.OUTPUT, item) for item in "ab"]
    for node in (x, built, risky):
        node.meta["val"] = value
    begun.meta["val"] = waited.meta["val"] = torch.empty(8)
    assert start_of(waited) is begun
    assert risky not in reusable_operands(graph)
    risky.append(waited)
    waited.append(risky)  # behind the wait it may
    assert risky in reusable_operands(graph)
