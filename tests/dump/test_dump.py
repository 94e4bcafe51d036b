"""dump(): every file is there, the code runs and computes what the module computes."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.passes.graph import Kind, inputs, outputs
from tests.zoo import SwiGLU, convolutions


def load(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files(tmp_path: pathlib.Path) -> None:
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    split.dump(tmp_path)
    drawing = "graph.svg" if shutil.which("dot") else "graph.dot"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            "backward.py",
            "backward_input.py",
            "backward_weight.py",
            "boundary.md",
            "forward.py",
            drawing,
            "joint.py",
        ]
    )
    boundary = (tmp_path / "boundary.md").read_text()
    assert boundary.startswith("# SwiGLU\n")
    assert "## Saved: F to the backward" in boundary
    assert "## Deferred: I to W" in boundary


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
    """Wire the dumped files by role, as a person debugging would, and compare with autograd."""
    split = autosplit.split(model, (x.requires_grad_(),))
    split.dump(tmp_path)
    graphs = split.functions[0].calling.graphs()
    known: dict[str, Tensor] = dict(model.named_parameters())
    known |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    known["args[0]"] = x
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in ("forward", "backward_input", "backward_weight"):
            taken = [
                known[role.name] if role.name in known else values[role.name]
                for role in inputs(graphs[name].graph)
            ]
            results = getattr(load(tmp_path / f"{name}.py"), name)(taken)
            assert taken == []
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


def test_blocks_have_a_folder_a_kind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many alike blocks one is dumped, and a line a call tells where each is."""
    monkeypatch.setenv("PATH", "")
    model = nn.Sequential(nn.Linear(16, 16), *[SwiGLU() for _ in range(5)])
    split = autosplit.split(model, (torch.randn(2, 4, 16, requires_grad=True),))
    split.dump(tmp_path)
    halves = ["backward_input.py", "backward_weight.py", "boundary.md", "forward.py", "graph.dot"]
    assert sorted(path.name for path in (tmp_path / "SwiGLU_0").iterdir()) == halves
    assert (tmp_path / "forward.py").read_text().count("constants['SwiGLU_0_forward']") == 5
    assert "5 calls: each 6 tensors" in (tmp_path / "boundary.md").read_text()
    assert "| _1_down_input " in (tmp_path / "SwiGLU_0" / "boundary.md").read_text()
    assert (tmp_path / "graph.dot").read_text().count('label="SwiGLU_0_forward') == 5


def test_drawing_without_graphviz(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    split = autosplit.split(nn.Linear(3, 2), (torch.randn(4, 3, requires_grad=True),))
    split.dump(tmp_path)
    dot = (tmp_path / "graph.dot").read_text()
    for line in (
        'label="F: forward"',
        'label="I: backward_input"',
        'label="W: backward_weight"',
        'F_addmm [label="addmm\\nf32[4, 2]"',
    ):
        assert line in dot
    assert not (tmp_path / "graph.svg").exists()


def test_drawing_shows_what_crosses(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    split = autosplit.split(model, (torch.randn(4, 3, requires_grad=True),))
    split.dump(tmp_path)
    dashed = [
        line for line in (tmp_path / "graph.dot").read_text().splitlines() if "dashed" in line
    ]
    edges = {line.split(" [")[0].strip() for line in dashed}
    # relu is read by I (its own gradient) and, through I, by W for the second weight.
    assert "F__2_input -> I__0_dy" in edges
    assert any(edge.startswith("F__2_input -> W_mm") for edge in edges)
    assert any(edge.startswith("I__0_dy -> W_") for edge in edges)


def test_tensors_are_called_as_the_user_calls_their_modules(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    split = autosplit.split(SwiGLU(), (torch.randn(2, 4, 16, requires_grad=True),))
    split.dump(tmp_path)
    code = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    for name in ("down_input", "up_dy", "gate_dy"):
        for graph in ("joint", "backward_input", "backward_weight"):
            assert f" {name} " in code[graph].replace(";", " ").replace(",", " "), (name, graph)
        assert f"# deferred {name}" in code["backward_weight"]
        assert f"| {name} " in (tmp_path / "boundary.md").read_text()
        assert f"{name} " in split.report()
    drawing = (tmp_path / "graph.dot").read_text()
    assert 'label="mul.Tensor\\ndown_input\\nf32[2, 4, 40]"' in drawing
    assert 'label="silu_backward\\ngate_dy\\nf32[2, 4, 40]"' in drawing
