"""``HookTables``: hooks of modules by numbers that every process gives them.

torch keeps a module's hooks in dictionaries whose keys, handles, count on over all modules of a
process: what was hooked before has no part in what the hooks do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.modules.module
from torch import nn

_ENDINGS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def is_table_name(name: str) -> bool:
    """Whether an attribute of a module, or of torch's module of modules, holds hooks."""
    return name.endswith(_ENDINGS)


@dataclasses.dataclass(frozen=True, eq=False)
class HookTable:
    """Hooks of one kind of one module, by their handles."""

    hooks: dict[int, Any]


class HookTables:
    """The dictionaries of hooks that were seen, and numbers of the handles in them."""

    def __init__(self) -> None:
        every = vars(torch.nn.modules.module)
        shared = (every[name] for name in every if is_table_name(name))
        self._tables = {id(each): each for each in shared if isinstance(each, dict)}
        self._numbers: dict[int, int] = {}

    def of(self, module: nn.Module) -> dict[str, HookTable]:
        """A module's, by the names of its attributes."""
        found = {}
        for name, each in vars(module).items():
            if is_table_name(name) and isinstance(each, dict):
                found[name] = HookTable(each)
                self._tables[id(each)] = each
        return found

    def numbers(self, table: HookTable) -> list[int]:
        """Numbers of a table's handles."""
        return [self._numbers.setdefault(key, len(self._numbers)) for key in table.hooks]

    def number(self, handle: Any) -> int | None:
        """The number of a handle that was seen."""
        return self._numbers.get(handle) if type(handle) is int else None

    def handle(self, number: int) -> int:
        """The handle of a number.

        Raises:
            IndexError: there is none.
        """
        return [*self._numbers][number]

    def key_text(self, table: Any, key: Any) -> str | None:
        """Text of a key of a dictionary of hooks; None for a key of anything else."""
        if id(table) not in self._tables:
            return None
        number = self.number(key)
        return None if number is None else f"hook {number}"
