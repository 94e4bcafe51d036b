"""The norm of gradients that are spread over ranks: the same bits however they are cut.

It is the root of the exact sum of the squares of all numbers (each square rounded to float64, which
holds that of a float32 exactly), rounded once. So the order of the sum does not matter, nor which
rank adds which part of which parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from autosplit.torch_internals.dtensor import local_tensor

_AT_ONCE = 2**16  # numbers that are looked at once, which a cache holds
_FRACTION = 52  # bits of a float64's fraction
_HALF = 26  # of it in the lower of two parts
_EXPONENTS = 2**11
_UNIT = 1023 + _FRACTION - 1  # the smallest number is 2**-_UNIT
_EXACT = 2**25  # so many of these parts, of one exponent, have an exact sum
_DIGIT = 24  # bits: sums of 2**29 ranks' digits are exact in float64
DIGITS = -(-(_EXPONENTS + _FRACTION + 64) // _DIGIT) + 1
"""How many numbers ``sum_of_squares`` gives."""


def sum_of_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The sum of the squares of all numbers in the gradients, of sharded ones in this rank's part.

    Returns:
        The sum's digits, shape [DIGITS], float64, on the CPU: sums of such tensors are exact. The
        last is no number, or infinite, where one of the squares is.
    """
    total, odd = 0, 0.0
    sums: Tensor | None = None
    count = 0
    for part in _parts([_numbers(p.grad) for p in parameters if p.grad is not None]):
        found = _by_exponent(part.to(torch.float64).square_())
        sums = found if sums is None else sums.add_(found)
        count += len(part)
        if count > _EXACT:
            more, strange = _whole(sums)
            total, odd, sums, count = total + more, odd + strange, None, 0
    if sums is not None:
        more, strange = _whole(sums)
        total, odd = total + more, odd + strange
    digits = [float(total >> (_DIGIT * at) & (2**_DIGIT - 1)) for at in range(DIGITS - 1)]
    return torch.tensor([*digits, odd], dtype=torch.float64, device="cpu")


def norm_of(digits: Tensor) -> float:
    """The norm that sums of squares make, of all ranks."""
    *parts, odd = digits.tolist()
    if odd:
        return math.sqrt(odd)  # infinite, or no number
    total = sum(int(part) << (_DIGIT * place) for place, part in enumerate(parts))
    try:
        return math.sqrt(total / 2**_UNIT)  # the division of whole numbers rounds once
    except OverflowError:
        return math.inf


def _numbers(gradient: Tensor) -> Tensor:
    """The real numbers of a gradient, in one dimension."""
    values = local_tensor(gradient).detach()
    if values.layout is not torch.strided:  # of a sparse embedding
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1)


def _parts(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """The numbers, many at once: small gradients are put together."""
    small: list[Tensor] = []
    size = 0
    for each in values:
        if not each.numel():
            continue
        if each.numel() >= _AT_ONCE:
            yield from each.split(_AT_ONCE)
            continue
        if small and (size + each.numel() > _AT_ONCE or small[0].dtype != each.dtype):
            yield torch.cat(small)
            small, size = [], 0
        small.append(each)
        size += each.numel()
    if small:
        yield torch.cat(small)


def _by_exponent(squares: Tensor) -> Tensor:
    """Exact sums by exponent, shape [2, exponents]: of numbers' upper halves, and of what is left.

    Halves of one exponent are whole multiples of one number, and less than 2**27 of it.
    """
    bits = squares.view(torch.int64)
    exponents = (bits >> _FRACTION).bitwise_and_(_EXPONENTS - 1)  # the sign of no number may be set
    upper = (bits & -(2**_HALF)).view(torch.float64)
    return torch.stack([_summed(exponents, upper), _summed(exponents, squares - upper)])


def _summed(places: Tensor, values: Tensor) -> Tensor:
    if places.device.type == "cpu":
        return torch.bincount(places, values, minlength=_EXPONENTS)
    return torch.zeros(_EXPONENTS, dtype=values.dtype, device=values.device).index_add_(
        0, places, values
    )


def _whole(sums: Tensor) -> tuple[int, float]:
    """The total of sums by exponent in units of the smallest number; and of what is none."""
    upper, lower = sums.tolist()
    odd, total = upper[-1], 0
    for value in (*upper[:-1], *lower[:-1]):
        if math.isinf(value):  # the greatest squares: so is their sum
            odd = value
        elif value:
            above, below = value.as_integer_ratio()
            total += (above << _UNIT) // below
    return total, odd
