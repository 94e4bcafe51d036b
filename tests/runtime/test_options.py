"""SplitOptions: one list of options for ``split`` and stages."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import autosplit
from autosplit import SplitError, SplitOptions
from autosplit.passes import PASSES, Pass, SplitGraphs
from autosplit.passes.graph import calls
from autosplit.pipeline import StageOptions
from autosplit.runtime.build import DUMP_VARIABLE
from autosplit.runtime.options import SplitArguments

aten = torch.ops.aten


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1


def scaled() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Scaled(4, 4), (torch.randn(2, 4, requires_grad=True),)


def of_split(**options: Any) -> Any:
    return autosplit.split(*scaled(), **options).functions[0]


def of_stage(**options: Any) -> Any:
    return autosplit.Stage(*scaled(), **options).functions


FACES = pytest.mark.parametrize("face", [of_split, of_stage])


def drop_unit_products(program: SplitGraphs) -> bool:
    graph = program.joint.graph
    products = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    units = [node for node in products if node.args[1] == 1]
    for node in units:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(units)


def lose_a_value(program: SplitGraphs) -> bool:
    del next(calls(program.joint.graph)).meta["val"]
    return True


def test_keyword_arguments_are_the_fields() -> None:
    assert get_type_hints(SplitArguments) == get_type_hints(SplitOptions)


@FACES
def test_a_pass_of_the_user_runs_and_is_dumped(
    face: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    functions = face(passes=(Pass("drop_unit_products", drop_unit_products), *PASSES))
    assert not functions.graphs.forward.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    (file,) = tmp_path.glob("00_Scaled/01_drop_unit_products.joint.py")
    assert "-2 aten.mul.Tensor" in file.read_text()


@FACES
def test_a_wrong_pass_of_the_user_is_named(face: Callable[..., Any]) -> None:
    passes = (*PASSES, Pass("lose_a_value", lose_a_value))
    with pytest.raises(SplitError, match="cannot be split: after lose_a_value:"):
        face(passes=passes, **{"fullgraph": True} if face is of_split else {})


@pytest.mark.parametrize("face", [of_split, of_stage, StageOptions])
def test_an_unknown_option_is_refused_with_the_known(face: Callable[..., Any]) -> None:
    text = "unexpected keyword argument 'memry'; known options: .*backend, .*memory, "
    with pytest.raises(TypeError, match=text):
        face(memry="lean")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"backend": "tpu"}, "unknown backend 'tpu'; known backends: 'eager', 'inductor'"),
        ({"mode": "max"}, "unknown mode 'max' of torch.compile; known modes: 'default', 'max-auto"),
        ({"mode": "max-autotune"}, "no effect with backend='eager'.*use backend='inductor'"),
        (
            {"backend": "inductor", "mode": "reduce-overhead"},
            "refused, because it only adds CUDA graphs: a CPU has none",
        ),
        ({"memory": -1}, "memory must be 'fast', 'balanced', 'lean', or .*; got -1"),
        ({"grad_dtype": torch.int8}, "grad_dtype must be a floating-point dtype .*int8"),
        ({"passes": [*PASSES]}, "passes must be a tuple of autosplit.passes.Pass, such as"),
        ({"passes": (drop_unit_products,)}, "passes must be a tuple of autosplit.passes.Pass"),
    ],
)
def test_a_wrong_value_is_refused(option: dict[str, Any], text: str) -> None:
    for face in (SplitOptions, StageOptions):
        with pytest.raises(SplitError, match=text):
            face(**option)


def test_split_refuses_the_dtype_of_sums() -> None:
    with pytest.raises(SplitError, match=r"grad_dtype=torch.float32 has no effect in split"):
        autosplit.split(nn.Linear(2, 2), grad_dtype=torch.float32)


def test_options_by_name_replace_those_of_the_whole() -> None:
    lean = SplitOptions(memory="lean", grad_dtype=torch.float64)
    assert of_stage(options=lean, memory="fast").graphs.memory.name == "fast"
    assert of_stage(options=lean).graphs.memory.name == "lean"
    assert StageOptions(options=lean, memory=8).split == replace(lean, memory=8)
    with pytest.raises(SplitError, match="options must be a SplitOptions; got a dict"):
        of_split(options={"memory": "lean"})


def test_options_of_a_stage_go_before_those_of_its_plan() -> None:
    plan = SplitOptions(memory="lean", backend="inductor")
    assert StageOptions().with_defaults(plan, None).split == plan
    chosen = StageOptions(memory="balanced", autocast=torch.bfloat16)
    both = chosen.with_defaults(plan, None)
    assert both.split == replace(plan, memory="balanced")
    assert both.autocast is torch.bfloat16
    whole = StageOptions(options=SplitOptions())
    assert replace(whole, autocast=None).with_defaults(plan, None).split == SplitOptions()


def test_the_whole_backward_is_deferred_on_request() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    model = autosplit.split(module, x, defer_whole_backward=True)
    assert not [*calls(model.functions[0].graphs.backward_input.graph)]
    model(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    module(x).sum().backward()
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in module.parameters())))
