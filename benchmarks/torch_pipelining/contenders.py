"""Who runs a schedule, and how many lines of a program that takes."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import cast

from .task import Step, Task


@dataclasses.dataclass(frozen=True)
class Contender:
    """One program.

    Attributes:
        name: as in the tables.
        program: its module in ``programs``.
        instead_of: the contender that must have failed for this one to run.
    """

    name: str
    program: str
    instead_of: str = ""

    @property
    def source(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.programs.{self.program}")

    @property
    def prepare(self) -> Callable[[Task], Step]:
        """Builds stages and schedule; gives one step."""
        return cast("Callable[[Task], Step]", self.source.prepare)

    def lines_changed(self) -> int:
        """Lines that are not in the program with torch's stages, or not as they are there."""
        before, after = (_lines(each.source) for each in (CONTENDERS[TORCH], self))
        return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))


def _lines(module: ModuleType) -> list[str]:
    """Without the docstring, which says what it is, and empty lines."""
    source = inspect.getsource(module).replace(f'"""{module.__doc__}"""', "", 1)
    return [line for line in source.splitlines() if line.strip()]


TORCH = "torch, eager"
COMPILED = "torch, compiled"
UNDONATED = "torch, compiled, no donated buffers"
OURS = "ours, eager"
INDUCTOR = "ours, Inductor"
ENGINE = "our engine, eager"

CONTENDERS = {
    each.name: each
    for each in (
        Contender(TORCH, "torch_eager"),
        Contender(COMPILED, "torch_compiled"),
        Contender(UNDONATED, "torch_undonated", instead_of=COMPILED),
        Contender(OURS, "split_eager"),
        Contender(INDUCTOR, "split_inductor"),
        Contender(ENGINE, "engine"),
    )
}
