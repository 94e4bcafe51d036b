"""Start a comparison's ranks, and write what they found."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from autosplit.pipeline.engine.default_group import process_group
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.simulation.activation_memory import memory_over_time
from autosplit.report.timelines import Panel, write_timelines
from autosplit.text.files import write_text

from .rank import compare_on_rank
from .settings import Comparison, Settings

# A comparison as a whole may take this many single waits.
_WAITS = 40


def compare(settings: Settings) -> Comparison | None:
    """Run a comparison on ranks of this machine, or as one rank of a torchrun launch.

    Returns:
        What was found; None on ranks other than 0 under torchrun.

    Raises:
        PipelineError: a rank failed; carries its error.
    """
    if "RANK" in os.environ:
        with process_group(settings.timeout):
            found = compare_on_rank(settings)
        return found if os.environ["RANK"] == "0" else None
    return launch(
        compare_on_rank,
        settings.ranks,
        (settings,),
        timeout=settings.timeout * _WAITS,
        threads=settings.threads,
    )[0]


def write_json(comparison: Comparison, file: pathlib.Path) -> None:
    """``{"rows": [...]}`` with the fields of ``Row``."""
    rows: list[dict[str, Any]] = [dataclasses.asdict(row) for row in comparison.rows]
    write_text(file, json.dumps({"rows": rows}, indent=2) + "\n")


def write_timelines_of(comparison: Comparison, folder: pathlib.Path) -> list[pathlib.Path]:
    """``write_timelines``, on whose page each step is above what it would be if nothing were lost;
    returns the paths.
    """
    pairs = zip(comparison.rows, comparison.timelines, strict=True)
    titled = [(row.title, timeline) for row, timeline in pairs]
    title = f"{comparison.rows[0].stages} stages"
    return write_timelines(titled, folder, title=title, panels=[*_panels(comparison)])


def _panels(comparison: Comparison) -> Iterator[Panel]:
    """What was measured, each above what it would be if nothing were lost.

    Under the bars of both is what a rank keeps between F and W, from the sizes of its graphs'
    boundaries.
    """
    steps = zip(
        comparison.rows, comparison.timelines, comparison.ideals, comparison.memory, strict=True
    )
    for row, timeline, ideal, sizes in steps:
        for how, each in (("measured", timeline), ("simulated", ideal)):
            curves = [memory_over_time(each, sizes, rank)[1:] for rank in range(each.ranks)]
            yield Panel(f"{row.title}, {how}", each, curves)
