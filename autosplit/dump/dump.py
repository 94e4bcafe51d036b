"""``dump()``: the generated graphs as readable, runnable files.

The graphs F, I and W as one picture in Graphviz's DOT, and the tensors on their boundaries. Blocks
that a model has several of are in a folder a kind; the graphs of the model call them.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from autosplit.passes.analysis.aliasing import is_free, storage_root
from autosplit.passes.graph import Kind, calls, inputs, origin_of, outputs
from autosplit.passes.lowering import codegen
from autosplit.passes.lowering.codegen import value_text
from autosplit.passes.subgraph import Subgraph, subgraph_of, subgraphs
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import size_text
from autosplit.text.files import writing

from .tables import BoundaryTensor, boundary_table, boundary_tensors, graph_table, total_bytes

_COLOURS = {"forward": "#4477AA", "backward_input": "#EE6677", "backward_weight": "#228833"}
_LETTERS = {"forward": "F", "backward_input": "I", "backward_weight": "W"}


def draw(graphs: Mapping[str, fx.GraphModule], title: str) -> str:
    """DOT text. Views are left out: an edge goes from the operator that allocated a tensor
    to the operators that read it. Edges between graphs are saved and deferred tensors, whose
    names are in the boxes that make them.

    Args:
        graphs: by name; others than F, I and W are not drawn.
        title: of the picture.
    """
    parts = {name: module for name, module in graphs.items() if name in _COLOURS}
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
    called = subgraph_of(node)
    if called is not None:
        return called.name
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
    code, that of every graph that was compiled so far, as ``forward.generated.py``. Where the
    graphs call blocks, each kind of block has a folder of its own, with the like of these.

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
        _write_drawing(root, draw(calling, title))
        for kind, halves in kinds.items():
            (root / kind).mkdir(exist_ok=True)
            for half, module in halves.items():
                (root / kind / f"{half}.py").write_text(_source(half, module, kind, {}))
            _write_drawing(root / kind, draw(halves, f"{kind} of {title}"))
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
    half = next(half for half in _COLOURS if called.name.endswith(f"_{half}"))
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
