"""Show the graphs of a split module. ``graph_tables`` returns their costs and the tensors on their
boundaries as text tables. ``dump`` writes readable, runnable files, with a folder for each kind of
repeated block.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate
from torch import fx

from autosplit.graph_picture import draw_graphs
from autosplit.passes.analysis.aliasing import distinct_bytes, is_view
from autosplit.passes.analysis.boundary import BoundaryTensor, boundaries, total_bytes
from autosplit.passes.analysis.operator_cost import graph_flops, weight_flops
from autosplit.passes.graph import Kind, calls, computed_outputs, inputs
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import Subgraph, subgraphs
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import few, short_source, size_text
from autosplit.text.files import writing

_TITLES = {
    "forward": "F  forward",
    "backward_input": "I  backward_input",
    "backward_weight": "W  backward_weight",
    "backward": "B  backward (unsplit)",
}


def graph_tables(functions: SplitFunctions, title: str) -> str:
    """Text with a table of the graphs, and a table of the boundary between I and W."""
    graphs, capture = functions.graphs, functions.capture
    results = [*capture.outputs, *(value.name for value in capture.values)]
    parts = [f"{title}: {', '.join(capture.inputs)} -> {', '.join(results)}"]
    parts += [graph_table(functions), *sizes_text(functions)]
    crossing = boundaries(graphs)
    if not crossing:
        parts.append("Captured without gradients: there is no backward and nothing is saved.")
        return "\n\n".join(parts)
    saved, deferred = crossing[Kind.SAVED], crossing[Kind.DEFERRED]
    parts.append(
        f"Saved by F for the backward: {len(saved)} tensors, {size_text(total_bytes(saved))}.\n"
        f"Deferred by I for W: {len(deferred)} tensors, {size_text(total_bytes(deferred))}:"
    )
    parts.append(boundary_table(deferred, "simple", joins_layers=True))
    parts.append(f"Deferred: {share_text(*weight_flops(graphs))}.")
    if functions.dependence.inseparable:
        parts.append("Not deferred, for an operator makes them with what input gradients need:")
        parts.append(inseparable_table(functions))
    return "\n\n".join([*parts, *specialized_text(functions)])


def specialized_text(functions: SplitFunctions) -> list[str]:
    """Lines for a report, one for each pair of I and W that was compiled for a backward in which
    some outputs get no gradient.
    """
    return [
        f"Backwards without a gradient of {few(sorted(missing), 3)} run I and W of their own, "
        "compiled at the first of them, without what only these outputs need. The tables here and "
        "the files of dump() are of the graphs for all gradients."
        for missing in functions.specialized
    ]


def sizes_text(functions: SplitFunctions) -> list[str]:
    """Lines for a report: the input dimensions whose sizes are symbols in the graphs; empty if
    there are none.
    """
    sizes, names = functions.capture.sizes, functions.capture.inputs
    if sizes is None:
        return []
    columns = [
        f"{names[at]} along dimension {' and '.join(map(str, sorted(dimensions)))}"
        for at, dimensions in sorted(sizes.dimensions.items())
    ]
    return [
        f"Captured for any size of {', '.join(columns)}; figures are for the first that varied."
    ]


def graph_table(functions: SplitFunctions, style: str = "simple") -> str:
    """Table with one row per graph: operators, views, FLOPs, bytes in and out (distinct
    storage).
    """
    graphs = functions.graphs.graphs()
    rows = [[title, *_graph_row(graphs[name])] for name, title in _TITLES.items() if name in graphs]
    headers = ["graph", "ops", "views", "GFLOPs", "state in", "other in", "out"]
    align = ("left", *["right"] * 6)
    return tabulate(rows, headers, tablefmt=style, colalign=align, disable_numparse=True)


def share_text(waiting: int, early: int) -> str:
    """Text on the share of the weight gradients' FLOPs that W computes."""
    if not waiting + early:
        return "none takes a matrix product or convolution that torch counts"
    share = f"{100 * waiting / (waiting + early):.1f} %"
    done = f"{_giga(waiting)} of {_giga(waiting + early)} GFLOPs a microbatch"
    return f"{share} of the weight gradients' floating-point operations ({done})"


def inseparable_table(functions: SplitFunctions, style: str = "simple") -> str:
    """Table with one row per parameter whose gradient cannot be deferred, with the operator that
    computes the gradient.
    """
    rows = list(functions.dependence.inseparable.items())
    return tabulate(rows, ["parameter", "operator"], tablefmt=style, disable_numparse=True)


def boundary_table(rows: list[BoundaryTensor], style: str, *, joins_layers: bool = False) -> str:
    """Table with one row per tensor of a boundary, the largest first.

    Args:
        rows: the tensors.
        style: the format, see tabulate.
        joins_layers: whether tensors of equal layers, whose names differ in one number only, share
            a row. The row has the number of tensors and the sum of their bytes.
    """
    if not rows:
        return "(no tensors)"
    groups = _equal_layers(rows) if joins_layers else [[row] for row in rows]
    groups.sort(key=lambda group: -sum(row.bytes for row in group))
    table = [
        [
            _joined_name([row.name for row in group]),
            f"x{len(group)}" if len(group) > 1 else "",
            group[0].shape,
            size_text(sum(row.bytes for row in group)),
            short_source(group[0].source),
            _joined_name([few(row.consumers) for row in group]),
        ]
        for group in groups
    ]
    headers = ["tensor", "", "shape", "bytes", "computed at", "for the gradient of"]
    align = ["left", "left", "left", "right", "left", "left"]
    if all(len(group) == 1 for group in groups):
        for line in (headers, align, *table):
            del line[1]
    return tabulate(table, headers, tablefmt=style, colalign=align, disable_numparse=True)


_NUMBER = re.compile(r"\d+")


def _equal_layers(rows: list[BoundaryTensor]) -> list[list[BoundaryTensor]]:
    """Group tensors that differ in nothing but the numbers in their names."""
    groups: dict[tuple[object, ...], list[BoundaryTensor]] = defaultdict(list)
    for row in rows:
        names = tuple(_NUMBER.sub("*", name) for name in (row.name, *row.consumers))
        groups[names, row.shape, row.bytes, row.source].append(row)
    return [*groups.values()]


def _joined_name(names: Sequence[str]) -> str:
    """The common name of several tensors, with ``*`` in place of each number that differs."""
    numbers = [_NUMBER.findall(name) for name in names]
    columns = [{*column} for column in zip(*numbers, strict=True)]
    parts = iter("*" if len(column) > 1 else column.pop() for column in columns)
    return _NUMBER.sub(lambda _: next(parts), names[0])


def _giga(count: int) -> str:
    """A number in billions, as text; small numbers are in scientific notation."""
    value = count / 1e9
    return f"{value:.3f}" if value >= 5e-4 or not count else f"{value:.1e}"


def _graph_row(module: fx.GraphModule) -> list[str]:
    ops, views, flops, *sizes = _graph_figures(module.graph).values()
    return [str(ops), str(views), _giga(flops), *map(size_text, sizes)]


def _graph_figures(graph: fx.Graph) -> dict[str, int]:
    """A graph's numbers of operators, views and FLOPs, and its bytes of distinct storage in and
    out.
    """
    nodes = list(calls(graph))
    views = sum(is_view(node) for node in nodes)
    state = inputs(graph, Kind.PARAMETER, Kind.BUFFER)
    arguments = [node for role, node in inputs(graph).items() if role not in state]
    results = [node for _, node in computed_outputs(graph)]
    return {
        "ops": len(nodes) - views,
        "views": views,
        "flops": graph_flops(graph),
        "state_bytes": distinct_bytes(list(state.values())),
        "input_bytes": distinct_bytes(arguments),
        "output_bytes": distinct_bytes(results),
    }


def split_figures(functions: SplitFunctions) -> dict[str, Any]:
    """The figures of ``graph_tables`` for JSON; sizes in bytes."""
    graphs = functions.graphs
    figures: dict[str, Any] = {
        "inputs": [*functions.capture.inputs],
        "outputs": [*functions.capture.outputs],
        "graphs": {
            name: _graph_figures(module.graph)
            for name, module in graphs.graphs().items()
            if name in _TITLES
        },
    }
    crossing = boundaries(graphs)
    if not crossing:
        return figures
    deferred_flops, early_flops = weight_flops(graphs)
    return figures | {
        "weight_gradient_flops": {"in_w": deferred_flops, "in_i": early_flops},
        "not_deferred": {name: str(op) for name, op in functions.dependence.inseparable.items()},
        **{
            kind.value: [{"name": row.name, "shape": row.shape, "bytes": row.bytes} for row in rows]
            for kind, rows in crossing.items()
        },
    }


_CALLED = re.compile(r"(.+)_(forward|backward_input|backward_weight|recomputed_\d+)")


def dump(
    functions: SplitFunctions,
    folder: str | os.PathLike[str],
    title: str,
    *,
    fold_views: bool = False,
) -> None:
    """Write ``joint.py``, ``forward.py``, ``backward_input.py``, ``backward_weight.py``,
    ``backward.py`` and ``boundary.md`` into a folder. If the backend generates code, the code of
    each graph compiled so far is written too, as ``forward.generated.py``. Each kind of repeated
    block has a folder of its own, with F, I and W. With matplotlib, and if the graphs are small
    enough to be read, ``graphs.svg`` shows F, I and W beside each other, with the bytes of tensors
    that cross from one to another.

    Args:
        functions: the graphs.
        folder: the folder for the files.
        title: the name of the module.
        fold_views: whether the call of a matrix product contains the views that only it reads.

    Raises:
        OutputError: the folder cannot be written.
    """
    root = pathlib.Path(folder)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        calling = functions.calling.graphs()
        kinds = _kinds(calling.values())
        for name, module in calling.items():
            text = program(name, module, title, fold_views=fold_views)
            (root / f"{name}.py").write_text(text)
        for name, code in functions.generated.items():
            (root / f"{name}.generated.py").write_text(code)
        for kind, halves in kinds.items():
            (root / kind).mkdir(exist_ok=True)
            for half, module in halves.items():
                text = program(half, module, kind, fold_views=fold_views)
                (root / kind / f"{half}.py").write_text(text)
            draw_graphs(halves, root / kind / "graphs.svg", kind)
        draw_graphs(calling, root / "graphs.svg", title)
        (root / "boundary.md").write_text(_boundary(functions, title))


def _kinds(graphs: Iterable[fx.GraphModule]) -> dict[str, dict[str, fx.GraphModule]]:
    """Maps each kind of called block to its graphs by name."""
    kinds: dict[str, dict[str, fx.GraphModule]] = defaultdict(dict)
    for called in (subgraph for module in graphs for subgraph in subgraphs(module.graph)):
        kind, half = _kind_of(called)
        kinds[kind][half] = called.module
    return kinds


def _kind_of(called: Subgraph) -> tuple[str, str]:
    """(kind of block that a subgraph belongs to, the graph's name: forward, backward_input,
    ...).
    """
    name = _CALLED.fullmatch(called.name)
    return (name[1], name[2]) if name else (called.name, "forward")


_CALLS = """

# The blocks that it calls, from their folders.
import pathlib
import runpy

_HERE = pathlib.Path(__file__).parent
{name}.__defaults__ = (
    {{
{blocks}
    }},
)
"""


def program(name: str, module: fx.GraphModule, title: str, *, fold_views: bool = False) -> str:
    """A graph as Python that runs: ``def name(args, constants)``, see ``codegen.generate``. The
    program reads called graphs from folders beside the program's file.
    """
    text = f'"""{name} of {title}, written by autosplit."""\n\n{codegen.HEADER}\n\n'
    constants = ", ".join(codegen.constants(module))
    note = f"# constants: {constants}\n" if constants else ""
    blocks = [
        f'        "{called.name}": runpy.run_path(_HERE / "{kind}" / "{half}.py")["{half}"],'
        for called in subgraphs(module.graph)
        for kind, half in [_kind_of(called)]
    ]
    calls = _CALLS.format(name=name, blocks="\n".join(blocks)) if blocks else ""
    return text + note + codegen.generate(name, module, fold_views=fold_views) + calls


def _boundary(functions: SplitFunctions, title: str) -> str:
    """Text of ``boundary.md``: costs of the graphs, and all tensors that cross between them, blocks
    included.
    """
    parts = [f"# {title}", graph_table(functions, "github")]
    headings = {Kind.SAVED: "Saved: F to the backward", Kind.DEFERRED: "Deferred: I to W"}
    for kind, rows in boundaries(functions.graphs).items():
        total = f"{len(rows)} tensors, {size_text(total_bytes(rows))} of distinct storage."
        parts += [f"## {headings[kind]}", total, boundary_table(rows, "github")]
    if functions.dependence.inseparable:
        about = "I computes these gradients, and passes them to W:"
        parts += ["## Not deferred", about, inseparable_table(functions, "github")]
    return "\n\n".join(parts) + "\n"
