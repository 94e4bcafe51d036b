"""divide: one convolution_backward becomes two by its output mask."""

from __future__ import annotations

import torch
from torch import fx, nn

from autosplit.passes.graph import calls
from autosplit.passes.rewrites.peephole import divide_backward_operators
from autosplit.passes.verify import verify
from tests.passes.graphs import program_of


def masks(module: fx.GraphModule) -> list[list[bool]]:
    return [
        list(node.args[10])
        for node in calls(module.graph)
        if node.target is torch.ops.aten.convolution_backward.default
    ]


def test_divides_by_the_mask() -> None:
    program = program_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True))
    assert masks(program.joint) == [[True, True, True]]
    assert divide_backward_operators(program)
    assert masks(program.joint) == [[True, False, False], [False, True, True]]
    verify(program)
    assert not divide_backward_operators(program)


def test_without_bias() -> None:
    program = program_of(
        nn.Conv2d(3, 4, 3, bias=False), torch.randn(2, 3, 8, 8, requires_grad=True)
    )
    divide_backward_operators(program)
    assert masks(program.joint) == [[True, False, False], [False, True, False]]


def test_leaves_alone_what_is_not_fused() -> None:
    no_input_gradient = program_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
    assert not divide_backward_operators(no_input_gradient)
    frozen = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert not divide_backward_operators(
        program_of(frozen, torch.randn(2, 3, 8, 8, requires_grad=True))
    )
