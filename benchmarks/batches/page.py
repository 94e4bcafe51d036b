"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from . import engine, model, simulated
from .settings import Settings

TEMPLATE = """\
# Microbatches of different lengths

Written by `python -m benchmarks.batches`; do not edit. {environment}. Lengths are those of the
sections of this repository's documentation, in tokens, with a log-normal tail, cut at 2,048. An
action costs a linear and a quadratic term of the length, as of a transformer of width 1,024.

The ways to run a list: *in order* and *sorted* are the shortest step of any named schedule in the
order of the list, and sorted by length; *found* is the order of
[`schedule="auto"`](../../docs/schedules.md); *padded* is the shortest step of any named schedule
with all microbatches as long as the longest. *Bound*: the work of the slowest rank, or the longest
chain of one microbatch.
{sections}
## To reproduce

```sh
{commands}
```
"""

PARTS: dict[str, Part[Settings]] = {
    "simulated": Part(
        "Simulated steps",
        """\
Medians over drawn lists; *worst* is the largest of the found steps over those in order or sorted.
The limit is on what a rank keeps of the microbatches: none but that of padded 1F1B, and twice and
once what 1F1B with filled waits keeps of the list in its order.""",
        simulated.measure,
        simulated.render,
    ),
    "limits": Part(
        "Memory limits",
        """\
Lists of a drawn number of microbatches, with a limit of once what 1F1B with filled waits keeps of
the list in its order.""",
        simulated.measure_limits,
        simulated.render_limits,
    ),
    "planning": Part(
        "Finding the order",
        """\
CPU time to find the order of a list that is not remembered, with each of the limits above. The
first list of a number of microbatches also builds the named schedules for it.""",
        simulated.measure_planning,
        simulated.render_planning,
    ),
    "engine": Part(
        "Through the engine",
        """\
Processes whose stages sleep for as long as each action costs; a step is from its first action to
its last. One list for each setting, without a limit.""",
        engine.measure,
        engine.render,
    ),
    "model": Part(
        "A model on two ranks",
        """\
A transformer of two stages of three blocks, one thread a rank, one text a microbatch. *In order*,
*sorted* and *padded* run `zb-h1`, *found* runs `"auto"` after the steps that it measures. The ways
take turns, each list in all of them; ratios are medians over the lists. Simulated steps take
seconds that are fitted to the sizes of all actions.""",
        model.measure,
        model.render,
    ),
}

PAGE = Page("batches", TEMPLATE, PARTS, Settings)
