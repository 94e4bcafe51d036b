"""``python -m benchmarks.coverage`` compares and writes its ``README.md`` and ``docs/tried.md``."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import math
import pathlib
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from ..page import parse
from ..results import Results, Rows, describe, sources
from .examine import examine
from .judge import FACTOR, ROUNDINGS
from .render import GOOD, category, render
from .results import row, tally
from .subject import Subject
from .tried import render as tried

HERE = pathlib.Path(__file__).parent
TRIED = HERE.parents[1] / "docs" / "tried.md"
PIPELINES = "pipelines"  # a part of the results, asked for as transformers with --pipeline
PARTS = ("pieces", "modules", "opinfo", "transformers", "libraries", "breaks", "generated")
RUN = 20  # examples of one run of hypothesis
SAVE_SECONDS = 20

Examination = Callable[[], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", default="", help="only cases whose name matches this pattern")
    parser.add_argument("--samples", type=int, default=6, help="inputs for each module at most")
    parser.add_argument("--op-samples", type=int, default=3, help="inputs for each operator")
    parser.add_argument(
        "--shard", default="1/1", help="2/3: the second of every three cases, for several processes"
    )
    parser.add_argument("--examples", type=int, default=3000, help="generated modules")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument(
        "--resume", action="store_true", help="skip what came out well with the same sources"
    )
    parser.add_argument(
        "--pipeline", type=int, default=0, help="train transformers in so many stages, on ranks"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one such training")
    options = parse(parser, PARTS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # it logs graph breaks
    results = Results.read(HERE / "results.json")
    for part in _parts(options):
        keep = functools.partial(
            results.update, part, command=_command(part, options), environment=describe()
        )
        _save_now_and_then(_run(part, options, results), keep)
    (HERE / "README.md").write_text(render(results, FACTOR, ROUNDINGS))
    TRIED.write_text(tried(results))


def _parts(options: argparse.Namespace) -> Iterator[str]:
    for part in options.parts or PARTS:
        yield PIPELINES if options.pipeline and part == "transformers" else part


def _save_now_and_then(found: Iterator[dict[str, Any]], keep: Callable[[Rows], None]) -> None:
    """What was found is kept, whatever ends the run."""
    rows: Rows = []
    last = time.monotonic()
    try:
        for each in found:
            rows.append(each)
            if time.monotonic() - last > SAVE_SECONDS:
                keep(rows)
                last = time.monotonic()
    finally:
        keep(rows)


def _run(part: str, options: argparse.Namespace, results: Results) -> Iterator[dict[str, Any]]:
    known = [each for each in results.rows(part) if each["sources"] == sources()]
    done = {each["name"] for each in known if _is_good(each)} if options.resume else set()
    first, step = map(int, options.shard.split("/"))
    cases = {
        name: examination
        for name, examination in [*_cases(part, options)][first - 1 :: step]
        if re.search(options.select, name) and name not in done
    }
    end = time.monotonic() + options.seconds
    if part == PIPELINES:
        from .pipelines.measure import measure

        found = measure([*cases], options.pipeline, options.limit)
    else:
        found = (each() for each in cases.values())
    for each in tqdm(found, desc=part, total=len(cases), mininterval=5):
        yield each
        if time.monotonic() > end:
            return


def _is_good(found: dict[str, Any]) -> bool:
    return not found["failures"] if "failures" in found else category(found) in GOOD


def _cases(part: str, options: argparse.Namespace) -> Iterator[tuple[str, Examination]]:
    """(name of the row, what makes the row)"""
    if part == "generated":
        for seed in range(math.ceil(options.examples / RUN)):
            examples = min(RUN, options.examples - seed * RUN)
            yield f"seed {seed}", functools.partial(_generated, seed, examples)
    elif part == "opinfo":
        from . import operator_database

        for name, subjects in operator_database.entries(options.op_samples):
            yield name, functools.partial(_operator, name, subjects)
    elif part == PIPELINES:
        import transformers

        from .pipelines import lesson

        transformers.logging.set_verbosity_error()
        for name, (group, subject) in lesson.subjects().items():
            yield name, functools.partial(_examined, subject, group)
    elif part == "libraries":
        from . import libraries

        for library, group, subject in libraries.subjects():
            yield subject.name, functools.partial(_examined, subject, group, library)
    else:
        library = part if part == "transformers" else ""
        for group, subject in _subjects(part, options):
            yield subject.name, functools.partial(_examined, subject, group, library)


def _examined(subject: Subject, group: str, library: str = "") -> dict[str, Any]:
    said = {"library": f"{library} {importlib.metadata.version(library)}"} if library else {}
    return row(examine(subject), group) | said


def _subjects(part: str, options: argparse.Namespace) -> Iterable[tuple[str, Subject]]:
    # Each part needs packages that the others do not.
    if part == "modules":
        from . import module_database

        return ((each.name.split()[0], each) for each in module_database.subjects(options.samples))
    if part == "transformers":
        import transformers

        from . import architectures

        transformers.logging.set_verbosity_error()
        return architectures.subjects()
    if part == "pieces":
        from . import pieces

        return (("pieces", each) for each in pieces.subjects())
    from . import breaks

    return (("breaks", each) for each in breaks.subjects())


def _generated(seed: int, examples: int) -> dict[str, Any]:
    from .generated.sweep import sweep

    found = sweep(examples, seed=seed)
    return {
        "name": f"seed {seed}",
        "verdicts": {verdict.value: count for verdict, count in found.verdicts.items()},
        "in_parts": found.in_parts,
        "refusals": dict(found.refusals),
        "failures": found.failures,
    }


def _operator(name: str, subjects: Iterable[Subject]) -> dict[str, Any]:
    return tally(name, map(examine, subjects))


def _command(part: str, options: argparse.Namespace) -> str:
    """What to type for the whole of this part: a run in pieces ends up with the same rows."""
    words = ["python", "-m", "benchmarks.coverage", part]
    if part == PIPELINES:
        words[-1:] = ["transformers", "--pipeline", str(options.pipeline)]
    if part == "modules":
        words += ["--samples", str(options.samples)]
    if part == "opinfo":
        words += ["--op-samples", str(options.op_samples)]
    if part == "generated":
        words += ["--examples", str(options.examples)]
    return shlex.join(words)


if __name__ == "__main__":
    main()
