"""Guards of Dynamo as plain data, and back.

A guard is a kind, options, and a source: the path from the call's variables to the value that is
looked at. Only torch's own classes of sources are looked up when they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch._dynamo.source
from torch._dynamo.guards import GuardBuilder
from torch._guards import Guard, Source

from autosplit.capture.cache.argument_text import NoFingerprintError

from .hook_tables import HookTables, is_table_name

_DATA = (type(None), bool, int, float, str, bytes)

SourceForm = tuple[str, tuple[tuple[str, Any], ...]]
GuardForm = tuple[int, str, tuple[tuple[str, Any], ...]]


class SourceWriter:
    """Sources as rows of a table, each once.

    Args:
        names: names of globals that are to be called otherwise.
        hooks: of the modules that guards look at.

    Attributes:
        table: class and fields of each; a field that is a source is the number of its row.
    """

    def __init__(self, names: dict[str, str], hooks: HookTables) -> None:
        self.table: list[SourceForm] = []
        self._hooks = hooks
        self._names = names
        self._rows: dict[Source, int] = {}

    @classmethod
    def going_on(
        cls, table: Sequence[SourceForm], sources: Sequence[Source], hooks: HookTables
    ) -> SourceWriter:
        """A writer that begins with a table, and the sources that it was read as."""
        made = cls({}, hooks)
        made.table = list(table)
        made._rows = {source: row for row, source in enumerate(sources)}
        return made

    def row(self, source: Source) -> int:
        """Number of a source's row.

        Raises:
            NoFingerprintError: it has no such form.
        """
        if source not in self._rows:
            kind = type(source)
            if getattr(torch._dynamo.source, kind.__name__, None) is not kind:
                raise NoFingerprintError(f"a guard reads a {kind.__qualname__}")
            fields = [field.name for field in dataclasses.fields(source) if field.init]
            form = tuple((name, self._field(name, getattr(source, name))) for name in fields)
            self._rows[source] = len(self.table)
            self.table.append((kind.__name__, form))
        return self._rows[source]

    def guard(self, guard: Guard) -> GuardForm:
        """Row of the guard's source, its kind and its options.

        Raises:
            NoFingerprintError: it has no such form.
        """
        made: Any = guard.create_fn
        options: dict[str, Any] = {}
        if isinstance(made, functools.partial):
            if made.args:
                raise NoFingerprintError("a guard has options without names")
            made, options = made.func, dict(made.keywords)
        kind = made.__name__
        if vars(GuardBuilder).get(kind) is not made:
            raise NoFingerprintError(f"a guard is made by {kind}")
        options.pop("recompile_hint", None)
        if kind == "TENSOR_MATCH":  # the tensor itself, as it was found
            options.pop("value", None)
        form = {name: self._field(name, value) for name, value in options.items()}
        number = self._hooks.number(options.get("key"))
        if number is not None and is_table_name(getattr(guard.originating_source, "member", "")):
            form["key"] = "hook", number
        return self.row(guard.originating_source), kind, tuple(form.items())

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, Source):
            return "source", self.row(value)
        if name == "global_name":
            value = self._names.get(value, value)
        return "value", _plain(value)


def _plain(value: Any) -> Any:
    if type(value) in _DATA:
        return value
    if type(value) is tuple:
        return tuple(map(_plain, value))
    raise NoFingerprintError(f"a guard looks for a {type(value).__qualname__}")


def read_sources(table: Sequence[SourceForm]) -> list[Source]:
    """The sources of a table.

    Raises:
        Exception: this torch has no such sources.
    """
    found: list[Source] = []
    for name, fields in table:
        kind = getattr(torch._dynamo.source, name)
        if not (isinstance(kind, type) and issubclass(kind, Source)):
            raise TypeError(f"{name} is no source")
        found.append(kind(**{field: _read(form, found) for field, form in fields}))
    return found


def read_guard(form: GuardForm, sources: Sequence[Source], hooks: HookTables) -> Guard:
    """The guard of a form.

    Raises:
        Exception: this torch has no such guards.
    """
    row, kind, options = form
    make: Callable[..., None] = vars(GuardBuilder)[kind]
    given = read_options(options, sources, hooks)
    return Guard(sources[row], functools.partial(make, **given) if given else make)


def read_options(
    options: tuple[tuple[str, Any], ...], sources: Sequence[Source], hooks: HookTables
) -> dict[str, Any]:
    """A guard's options by name; sources among them as sources."""
    return {
        name: hooks.handle(form[1]) if form[0] == "hook" else _read(form, sources)
        for name, form in options
    }


def looked_at(kind: str, options: dict[str, Any], source: Source) -> tuple[dict[str, Any], Source]:
    """Options and source of a guard as torch has them since 2.12: before, the source of a guard of
    an attribute is that of the attribute, which need not exist, instead of the object's.

    Raises:
        NoFingerprintError: it is the source of something else.
    """
    if kind != "HASATTR" or "attr" in options:
        return options, source
    while isinstance(source, torch._dynamo.source.NNModuleSource):
        source = source.base
    if isinstance(source, torch._dynamo.source.CodeSource):
        return {"attr": "__code__"}, source.base
    if isinstance(source, torch._dynamo.source.AttrSource):
        return {"attr": source.member}, source.base
    raise NoFingerprintError(f"a guard of an attribute reads a {type(source).__qualname__}")


def _read(form: tuple[str, Any], sources: Sequence[Source]) -> Any:
    what, value = form
    return sources[value] if what == "source" else value
