"""Definitions of custom operators as text: all that tracing takes from them, or nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.capture.cache import custom_operators
from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.capture.cache.custom_operators import definition_text

FACTOR = 2.0
TABLE = [1.0, 2.0]
SPACE = "autosplit_definitions"
SCHEMA = "(Tensor x) -> Tensor"


def fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def text() -> Callable[..., str]:
    """Defines an operator with a backward, and gives its text."""
    made: list[Any] = []

    def define(backward: Any, fake: Any = fake) -> str:
        name = f"{SPACE}::op{len(made)}"
        op = torch.library.custom_op(
            name, lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_fake(fake)
        op.register_autograd(backward)
        made.append(op)
        return definition_text(op._opoverload).replace(name, "the operator")

    return define


def scaled(grad: Tensor) -> Tensor:
    return grad * FACTOR


def plain(ctx: Any, grad: Tensor) -> Tensor:
    return scaled(torch.tanh(grad)) * math.pi


def same_but_for_the_name(ctx: Any, grad: Tensor) -> Tensor:
    return scaled(torch.tanh(grad)) * math.pi


def other_constant(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 3


def other_operator(ctx: Any, grad: Tensor) -> Tensor:
    return grad + 3


def with_default(ctx: Any, grad: Tensor, factor: float = 3.0) -> Tensor:
    return grad + factor


def test_a_definition_is_what_it_computes(
    text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = plain.__globals__
    first = text(plain)
    assert text(plain) == first
    monkeypatch.setitem(here, "FACTOR", 3.0)
    other_number = text(plain)
    monkeypatch.undo()
    monkeypatch.setitem(here, "scaled", same_but_for_the_name)
    other_helper = text(plain)
    monkeypatch.undo()
    texts = [first, other_number, other_helper]
    texts += [text(each) for each in (other_constant, other_operator, with_default)]
    monkeypatch.setattr(with_default, "__defaults__", (4.0,))
    texts.append(text(with_default))
    texts.append(text(plain, fake=torch.empty_like))
    assert len({*texts}) == len(texts)
    assert text(plain) == first


def from_table(ctx: Any, grad: Tensor) -> Tensor:
    return grad * custom_operators.FACTOR  # type: ignore[attr-defined]


def imports(ctx: Any, grad: Tensor) -> Tensor:
    import os

    return grad * len(os.environ)


def evaluates(ctx: Any, grad: Tensor) -> Tensor:
    return eval("grad * 2")  # type: ignore[no-any-return]


def closure(factor: float) -> Callable[..., Tensor]:
    return lambda ctx, grad: grad * factor


class Helper:
    factor = 2.0


def from_class(ctx: Any, grad: Tensor) -> Tensor:
    return grad * Helper.factor


REFUSED: dict[str, tuple[Any, str]] = {
    "another module": (from_table, "reads custom_operators, which may be anything"),
    "an import": (imports, "imports"),
    "evaluation": (evaluates, "calls eval"),
    "a closure": (closure(2.0), "no plain function"),
    "a partial": (functools.partial(plain), "no plain function"),
    "a class": (from_class, "reads Helper, which may be anything"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_that_is_out_of_sight_is_refused(text: Callable[..., str], what: str) -> None:
    function, reason = REFUSED[what]
    with pytest.raises(NoFingerprintError, match=reason):
        text(function)


def test_kernels_besides_its_own_are_refused() -> None:
    op: Any = torch.library.custom_op(f"{SPACE}::twice", fake, mutates_args=(), schema=SCHEMA)
    op.register_fake(fake)
    assert "twice" in definition_text(op._opoverload)
    with torch.library._scoped_library(SPACE, "IMPL") as library:
        library.impl("twice", lambda x: x, "AutogradCPU")
        with pytest.raises(NoFingerprintError, match="kernels besides its own"):
            definition_text(op._opoverload)


def test_operators_that_are_not_made_in_python_are_refused() -> None:
    with torch.library._scoped_library(f"{SPACE}_raw", "DEF") as library:
        library.define("thrice(Tensor x) -> Tensor")
        raw = getattr(torch.ops, f"{SPACE}_raw").thrice.default
        with pytest.raises(NoFingerprintError, match="is not made in Python"):
            definition_text(raw)
