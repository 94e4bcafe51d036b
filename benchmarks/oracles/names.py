"""Names of autosplit wherever they are defined, so that one script asks trees of other shapes."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import autosplit


def find(name: str, room: str) -> Any:
    """A function or class by its name, in whichever module of a folder of autosplit has it.

    Raises:
        LookupError: none has it, or several do.
    """
    top = Path(autosplit.__file__).parent
    defined = re.compile(rf"^(def|class) {name}\b", re.MULTILINE)
    files = [each for each in (top / room).rglob("*.py") if defined.search(each.read_text())]
    if len(files) != 1:
        raise LookupError(f"{name} is defined in {len(files)} files of {top / room}, expected one")
    parts = files[0].relative_to(top.parent).with_suffix("").parts
    return getattr(import_module(".".join(parts)), name)
