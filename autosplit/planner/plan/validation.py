"""Validation of plans, whether made here, by a user, or read from a file."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autosplit.errors import PlanError, SplitError
from autosplit.runtime.split_options import SplitOptions

if TYPE_CHECKING:
    from .plan import Plan

_LARGEST = 1 << 63


def check_types(made: Any) -> None:
    """Refuse a dataclass whose fields do not hold what their annotations say. Numbers are finite
    and not negative.

    Raises:
        PlanError: names the field, what it has to be, and what it is.
    """
    hints = typing.get_type_hints(type(made))
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if not _is(value, hints[field.name]):
            expected = str(field.type).replace("float", "number")
            raise PlanError(
                f"{field.name!r} must be {expected}, numbers finite and >= 0; got "
                f"{reprlib.repr(value)}"
            )


def check_plan(plan: Plan) -> None:
    """Refuse a plan whose parts do not belong together.

    Raises:
        PlanError: says which.
    """
    check_types(plan)
    for name in ("ranks", "microbatches", "microbatch_size"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name!r} must be at least 1, got {getattr(plan, name)}")
    for name, count, each in _lengths(plan):
        if len(getattr(plan, name)) != count:
            raise PlanError(
                f"{name!r} must have {count} entries, one for each {each}; it has "
                f"{len(getattr(plan, name))}"
            )
    if plan.bubble > 1.0:
        raise PlanError(f"'bubble' must be a share from 0 to 1, got {plan.bubble}")
    blocks = iter(plan.made_for.blocks[1:])
    if not all(cut in blocks for cut in plan.cuts):
        raise PlanError(
            "'cuts' must be names of blocks of the model behind its first, in their order; got "
            f"{reprlib.repr(plan.cuts)}"
        )
    shaped = next((each.shape for each in plan.made_for.inputs if each.shape), (1,))
    if plan.microbatch_size != shaped[0]:
        raise PlanError(
            f"'microbatch_size' is {plan.microbatch_size}, but the inputs that the plan was made "
            f"for have {shaped[0]} samples"
        )
    try:
        SplitOptions(plan.backend, plan.memory)
    except SplitError as error:
        raise PlanError(str(error)) from error


def _lengths(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Field, how many entries it has, and what each is for."""
    for name in ("placement", "stage_times", "stage_parameters"):
        yield name, plan.stages, "stage"
    yield "crossing", len(plan.cuts), "cut"
    for name in ("actions", "peak_memory", "resting_memory"):
        yield name, plan.ranks, "rank"


def _is(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(value) and all(map(_is, value, kinds))
    if hint is int:
        return type(value) is int and 0 <= value < _LARGEST
    if hint is float:  # JSON writes 2.0 as it likes
        number = type(value) in (int, float) and 0 <= value < _LARGEST
        return number and math.isfinite(value)
    return isinstance(value, hint)
