"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from pathlib import Path

from ..page import Page, Part
from ..results import Results
from . import cells, scaling, stages
from .settings import Settings

TEMPLATE = """\
# The tables and figures of 2BP, measured again

Written by `python -m benchmarks.paper`; do not edit. {environment}. The paper is Rae, Lee and
Richings, [arXiv 2405.18047](https://arxiv.org/abs/2405.18047). Models are Llama, BERT, Mamba and
ResNet from transformers' configurations, small ([families](../../examples/families)).
{sections}
## To reproduce

```sh
{commands}
```
"""

PARTS: dict[str, Part[Settings]] = {
    "cells": Part(
        "Throughput, memory and bubbles with and without split",
        """\
Whole models train on text and digits over two processes with one thread each: naive with one
microbatch, GPipe and 1F1B-1 with two, 1F1B-2 with four. Each trainer cuts its model into two stages
for the schedule that it runs, fused or split, from one profile of the model's blocks. Fused and
split alternate step by step in one run; a step is forward, backward and AdamW until all ranks are
done. Times are medians ± interquartile range, the speed-up is the median over the pairs, **bold**
where there is none. *Ideal* is simulated from the durations measured in this run; the next column
follows from the bubble ratios of the paper's figure. *Bubble* is idle time over total time of the
ranks. *Peak*: the most bytes of tensors that a rank holds at any time of a step, its parameters and
its optimizer's state among them, of the larger rank.""",
        cells.measure,
        cells.render,
    ),
    "stages": Part(
        "F, I and W of a stage",
        """\
The middle one of three stages that are cut by measured cost, alone on one core. The last column is
what I hands to W over what F keeps, in bytes. The paper's concatenated W of several microbatches is
[`accumulation="joined"`](../accumulation/README.md).""",
        stages.measure,
        stages.render,
    ),
    "scaling": Part(
        "Scaling with the number of ranks",
        """\
Stand-in stages: the real engine, its messages and its clock, over stages that sleep, so that N
ranks run on any two cores. F : I : W are those that the families' middle stages take by themselves,
all stages alike. Speed-up of split over fused, M = 1, N, N and 2N.""",
        lambda settings: scaling.measure(
            settings, Results.read(Path(__file__).parent / "results.json").rows("stages")
        ),
        scaling.render,
    ),
}

PAGE = Page("paper", TEMPLATE, PARTS, Settings)
