"""``python -m benchmarks.pipeline`` measures and writes ``benchmarks/pipeline/README.md``."""

from __future__ import annotations

import argparse
import pathlib

from autosplit.compare.run import compare, write_json, write_pictures
from autosplit.compare.settings import Comparison, Settings
from autosplit.report.comparison import comparison_table, durations_table

from ..environment import describe
from .overhead import Overhead, measure_all, table

HERE = pathlib.Path(__file__).parent
TEMPLATE = """\
# Fused against split, on two processes

Written by `python -m benchmarks.pipeline`; do not edit. {environment}.

The same LLaMA-like decoder (`examples.models:llama`, two stages) trains twice in one run, with
the fused and with the split backward, alternating step by step. Times are medians, the spread
is the interquartile range, the speed-up is the median over the pairs. *Ideal* is simulated from
the durations of F, I, W and B measured in this run; a first stage has no input gradient, so its
I is empty and its W carries the whole backward. `grad diff` is the largest difference from the
gradients of single-process autograd.

{comparison}

| schedule | M | speed-up | ideal | reached |
|:---------|--:|---------:|------:|--------:|
{reached}

![timelines](timeline.png)

Median duration of each action:

{durations}

## What splitting costs on one rank

The second of two stages of each example, one thread: plain autograd's forward and backward
against F, I and W of the `eager` backend, interleaved.

{overhead}

To reproduce: `python -m benchmarks.pipeline --steps {steps} --rounds {rounds}`
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the overhead table")
    options = parser.parse_args()
    settings = Settings(
        factory="examples.models:llama",
        overrides={},
        stages=2,
        ranks=2,
        schedules=("1f1b",),
        microbatches=(2, 4),
        weights="fill",
        steps=options.steps,
        warmup=2,
        learning_rate=1e-3,
        threads=1,
        timeout=120.0,
    )
    found = compare(settings)
    if found is None:
        raise SystemExit("run this without torchrun")
    write_json(found, HERE / "results.json")
    write_pictures(found, HERE)
    (HERE / "trace.json").unlink()
    text = render(found, measure_all(options.rounds), options.steps, options.rounds)
    (HERE / "README.md").write_text(text)
    print(text)


def render(found: Comparison, overhead: list[Overhead], steps: int, rounds: int) -> str:
    reached = [
        f"| {row.schedule} | {row.microbatches} | {row.speedup:.3f}x | {row.ideal_speedup:.3f}x "
        f"| {row.speedup / row.ideal_speedup:.1%} |"
        for row in found.rows
        if row.split
    ]
    return TEMPLATE.format(
        environment=describe(threads=1),
        comparison=comparison_table(found.rows, "github"),
        durations=durations_table(found.rows, "github"),
        reached="\n".join(reached),
        overhead=table(overhead),
        steps=steps,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
