"""``dump()``: the generated graphs as readable, runnable files.

And the tensors on their boundaries. Blocks that a model has several of are in a folder a kind; the
graphs of the model call them.
"""

from __future__ import annotations

import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from autosplit.passes.graph import Kind, origin_of, outputs
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import Subgraph, subgraph_of, subgraphs
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import size_text
from autosplit.text.files import writing

from .tables import BoundaryTensor, boundary_table, boundary_tensors, graph_table, total_bytes

_HALVES = ("forward", "backward_input", "backward_weight")


def dump(functions: SplitFunctions, folder: str | os.PathLike[str], title: str) -> None:
    """Write ``joint.py``, ``forward.py``, ``backward_input.py``, ``backward_weight.py``,
    ``backward.py`` and ``boundary.md``; and for a backend that generates code, that of every graph
    that was compiled so far, as ``forward.generated.py``. Where the graphs call blocks, each kind
    of block has a folder of its own, with the like of these.

    Raises:
        OutputError: the folder cannot be written.
    """
    root = pathlib.Path(folder)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        calling = functions.calling.graphs()
        kinds = _kinds(calling.values())
        for name, module in calling.items():
            (root / f"{name}.py").write_text(_source(name, module, title, kinds))
        for name, code in functions.generated.items():
            (root / f"{name}.generated.py").write_text(code)
        for kind, halves in kinds.items():
            (root / kind).mkdir(exist_ok=True)
            for half, module in halves.items():
                (root / kind / f"{half}.py").write_text(_source(half, module, kind, {}))
        for folder, text in _boundaries(functions, title).items():
            (root / folder / "boundary.md").write_text(text)


def _kinds(graphs: Iterable[fx.GraphModule]) -> dict[str, dict[str, fx.GraphModule]]:
    """Kind of block -> its F, I and W by name, of those that graphs call."""
    kinds: dict[str, dict[str, fx.GraphModule]] = defaultdict(dict)
    for called in (each for module in graphs for each in subgraphs(module.graph)):
        kind, half = _kind_of(called)
        kinds[kind][half] = called.module
    return kinds


def _kind_of(called: Subgraph) -> tuple[str, str]:
    """The kind of block that a graph is of, and which of its graphs that is."""
    half = next(half for half in _HALVES if called.name.endswith(f"_{half}"))
    return called.name.removesuffix(f"_{half}"), half


_CALLS = """

# Blocks that it calls, from their folders.
import pathlib
import runpy

_HERE = pathlib.Path(__file__).parent
{name}.__defaults__ = (
    {{
{blocks}
    }},
)
"""


def _source(
    name: str,
    module: fx.GraphModule,
    title: str,
    kinds: Mapping[str, Mapping[str, fx.GraphModule]],
) -> str:
    text = f'"""{name} of {title}, written by autosplit."""\n\n{codegen.HEADER}\n\n'
    constants = ", ".join(codegen.constants(module))
    note = f"# constants: {constants}\n" if constants else ""
    blocks = [
        f'        "{called.name}": runpy.run_path(_HERE / "{kind}" / "{half}.py")["{half}"],'
        for called in subgraphs(module.graph)
        for kind, half in [_kind_of(called)]
    ]
    calls = _CALLS.format(name=name, blocks="\n".join(blocks)) if blocks else ""
    return text + note + codegen.generate(name, module) + calls


def _boundaries(functions: SplitFunctions, title: str) -> dict[str, str]:
    """Folder -> its ``boundary.md``: tensors that blocks make are in that of their kind, those of
    one block for all.
    """
    graphs, calling = functions.graphs, functions.calling
    parts: dict[str, list[str]] = {"": [f"# {title}", graph_table(functions, "github")]}
    if graphs.backward and graphs.backward_input and graphs.backward_weight:
        halves = graphs.forward, graphs.backward_input
        makers: dict[str, tuple[str, str]] = {}
        for heading, at, taker, crossing in (
            ("Saved: F to the backward", 0, graphs.backward, Kind.SAVED),
            ("Deferred: I to W", 1, graphs.backward_weight, Kind.DEFERRED),
        ):
            makers |= _makers((calling.forward, calling.backward_input)[at], crossing)
            rows = boundary_tensors(halves[at], taker, crossing)
            _add_boundary(parts, heading, rows, makers, title)
    return {folder: "\n\n".join(text) + "\n" for folder, text in parts.items()}


def _add_boundary(
    parts: dict[str, list[str]],
    heading: str,
    rows: list[BoundaryTensor],
    makers: Mapping[str, tuple[str, str]],
    title: str,
) -> None:
    """Add what crosses between two graphs: to the model's text, and to that of each kind of block.

    Args:
        parts: folder -> its text so far; added to.
        heading: for what crosses.
        rows: all tensors that cross.
        makers: name of a tensor -> kind and name of the block that makes it, where one does.
        title: of the model.
    """
    kinds: dict[str, dict[str, list[BoundaryTensor]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        kind, block = makers.get(row.name, ("", ""))
        kinds[kind][block].append(row)
    total = f"{len(rows)} tensors, {size_text(total_bytes(rows))} of distinct storage."
    parts[""] += [f"## {heading}", total]
    own = kinds.pop("", {"": []})[""]
    for kind, blocks in kinds.items():
        name, of_one = next(iter(blocks.items()))
        size = f"{len(of_one)} tensors, {size_text(total_bytes(of_one))}"
        parts[""].append(f"`{kind}`, {len(blocks)} calls: each {size}, see {kind}/boundary.md.")
        text = parts.setdefault(kind, [f"# {kind} of {title}"])
        text += [f"## {heading}", f"{size}, in `{name}`.", boundary_table(of_one, "github")]
    parts[""].append(boundary_table(own, "github"))


def _makers(module: fx.GraphModule | None, crossing: Kind) -> dict[str, tuple[str, str]]:
    """Name of a tensor that crosses -> kind and name of the block that makes it."""
    found = {}
    for role, value in outputs(module.graph, crossing) if module else ():
        called = subgraph_of(value) if isinstance(value, fx.Node) else None
        if called is not None:
            modules = origin_of(value).modules or ("",)
            found[role.name] = _kind_of(called)[0], modules[-1]
    return found
