"""``results.json`` as a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from ..page import Page, Part
from ..results import Rows, table
from .contenders import CONTENDERS
from .measure import Settings, measure_all
from .targets import (
    Cell,
    Figure,
    adapter,
    against_compiled,
    against_eager,
    against_torch,
    cells,
    memory,
    ran,
    verdicts,
)

TEMPLATE = """\
# Under torch.distributed.pipelining: its stages, ours, and our engine

Written by `python -m benchmarks.torch_pipelining`; do not edit. {environment}.
{sections}
## To reproduce

```sh
{commands}
```
"""

_SECTIONS = """\
`examples.models:llama` with {settings}; {rounds} rounds.

### Targets

{verdicts}

### Time of a step

Medians in ms, with the range between the quartiles.

{times}

Ratios are medians of those of the same round, with their quartiles; **bold** ones miss their
target. *Fastest eager*: of torch's stage, ours and our engine.

{ratios}

### Peak memory of activations

MiB that a step from no gradients holds at its most, but for parameters and for what is left as
gradients, on the rank where that is more.

{memory}

### Gradients

The largest difference from plain autograd in one process, over the largest gradient of its stage.

{differences}

### Lines changed

Of the program with torch's eager stages, by a user.

{lines}
{errors}"""


def render(rows: Rows) -> str:
    """All that rows say, target by target."""
    return _SECTIONS.format(
        settings=", ".join(sorted({row["settings"] for row in rows})),
        rounds=" or ".join(
            str(each) for each in sorted({len(row["rounds"]) for row in rows if row["rounds"]})
        ),
        verdicts="\n".join(f"- {each}" for each in verdicts(rows)),
        times=_by_contender(rows, _time),
        ratios=_ratios(rows),
        memory=_by_contender(
            rows, lambda row: f"{row['peak'] / 2**20:.1f}", ("ours over torch", memory)
        ),
        differences=_by_contender(
            rows, lambda row: f"{row['difference']:.1e}".replace("0.0e+00", "0")
        ),
        lines=_lines(),
        errors=_errors(rows),
    )


def _time(row: dict[str, Any]) -> str:
    low, high = min(row["rounds"]), max(row["rounds"])
    if len(row["rounds"]) > 1:
        low, _, high = statistics.quantiles(row["rounds"], n=4, method="inclusive")
    return f"{1e3 * statistics.median(row['rounds']):.0f} ±{5e2 * (high - low):.0f}"


def _by_contender(
    rows: Rows,
    shown: Callable[[dict[str, Any]], str],
    *figures: tuple[str, Callable[[Cell], Figure | None]],
) -> str:
    """A line a cell, a column a contender, and further columns."""
    named = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
    lines = [
        [
            name,
            *(_shown(cell, contender, shown) for contender in named),
            *(str(figure(cell) or "") for _, figure in figures),
        ]
        for name, cell in cells(rows).items()
    ]
    return table(["schedule", *named, *(title for title, _ in figures)], lines)


def _shown(cell: Cell, contender: str, shown: Callable[[dict[str, Any]], str]) -> str:
    if contender not in cell:
        return ""
    return shown(cell[contender]) if ran(cell, contender) else "fails"


def _ratios(rows: Rows) -> str:
    figures = (against_torch, against_compiled, against_eager, adapter)
    lines = [
        [name, *(str(figure(cell) or "") for figure in figures)]
        for name, cell in cells(rows).items()
    ]
    headers = [
        "schedule",
        "torch over ours, eager",
        "torch compiled over ours, Inductor",
        "fastest eager over ours, Inductor",
        "ours over our engine, eager",
    ]
    return table(headers, lines)


def _lines() -> str:
    return table(
        ["program", "lines"],
        [[each.name, str(each.lines_changed())] for each in CONTENDERS.values()],
    )


def _errors(rows: Rows) -> str:
    """Every error once, as it was said, and by whom."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["error"]:
            said.setdefault(row["error"], []).append(row["name"])
    return "".join(_error(error, names) for error, names in said.items()) and (
        "\n### What failed\n" + "".join(_error(error, names) for error, names in said.items())
    )


def _error(error: str, names: list[str]) -> str:
    return f"\n{'; '.join(names)}:\n\n```\n{error}\n```\n"


PAGE = Page(
    "torch_pipelining",
    TEMPLATE,
    {
        "steps": Part(
            "Steps of a decoder",
            """\
A LLaMA-like decoder on two processes with one thread each, under every schedule of torch's: forward
and backward of a whole step, until both ranks are done. The contenders of a row take turns in one
run, in another order in each round. Each is a [program](programs) of its own: torch's
`PipelineStage`, eager and after `module.compile()`; the same without donated buffers, where that
fails; `SplitPipelineStage`, eager and with `backend="inductor"`; and `PipelineTrainer` with every
rank's actions in torch's order.""",
            measure_all,
            render,
        )
    },
    Settings,
    keeping=True,
)
