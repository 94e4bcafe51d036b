"""Draw F, I and W as three columns of operators, with an arrow for each tensor that crosses.

       F                I                W
    [ addmm ] --------------------->  [ mm  ]     8.00 KiB
    [ gelu  ] ---> [ gelu_backward ]
                   [ mm            ] ------------> ...

Views are left out: an arrow ends at the operator that reads a view of the tensor.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import fx

from autosplit.passes.analysis.aliasing import is_view, producer, storage_bytes, storage_root
from autosplit.passes.analysis.operators import overload
from autosplit.passes.graph import SUBGRAPH, Kind, computed_outputs, inputs, outputs, value_text
from autosplit.text.figures import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_OPERATORS = 400
"""A graph with more is not drawn: nobody could read it."""

_COLUMNS = ("forward", "backward_input", "backward_weight")
_TITLES = ("F  forward", "I  backward input", "W  backward weight")
_FILLS = ("#0072B2", "#E69F00", "#009E73")  # as in timelines
_BOX, _GAP = 3.6, 2.2  # inches: the width of a box, and between two columns
_LINE = 0.24  # inches: the height of a row
_LONG = 44  # characters of a label that leaves no room for a shape


Place: TypeAlias = "tuple[int, int]"
"""A column and a row."""


class Crossing(NamedTuple):
    """A tensor that crosses from one graph to another.

    Attributes:
        name: the tensor's name on the boundary.
        source: the operator that computes the tensor.
        target: an operator that reads the tensor.
        bytes: the bytes of the tensor's storage.
    """

    name: str
    source: Place
    target: Place
    bytes: int


def operator_rows(graph: fx.Graph) -> dict[fx.Node, int]:
    """Maps each node of a column to its row: the graph's inputs and tangents, then its operators in
    order.
    """
    arrived = [n for n in inputs(graph, Kind.INPUT, Kind.TANGENT).values() if n.users]
    computed = [n for n in graph.nodes if n.op == "call_function" and not _passes_through(n)]
    return {node: row for row, node in enumerate([*arrived, *computed])}


def _passes_through(node: fx.Node) -> bool:
    """Whether the node is a view or an item of its first argument."""
    return node.target is operator.getitem or is_view(node)


def crossings(graphs: Mapping[str, fx.GraphModule]) -> Iterator[Crossing]:
    """Yield the tensors that cross from F to I or W, and from I to W, once for each reader."""
    sources: dict[str, tuple[Place, int]] = {}  # of tensors that earlier columns leave
    for column, name in enumerate(_COLUMNS):
        graph = graphs[name].graph
        rows = operator_rows(graph)
        arrived = inputs(graph, Kind.SAVED, Kind.DEFERRED)
        roles = {node: role.name for role, node in arrived.items()}
        for node in roles:
            if roles[node] in sources:
                source, size = sources[roles[node]]
                for row in sorted({rows[reader] for reader in _readers(node, rows)}):
                    yield Crossing(roles[node], source, (column, row), size)
        sent = {}
        for role, value in outputs(graph, Kind.SAVED, Kind.DEFERRED):
            maker = producer(value)
            if maker in roles and roles[maker] in sources:  # it only passes through
                sent[role.name] = sources[roles[maker]]
            elif maker in rows:
                sent[role.name] = (column, rows[maker]), storage_bytes(storage_root(value))
        sources |= sent


def _readers(node: fx.Node, rows: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the operators that read a value, also through views."""
    for user in node.users:
        if user in rows:
            yield user
        elif user.op == "call_function":
            yield from _readers(user, rows)


def draw_graphs(graphs: Mapping[str, fx.GraphModule], path: Path, title: str) -> bool:
    """Draw F, I and W into a file, if matplotlib is installed and the graphs are small enough.

    Args:
        graphs: the graphs by name: forward, backward_input, backward_weight.
        path: the file; its suffix names the format.
        title: the title of the picture.

    Returns:
        Whether the picture was drawn.
    """
    if not graphs.keys() >= {*_COLUMNS}:
        return False
    columns = [operator_rows(graphs[name].graph) for name in _COLUMNS]
    most = max(map(len, columns))
    if most > MOST_OPERATORS:
        return False
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    width, height = 3 * _BOX + 2 * _GAP + 0.4, _LINE * (most + 4)
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.2, width - 0.2), ylim=(_LINE * (most + 0.5), -3.5 * _LINE))
    axes.set_axis_off()
    axes.text(0, -2.4 * _LINE, title, fontsize=11, fontweight="bold", parse_math=False)
    # The rows of a short column are further apart, so that arrows do not end in one corner.
    lines = [_LINE * min(8.0, most / max(1, len(rows))) for rows in columns]
    gradients = _gradients(graphs["backward_weight"].graph)
    for column, rows in enumerate(columns):
        _draw_column(axes, column, rows, lines[column], gradients)
    sent: dict[Place, dict[str, int]] = defaultdict(dict)
    for crossing in crossings(graphs):
        _draw_arrow(axes, crossing, lines)
        sent[crossing.source][crossing.name] = crossing.bytes
    for (column, row), sizes in sent.items():
        place = _left(column) + _BOX + 0.04, row * lines[column] - 0.02
        text = size_text(sum(sizes.values()))
        axes.text(*place, text, color="#666666", fontsize=6, va="bottom")
    figure.savefig(path, dpi=110)
    return True


def _gradients(graph: fx.Graph) -> dict[fx.Node, str]:
    """Map each operator that computes the gradient of a parameter to the parameter."""
    makers = [
        (producer(value), role.name) for role, value in computed_outputs(graph, Kind.PARAMETER_GRAD)
    ]
    return {maker: name for maker, name in makers if SUBGRAPH not in maker.meta}


def _left(column: int) -> float:
    return column * (_BOX + _GAP)


def _draw_column(
    axes: Axes,
    column: int,
    rows: Mapping[fx.Node, int],
    line: float,
    gradients: Mapping[fx.Node, str],
) -> None:
    from matplotlib.patches import Rectangle

    left, fill = _left(column), _FILLS[column]
    axes.text(left, -0.8 * _LINE, _TITLES[column], color=fill, fontsize=10, fontweight="bold")
    text: dict[str, Any] = {"color": "#222222", "fontsize": 7, "va": "center_baseline"}
    for node, row in rows.items():
        is_input = node.op == "placeholder"
        box = Rectangle(
            (left, row * line - 0.4 * _LINE),
            _BOX,
            0.8 * _LINE,
            facecolor="#F4F4F4" if is_input else fill,
            alpha=1.0 if is_input else 0.25,
            edgecolor="#999999",
            linewidth=0.4,
        )
        axes.add_patch(box)
        value = node.meta.get("val")
        label = f"{_label(node)}  {gradients.get(node, '')}"
        has_room = len(label) < _LONG and not isinstance(value, tuple | list)
        shape = value_text(value) if has_room else ""
        axes.text(left + 0.06, row * line, label, **text, parse_math=False)
        axes.text(left + _BOX - 0.06, row * line, shape, ha="right", **text, parse_math=False)


def _label(node: fx.Node) -> str:
    """An operator's name without its overload; the name of an input or of a called block."""
    if SUBGRAPH in node.meta:
        return str(node.meta[SUBGRAPH].name)
    op = overload(node)
    if op is not None:
        return str(op.overloadpacket).rpartition(".")[2]
    return node.name if node.op == "placeholder" else getattr(node.target, "__name__", node.name)


def _draw_arrow(axes: Axes, crossing: Crossing, lines: Sequence[float]) -> None:
    from matplotlib.patches import FancyArrowPatch

    (from_column, from_row), (to_column, to_row) = crossing.source, crossing.target
    start = _left(from_column) + _BOX, from_row * lines[from_column]
    end = _left(to_column), to_row * lines[to_column]
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=6,
        linewidth=0.6,
        color=_FILLS[from_column],
        alpha=0.35 if to_column - from_column > 1 else 0.7,
        zorder=0,
    )
    axes.add_patch(arrow)
