"""Start a comparison's ranks, and write what they found."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from autosplit.pipeline.engine.default_group import process_group
from autosplit.pipeline.engine.launch import launch
from autosplit.report.timelines import write_timelines
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
    """``write_timelines``, in whose trace each step is above what it would be if nothing were lost;
    returns the paths.
    """
    rows, both = [], []
    for row, timeline, ideal in zip(
        comparison.rows, comparison.timelines, comparison.ideals, strict=True
    ):
        rows.append((row.title, timeline))
        both += [(f"{row.title}, measured", timeline), (f"{row.title}, simulated", ideal)]
    title = f"{comparison.rows[0].stages} stages"
    return write_timelines(rows, folder, title=title, trace_rows=both)
