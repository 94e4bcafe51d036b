"""F, I, W and B of a dozen models as dumped, names normalised, with strides at their ends."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, fx

import autosplit

from .subjects import subjects

GRAPHS = ("forward", "backward_input", "backward_weight", "backward")
FORMS: dict[str, dict[str, Any]] = {
    "balanced": {},
    "lean": {"memory": "lean"},
    "fast": {"memory": "fast"},
}
"""Options of the split by name."""

_ASSIGNED = re.compile(r"^\s+(\w+)(?:,  #| = )", re.MULTILINE)
_CROSSING = re.compile(r"# (saved|deferred) (\S+?)(?=:|$)", re.MULTILINE)


def cases() -> Iterator[tuple[str, Any]]:
    """Each model's graphs under each setting."""
    for form, options in FORMS.items():
        for name, module, (args, kwargs) in subjects():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    split = autosplit.split(module, **options)
                    split.capture(*args, **kwargs)
                except autosplit.AutosplitError as error:
                    yield f"{form}/{name}", f"refused: {error}"
                    continue
            yield f"{form}/{name}", {**_dumped(split), "strides": _strides(split)}


def _dumped(split: autosplit.SplitModule) -> dict[str, str]:
    """The graphs as files have them, with names by order of appearance."""
    crossing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        split.dump(folder)
        files = {name: Path(folder, f"{name}.py") for name in GRAPHS}
        return {
            name: _normalised(file.read_text(), crossing)
            for name, file in files.items()
            if file.exists()
        }


def _normalised(text: str, crossing: dict[str, str]) -> str:
    """Locals are numbered; what crosses from graph to graph, the same in all of them."""

    def crosses(found: re.Match[str]) -> str:
        name = crossing.setdefault(found[2], f"crossing{len(crossing)}")
        return f"# {found[1]} {name}"

    numbers = count()
    names = {name: f"v{next(numbers)}" for name in dict.fromkeys(_ASSIGNED.findall(text))}
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue  # the user's line, by the path of this file
        code, mark, comment = line.partition("  # ")
        code = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: _renamed(found, names), code)
        lines.append(code + _CROSSING.sub(crosses, mark + comment))
    return "\n".join(lines)


def _renamed(found: re.Match[str], names: Mapping[str, str]) -> str:
    """A local's number; attributes and keywords stay."""
    before, behind = found.string[: found.start()], found.string[found.end() :]
    if before.endswith(".") or (behind.startswith("=") and not behind.startswith("==")):
        return found[0]
    return names.get(found[0], found[0])


def _strides(split: autosplit.SplitModule) -> dict[str, list[str]]:
    """Dtype, shape and stride of all that enters and leaves each graph, in order."""
    graphs: Mapping[str, fx.GraphModule] = split.functions[-1].graphs.graphs()
    return {name: [*_ends(graphs[name].graph)] for name in GRAPHS if name in graphs}


def _ends(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "placeholder":
            yield f"in {_laid_out(node.meta['val'])}"
    for result in graph.output_node().args[0]:  # type: ignore[union-attr]
        yield f"out {_laid_out(result.meta['val']) if isinstance(result, fx.Node) else result}"


def _laid_out(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} {list(value.stride())}"
