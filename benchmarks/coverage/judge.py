"""Compare what was observed of a split module with what was observed of plain autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .observe import Observed

# How much larger our error against float64 may be than plain autograd's own.
FACTOR = 10.0
# Errors below this many roundings of the largest element are rounding, whoever makes them.
ROUNDINGS = 16.0
# Outputs in float64 that are off by more than this share of the largest element belong to
# another computation.
FAR = 1e-2


def differences(mine: Observed, theirs: Observed) -> list[str]:
    """Names of everything that is not exactly equal."""
    names = [*theirs, *(name for name in mine if name not in theirs)]
    return [
        name
        for name in names
        if name not in mine or name not in theirs or not _equal(mine[name], theirs[name])
    ]


def out_of_tolerance(
    names: list[str], mine: Observed, theirs: Observed, exact: Observed | None
) -> list[str]:
    """Which of the differences rounding does not explain, each with its size.

    Args:
        names: what ``differences`` found.
        mine: observed of the split module.
        theirs: observed of plain autograd.
        exact: observed of plain autograd in float64; None where ``theirs`` is float64 itself.
    """
    if exact is not None and (exact.keys() != theirs.keys() or not _is_reference(theirs, exact)):
        exact = None
    scale = max((_scale(value) for value in theirs.values()), default=0.0)
    eps = max((torch.finfo(v.dtype).eps for v in theirs.values() if is_inexact(v)), default=0.0)
    lines = [
        _complaint(name, mine.get(name), theirs.get(name), (exact or {}).get(name), eps, scale)
        for name in names
    ]
    return [line for line in lines if line]


def _is_reference(theirs: Observed, exact: Observed) -> bool:
    """Whether ``exact`` is the same computation in higher precision. It is another one where
    other random numbers were drawn or a branch was taken elsewhere; outputs are then far apart.
    (Gradients may be far apart for another reason: what is zero in exact arithmetic is noise.)
    """
    names = [name for name in theirs if name.startswith("output") and is_inexact(theirs[name])]
    higher = any(theirs[name].element_size() < exact[name].element_size() for name in names)
    return higher and all(
        theirs[name].shape == exact[name].shape
        and _error(theirs[name], exact[name]) <= FAR * _scale(theirs[name])
        for name in names
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = _real(a), _real(b)
        return bool(torch.equal(a, b)) or _equal_with_nan(a, b)
    return type(a) is type(b) and bool(a == b)


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    if not is_inexact(a):
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _real(value: Tensor) -> Tensor:
    """Real and imaginary parts, which have operators that not every complex dtype has."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _complaint(name: str, a: Any, b: Any, exact: Any, eps: float, largest: float) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{name}: {_brief(a)}, expected {_brief(b)}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name}: {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
    if not is_inexact(a):
        return f"{name}: {int((a != b).sum())} of {a.numel()} elements differ"
    off, allowed = _errors(a, b, exact, eps, largest)
    return "" if off <= allowed else f"{name}: off by {off:.2e}, allowed {allowed:.2e}"


def _errors(
    mine: Tensor, theirs: Tensor, exact: Any, eps: float, largest: float
) -> tuple[float, float]:
    """Our error and the error allowed: plain autograd's own times a small factor, and some
    rounding. Without a reference plain autograd's value is one, and only rounding is allowed:
    in the coarsest dtype and of the largest number seen anywhere, because a result may be
    computed from coarser ones, and sums that cancel leave that much noise.
    """
    if isinstance(exact, Tensor) and exact.shape == theirs.shape:
        own = _error(theirs, exact)
        rounding = ROUNDINGS * torch.finfo(theirs.dtype).eps
        return _error(mine, exact), FACTOR * own + rounding * _scale(theirs)
    return _error(mine, theirs), ROUNDINGS * eps * largest


def _scale(value: Any) -> float:
    """The largest finite element."""
    if not is_inexact(value) or not value.numel():
        return 0.0
    return float(_real(value).abs().nan_to_num(0.0, 0.0, 0.0).max())


def is_inexact(value: Any) -> bool:
    """Whether it is a tensor whose values are rounded."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _error(a: Tensor, b: Tensor) -> float:
    a, b = _real(a).double(), _real(b).double()
    off = torch.where(_same(a, b), 0.0, (a - b).abs())
    return float(off.nan_to_num(float("inf")).max()) if off.numel() else 0.0


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Equal elements, infinities and NaN in both included."""
    return (a == b) | (a.isnan() & b.isnan())


def _brief(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
