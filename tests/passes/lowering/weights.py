"""W of small modules, run with values of several microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.backends.backend import Eager
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import inputs
from autosplit.passes.lowering.forms import Fuses, GraphForm
from autosplit.passes.lowering.join import joined_role
from autosplit.passes.manager import When, run_graph_passes
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import split

MICROBATCHES = 3
TOLERANCE = 1e-12
"""Of gradients in float64, relative to the largest element of each."""


def weight_graph(model: nn.Module, *args: Tensor) -> fx.GraphModule:
    module = split(model, *args).backward_weight
    assert module is not None
    return module


def values_of(weight: fx.GraphModule) -> dict[Role, Tensor]:
    """Random values of all microbatches' arguments of W, and of accumulators."""
    generator = torch.Generator().manual_seed(0)

    def value(node: fx.Node) -> Tensor:
        fake = node.meta["val"]
        if not fake.is_floating_point():
            return torch.randint(0, 2, fake.shape, generator=generator).to(fake.dtype)
        values = torch.randn(fake.shape, generator=generator).to(fake.dtype)
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(values)

    values = {}
    for role, node in inputs(weight.graph).items():
        values |= {joined_role(role, at): value(node) for at in range(MICROBATCHES)}
        values[role] = value(node)  # of a parameter, all microbatches read it
    sums = inputs(adding(weight).graph, Kind.ACCUMULATOR)
    return values | {role: value(node) for role, node in sums.items()}


def run(module: fx.GraphModule, values: dict[Role, Tensor]) -> dict[Role, Tensor]:
    """The accumulators after a call of a graph that adds."""
    sums = {r: values[r].clone() for r in values if r.kind is Kind.ACCUMULATOR}
    arguments = [{**values, **sums}[role] for role in inputs(module.graph)]
    compile_graph("backward_weight", module, Eager()).call(arguments)
    return values | sums


def one_by_one(module: fx.GraphModule, values: dict[Role, Tensor]) -> dict[Role, Tensor]:
    """The accumulators after a call for each microbatch."""
    for at in range(MICROBATCHES):
        own = {r: values[joined_role(r, at)] for r in inputs(module.graph, Kind.DEFERRED)}
        values = values | run(module, {**values, **own})
    return values


def assert_same_sums(actual: dict[Role, Tensor], expected: dict[Role, Tensor]) -> None:
    sums = [role for role in expected if role.kind is Kind.ACCUMULATOR]
    assert sums
    for role in sums:
        allowed = TOLERANCE * float(expected[role].abs().max())
        torch.testing.assert_close(actual[role], expected[role], rtol=0.0, atol=allowed)


def adding(
    weight: fx.GraphModule,
    fuses: Fuses = "none",
    dtype: torch.dtype | None = None,
    *,
    writes_first: bool = False,
) -> fx.GraphModule:
    """The graph in the form that adds into accumulators."""
    form: dict[str, Any] = {"fuses": fuses, "dtype": dtype, "writes_first": writes_first}
    return _run_pass(When.ACCUMULATING, weight, **form)


def joined(weight: fx.GraphModule, rows: int) -> fx.GraphModule:
    """W of all microbatches, products of at most so many rows joined."""
    return _run_pass(When.JOINING, weight, count=MICROBATCHES, rows=rows)


def _run_pass(when: When, weight: fx.GraphModule, **form: Any) -> fx.GraphModule:
    program = SplitGraphs(weight, backward_weight=weight)
    (module,) = run_graph_passes(when, program, GraphForm("backward_weight", **form)).values()
    return module
