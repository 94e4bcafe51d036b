"""The source of graphs runs, reads well, and lets tensors die early."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

from autosplit.passes import PassError
from autosplit.passes.errors import StrideError
from autosplit.passes.lowering.codegen import generate, stride_check
from tests.passes.graphs import hand_made, joint_of

# --- codegen: the source runs, reads well, and lets tensors die early -----------------------------


def test_literal() -> None:
    module, _ = hand_made()
    assert generate("joint", module) == (
        "def joint(args, constants={}):\n"
        "    (\n"
        "        x,  # input: f32[3]\n"
        "        g,  # tangent output: f32[3]\n"
        "    ) = args\n"
        "    args.clear()\n"
        "    mul_tensor = aten.mul.Tensor(x, 2); del x  # f32[3]\n"
        "    mul_tensor_1 = aten.mul.Tensor(g, 2); del g  # f32[3]\n"
        "    return [\n"
        "        mul_tensor,  # output output\n"
        "        mul_tensor_1,  # input_grad x\n"
        "    ]\n"
    )


ARGUMENTS = {
    "float('inf')": float("inf"),
    "float('-inf')": float("-inf"),
    "torch.float16": torch.float16,
    "torch.device('cpu')": torch.device("cpu"),
    "torch.channels_last": torch.channels_last,
    "torch.strided": torch.strided,
    "slice(None, 2, None)": slice(None, 2),
    "...": Ellipsis,
    "[1, [2, None]]": [1, [2, None]],
    "(True,)": (True,),
    "{'a': 1}": {"a": 1},
    "complex(1.0, 2.0)": 1 + 2j,
    "'text'": "text",
    "aten.sin.default": torch.ops.aten.sin.default,
    "torch.ops.prims.sin.default": torch.ops.prims.sin.default,
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_arguments(text: str) -> None:
    module, nodes = hand_made()
    nodes["y"].args = (nodes["x"], ARGUMENTS[text])
    source = generate("joint", module)
    assert f"aten.mul.Tensor(x, {text})" in source
    compile(source, "joint", "exec")


def test_results_that_are_all_read_are_assigned_by_one_statement() -> None:
    source = generate("joint", joint_of(nn.LayerNorm(4), torch.rand(2, 4)))
    assert re.search(r"\n    \w+, \w+, \w+ = aten.native_layer_norm.default\(", source)
    assert "native_layer_norm[" not in source


def test_values_without_a_source_form_are_refused() -> None:
    module, nodes = hand_made()
    nodes["y"].kwargs = {"alpha": object()}
    with pytest.raises(
        PassError, match=r"is <object object at .*> \(object\), which cannot be written"
    ):
        generate("joint", module)
    nodes["y"].kwargs = {}
    nodes["y"].target = fx.GraphModule
    with pytest.raises(
        PassError, match=r"mul_tensor calls .*GraphModule.*, which cannot be written as"
    ):
        generate("joint", module)


# --- strides: what addresses memory is checked as it runs -----------------------------------------


aten = torch.ops.aten


def call(operand: torch.Tensor, target: object = aten.as_strided.default) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = operand
    return graph.call_function(target, (x, [2], [1]))


def lines(node: fx.Node) -> list[str]:
    return [line.strip() for line in stride_check(node, str)]


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    first, *_ = lines(call(torch.empty(2, 1, 3)))
    assert first == "if (x.stride(0), x.stride(2),) != (3, 1):"
    assert lines(call(torch.empty(1))) == lines(call(torch.empty(3, 0))) == []


def test_other_strides_raise_an_error_of_the_passes() -> None:
    check = "\n".join(stride_check(call(torch.empty(2, 3)), str))
    function = f"def run(x):\n{check}\n    return x"
    space: dict[str, object] = {}
    exec(function, space)
    as_traced = torch.empty(2, 3)
    assert space["run"](as_traced) is as_traced
    with pytest.raises(StrideError, match=r"by the strides \(3, 1\) that .*strides \(1, 2\)"):
        space["run"](torch.empty(3, 2).t())
    assert "autosplit import" not in check
