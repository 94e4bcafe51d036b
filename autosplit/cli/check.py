"""``autosplit check``: does a schedule end under NCCL's rules, on a mesh of GPUs?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path

import click

from autosplit.cli.options import dimensions, typed_errors
from autosplit.errors import ScheduleError
from autosplit.mesh.dimensions import DIMENSIONS, PIPELINE
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.communicators import (
    RECEIVE,
    SEND,
    Programs,
    Sharing,
    held_up,
    in_flight,
    stuck,
)
from autosplit.pipeline.validation.grid import describe
from autosplit.pipeline.validation.programs import COMMUNICATORS, of_engine, of_torch
from autosplit.pipeline.validation.torch_csv import add_communication, read_actions
from autosplit.text.figures import few

_RULES: dict[Sharing, str] = {
    "streams": "a stream for each communicator",
    "launches": "one connection to the device (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "kernels": "one kernel at a time that communicates",
}


def read_schedule(
    source: str, ranks: int | None, microbatches: int | None
) -> tuple[Schedule, Sequence[Sequence[Action]]]:
    """A schedule from a file, or one of ours by its name; and per rank its actions with sends and
    receives.

    Args:
        source: the file, in any form, or the name.
        ranks: that there are to be; None: as the file has them.
        microbatches: of one of ours; None: two a rank.

    Raises:
        ScheduleError: no such schedule, an illegal one, or one of other ranks.
    """
    if source in SCHEDULES and ranks is not None:
        stages = ranks * (SCHEDULES[source].chunks or 2)
        schedule = build(source, stages, microbatches or 2 * ranks, ranks=ranks)
        return schedule, add_communication(schedule)
    if not Path(source).is_file():
        raise ScheduleError(
            f"{source!r} is neither a file nor, with --mesh {PIPELINE}=..., one of the schedules "
            f"{', '.join(SCHEDULES)}"
        )
    schedule, rows = read_actions(source)
    if ranks not in (None, len(schedule.ranks)):
        raise ScheduleError(f"{source!r} has {len(schedule.ranks)} ranks, the mesh {ranks}")
    return schedule, rows


def certificate(schedule: Schedule, programs: Programs) -> str:
    """What is proved of a step that is known to end where each communicator has a stream, and what
    it has under way at most.
    """
    lines = ["ends, whatever anything takes, with any buffers in the network or none:"]
    for sharing, what in _RULES.items():
        if sharing == "streams":
            verdict = "ends"
        elif has_moves(schedule):
            verdict = "not judged, as moves have threads of their own"
        else:
            verdict = "ends" if stuck(programs, sharing) is None else "may hang"
        lines.append(f"  {what}: {verdict}")
    lines.append("communicators, and the most operations of a rank over one of them:")
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for program in programs.values():
        parts = (part for operation in program for part in operation.parts)
        for name, count in Counter(part.communicator for part in parts).items():
            kinds[re.sub("[0-9]+", "", name)] |= Counter({name: count})
    for names in kinds.values():
        lines.append(f"  {len(names)}: {few([*names], 2)}: {max(names.values())}")
    most = reduce(or_, map(in_flight, programs.values()))
    late = max(map(held_up, programs.values()))
    lines.append(f"in flight on a rank at most: {most[SEND]} sends, {most[RECEIVE]} receives")
    lines.append(f"sends behind a receive in their queue, on a rank at most: {late}")
    return "\n".join(lines)


@click.command()
@click.argument("schedule")
@click.option(
    "--mesh",
    callback=dimensions,
    metavar="NAME=SIZE,...",
    help=f"Dimensions and their sizes: {', '.join(DIMENSIONS)}.",
)
@click.option("--backend", type=click.Choice(["nccl"]), default="nccl", help="Whose rules.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Of one of our schedules.")
@click.option(
    "--torch",
    "communicators",
    type=click.Choice([*COMMUNICATORS]),
    help="Run by torch.distributed.pipelining: what messages have a communicator for.",
)
@typed_errors
def check(
    schedule: str,
    mesh: tuple[tuple[str, int], ...],
    backend: str,
    microbatches: int | None,
    communicators: str | None,
) -> None:
    """Prove that a step of SCHEDULE ends, or print what waits for itself.

    SCHEDULE is a CSV file as torch writes them, or the name of one of our schedules.
    """
    sizes = dict(mesh)
    if unknown := sizes.keys() - DIMENSIONS:
        raise click.BadParameter(f"unknown dimensions {unknown}; known: {', '.join(DIMENSIONS)}")
    found, rows = read_schedule(schedule, sizes.get(PIPELINE), microbatches)
    several = [name for name, size in mesh if size > 1 and name != PIPELINE]
    if communicators is None:
        programs = of_engine(found, several)
    else:
        if has_moves(found):
            raise ScheduleError("torch's runtime does not move microbatches")
        programs = of_torch(rows, found.placement, communicators, several)
    click.echo(f"{describe(found)}, {backend}{''.join(f', {n}={s}' for n, s in mesh)}")
    circle = stuck(programs)
    if circle is None:
        click.echo(certificate(found, programs))
        return
    click.echo(f"never ends, whatever anything takes:\n{circle}")
    raise click.exceptions.Exit(1)
