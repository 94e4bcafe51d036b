"""tensor_names: a saved or deferred tensor is called after a module and what it is to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.passes import Kind, SplitGraphs, run
from tests.passes.graphs import joint_of, names_out
from tests.zoo import Made


def gated() -> nn.Module:
    gate, up, down = (nn.Linear(*sizes, bias=False) for sizes in ((4, 6), (4, 6), (6, 4)))
    return Made(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), gate=gate, up=up, down=down)


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": gated()}) for _ in range(depth)
        )
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))
        return self.head(x)


def split(module: nn.Module, *shape: int) -> SplitGraphs:
    return run(joint_of(module, torch.randn(shape, requires_grad=True)), memory="fast")


def test_deferred_tensors_are_inputs_and_derivatives_of_modules() -> None:
    assert sorted(names_out(split(Model(), 3, 4).backward_input, Kind.DEFERRED)) == [
        "grad_output",
        "head_input",
        "layers_0_mlp_down_dy",
        "layers_0_mlp_down_input",
        "layers_0_mlp_gate_dy",
        "layers_0_mlp_input",  # of gate and up
        "layers_0_mlp_up_dy",
        "layers_0_norm_bias_grad",
        "layers_0_norm_weight_grad",
        "layers_1_mlp_down_dy",
        "layers_1_mlp_down_input",
        "layers_1_mlp_gate_dy",
        "layers_1_mlp_input",
        "layers_1_mlp_up_dy",
        "layers_1_norm_bias_grad",
        "layers_1_norm_weight_grad",
    ]


def test_saved_tensors_say_which_module_made_or_reads_them() -> None:
    saved = names_out(split(Model(1), 3, 4).forward, Kind.SAVED)
    assert set(saved) == {
        "args_0",
        "layers_0_norm_layer_norm",  # its mean,
        "layers_0_norm_layer_norm_2",  # and one over its deviation
        "layers_0_mlp_input",
        "layers_0_mlp_gate_output",
        "layers_0_mlp_silu",
        "layers_0_mlp_up_output",
        "layers_0_mlp_down_input",
        "head_input",
    }


def test_a_later_call_of_a_module_has_its_number() -> None:
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
    graphs = split(Made(lambda m, x: m.block(m.block(x)), block=block), 3, 4)
    assert set(names_out(graphs.backward_input, Kind.DEFERRED)) == {
        "args_0",
        "block_0_call_2_input",
        "block_0_call_2_dy",
        "block_0_dy",
    }


class WithoutModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


def test_outside_of_modules_operator_and_line_are_the_name() -> None:
    line = WithoutModules.forward.__code__.co_firstlineno + 1
    graphs = split(WithoutModules(), 3, 4)
    assert names_out(graphs.forward, Kind.SAVED) == [
        "args_0",
        f"tanh_test_tensor_names_line_{line}",
    ]
    assert names_out(graphs.backward_input, Kind.DEFERRED) == [
        "args_0",
        f"tanh_grad_test_tensor_names_line_{line}",
    ]
