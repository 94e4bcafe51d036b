"""Blocks that look alike and are not: kinds of their own, or captured with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.capture import export, region_session
from autosplit.runtime import build
from tests.capture.regions.blocks import WIDTH, Gated, Plain, Residual, Stack, kinds
from tests.semantics.against_autograd import assert_equals_autograd

ODD = 2  # of three blocks, or more


class Scaled(Plain):
    """A constant of its own for one of the blocks."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 0.5 if index == ODD else 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Wide(Residual):
    """One of the blocks is wider inside."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == ODD:
            self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, False)


class Normalised(nn.Module):
    """Running statistics are written in each block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Same(Plain):
    """One block returns what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Calling(Plain):
    """More than the forward is called."""

    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Changing(Stack):
    """Every block is another one while the model calls it."""

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            earlier, layer.scale = layer.scale, 0.5 * at
            x = layer(x)
            layer.scale = earlier
        return self.head(x)


class Objects(Stack):
    """Blocks are handed an object that is no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(Given(x))
        return self.head(x)


class Given:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class TakingObjects(Plain):
    def forward(self, given: Given) -> Tensor:
        return super().forward(given.x)


class Rooted(Plain):
    """A gradient of zeros for the second result would become NaN."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, (y - y).sqrt()


class Unread(Stack):
    """Reads one result of each block, and from one block the other result, too."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            x, root = layer(x)
            x = x + root.detach() if at == ODD else x
        return self.head(x)


class Biased(Plain):
    """Returns an input beside what it computes, as layers of a T5 return their bias."""

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        return super().forward(x + bias), bias


class BiasFirst(Plain):
    def forward(self, x: Tensor, bias: Tensor) -> Any:
        return bias, super().forward(x + bias)


class PassingOn(Stack):
    """Each block gets the second input from the block before it; the result reads it, too."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        bias = x.sin()
        for layer in self.layers:
            one, other = layer(x, bias)
            x, bias = (one, other) if isinstance(layer, Biased) else (other, one)
        return self.head(x * bias)


def tied_blocks() -> nn.Module:
    model = Stack(Plain, 4)
    model.layers[ODD].linear.weight = model.layers[1].linear.weight
    return model


def tied_to_the_head() -> nn.Module:
    model = Stack(Plain)
    model.head = nn.Linear(WIDTH, WIDTH)
    model.head.weight = model.layers[ODD].linear.weight
    return model


def one_block() -> nn.Module:
    model = Stack(Plain)
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


def hooked() -> nn.Module:
    model = Stack(Plain)
    model.layers[ODD].register_forward_hook(lambda module, args, output: output * 3)
    return model


UNLIKE: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "constant": (lambda: Stack(Scaled), [2, 1]),
    "width": (lambda: Stack(Wide), [2]),
    "tied_blocks": (tied_blocks, [2]),
    "tied_to_the_head": (tied_to_the_head, [2]),
    "one_block": (one_block, []),
    "hook": (hooked, [2]),
    "running_statistics": (lambda: Stack(Normalised, 2), [2]),
    "changed_by_the_model": (lambda: Changing(Scaled), []),
    "call": (lambda: Stack(Calling), []),
    "passed_on": (lambda: Stack(Same), []),
    "input_returned": (lambda: PassingOn(Biased), [3]),
    "input_returned_first": (lambda: PassingOn(BiasFirst), []),
    "unread_result": (lambda: Unread(Rooted), [3]),
    "objects": (lambda: Objects(TakingObjects), []),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_gradients(name: str) -> None:
    make, expected = UNLIKE[name]
    split = assert_equals_autograd(make(), [(torch.randn(5, WIDTH, requires_grad=True),)] * 2)
    assert kinds(split) == expected


class GivenTwice(Stack):
    """Of three kinds of blocks, two get one tensor as two inputs."""

    def __init__(self) -> None:
        super().__init__(lambda index: Gated(Plain(0), *_linears(index // 2)), 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            x = layer(x, x.sin() if at < ODD else x)
        return self.head(x)


def _linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def test_each_kind_is_captured_once_whichever_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    split_block = build._split_block

    def counted(*args: Any) -> Any:
        captured.append(args[3])
        return split_block(*args)

    monkeypatch.setattr(build, "_split_block", counted)
    split = assert_equals_autograd(GivenTwice(), [(torch.randn(5, WIDTH, requires_grad=True),)] * 2)
    assert kinds(split) == [2]
    assert len(captured) == 3


class Transposed(GivenTwice):
    """The results of a third kind get gradients of another layout."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            x = layer(x, x if at // ODD == 1 else x.sin())
            if at >= 2 * ODD:
                x = torch.bmm(x.t()[None], torch.eye(5)[None])[0].t().contiguous()
        return self.head(x)


def test_one_trace_finds_all_blocks_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[dict[str, str]] = []
    session = region_session.RegionSession

    def counted(*args: Any) -> Any:
        sessions.append(dict(args[2]))
        return session(*args)

    monkeypatch.setattr(region_session, "RegionSession", counted)
    split = assert_equals_autograd(Transposed(), [(torch.randn(5, WIDTH, requires_grad=True),)])
    assert kinds(split) == [2]
    assert len(sessions) == 2
    assert len({*sessions[1].values()}) == 2


@pytest.mark.parametrize(
    ("model", "traces"), [(Stack(Same), 2), (Objects(TakingObjects), 1), (Changing(Scaled), 1)]
)
def test_blocks_refused_while_dynamo_traces_are_traced_with_the_model(
    model: nn.Module, traces: int
) -> None:
    traced = mock.Mock(wraps=export.fullgraph_capture)
    with mock.patch.object(export, "fullgraph_capture", traced):
        assert_equals_autograd(model, [(torch.randn(5, WIDTH, requires_grad=True),)])
    assert traced.call_count == traces


class FirstAlone(Stack):
    """The first block is called as a graph of its own; others like it get objects."""

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x) if at == 0 else layer(Given(x))
        return self.head(x)


class TakingBoth(Plain):
    def forward(self, given: Any) -> Tensor:
        return super().forward(given.x if isinstance(given, Given) else given)


def test_a_model_is_captured_whole_once_few_blocks_remain() -> None:
    split = assert_equals_autograd(FirstAlone(TakingBoth), [(torch.randn(5, WIDTH),)])
    assert kinds(split) == []


BECOMES: dict[str, Callable[[Any], object]] = {
    "constant": lambda block: setattr(block[0], "scale", 0.25),
    "frozen": lambda block: block.requires_grad_(False),
    "evaluation": lambda block: block.eval(),
    "hook": lambda block: block.register_forward_hook(lambda module, args, output: output * 3),
    "forward": lambda block: setattr(block, "forward", lambda x: x.sin()),
}


def test_a_block_in_the_place_of_another_is_noticed() -> None:
    model = Stack(Scaled)
    x = torch.randn(5, WIDTH)
    split = assert_equals_autograd(model, [(x,)])
    model.layers[1] = Scaled(ODD)
    assert torch.equal(split(x), model(x))


def test_a_block_that_becomes_another_is_noticed() -> None:
    model = Stack(lambda index: nn.Sequential(Scaled(0), nn.Dropout(0.5)))
    x = torch.randn(5, WIDTH, requires_grad=True)
    split = assert_equals_autograd(model, [(x,)])
    for name, change in BECOMES.items():
        change(model.layers[ODD])
        grads = []
        for network in (split, model):
            model.zero_grad()
            torch.manual_seed(0)
            network(x).sum().backward()
            split.backward_weight()
            grads.append([parameter.grad for parameter in model.parameters()])
        for mine, theirs in zip(*grads, strict=True):
            assert (mine is None) == (theirs is None), name
            assert mine is None or torch.equal(mine, theirs), name
