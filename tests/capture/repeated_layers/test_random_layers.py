"""Layers of random operators: extended or not, the joint graph is the one that is traced whole."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.repeated_layers.layered import WIDTH, in_both_ways, lines

COUNTS = (1, 3, 7, 9, 11)  # layers of a stretch
EXTENDED, WHOLE = (6, 9, 32), (1,)  # seeds


@dataclasses.dataclass
class State:
    """Attributes:
    values: that operators read and replace.
    collected: that are returned besides.
    shared: a parameter of all layers.
    """

    values: list[Tensor]
    collected: list[Tensor]
    shared: Tensor


Operator = Callable[[State, int, int, Tensor], Tensor | None]


def summed_in_place(state: State, a: int, b: int, own: Tensor) -> Tensor:
    return (state.values[a] * 1.0).add_(state.values[b])


def collected(state: State, a: int, b: int, own: Tensor) -> None:
    state.collected.append(state.values[a])


def without_gradient(state: State, a: int, b: int, own: Tensor) -> Tensor:
    with torch.no_grad():
        scale = state.values[b].abs().amax() + 1
    return state.values[a] / scale


def recomputed(state: State, a: int, b: int, own: Tensor) -> Tensor:
    result: Tensor = checkpoint(
        lambda x, y: torch.sin(x @ own) + y, state.values[a], state.values[b], use_reentrant=False
    )
    return result


OPERATORS: tuple[Operator, ...] = (
    lambda state, a, b, own: torch.tanh(state.values[a] @ own),
    lambda state, a, b, own: torch.tanh(state.values[a] @ own) + state.values[b],
    lambda state, a, b, own: torch.tanh(state.values[a] @ state.shared),
    lambda state, a, b, own: torch.sin(state.values[a]),
    lambda state, a, b, own: (state.values[a] + state.values[b]) * 0.5,
    lambda state, a, b, own: torch.cat([state.values[a][:2], state.values[b][2:]]),
    lambda state, a, b, own: state.values[a].t().contiguous().t() + state.values[b].sum(),
    lambda state, a, b, own: nn.functional.dropout(state.values[a], 0.3),
    lambda state, a, b, own: state.values[a] + torch.tensor([0.1, 0.2, 0.3, 0.4]),
    lambda state, a, b, own: torch.where(state.values[a] > 0, state.values[a], state.values[b]),
    lambda state, a, b, own: 2 * state.values[a],
    summed_in_place,
    collected,
    without_gradient,
    recomputed,
)


class RandomLayers(nn.Module):
    """Stretches of layers; in some a layer has an operator more.

    Args:
        seed: says which.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.own = nn.ParameterList()
        self.plan: list[tuple[Operator, int, int, int, int]] = []
        for _ in range(chance.randint(1, 3)):
            layer = [self._operator(chance) for _ in range(chance.randint(2, 6))]
            more, count = self._operator(chance), chance.choice(COUNTS)
            odd = chance.randrange(count) if chance.random() < 0.25 else None
            for index in range(count):
                for each in (*layer, more) if index == odd else layer:
                    self.own.append(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2))
                    self.plan.append((*each, len(self.own) - 1))

    @staticmethod
    def _operator(chance: random.Random) -> tuple[Operator, int, int, int]:
        return chance.choice(OPERATORS), *(chance.randrange(3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        state = State([x * 1.0, x + 1, x @ self.shared], [], self.shared)
        for operator, a, b, to, own in self.plan:
            made = operator(state, a, b, self.own[own])
            if made is not None:
                state.values[to] = made
        return state.collected, state.values


@pytest.mark.parametrize("seed", [*EXTENDED, *WHOLE])
def test_joint_graph(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = RandomLayers(seed), torch.randn(5, WIDTH, requires_grad=True)
    found = in_both_ways(model, (x,), {})
    assert found.traces.layers == [seed in EXTENDED]
    assert lines(found.extended) == lines(found.whole)
