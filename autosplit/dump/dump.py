"""``dump()``: the generated graphs as readable, runnable files."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

from torch import fx

from autosplit.passes.graph import Kind
from autosplit.passes.lowering import codegen
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.byte_sizes import size_text
from autosplit.text.writing import writing

from .boundary import boundary_tensors, total_bytes
from .drawing import draw
from .tables import boundary_table, graph_table

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
