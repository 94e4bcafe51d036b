"""``report()`` of a model that is split graph by graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from autosplit.autograd.parameter_hooks import hooks_text
from autosplit.dump.tables import share_text, short_source
from autosplit.text.names import few

if TYPE_CHECKING:
    from .partial_model import Partial


def partial_report(partial: Partial, title: str) -> str:
    """Tables of graphs and breaks, parameters outside graphs, and the deferred share."""
    count = sum(part.is_split for part in partial.parts)
    sections = [
        f"{title} is split graph by graph: Dynamo found {len(partial.parts)}, "
        f"{count} of them split.",
        *([partial.reason] if partial.reason else []),
        _parts(partial),
    ]
    if partial.breaks:
        rows = [[short_source(each.line), each.reason] for each in partial.breaks]
        sections.append("Where graphs end:\n\n" + _table(rows, ["line", "because"]))
    ordinary = _ordinary(partial)
    if ordinary:
        sections.append("Gradients from an ordinary backward:\n\n" + ordinary)
    sections += [_share(partial), *hooks_text(partial.named_parameters())]
    return "\n\n".join(sections)


def _parts(partial: Partial) -> str:
    rows = [
        [
            index,
            part.lines,
            few(part.parameters, 4),
            partial.calls[part],
            f"{part.weight_flops[0] / 1e9:.3f}",
            part.state,
        ]
        for index, part in enumerate(partial.parts)
    ]
    headers = ["graph", "lines", "parameters", "calls", "W GFLOPs", "state"]
    return _table(rows, headers) if rows else "(no graph)"


def _ordinary(partial: Partial) -> str:
    if partial.history is None:
        return ""
    names = {parameter: name for name, parameter in partial.named_parameters()}
    rows = [
        [names.get(parameter, "(not the model's)"), f"{flops / 1e9:.3f}"]
        for parameter, flops in partial.history.ordinary.items()
    ]
    return _table(rows, ["parameter", "GFLOPs"]) if rows else ""


def _share(partial: Partial) -> str:
    history = partial.history
    if history is None:
        return "No call needed a gradient yet."
    names = f"{len(history.deferred)} of {len(history.deferred | history.ordinary.keys())}"
    share = share_text(*partial.weight_flops)
    text = f"Deferred: the gradients of {names} parameters, {share}."
    if not history.unknown:
        return text
    return (
        f"{text} What else the backward of {few(history.unknown, 4)} computes is not known: Python "
        "functions that no graph holds may reach any parameter, whose gradient is then ready when "
        "backward() ends."
    )


def _table(rows: Sequence[Sequence[object]], headers: list[str]) -> str:
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True)
