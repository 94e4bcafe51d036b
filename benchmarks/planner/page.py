"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from ..results import Rows
from . import big
from .automatic import MICROBATCHES, SCHEDULE, STAGES, Amount, measure
from .tables import render_predictions, render_stages, render_steps

TEMPLATE = """\
# Plans: against cuts by hand, and against what was then measured

Written by `python -m benchmarks.planner`; do not edit. {environment}. **Bold** figures miss
their target.
{sections}
## To reproduce

`python -m benchmarks.planner` measures everything; each part alone:

```sh
{commands}
```
"""


def _render(rows: Rows) -> str:
    return f"""\
{render_steps(rows)}

### What the plan foretold

*Predicted* is what the plan says: the step simulated from the profiled blocks and the measured
link. *Measured* is the median of training steps afterwards, with a trainer of their own and new
batches; between the two, a machine that others use as well comes to run faster or slower, for
seconds or minutes. Stage times are medians of the recorded steps.

{render_predictions(rows)}

### Whether blocks add up

F, I and W of the automatic stages: the sum of their blocks as profiled one by one, with one call's
overhead, before; and what the trainer recorded (medians). The last column is the first, F + I + W,
over the second.

{render_stages(rows)}"""


PARTS: dict[str, Part[Amount]] = {
    "automatic": Part(
        "Automatic cuts against cuts by hand",
        f"""\
Whole models from `examples.families` (small sizes) and two lopsided ones, cut into {STAGES} stages
for two ranks with one thread each, {SCHEDULE}, M = {MICROBATCHES}, split backward, each schedule
built for its own stages. By hand: equal counts of layers, the embedding before the first and the
head after the last. The automatic cut is found as `autosplit.partition` finds it: both ranks
profile the model's blocks at once. Both ways then train in one run, alternating step by step; a
step is `forward_backward`, without the optimizer's update. Ratios are medians over pairs of steps,
the spread is their interquartile range. The last column is where a plan from FLOPs and bytes would
cut, without any profile. Processes keep what was freed (`MALLOC_TRIM_THRESHOLD_` and its like, see
[page.py](../page.py)), as allocators made for training do: how much malloc would else give back and
take anew in each step is a matter of chance, another in each trainer.""",
        measure,
        _render,
    ),
    "7b": Part(
        "Planning a 7B Llama",
        """\
`examples.families:llama_7b` (sequence 1024, one sample a microbatch) with its parameters on the
meta device, in a fresh process: captured whole, its blocks traced and split without memory, costs
from FLOPs and bytes, for a named accelerator's peak rates (with autocast to bfloat16) and for rates
measured on this machine, then solved for several N with M = 2N, 1F1B. *GiB* is the peak resident
memory of the process, libraries included. Steps by peak rates rank plans; real ones take about
twice as long.""",
        lambda amount: big.measure(tiny=amount.tiny),
        big.render,
    ),
}


PAGE = Page("planner", TEMPLATE, PARTS, Amount, keeping=True)
