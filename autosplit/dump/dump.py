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

from autosplit.passes.graph import Kind
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import Subgraph, subgraphs
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import size_text
from autosplit.text.files import writing

from .tables import boundary_table, boundary_tensors, graph_table, total_bytes

_HALVES = ("forward", "backward_input", "backward_weight")


def dump(functions: SplitFunctions, folder: str | os.PathLike[str], title: str) -> None:
    """Write ``joint.py``, ``forward.py``, ``backward_input.py``, ``backward_weight.py``,
    ``backward.py`` and ``boundary.md``; and for a backend that generates code, that of every graph
    that was compiled so far, as ``forward.generated.py``. Where the graphs call blocks, each kind
    of block has a folder of its own, with F, I and W.

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
        (root / "boundary.md").write_text(_boundary(functions, title))


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


def _boundary(functions: SplitFunctions, title: str) -> str:
    """What the graphs cost, and all tensors that cross between them, those of blocks included."""
    graphs = functions.graphs
    parts = [f"# {title}", graph_table(functions, "github")]
    if graphs.backward and graphs.backward_input and graphs.backward_weight:
        for heading, giver, taker, crossing in (
            ("Saved: F to the backward", graphs.forward, graphs.backward, Kind.SAVED),
            ("Deferred: I to W", graphs.backward_input, graphs.backward_weight, Kind.DEFERRED),
        ):
            rows = boundary_tensors(giver, taker, crossing)
            total = f"{len(rows)} tensors, {size_text(total_bytes(rows))} of distinct storage."
            parts += [f"## {heading}", total, boundary_table(rows, "github")]
    return "\n\n".join(parts) + "\n"
