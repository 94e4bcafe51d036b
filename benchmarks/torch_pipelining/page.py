"""``results.json`` as a page: what was aimed at, and whether it was met."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from autosplit.text.figures import quartiles

from ..page import Page, Part
from ..results import Rows, mark, ratios, table
from .contenders import COMPILED, CONTENDERS, ENGINE, INDUCTOR, OURS, TORCH, UNDONATED
from .measure import Settings, measure_all

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

{verdicts}

Medians of a step in ms, with the range between the quartiles:

{times}

Ratios are medians of those of the same round, with their quartiles; **bold** ones miss their
target. *Fastest eager*: of torch's stage, ours and our engine. *Peak* is what a step from no
gradients holds at its most, but for parameters and for what is left as gradients, on the rank where
that is more.

{ratios}
{errors}"""

Cell = Mapping[str, dict[str, Any]]
"""The rows of one schedule and M that ran, by contender."""

Range = tuple[float, float, float]


def _over(over: tuple[str, ...], under: str) -> Callable[[Cell], Range | None]:
    """Quartiles of turns of the same round; of several, over the one with the least median."""

    def ratio(cell: Cell) -> Range | None:
        there = [name for name in over if name in cell]
        if not there or under not in cell:
            return None
        fastest = min(there, key=lambda name: statistics.median(cell[name]["rounds"]))
        return quartiles(ratios(cell[fastest]["rounds"], cell[under]["rounds"]))

    return ratio


def _compiled(cell: Cell) -> Range | None:
    return _over((COMPILED if COMPILED in cell else UNDONATED,), INDUCTOR)(cell)


def _peak(cell: Cell) -> Range | None:
    if TORCH not in cell or OURS not in cell:
        return None
    ratio = cell[OURS]["peak"] / cell[TORCH]["peak"]
    return ratio, ratio, ratio


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of each schedule and M, and what it should be.

    Attributes:
        title: the head of its column.
        of: least quartile, median and greatest, if there is one.
        fused: the target in schedules without I and W.
        split: in those with.
        most: whether targets are the most, rather than the least.
    """

    title: str
    of: Callable[[Cell], Range | None]
    fused: float
    split: float
    most: bool = False

    def met(self, cell: Cell, value: float) -> bool:
        aim = self.split if next(iter(cell.values()))["split"] else self.fused
        return value <= aim if self.most else value >= aim

    def shown(self, cell: Cell) -> str:
        found = self.of(cell) if cell else None
        if found is None:
            return ""
        low, value, high = found
        text = mark(f"{value:.3f}x", self.met(cell, value))
        return text if low == high else f"{text} ({low:.2f}-{high:.2f})"

    def verdict(self, every: Mapping[str, Cell]) -> str:
        values = {name: found[1] for name, each in every.items() if (found := self.of(each))}
        missed = [f"{n} {v:.3f}x" for n, v in values.items() if not self.met(every[n], v)]
        said = f"missed in {', '.join(missed)}" if missed else f"met in all {len(values)} rows"
        aims = f"{self.split:g}x in zero-bubble schedules, {self.fused:g}x in others"
        return f"- {self.title}: at {'most' if self.most else 'least'} {aims}; {said}."


FIGURES = (
    Figure("torch over ours, eager", _over((TORCH,), OURS), 0.99, 1.05),
    Figure("torch compiled over ours, Inductor", _compiled, 1.0, 1.3),
    Figure("fastest eager over ours, Inductor", _over((TORCH, OURS, ENGINE), INDUCTOR), 1.0, 1.0),
    Figure("ours over our engine, eager", _over((OURS,), ENGINE), 1.03, 1.03, most=True),
    Figure("peak, ours over torch's", _peak, 1.0, 0.8, most=True),
)


def render(rows: Rows) -> str:
    """All that rows say, target by target."""
    every: dict[str, dict[str, dict[str, Any]]] = {}
    said: dict[str, list[str]] = {}
    for row in rows:
        cell = every.setdefault(row["name"].partition(": ")[0], {})
        if row["error"]:
            said.setdefault(row["error"], []).append(row["name"])
        else:
            cell[row["contender"]] = row
    named = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
    tried = {row["name"] for row in rows}
    times = [
        [name, *(_time(cell.get(each), f"{name}: {each}" in tried) for each in named)]
        for name, cell in every.items()
    ]
    figures = [[name, *(each.shown(cell) for each in FIGURES)] for name, cell in every.items()]
    return _SECTIONS.format(
        settings=", ".join(sorted({row["settings"] for row in rows})),
        rounds=" or ".join(sorted({str(len(row["rounds"])) for row in rows if row["rounds"]})),
        verdicts="\n".join(each.verdict(every) for each in FIGURES),
        times=table(["schedule", *named], times),
        ratios=table(["schedule", *(each.title for each in FIGURES)], figures),
        errors="".join(
            f"\n{'; '.join(names)}:\n\n```\n{error}\n```\n" for error, names in said.items()
        ),
    )


def _time(row: dict[str, Any] | None, tried: bool) -> str:
    if row is None:
        return "fails" if tried else ""
    low, middle, high = quartiles(row["rounds"])
    return f"{1e3 * middle:.0f} ±{5e2 * (high - low):.0f}"


PAGE = Page(
    "torch_pipelining",
    TEMPLATE,
    {
        "steps": Part(
            "Steps of a decoder",
            """\
A LLaMA-like decoder on two processes with one thread each, under every schedule of torch's: forward
and backward of a whole step, until both ranks are done. The contenders of a row take turns in one
run, in another order in each round: torch's `PipelineStage`, eager and after `module.compile()`;
the same without donated buffers, where that fails; `SplitPipelineStage`, eager and with
`backend="inductor"`; and `PipelineTrainer` with every rank's actions in torch's order.""",
            measure_all,
            render,
        )
    },
    Settings,
    keeping=True,
)
