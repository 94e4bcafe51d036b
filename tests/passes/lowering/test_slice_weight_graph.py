"""slices: W in parts of near-equal FLOPs that do nothing twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx, nn

from autosplit.passes import PassError, memory_setting, run
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.passes.graph import Kind
from autosplit.passes.lowering.slice_weight_graph import slice_weight_graph
from autosplit.passes.verify import verify_graph
from tests.passes.graphs import names_in, names_out, ops, program_of
from tests.zoo import CASES


def weight(model: nn.Module, batch: torch.Tensor, *, late_input: bool = False) -> fx.GraphModule:
    setting = memory_setting("balanced", late_input=late_input)
    module = run(program_of(model, batch).joint, memory=setting).backward_weight
    assert module is not None
    return module


def gradients(parts: list[fx.GraphModule]) -> list[list[str]]:
    return [names_out(part, Kind.PARAMETER_GRAD) for part in parts]


@pytest.mark.parametrize(
    ("name", "most"), [("attention", 2), ("convolutions", 3), ("tied", 2), ("repeated", 3)]
)
def test_every_gradient_once_and_no_work_twice(name: str, most: int) -> None:
    case = CASES[name]
    batch = case.batch()
    whole = weight(case.build(), batch.requires_grad_(batch.is_floating_point()))
    for count in range(1, most + 1):
        parts = slice_weight_graph(whole, count)
        for part in parts:
            verify_graph("backward_weight_slice", part, "slices")
        found = [name for names in gradients(parts) for name in names]
        assert sorted(found) == sorted(names_out(whole, Kind.PARAMETER_GRAD))
        assert sum((ops(part) for part in parts), start=ops(None)) == ops(whole)
        assert sum(graph_flops(part.graph) for part in parts) == graph_flops(whole.graph)


def test_near_equal_flops() -> None:
    """Layers of 1, 1, 2, 4 and 8 units; the backward goes through them from the end."""
    widths = [8, 8, 8, 16, 16, 32]
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    whole = weight(nn.Sequential(*layers), torch.randn(4, 8, requires_grad=True))
    parts = slice_weight_graph(whole, 2)
    assert gradients(parts) == [["4.weight"], ["0.weight", "1.weight", "2.weight", "3.weight"]]
    shares = [
        graph_flops(part.graph) / graph_flops(whole.graph) for part in slice_weight_graph(whole, 3)
    ]
    assert shares == pytest.approx([8 / 16, 4 / 16, 4 / 16])


def test_a_bias_is_reduced_with_its_weight() -> None:
    whole = weight(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    )
    assert gradients(slice_weight_graph(whole, 2)) == [
        ["1.weight", "1.bias"],
        ["0.weight", "0.bias"],
    ]


def test_what_a_later_slice_reads_is_handed_on() -> None:
    """All of a first stage's backward is W: a chain."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    whole = weight(model, torch.randn(4, 8), late_input=True)
    first, second, third = slice_weight_graph(whole, 3)
    assert names_out(third, Kind.DEFERRED) == []
    for giver, taker in ((first, second), (second, third)):
        (handed,) = names_out(giver, Kind.DEFERRED)
        assert handed in names_in(taker, Kind.DEFERRED)
        assert handed not in names_in(whole, Kind.DEFERRED)


@pytest.mark.parametrize("count", [0, 7])
def test_count_out_of_range(count: int) -> None:
    example = torch.randn(4, 8, requires_grad=True)
    module = run(program_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), example).joint)
    with pytest.raises(PassError, match=rf"2 matrix .* into {count} slices; ask for 1 to 2"):
        slice_weight_graph(module.backward_weight, count)
