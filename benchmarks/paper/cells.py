"""Every family under every schedule of the paper, fused against split, on two real ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from autosplit.compare import settings as comparison
from autosplit.compare.run import compare
from autosplit.errors import PipelineError

from ..results import Rows
from .settings import Settings
from .theory import BY_LABEL, SCHEDULES

RANKS = 2


@dataclasses.dataclass(frozen=True)
class Cells(comparison.Settings):
    """The paper's schedules, each with its own number of microbatches; ``schedules`` are labels."""

    @property
    def cases(self) -> list[tuple[str, int]]:
        chosen = (BY_LABEL[label] for label in self.schedules)
        return [(each.name, each.microbatches(self.ranks)) for each in chosen]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Two rows a cell; fused and split alternate step by step in one run."""
    for family in settings.families:
        found = compare(
            Cells(
                factory=f"examples.families.automatic:{family}",
                overrides={name: str(value) for name, value in settings.overrides(family).items()},
                stages=RANKS,
                ranks=RANKS,
                schedules=settings.schedules,
                microbatches=tuple(
                    BY_LABEL[label].microbatches(RANKS) for label in settings.schedules
                ),
                weights=None,
                steps=settings.steps,
                warmup=2,
                learning_rate=1e-3,
                threads=1,
                timeout=120.0,
                profiling=settings.profiling,
            )
        )
        if found is None:
            raise PipelineError("run this without torchrun: it starts its ranks itself")
        labels = [label for label in settings.schedules for _ in (False, True)]
        for label, row in zip(labels, found.rows, strict=True):
            yield {
                "name": f"{family}, {label}, {'split' if row.split else 'fused'}",
                "family": family,
                "label": label,
                **dataclasses.asdict(row),
            }


@dataclasses.dataclass(frozen=True)
class Cell:
    """The two rows of one family and schedule."""

    family: str
    label: str
    fused: dict[str, Any]
    split: dict[str, Any]

    @property
    def memory_ratio(self) -> float:
        """Split over fused, of the rank with the largest peak."""
        return float(max(self.split["peak_bytes"]) / max(self.fused["peak_bytes"]))


def pair(rows: Rows) -> list[Cell]:
    """Cells by family, then in the paper's order of schedules."""
    found = {(row["family"], row["label"], row["split"]): row for row in rows}
    families = dict.fromkeys(row["family"] for row in rows)
    return [
        Cell(
            family,
            each.label,
            found[family, each.label, False],
            found[family, each.label, True],
        )
        for family in families
        for each in SCHEDULES
        if (family, each.label, True) in found
    ]
