"""Pytrees of classes that others registered, with keys and without."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

from autosplit.torch_internals.pytree import flatten_named
from tests.semantics.against_autograd import assert_equals_autograd


@dataclasses.dataclass
class Keyless:
    """As other libraries register their outputs: by flatten and unflatten alone."""

    sample: Any
    scale: Any


def register() -> None:
    if Keyless not in SUPPORTED_NODES:
        register_pytree_node(
            Keyless, lambda each: ([each.sample, each.scale], None), lambda v, _: Keyless(*v)
        )


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Keyless:
        return Keyless(self.inner(x), {"factor": (x * 2, None)})


class Taking(Returning):
    def forward(self, given: Keyless) -> Tensor:  # type: ignore[override]
        return self.inner(given.sample) * given.scale


def test_names() -> None:
    register()
    assert flatten_named("x", None) == [("x", None)]
    assert flatten_named("x", ()) == []
    assert flatten_named("x", [1, {"a": (2,), "b": 3}]) == [
        ("x[0]", 1),
        ("x[1]['a'][0]", 2),
        ("x[1]['b']", 3),
    ]
    assert flatten_named("x", (Keyless(1, [2]),)) == [("x[0][0]", 1), ("x[0][1][0]", 2)]


def test_outputs_and_inputs_without_keys_are_in_one_graph() -> None:
    register()
    x = torch.randn(2, 3, requires_grad=True)
    split = assert_equals_autograd(Returning(), [(x,)], fullgraph=True)
    assert split.functions[-1].output_names[0] == "output[0]"
    assert_equals_autograd(Taking(), [(Keyless(x, torch.ones(3)),)], fullgraph=True)
