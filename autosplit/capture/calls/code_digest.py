"""``CodeDigests``: digests of code objects that are equal in every process."""

from __future__ import annotations

import hashlib
from types import CodeType
from typing import Any

_FIELDS = (
    "co_filename",
    "co_qualname",
    "co_firstlineno",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_code",
    "co_linetable",
    "co_exceptiontable",
)


class CodeDigests:
    """Digests of code objects, and which were asked for.

    What ``marshal`` writes will not do: it depends on reference counts and on the order of sets.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, CodeType]] = {}

    def of(self, code: CodeType) -> str:
        """Digest of a function's instructions, names, constants, lines and inner functions."""
        known = self._found.get(id(code))
        if known is None:
            facts = [getattr(code, field) for field in _FIELDS]
            text = f"{facts!r} {list(map(self._constant, code.co_consts))!r}"
            known = hashlib.sha256(text.encode()).hexdigest(), code
            self._found[id(code)] = known
        return known[0]

    def __copy__(self) -> CodeDigests:
        made = CodeDigests()
        made._found = dict(self._found)
        return made

    def __len__(self) -> int:
        return len(self._found)

    def forget(self, count: int) -> None:
        """Forget all but the first ``count`` that were asked for."""
        while len(self._found) > count:
            self._found.popitem()

    def __contains__(self, code: CodeType) -> bool:
        return id(code) in self._found

    def _constant(self, value: Any) -> str:
        if isinstance(value, CodeType):
            return self.of(value)
        if isinstance(value, frozenset):
            return f"set {sorted(map(self._constant, value))}"
        if isinstance(value, tuple):
            return f"tuple {list(map(self._constant, value))}"
        return f"{type(value).__name__} {value!r}"
