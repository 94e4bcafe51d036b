"""What is captured under a default device is split as one graph, and made on that device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import Stage
from autosplit.torch_internals.version import TORCH
from tests.capture.regions.blocks import Stack, kinds


class Shifted(nn.Module):
    """Makes tensors in its forward, on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.arange(4.0)) * torch.full((4,), 2.0)  # type: ignore[no-any-return]


def test_a_model_is_split_as_one_graph_under_a_default_device() -> None:
    with torch.device("cpu"):
        model = Shifted()
        split, x = autosplit.split(model), torch.randn(2, 4)
        modes = torch.overrides._get_current_function_mode_stack()
        split(x).sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == modes
        assert "graph by graph" not in str(split.report())
        found = [each.grad for each in split.parameters()]
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(map(torch.equal, found, expected))


def test_blocks_are_captured_by_themselves_under_a_default_device() -> None:
    with torch.device("cpu"):
        split, x = autosplit.split(Stack(lambda _: Shifted())), torch.randn(2, 4)
        modes = torch.overrides._get_current_function_mode_stack()
        for _ in range(2):
            split(x).sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == modes
        assert kinds(split) == [4]
        assert len(split.functions) == 1
        assert "_device.py" not in str(split.report())


def test_a_call_without_that_default_is_captured_anew() -> None:
    model = Shifted()
    with torch.device("cpu"):
        split = autosplit.split(model)
        split(torch.ones(2, 4)).sum().backward()
    with torch.device("meta"), pytest.raises(Exception, match="meta"):
        split(torch.ones(2, 4, device="cpu"))
    split(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.layer.bias.grad, torch.full((4,), 8.0))


@pytest.mark.skipif(TORCH < (2, 12), reason="nor does torch.compile of torch 2.11")
def test_a_stage_is_made_under_a_default_device() -> None:
    with torch.device("meta"):
        stage = Stage(Shifted(), [torch.ones(2, 4, requires_grad=True)])
    ((shape, _, _),) = stage.output_specs
    assert tuple(shape) == (2, 4)
