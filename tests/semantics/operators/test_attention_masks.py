"""Layers of torch that look at the values of an attention mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, Stage
from tests.semantics.against_autograd import assert_equals_autograd

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
OPEN = torch.zeros(5, 5)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1)


def batch(*masks: Tensor) -> list[dict[str, Tensor]]:
    return [{"src": torch.randn(2, 5, 8), "mask": mask} for mask in masks]


def test_graphs_for_either_answer() -> None:
    masks = CAUSAL, OPEN, CAUSAL
    split = assert_equals_autograd(encoder(), batch(*masks), fullgraph=True)
    assert len(split.functions) == 2


def test_the_kernel_is_that_of_eager_mode() -> None:
    masks = OPEN, CAUSAL, OPEN
    split = assert_equals_autograd(encoder().eval(), batch(*masks), fullgraph=True)
    hints = []
    for functions in split.functions:
        graph = functions.graphs.forward.graph
        (found,) = [n for n in graph.nodes if "scaled_dot_product" in str(n.target)]
        hints.append(True in found.args)
    assert sorted(hints) == [False, True]


def test_truth_values() -> None:
    masks = [CAUSAL.isinf(), torch.zeros(5, 5, dtype=torch.bool), CAUSAL.isinf()]
    assert len(assert_equals_autograd(encoder(), batch(*masks), fullgraph=True).functions) == 2


class Own(nn.Module):
    """Makes the mask itself, or has it as a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.encoder = kind, encoder()
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: Tensor) -> Any:
        match self.kind:
            case "buffer":
                return self.encoder(x, mask=self.mask)
            case "made":
                made = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
                return self.encoder(x, mask=made)
            case "written":
                made = torch.zeros(5, 5)
                made[:, 3:] = -torch.inf
                return self.encoder(x, mask=made)
        return self.encoder(x, mask=torch.where(torch.rand(5, 5) > 2, -torch.inf, 0.0))


@pytest.mark.parametrize("kind", ["buffer", "made"])
def test_masks_of_the_module(kind: str) -> None:
    inputs = [(torch.randn(2, 5, 8),) for _ in range(2)]
    split = assert_equals_autograd(Own(kind), inputs, fullgraph=True)
    assert len(split.functions) == 1


def test_a_buffer_that_is_written_to() -> None:
    model = Own("buffer").eval()
    split = autosplit.split(model, fullgraph=True)
    x = torch.randn(2, 5, 8)
    for mask in (CAUSAL, OPEN, CAUSAL):
        with torch.no_grad():
            model.mask.copy_(mask)  # type: ignore[operator]
        assert torch.equal(split(x), model(x))
    assert len(split.functions) == 2


@pytest.mark.parametrize("kind", ["written", "random"])
def test_masks_that_cannot_be_made_again_are_no_constants(kind: str) -> None:
    with pytest.raises(CaptureError):
        autosplit.split(Own(kind), fullgraph=True)(torch.randn(2, 5, 8))
    assert_equals_autograd(Own(kind), [(torch.randn(2, 5, 8),) for _ in range(2)])


def test_a_stage_is_for_no_values() -> None:
    """It is set up with examples that stand for all inputs."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.encoder(x, mask=mask)

    with pytest.raises(CaptureError):
        Stage(Masked(), (torch.randn(2, 5, 8), CAUSAL))
