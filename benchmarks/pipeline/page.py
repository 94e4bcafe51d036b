"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

import dataclasses

from ..page import HERE, Page, Part, option
from . import engine, fused, memory, overview, peers, standin

TEMPLATE = """\
# Pipelines: measured against their ideal and against torch's

Written by `python -m benchmarks.pipeline`; do not edit. {environment}. **Bold** figures miss
their target.
{sections}
## To reproduce

`python -m benchmarks.pipeline` measures everything; each part alone:

```sh
{commands}
```
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to measure."""

    steps: int = option(12, "timed steps of each contender")
    soak: int = option(2000, "steps of the soak")
    backends: tuple[str, ...] = option(peers.BACKENDS, "of the peers' table", peers.BACKENDS)
    microbatches: tuple[int, ...] = option(peers.COUNTS, "of the peers' table", peers.COUNTS)
    processes: int = option(2, "of the peers' table: one core each")
    ranks: tuple[int, ...] = option((*standin.UNITS,), "of the stand-ins' table", standin.UNITS)


PARTS: dict[str, Part[Settings]] = {
    "fused": Part(
        "Fused against split, on two processes",
        """\
The same LLaMA-like decoder (`examples.models:llama`, two stages) trains twice in one run, with
the fused and with the split backward, alternating step by step. Times are medians, the spread
is the interquartile range, the speed-up is the median over the pairs. *Ideal* is simulated from
the durations of F, I, W and B measured in this run; a first stage has no input gradient, so its
I is empty and its W carries the whole backward. `grad diff` is the largest difference from the
gradients of single-process autograd.""",
        lambda settings: fused.measure(settings.steps),
        fused.render,
    ),
    "standin": Part(
        "Every schedule against its own ideal",
        f"""\
The real engine, its messages and its clock, over stages that sleep for F, I and W, so that 4 and 8
ranks run on any two cores. A system wakes a sleeper late, so a stage sleeps that much less than its
time, as far as it can be foreseen. A rank's share of the model takes F + I + W as given, also where
it is cut into several stages. *Simulated* is the ideal of the schedule; *in flight* is the time
from one `step_async` to the next. Speed-ups are over the fused 1F1B of the same run; the ceiling of
any schedule at M = N is (2N-1)/N for F = I = W (Qi et al.). A message's latency counts against
every action it delays, so short actions (many stages on a rank) come off worst. None takes less
than {1e3 * standin.SHORTEST:.0f} ms: a rank of many stages has a larger share, and speed-ups are
for the same work.""",
        lambda settings: standin.measure_all(settings.ranks),
        standin.render,
    ),
    "memory": Part(
        "What a step allocates",
        f"""\
Decoder blocks, {memory.LAYERS} on every rank, M = 2P microbatches on P ranks: the peak of the
fullest rank, gradients and temporaries included. The formula, in the docstring of each schedule, is
that of activations alone.""",
        lambda settings: memory.measure_all(),
        memory.render,
    ),
    "peers": Part(
        "Beside torch.distributed.pipelining",
        """\
The same decoder on ranks of one thread each, two where no other number is named, the same batches,
in one run: forward and backward of a whole step, until all ranks are done. Contenders take turns,
in another order in each round; a ratio is the median of those of the same round, with its
quartiles. *In flight* has the optimizer, too, and is the time from one step to the next, without a
meeting of the ranks between them
(`step_async`; torch's `step` waits for the other rank no more than its messages need).
*Peak* is what the larger rank allocates in a step, parameters excluded.""",
        lambda settings: peers.measure_all(
            settings.steps, settings.backends, settings.microbatches, settings.processes
        ),
        peers.render,
    ),
    "engine": Part(
        "The engine itself",
        """\
Python's time for an action beyond the stage's own call, over 1F1B with stages that do nothing, on
one rank and with messages between two; and a soak of steps that watches the memory of a rank.""",
        lambda settings: engine.measure(settings.soak),
        engine.render,
    ),
}


README = HERE.parent / "README.md"
PAGE = Page("pipeline", TEMPLATE, PARTS, Settings, also={README: overview.written})
