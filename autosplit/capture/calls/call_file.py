"""What is kept under one key: calls that only their guards tell apart, as plain data."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from autosplit.capture.cache.plain_data import read_plain

_MOST = 8
"""How many calls one key has at most; those kept last stay."""

Told = tuple[str, str, str, int]


class CallForm(NamedTuple):
    """One call on disk.

    Attributes:
        guards: fields of its ``KeptGuards``.
        told: text, category, file and line of each warning of its tracing.
        graphs: key of its graphs; empty where it was refused.
        names: paths of the leaves of its result.
        spec: how the leaves make up the result, as ``write_spec`` has it.
        refusal: why it cannot be captured, although a call after it can.
        places: where its inputs say the sizes that are left open, by numbers of these.
    """

    guards: tuple[Any, ...]
    told: tuple[Told, ...]
    graphs: str = ""
    names: tuple[str, ...] = ()
    spec: Any = None
    refusal: str = ""
    places: tuple[tuple[int, int, str, int], ...] = ()


def read_forms(data: bytes) -> list[CallForm]:
    """All calls of a file.

    Raises:
        Exception: it is no such file.
    """
    return [CallForm(*fields) for fields in read_plain(data)]


def with_form(data: bytes | None, form: CallForm) -> bytes:
    """A file's content with one more call, which is looked at first and replaces one with the same
    guards.

    Args:
        data: what the file holds; None where there is none.
        form: the call.

    Raises:
        Exception: it has no form on disk.
    """
    try:
        known = [] if data is None else read_forms(data)
    except Exception:  # damaged, or of somebody else
        known = []
    others = [each for each in known if each.guards != form.guards]
    return pickle.dumps([tuple(each) for each in (form, *others)[:_MOST]])
