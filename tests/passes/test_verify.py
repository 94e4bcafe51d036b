"""verify: every invariant, broken on purpose."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import PassError, Role, SplitGraphs
from autosplit.passes.graph import Kind, inputs
from autosplit.passes.lowering.accumulate import accumulate
from autosplit.passes.partition.split_graphs import partition_forward_backward, split_backward
from autosplit.passes.verify import verify, verify_graph
from tests.passes.graphs import copied, hand_made, joint_of, program_of
from tests.zoo import SwiGLU

aten = torch.ops.aten


@functools.cache
def linear() -> torch.fx.GraphModule:
    return joint_of(nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True))


def whole(module: nn.Module | None = None, *args: Tensor) -> SplitGraphs:
    program = program_of(module, *args) if module else SplitGraphs(copied(linear()))
    partition_forward_backward(program)
    split_backward(program)
    verify(program)
    return program


def append(module: torch.fx.GraphModule, target: object, *args: object) -> torch.fx.Node:
    with module.graph.inserting_before(module.graph.output_node()):
        node = module.graph.call_function(target, args)
    node.meta["val"] = torch.empty(3, device="meta")
    return node


def test_value_unknown() -> None:
    module, nodes = hand_made()
    del nodes["dx"].meta["val"]
    with pytest.raises(PassError, match=r"joint: mul_tensor_1: has no meta\['val'\]"):
        verify(SplitGraphs(module))


def test_tangent_in_forward() -> None:
    program = whole()
    first = next(iter(program.forward.graph.nodes))
    first.meta["role"] = Role(Kind.TANGENT, "output")
    with pytest.raises(PassError, match=r"forward: .*tangent output must not enter this graph"):
        verify(program)


def test_boundary_that_does_not_match() -> None:
    program = whole()
    output = program.forward.graph.output_node()
    output.meta["roles"] = (*output.meta["roles"][:-1], Role(Kind.SAVED, "other"))
    with pytest.raises(PassError, match=r"forward returns saved .*other.*, backward takes"):
        verify(program)


def test_boundary_that_carries_no_tensor() -> None:
    program = whole()
    output = program.forward.graph.output_node()
    output.args = ([*output.args[0][:-1], 7],)
    with pytest.raises(PassError, match="saved args_0 is 7; boundaries carry tensors"):
        verify(program)


def test_output_lost_and_output_doubled() -> None:
    program = whole()
    output = program.backward_weight.graph.output_node()
    output.args = ([output.args[0][0], output.args[0][0]],)
    output.meta["roles"] = (output.meta["roles"][0],) * 2
    with pytest.raises(PassError) as caught:
        verify(program)
    assert "parameter_grad weight is returned 2 times over the graphs, not 1" in str(caught.value)
    assert "parameter_grad bias is returned 0 times over the graphs, not 1" in str(caught.value)


def test_gradients_that_a_pass_exchanges() -> None:
    program = whole()
    output = program.backward_weight.graph.output_node()
    output.args = (output.args[0][::-1],)
    message = (
        r"backward_weight: parameter_grad weight is \(torch.float32, '2'\), and was traced as \("
    )
    with pytest.raises(PassError, match=message):
        verify(program)


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        (aten.rand.default, [[3]], "rand_default: aten.rand.default may draw random"),
        (aten._scaled_dot_product_attention_math.default, [...], ".*random|attention's forward"),
        (aten.add_.Tensor, [..., 1], ".*add_.Tensor has a side effect in a backward"),
    ],
    ids=str,
)
def test_operator_that_no_backward_may_have(target: Any, args: list[Any], said: str) -> None:
    program = whole()
    x = next(iter(program.backward_weight.graph.nodes))
    append(
        program.backward_weight, target, *(x if argument is ... else argument for argument in args)
    )
    with pytest.raises(PassError, match=f"backward_weight: {said}"):
        verify(program)


def accumulating() -> torch.fx.GraphModule:
    module = accumulate(whole().backward_weight)
    verify_graph("backward_weight_accumulating", module, "accumulate")
    return module


def test_accumulator_that_is_read() -> None:
    module = accumulating()
    total = next(iter(inputs(module.graph, Kind.ACCUMULATOR).values()))
    append(module, aten.mul.Tensor, total, 2)
    with pytest.raises(PassError, match=r"after a pass:\n.*mul_tensor: reads accumulator weight"):
        verify_graph("backward_weight_accumulating", module, "a pass")


def test_accumulator_that_gets_nothing() -> None:
    module = accumulating()
    written = next(n for n in module.graph.nodes if n.target is aten.add_.Tensor)
    module.graph.erase_node(written)
    with pytest.raises(PassError, match="nothing is added into accumulator weight"):
        verify_graph("backward_weight_accumulating", module, "a pass")


def test_only_accumulators_are_written() -> None:
    module = accumulating()
    deferred = next(iter(inputs(module.graph, Kind.DEFERRED).values()))
    append(module, aten.add_.Tensor, deferred, 1)
    with pytest.raises(PassError, match=r"add__tensor_2: aten.add_.Tensor has a side effect"):
        verify_graph("backward_weight_accumulating", module, "a pass")


def test_accumulator_in_a_graph_that_adds_nothing_up() -> None:
    with pytest.raises(PassError, match="accumulator weight must not enter this graph"):
        verify_graph("backward_weight", accumulating(), "a pass")


def test_matrix_product_that_runs_again() -> None:
    program = whole()
    again = append(program.backward_weight, aten.mm.default)
    product = next(n for n in program.forward.graph.nodes if "addmm" in str(n.target))
    again.name = product.name
    with pytest.raises(
        PassError, match=r"backward_weight: addmm: aten.mm.default ran in forward and runs again"
    ):
        verify(program)


def test_all_violations_at_once_with_source_lines() -> None:
    program = program_of(SwiGLU(), torch.randn(2, 4, 16, requires_grad=True))
    partition_forward_backward(program)
    for node in program.forward.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]
    with pytest.raises(PassError) as caught:
        verify(program, "a pass")
    text = str(caught.value)
    assert text.startswith("after a pass:\n  - forward: ")
    assert text.count("has no meta['val']") >= 2
    assert "zoo.py:" in text


def test_a_write_of_the_backward_is_refused() -> None:
    module, nodes = hand_made()
    write = append(module, aten.copy_.default, nodes["x"], nodes["dx"])
    write.meta["partitioner_tag"] = "must_be_in_backward"
    with pytest.raises(PassError, match=r"joint: copy__default: the backward writes, and its"):
        verify(SplitGraphs(module))
