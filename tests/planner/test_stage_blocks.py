"""Equal blocks of a stage are modules that it calls, and are captured once for each kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.capture import joint_graph
from autosplit.planner import WholeModel, cut
from autosplit.stage import Stage


class Layer(nn.Module):
    """Random numbers, an input from outside of the layers, a buffer that is written, and a size."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        shifts = torch.arange(8, device=x.device)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.linear(self.norm(x))
        return x + self.dropout(y * scale + shifts).float() / len(x)


class Layers(nn.Module):
    def __init__(self, *dropouts: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(map(Layer, dropouts))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x), x.mean()
        for layer in self.layers:
            x = layer(x, scale)
        return self.last(x)


def stage_of(model: nn.Module) -> Any:
    """The first stage of a model that is cut before its last module."""
    return cut(*WholeModel.capture(model, (torch.randn(4, 8),)).divided(["last"])).build(0)


def blocks_of(module: Any) -> tuple[tuple[str, ...], int]:
    graph = module.check_inputs([torch.randn(4, 8)])
    return graph.blocks, len(graph.kinds)


def test_blocks_are_traced_once_and_compute_the_same_bits() -> None:
    torch.manual_seed(0)
    module = stage_of(Layers(*[0.2] * 4))
    assert blocks_of(module) == (("layers.0", "layers.1", "layers.2", "layers.3"), 1)
    plain, batch = copy.deepcopy(module), torch.randn(4, 8)
    traces = mock.Mock(wraps=joint_graph.trace_joint)
    with mock.patch.object(joint_graph, "trace_joint", traces):
        stage = Stage(module, [batch.clone()])
    assert traces.call_count == 2  # of the stage, and of a layer
    for training in (True, False):
        for part in (module, plain):
            part.train(training)
        for microbatch in range(2):
            torch.manual_seed(microbatch)
            expected = plain(batch)
            grads = [torch.randn_like(output) for output in expected]
            torch.autograd.backward(expected, grads)
            torch.manual_seed(microbatch)
            results = stage.forward(microbatch, [batch.clone()])
            assert all(map(torch.equal, results, expected))
            stage.backward(microbatch, [*grads])
    for name, parameter in plain.named_parameters():
        assert torch.equal(stage.gradients[name], parameter.grad)
    for name, buffer in plain.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer)
    assert blocks_of(module)[1] == 1  # also in evaluation mode


def test_blocks_for_open_sizes_are_traced_once_for_all_sizes() -> None:
    torch.manual_seed(0)
    module = stage_of(Layers(*[0.2] * 4))
    for rows in (6, 9):
        module.take_sizes([[(rows, 8)]], training=True)
    graph = module.check_inputs([torch.randn(9, 8)])
    assert (len(graph.blocks), len(graph.kinds)) == (4, 1)
    plain, stage = copy.deepcopy(module), Stage(module, [torch.randn(4, 8)])
    traces = mock.Mock(wraps=joint_graph.trace_joint)
    with mock.patch.object(joint_graph, "trace_joint", traces):
        for rows in (6, 9, 5):
            batch = torch.randn(rows, 8)
            torch.manual_seed(rows)
            expected = plain(batch)
            grads = [torch.randn_like(output) for output in expected]
            torch.autograd.backward(expected, grads)
            torch.manual_seed(rows)
            stage.prepare([batch.clone()])
            assert all(map(torch.equal, stage.forward(0, [batch.clone()]), expected))
            stage.backward(0, [*grads])
    assert traces.call_count == 2  # of the stage, and of a layer
    for name, parameter in plain.named_parameters():
        assert torch.equal(stage.gradients[name], parameter.grad)


def read_elsewhere(model: Any) -> None:
    """Let the model read a parameter of a layer."""
    model.first.register_forward_hook(lambda _, __, y: y * model.layers[1].linear.bias)


def share(model: Any) -> None:
    """Let two layers have a weight in common."""
    model.layers[0].linear.weight = model.layers[1].linear.weight


@pytest.mark.parametrize(
    ("change", "blocks"),
    [(read_elsewhere, ("layers.0", "layers.2", "layers.3")), (share, ("layers.2", "layers.3"))],
)
def test_blocks_whose_parameters_others_read_are_part_of_their_stage(
    change: Callable[[Any], None], blocks: tuple[str, ...]
) -> None:
    model = Layers(*[0.2] * 4)
    change(model)
    assert blocks_of(stage_of(model)) == (blocks, 1)


def test_blocks_with_other_operations_are_other_kinds() -> None:
    module = stage_of(Layers(0.1, 0.2, 0.3, 0.2, 0.1))
    assert blocks_of(module) == (("layers.0", "layers.1", "layers.3", "layers.4"), 2)


def test_graphs_of_blocks_move_with_their_stage() -> None:
    module = stage_of(Layers(0.1, 0.1)).to("meta")
    blank = torch.empty(4, 8, device="meta")
    (kind,) = module.check_inputs([blank]).kinds.values()
    assert "device(type='meta')" in kind.graph.code
    assert module(blank)[0].is_meta
