"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from . import engine, limits, model, simulated
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
Two ranks train a transformer of two stages of three blocks under a `memory_limit` of what a step of
four texts of 1,152 tokens takes with `1f1b`, on lists of 1 to 16 texts; of one list in ten, the
texts are twice as long. A list for which no schedule is within the limit is refused, and the others
run. *Limit kept*: the bytes that the trainer records never exceed it. *By storages*: nor do the
bytes of all storages that operators of the step read or return, each counted for as long as it
lives.""",
        limits.measure,
        limits.render,
    ),
    "planning": Part(
        "Finding the order",
        """\
Time to find the order of a list that is not remembered, on one core, with each of the limits above:
the least of several times. The first list of a number of microbatches also builds the named
schedules for it.""",
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
