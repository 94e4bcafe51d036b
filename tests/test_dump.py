"""Graphs as files that run, and as tables."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from autosplit.passes.graph import Kind, inputs, outputs
from autosplit.text.figures import short_source
from tests.zoo import Made, SwiGLU, convolutions

# --- dump(): every file is there, the code runs and computes what the module computes -------------


def load(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (SwiGLU(), torch.randn(2, 4, 16)),
        (convolutions(), torch.randn(4, 3, 8, 8)),
        (nn.Sequential(nn.Linear(16, 16), SwiGLU(), SwiGLU(), SwiGLU()), torch.randn(2, 4, 16)),
    ],
    ids=["swiglu", "convolutions", "blocks"],
)
def test_dumped_code_computes_the_gradients(
    model: nn.Module, x: Tensor, tmp_path: pathlib.Path
) -> None:
    model, x = copy.deepcopy(model), x.detach().requires_grad_()
    split = autosplit.split(model, (x,))
    for fold_views in (False, True):
        x.grad = None
        model.zero_grad()
        assert_dumped(split, x, fold_views, tmp_path / str(fold_views))


def assert_dumped(split: Any, x: Tensor, fold_views: bool, tmp_path: pathlib.Path) -> None:
    """Wire the dumped files by role, as a person debugging would, and compare with autograd."""
    model = split.unsplit
    split.dump(tmp_path, fold_views=fold_views)
    nested = [re.search(r"mm\..*\(aten", path.read_text()) for path in tmp_path.rglob("*.py")]
    has_products = any("aten.mm" in path.read_text() for path in tmp_path.rglob("*.py"))
    assert any(nested) == (fold_views and has_products)
    graphs = split.functions[0].calling.graphs()
    expected: dict[str, Tensor] = dict(model.named_parameters())
    expected |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected["args[0]"] = x
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in ("forward", "backward_input", "backward_weight"):
            received = [
                expected[role.name] if role.name in expected else values[role.name]
                for role in inputs(graphs[name].graph)
            ]
            results = getattr(load(tmp_path / f"{name}.py"), name)(received)
            assert received == []
            roles = [role for role, _ in outputs(graphs[name].graph)]
            prefix = {Kind.INPUT_GRAD: "grad of ", Kind.PARAMETER_GRAD: "grad of "}
            for role, value in zip(roles, results, strict=True):
                if role.kind is Kind.OUTPUT:
                    values[role.name] = torch.ones_like(value)  # its gradient
                elif role.kind is not Kind.UPDATE:
                    values[prefix.get(role.kind, "") + role.name] = value
    model(x).sum().backward()
    assert torch.equal(values["grad of args[0]"], x.grad)
    for name, parameter in model.named_parameters():
        assert torch.equal(values[f"grad of {name}"], parameter.grad), name


def test_a_folded_operand_lives_until_its_product(tmp_path: pathlib.Path) -> None:
    """``y`` is last read by name before the product that reads its transpose."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = x + 1.0
        transposed, scale = y.t(), y.sum()
        return (transposed @ x) * scale

    split = autosplit.split(Made(forward), (torch.randn(3, 3),))
    split.dump(tmp_path, fold_views=True)
    (result,) = load(tmp_path / "forward.py").forward([x := torch.randn(3, 3)])
    assert "aten.mm.default(aten.t.default(" in (tmp_path / "forward.py").read_text()
    assert torch.equal(result, split.unsplit(x))


def test_weights_for_their_shape_and_gradients_of_i_are_told(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    autosplit.split(model, (x,)).dump(tmp_path)
    shape = "_2_weight,  # parameter{}: f32[2, 4, 3, 3]"
    assert shape.format(", for its shape") in (tmp_path / "backward_weight.py").read_text()
    for name in ("forward", "backward_input", "backward"):
        assert shape.format("") in (tmp_path / f"{name}.py").read_text()
    told = (tmp_path / "boundary.md").read_text().partition("## Not deferred")[2]
    assert "| 1.weight    | aten.native_batch_norm_backward.default |" in told


def test_blocks_have_a_folder_a_kind(tmp_path: pathlib.Path) -> None:
    """Of many alike blocks one is dumped; what crosses in each of them is in one table."""
    model = nn.Sequential(nn.Linear(16, 16), *[SwiGLU() for _ in range(5)])
    split = autosplit.split(model, (torch.randn(2, 4, 16, requires_grad=True),))
    split.dump(tmp_path)
    names = ["backward_input.py", "backward_weight.py", "forward.py", "recomputed_7.py"]
    assert sorted(path.name for path in (tmp_path / "SwiGLU_0").glob("*.py")) == names
    assert (tmp_path / "forward.py").read_text().count("constants['SwiGLU_0_forward']") == 5
    crossing = (tmp_path / "boundary.md").read_text()
    assert all(f"| _{at}_down_input " in crossing for at in range(1, 6))


def test_tensors_are_called_as_the_user_calls_their_modules(tmp_path: pathlib.Path) -> None:
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    split.dump(tmp_path)
    code = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    for name in ("down_input", "up_dy", "gate_dy"):
        for graph in ("joint", "backward_input", "backward_weight"):
            assert f" {name} " in code[graph].replace(";", " ").replace(",", " "), (name, graph)
        assert f" {name},  # deferred: " in code["backward_weight"]
        assert f"| {name} " in (tmp_path / "boundary.md").read_text()
        assert f"{name} " in split.report()


# --- report(): its tables agree with the graphs ---------------------------------------------------


def test_report_of_a_linear_layer() -> None:
    split = autosplit.split(nn.Linear(3, 2), (torch.randn(4, 3, requires_grad=True),))
    # W computes dW with 2*4*3*2 = 48 FLOPs, and the bias gradient by a sum.
    assert split.report().splitlines() == [
        "Linear: args[0] -> output",
        "",
        "graph                    ops    views    GFLOPs    state in    other in    out",
        "---------------------  -----  -------  --------  ----------  ----------  -----",
        "F  forward                 1        1   4.8e-08        32 B        48 B   80 B",
        "I  backward_input          1        0   4.8e-08        24 B        80 B  128 B",
        "W  backward_weight         2        1   4.8e-08         0 B        80 B   32 B",
        "B  backward (unsplit)      3        1   9.6e-08        24 B        80 B   80 B",
        "",
        "Saved by F for the backward: 1 tensors, 48 B.",
        "Deferred by I for W: 2 tensors, 80 B:",
        "",
        "tensor       shape        bytes  computed at    for the gradient of",
        "-----------  ---------  -------  -------------  ---------------------",
        "args_0       f32[4, 3]     48 B                 weight",
        "grad_output  f32[4, 2]     32 B                 weight and 1 more",
        "",
        "Deferred: 100.0 % of the weight gradients' floating-point operations (4.8e-08 of 4.8e-08 "
        "GFLOPs a microbatch).",
    ]


def test_boundary_names_line_and_consumer() -> None:
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    rows = split.report().splitlines()
    (row,) = [row for row in rows if row.endswith("down.weight") and "f32[2, 4, 40]" in row]
    assert row.startswith("down_input ")
    assert "zoo.py:" in row
    assert "self.down(F.silu" in row


def test_report_without_gradients() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    with torch.no_grad():
        split.capture(torch.randn(4, 3))
    assert "Captured without gradients: there is no backward" in split.report()


def test_report_of_a_graph_with_nothing_to_do() -> None:
    scaled = Made(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(0)))
    model = autosplit.split(scaled, torch.ones(0, requires_grad=True))
    assert "none takes a matrix product" in model.report()


def test_report_prefers_the_graph_with_a_backward() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    split(torch.randn(4, 3))
    with torch.no_grad():
        split.capture(torch.randn(4, 3))
    assert "Deferred by I for W" in split.report()


def test_nothing_captured(tmp_path) -> None:
    split = autosplit.split(nn.Linear(3, 2))
    with pytest.raises(SplitError, match="nothing captured yet: call the module, capture"):
        split.report()
    with pytest.raises(SplitError, match="nothing captured yet"):
        split.dump(tmp_path)


def test_short_source() -> None:
    assert short_source("/a/b/model.py:12 return x") == "model.py:12 return x"
    assert short_source("/a/b/model.py:12 " + "x" * 90) == "model.py:12 " + "x" * 45 + "..."
    assert short_source("") == ""


def test_equal_layers_are_one_row_and_lines_have_no_folder() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 2))
    split = autosplit.split(model, torch.ones(3, 4))
    rows = [line.split() for line in split.report().splitlines()]
    assert ["_*_dy", "x3"] in [row[:2] for row in rows]
    assert not [row for row in rows if "/" in " ".join(row)]
