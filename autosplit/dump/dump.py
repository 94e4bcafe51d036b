"""``dump()``: the generated graphs as readable, runnable files.

The graphs F, I and W as one picture in Graphviz's DOT, and the tensors on their boundaries.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from autosplit.passes.analysis.aliasing import is_free, storage_root
from autosplit.passes.graph import Kind, SplitGraphs, calls, inputs, outputs
from autosplit.passes.lowering import codegen
from autosplit.passes.lowering.codegen import value_text
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import size_text
from autosplit.text.files import writing

from .boundary import boundary_tensors, total_bytes
from .tables import boundary_table, graph_table

_COLOURS = {"forward": "#4477AA", "backward_input": "#EE6677", "backward_weight": "#228833"}
_LETTERS = {"forward": "F", "backward_input": "I", "backward_weight": "W"}


def draw(graphs: SplitGraphs, title: str) -> str:
    """DOT text. Views are left out: an edge goes from the operator that allocated a tensor
    to the operators that read it. Edges between graphs are saved and deferred tensors, whose
    names are in the boxes that make them.
    """
    parts = {name: module for name, module in graphs.graphs().items() if name in _COLOURS}
    lines = [
        "digraph autosplit {",
        f"  label={_quoted(title)}; rankdir=TB; fontname=Helvetica; newrank=true;",
        # Without a limit, layout of a few hundred operators takes a minute for little gain.
        "  nslimit=1; nslimit1=1;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=10, '
        "fontcolor=white, color=white];",
        "  edge [color=gray50, arrowsize=0.6];",
    ]
    for name, module in parts.items():
        lines += _cluster(name, module.graph)
    lines += _boundary_edges(parts)
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(name: str, graph: fx.Graph) -> Iterator[str]:
    yield f"  subgraph cluster_{name} {{"
    yield f'    label="{_LETTERS[name]}: {name}"; color="{_COLOURS[name]}";'
    names = _boundary_names(graph)
    for node in _drawn(graph):
        label = "\n".join([_operator(node), *names[node], value_text(node.meta.get("val"))])
        yield f'    {_id(name, node)} [label={_quoted(label)}, fillcolor="{_COLOURS[name]}"];'
    for node in _drawn(graph):
        for operand in _operands(node):
            yield f"    {_id(name, operand)} -> {_id(name, node)};"
    yield "  }"


def _boundary_names(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """The saved and deferred tensors that an operator makes."""
    names: dict[fx.Node, list[str]] = defaultdict(list)
    for role, value in outputs(graph, Kind.SAVED, Kind.DEFERRED):
        names[_operator_behind(storage_root(value))].append(role.name)
    return names


def _boundary_edges(parts: dict[str, fx.GraphModule]) -> Iterator[str]:
    """From the operator that made a saved or deferred tensor to its readers in later graphs."""
    makers: dict[str, str] = {}
    for name, module in parts.items():
        for role, node in inputs(module.graph, Kind.SAVED, Kind.DEFERRED).items():
            if role.name not in makers:
                continue
            for reader in _readers(node):
                yield (
                    f"  {makers[role.name]} -> {_id(name, reader)} "
                    f'[style=dashed, color="{_COLOURS[name]}"];'
                )
        for role, value in outputs(module.graph, Kind.SAVED, Kind.DEFERRED):
            root = storage_root(value)
            if root.op == "call_function":
                makers[role.name] = _id(name, _operator_behind(root))


def _drawn(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in calls(graph) if not is_free(node) and _operator_behind(node) is node]


def _operator_behind(node: fx.Node) -> fx.Node:
    """The operator behind a ``getitem`` of its results."""
    parent = node.args[0] if node.args else None
    is_item = getattr(node.target, "__name__", "") == "getitem"
    return parent if is_item and isinstance(parent, fx.Node) else node


def _operands(node: fx.Node) -> set[fx.Node]:
    found = {_operator_behind(storage_root(operand)) for operand in node.all_input_nodes}
    return {operand for operand in found if operand.op == "call_function"}


def _readers(node: fx.Node) -> set[fx.Node]:
    """Operators that read a value, directly or through views and ``getitem``."""
    found: set[fx.Node] = set()
    for user in node.users:
        if user.op == "call_function":
            through = is_free(user) or _operator_behind(user) is not user
            found |= _readers(user) if through else {user}
    return found


def _operator(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _id(graph: str, node: fx.Node) -> str:
    return f"{_LETTERS[graph]}_{node.name}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


_LAYOUT_SECONDS = 60


def dump(functions: SplitFunctions, folder: str | os.PathLike[str], title: str) -> None:
    """Write ``joint.py``, ``forward.py``, ``backward_input.py``, ``backward_weight.py``,
    ``backward.py``, ``boundary.md`` and ``graph.svg`` (``graph.dot`` where graphviz is not
    installed or takes longer than a minute); and for a backend that generates
    code, that of every graph that was compiled so far, as ``forward.generated.py``.

    Raises:
        OutputError: the folder cannot be written.
    """
    root = pathlib.Path(folder)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        for name, module in functions.graphs.graphs().items():
            (root / f"{name}.py").write_text(_source(name, module, title))
        for name, code in functions.generated.items():
            (root / f"{name}.generated.py").write_text(code)
        (root / "boundary.md").write_text(_boundary(functions, title))
        _write_drawing(root, draw(functions.graphs, title))


def _source(name: str, module: fx.GraphModule, title: str) -> str:
    text = f'"""{name} of {title}, written by autosplit."""\n\n{codegen.HEADER}\n\n'
    constants = ", ".join(codegen.constants(module))
    note = f"# constants: {constants}\n" if constants else ""
    return text + note + codegen.generate(name, module)


def _boundary(functions: SplitFunctions, title: str) -> str:
    graphs = functions.graphs
    parts = [f"# {title}", graph_table(functions, "github")]
    if graphs.backward and graphs.backward_input and graphs.backward_weight:
        for heading, giver, taker, kind in (
            ("Saved: F to the backward", graphs.forward, graphs.backward, Kind.SAVED),
            ("Deferred: I to W", graphs.backward_input, graphs.backward_weight, Kind.DEFERRED),
        ):
            rows = boundary_tensors(giver, taker, kind)
            count = f"{len(rows)} tensors, {size_text(total_bytes(rows))} of distinct storage."
            parts += [f"## {heading}", count, boundary_table(rows, "github")]
    return "\n\n".join(parts) + "\n"


def _write_drawing(root: pathlib.Path, dot: str) -> None:
    program = shutil.which("dot")
    if program is not None:
        try:
            svg = subprocess.run(
                [program, "-Tsvg"],
                input=dot,
                capture_output=True,
                text=True,
                check=True,
                timeout=_LAYOUT_SECONDS,
            ).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pass
        else:
            (root / "graph.svg").write_text(svg)
            (root / "graph.dot").unlink(missing_ok=True)
            return
    (root / "graph.dot").write_text(dot)
    (root / "graph.svg").unlink(missing_ok=True)
