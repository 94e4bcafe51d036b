"""Expressions over open sizes: read as they were written, and nothing else read."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.capture.cache.size_expressions import read_expression, write_expression

ROWS, LENGTH = sympy.symbols("s5 s3", positive=True, integer=True)
OTHERS = sympy.symbols("s1 s9", positive=True, integer=True)
NUMBERS = {ROWS: 0, LENGTH: 1}


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Integer(-3),
        ROWS,
        2 * ROWS * LENGTH + LENGTH**2 - 1,
        FloorDiv(ROWS + 7, 4) * Max(1, LENGTH),
        sympy.Eq(Mod(LENGTH, 2), 0),
        sympy.And(ROWS > 3, sympy.Ne(ROWS, LENGTH)),
    ],
    ids=str,
)
def test_symbols_go_by_numbers(expression: Any) -> None:
    form = pickle.loads(pickle.dumps(write_expression(expression, NUMBERS)))
    renamed = expression.xreplace(dict(zip((ROWS, LENGTH), OTHERS, strict=True)))
    assert read_expression(form, (ROWS, LENGTH)) == expression
    assert read_expression(form, OTHERS) == renamed
    assert write_expression(renamed, dict(zip(OTHERS, (0, 1), strict=True))) == form


def test_what_follows_from_no_input_is_not_written() -> None:
    with pytest.raises(NoFingerprintError, match="s1 follows from no size of an input"):
        write_expression(OTHERS[0] + ROWS, NUMBERS)
    with pytest.raises(NoFingerprintError, match="sizes with sin"):
        write_expression(sympy.sin(ROWS), NUMBERS)


@pytest.mark.parametrize("form", [("eval", 1), ("__import__", "os"), (), "s5", 1.5])
def test_what_is_not_listed_is_not_read(form: Any) -> None:
    with pytest.raises(NoFingerprintError):
        read_expression(form, (ROWS, LENGTH))
