"""Plans as JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import PlanError
from autosplit.text.reading import read_text
from autosplit.text.writing import write_text

from .plan_signature import Input, PlanSignature

if TYPE_CHECKING:
    from .plan import Plan

_FORMAT = "autosplit plan 1"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write all fields of a plan but the model that it may be bound to.

    Raises:
        OutputError: the file cannot be written.
    """
    made = plan.made_for
    data = {"format": _FORMAT, **{name: getattr(plan, name) for name in _names(type(plan))}}
    data["made_for"] = {
        "model": made.model,
        "blocks": made.blocks,
        "inputs": [
            {"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in made.inputs
        ],
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_plan(kind: type[Plan], path: str | Path) -> Plan:
    """Read what ``write_plan`` wrote.

    Raises:
        PlanError: there is no such file, it cannot be read, or it is no plan.
    """
    text = read_text(path, "a plan", PlanError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"cannot read a plan from {str(path)!r}: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise PlanError(f'{str(path)!r} is no plan: expected JSON with "format": {_FORMAT!r}')
    names = _names(kind)
    odd = sorted(set(data) ^ set(names))
    if odd:
        what = "lacks" if odd[0] in names else "has the unknown"
        raise PlanError(f"{str(path)!r} is no whole plan: it {what} {odd[0]!r}")
    try:
        data["made_for"] = _made_for(data["made_for"])
        return kind(**{name: _frozen(value) for name, value in data.items()})
    except PlanError as error:
        raise PlanError(f"{str(path)!r} is no whole plan: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{str(path)!r} is no whole plan: {error!r}") from error


def _names(kind: type[Plan]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "partition"]


def _made_for(data: Any) -> PlanSignature:
    inputs = [Input(each["name"], tuple(each["shape"]), each["dtype"]) for each in data["inputs"]]
    return PlanSignature(data["model"], tuple(data["blocks"]), tuple(inputs))


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_frozen, value))
    return value
