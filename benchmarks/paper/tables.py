"""The tables, what each is made of, and its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..results import Results, Rows
from . import (
    bubble,
    cells,
    concatenation,
    memory,
    occupancy,
    peers,
    scaling,
    stages,
    throughput,
)
from .settings import Settings

TEMPLATE = """\
# {title}

Written by `python -m benchmarks.paper {name}`; do not edit. {environment}.

{about}

{body}

## To reproduce

```sh
{commands}
```
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """One table or figure of the paper.

    Attributes:
        title: its heading.
        about: what was done.
        needs: names of measurements.
        render: rows by measurement -> table and verdicts.
    """

    title: str
    about: str
    needs: tuple[str, ...]
    render: Callable[[Mapping[str, Rows]], str]


MEASUREMENTS: Mapping[str, Callable[[Settings, Results], Iterable[dict[str, Any]]]] = {
    "stages": lambda settings, results: stages.measure(settings),
    "cells": lambda settings, results: cells.measure(settings),
    "peers": lambda settings, results: peers.measure(settings),
    "scaling": lambda settings, results: scaling.measure(settings, results.rows("stages")),
    "joined": lambda settings, results: concatenation.measure(settings),
}
"""In the order in which they are made: the stand-in stages take the times of real ones."""

_CELLS = """\
Llama, BERT, Mamba and ResNet from transformers' configurations, small, whole
([families](../../../examples/families/automatic.py)), train on text and digits over two processes
with one thread each: naive with one microbatch, GPipe and 1F1B-1 with two, 1F1B-2 with four. Each
trainer cuts its model into two stages for the schedule that it runs, fused or split, from one
profile of the model's blocks. Fused and split alternate step by step in one run; a step is forward,
backward and AdamW until all ranks are done."""

TABLES: Mapping[str, Table] = {
    "throughput": Table(
        "Throughput with and without split",
        _CELLS
        + """ Times are medians ± interquartile range, the speed-up is the median over the
pairs. *Ideal* is simulated from the durations measured in this run, the last column follows from
the bubble ratios of the paper's figure. **Bold** speed-ups are no gain.""",
        ("cells", "peers"),
        throughput.render,
    ),
    "memory": Table(
        "Peak memory with and without split",
        _CELLS
        + " The peak is the most bytes of tensors that a rank holds at any time of a step: what it "
        "allocates\nin the step, its parameters and its optimizer's state.",
        ("cells",),
        memory.render,
    ),
    "bubble": Table(
        "Bubble ratios, formula against measured",
        "The bubble ratio is idle time over total time of the ranks in one step.",
        ("cells", "stages", "scaling"),
        bubble.render,
    ),
    "occupancy": Table(
        "F, I and W in a step",
        "How the time of a stage and of a step is divided.",
        ("cells", "stages"),
        occupancy.render,
    ),
    "scaling": Table(
        "Scaling with the number of ranks",
        """\
Stand-in stages: the real engine, its messages and its clock, over stages that sleep, so that N
ranks run on any two cores. F : I : W are those that the families' middle stages take by
themselves on one core ([occupancy](../occupancy/README.md)), all stages alike. Speed-up of split
over fused, M = 1, N, N and 2N.""",
        ("stages", "scaling"),
        scaling.render,
    ),
    "concatenation": Table(
        "W one by one, fused, or concatenated",
        """\
Each family in two stages, one a process with one thread, under GPipe with every W at the end
(`weights="2bp"`). Three `PipelineTrainer`s take turns step by step: `accumulation="exact"`, W *one
by one*; `"fused"`, where the matrix product adds into the sum; `"concatenated"`, one call of W for
all microbatches of a stage, with one product for each parameter, as the paper does it. *W of a
step*: of both ranks together. *Peak*: of the larger rank. *Distance*: the largest of a gradient
concatenated from one by one, over the norm of all.""",
        ("joined",),
        concatenation.render,
    ),
}


def needed(tables: Iterable[str]) -> list[str]:
    """The measurements that some tables are made of, in order."""
    wanted = {need for name in tables for need in TABLES[name].needs}
    return [name for name in MEASUREMENTS if name in wanted]


def complete(name: str, results: Results) -> bool:
    """Whether a table has all its measurements; a peer's may be missing."""
    return all(results.rows(need) for need in TABLES[name].needs if need not in OPTIONAL)


OPTIONAL = ("peers",)


def page(name: str, results: Results, command: str, environment: str) -> str:
    """``README.md`` of a table."""
    table = TABLES[name]
    parts = [results.parts[need] for need in table.needs if need in results.parts]
    environments = list(dict.fromkeys(part["environment"] for part in parts)) or [environment]
    return TEMPLATE.format(
        title=table.title,
        name=name,
        environment="; ".join(environments),
        about=table.about,
        body=table.render({need: results.rows(need) for need in table.needs}),
        commands=command,
    )
