"""trace_layers: the joint graph of a few layers, extended, is the one of all, node for node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autosplit
from tests.capture.repeated_layers.layered import (
    WIDTH,
    Residual,
    Stack,
    assert_as_whole,
    captured,
    in_both_ways,
    lines,
    watched,
)
from tests.semantics.against_autograd import assert_equals_autograd


class Dropping(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Buffered(Residual):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("scale", torch.full((WIDTH,), 1.0 + index))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Constant(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([0.5, 0.25, 1.0, 2.0])


class Careful(Residual):
    """Modes are entered and left in every layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + 1
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(self.norm(x))
        return x + self.down(y.float()) / scale


class Frozen(Residual):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.up.requires_grad_(False)


class Checkpointed(Residual):
    """Two regions in each layer are recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(self.up(self.norm(x))), x, use_reentrant=False)
        return x + checkpoint(lambda y: torch.relu(self.down(y)), y, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * grad


class Custom(Residual):
    """Every layer calls a function with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        square: Any = Square.apply
        return x + self.down(square(self.up(self.norm(x))))


class Deciding(Residual):
    """Every layer holds graphs of both branches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)))


class Alternating(Residual):
    """Two kinds of layers in turn."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = torch.sin if index % 2 else torch.cos

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(super().forward(x))


class Listing(Stack):
    """All hidden states are returned."""

    def forward(self, x: Tensor) -> Any:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {"states": states, "head": self.head(states[-1])}


class Shared(Stack):
    """One layer, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 12)


class Reading(Stack):
    """Every layer reads what comes from before all layers, and needs a gradient."""

    def __init__(self) -> None:
        super().__init__(count=12)

    def forward(self, x: Tensor) -> Any:
        memory = self.first(x)
        for layer in self.layers:
            x = layer(x + memory) * memory
        return self.head(x)


class TwoStacks(Stack):
    """An encoder, and a decoder that reads what it makes."""

    def __init__(self) -> None:
        super().__init__(count=12)
        self.decoder = nn.ModuleList(map(Residual, range(12)))

    def forward(self, x: Tensor) -> Any:
        y = x
        for layer in self.layers:
            x = layer(x)
        for layer in self.decoder:
            y = torch.sigmoid(layer(y)) + x
        return self.head(y)


class Waves(Stack):
    """Two stretches that look alike, without parameters to tell them apart."""

    def forward(self, x: Tensor) -> Any:
        for function in (torch.relu, torch.tanh):
            for _ in range(9):
                x = (2 * x).sin()
            x = function(x)
        return self.head(x)


class Doubling(Stack):
    """Two stretches whose backward reads nothing of the forward."""

    def forward(self, x: Tensor) -> Any:
        for function in (torch.relu, torch.tanh):
            for _ in range(9):
                x = 2 * x
                x = x + 1
            x = function(x)
        return self.head(x)


class Collecting(Stack):
    """Every layer writes into one tensor."""

    def __init__(self) -> None:
        super().__init__(count=12)

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x)
            total.add_(x)
        return self.head(total)


class GivenEach(Stack):
    """Every layer has an input of its own."""

    def forward(self, x: Tensor, *scales: Tensor) -> Any:
        x = self.first(x)
        for layer, scale in zip(self.layers, scales, strict=True):
            x = layer(x) * scale
        return self.head(x)


LAYERS = (Residual, Dropping, Buffered, Constant, Careful, Frozen, Checkpointed, Custom, Deciding)


def batch() -> Tensor:
    return torch.randn(5, WIDTH, requires_grad=True)


@pytest.mark.parametrize(
    "layer",
    LAYERS,
    ids=lambda kind: kind.__name__,
)
def test_layers(layer: type[Residual]) -> None:
    assert_as_whole(Stack(layer), batch())


@pytest.mark.parametrize(
    "model",
    [Listing, Shared, Reading, TwoStacks, Waves, Doubling, Collecting],
    ids=lambda kind: kind.__name__,
)
def test_models(model: type[Stack]) -> None:
    assert_as_whole(model(), batch())


def test_gradients() -> None:
    assert_equals_autograd(Stack(Checkpointed), [(batch(),), (batch(),)])


def test_layers_of_two_kinds_in_turn() -> None:
    assert_as_whole(Stack(Alternating, 14), batch())


def test_an_input_for_each_layer() -> None:
    scales = [torch.randn(WIDTH, requires_grad=True) for _ in range(8)]
    assert_as_whole(GivenEach(), batch(), *scales)


def test_what_is_traced_does_not_grow_with_the_layers() -> None:
    """Inputs and outputs of the graph do: it is computations that are traced."""
    shallow, deep = (assert_as_whole(Stack(count=n), batch()).nodes for n in (8, 14))
    inputs = len([*Residual(0).parameters()]) * (14 - 8)
    assert deep == [nodes + inputs for nodes in shallow]


def test_two_stacks_leave_out_layers_of_both() -> None:
    found = in_both_ways(TwoStacks(), (batch(),), {})
    assert found.traces.nodes[-1] < 0.75 * len(found.whole.graph.nodes)


def test_sizes_that_are_left_open() -> None:
    model = Stack()
    with watched() as traces:
        split = autosplit.split(model)
        for size in (5, 6, 9, 1):
            x = torch.randn(size, WIDTH)
            split(x).sum().backward()
            split.backward_weight()
            mine = [each.grad for each in model.parameters()]
            model.zero_grad()
            model(x).sum().backward()
            torch.testing.assert_close(mine, [p.grad for p in model.parameters()], rtol=0, atol=0)
            model.zero_grad()
    assert traces.layers == [True, True, True]  # of 5, of any, of 1


def test_notes_name_the_module_of_each_layer() -> None:
    joint = captured(Stack(count=12), (batch(),), {})
    found = {
        frame
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        for frame in node.meta["origin"].modules
    }
    assert {f"layers.{index}" for index in range(12)} <= found


def test_a_forward_alone() -> None:
    with torch.no_grad():
        assert_as_whole(Stack(), torch.randn(5, WIDTH))


def test_a_model_of_transformers() -> None:
    """As people call it: with a cache of keys and values."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 7, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "vocab_size": 11, "max_position_embeddings": 8}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 11, (2, 6))
    assert_as_whole(model, input_ids=ids, labels=ids)


def test_lines_tell_graphs_apart() -> None:
    """What the tests above compare is not blind."""
    with watched(whole=True):
        one, other = (captured(Stack(kind), (batch(),), {}) for kind in (Residual, Buffered))
    assert lines(one) != lines(other)
