"""Calls taken apart, and what tells them from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.runtime.specializations import CallFlattening, CallSignature
from autosplit.torch_internals.pytree import tree_flatten

X, Y = torch.ones(2, 3), nn.Parameter(torch.zeros(4))

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "tensors": ((X, Y), {}),
    "values": ((X, 1, 2.0, True, None, "word"), {}),
    "keywords": ((X,), {"b": Y, "a": 3}),
    "other order": ((X,), {"a": 3, "b": Y}),
    "nested": (([X, (Y,)],), {"more": {"x": X}}),
    "object": ((object(), X), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_flattening_is_that_of_pytrees(name: str) -> None:
    args, kwargs = CALLS[name]
    flatten = CallFlattening()
    leaves, _ = tree_flatten((args, kwargs))
    for _ in range(2):
        mine, structure = flatten(args, kwargs)
        assert len(mine) == len(leaves)
        assert all(a is b for a, b in zip(mine, leaves, strict=True))
        assert flatten(args, kwargs)[1] is structure


def test_calls_of_one_shape_share_one_structure() -> None:
    flatten = CallFlattening()
    structures = {id(flatten((torch.ones(n), n), {"scale": float(n)})[1]) for n in range(1, 5)}
    assert len(structures) == 1
    assert flatten((X,), {"a": Y})[1] != flatten((X,), {"b": Y})[1]
    assert flatten((X, Y), {})[1] != flatten((X,), {"b": Y})[1]


def test_zeros_of_two_signs_are_told_apart() -> None:
    """They are equal, but ``math.copysign`` of them is not."""
    assert len({CallSignature.of([value], None) for value in (0.0, -0.0)}) == 2
    assert len({CallSignature.of([value], None) for value in (0j, -0j, 0j.conjugate())}) == 3


def test_modes_are_told_apart() -> None:
    signatures = {CallSignature.of([X], None)}
    with torch.no_grad():
        signatures.add(CallSignature.of([X], None))
    with torch.inference_mode():
        signatures.add(CallSignature.of([X], None))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            signatures.add(CallSignature.of([X], None))
    assert len(signatures) == 5
