"""``autosplit check``: does a schedule end under NCCL's rules, on a mesh of GPUs?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from autosplit.cli.options import Assigned, Listed, typed_errors
from autosplit.errors import DeadlockError, ScheduleError
from autosplit.mesh.dimensions import DIMENSIONS, PIPELINE, check_dimensions
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.validation.communicators import Programs, Sharing, stuck
from autosplit.pipeline.validation.grid import describe
from autosplit.pipeline.validation.programs import COMMUNICATORS, of_engine, of_torch
from autosplit.pipeline.validation.torch_csv import add_communication, check_memory, read_actions
from autosplit.text.figures import few, nearest

_RULES: dict[Sharing, str] = {
    "streams": "a stream for each communicator",
    "launches": "one connection to the device (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "kernels": "one NCCL kernel at a time, as launched (NCCL_LAUNCH_ORDER_IMPLICIT=1)",
}


def read_schedule(
    source: str, ranks: int | None, microbatches: int | None
) -> tuple[Schedule, Sequence[Sequence[Action]] | None]:
    """A schedule from a file, or one of ours by its name; and per rank its actions with sends and
    receives, where a file lists these.

    Args:
        source: the file, in any form, or the name.
        ranks: that there are to be; None: as the file has them.
        microbatches: likewise; of one of ours None is two a rank.

    Raises:
        ScheduleError: no such schedule, an illegal one, or one of other ranks or microbatches.
    """
    if source in SCHEDULES and ranks is not None:
        stages = ranks * (SCHEDULES[source].chunks or 2)
        return build(source, stages, microbatches or 2 * ranks, ranks=ranks), None
    if not Path(source).is_file():
        raise ScheduleError(
            f"{source!r} is neither a file nor, with --mesh {PIPELINE}=..., one of the schedules "
            f"{', '.join(SCHEDULES)}{nearest(source, () if source in SCHEDULES else SCHEDULES)}"
        )
    schedule, rows = read_actions(source)
    for what, given, found in (
        ("ranks", ranks, len(schedule.ranks)),
        ("microbatches", microbatches, schedule.microbatches),
    ):
        if given not in (None, found):
            raise ScheduleError(f"{source!r} has {found} {what}, not the {given} of the command")
    return schedule, rows


def certificate(schedule: Schedule, programs: Programs) -> tuple[bool, str]:
    """Of a step that is known to end where each communicator has a stream: whether it ends whatever
    queues share, as far as that is judged; and what is proved, and of which communicators.
    """
    verdicts = dict.fromkeys(_RULES, "ends")
    found = {}
    for sharing in ("launches", "kernels"):
        if has_moves(schedule):
            verdicts[sharing] = "not judged, as moves have threads of their own"
        elif circle := stuck(programs, sharing):
            verdicts[sharing] = "may hang"
            found[_RULES[sharing]] = circle
    ends = "ends" if not found else f"may hang with {' or '.join(found)}, else ends"
    lines = [f"{ends}, whatever anything takes, with any buffers in the network or none:"]
    lines += [f"  {what}: {verdicts[sharing]}" for sharing, what in _RULES.items()]
    lines += [f"with {what}:\n{circle}" for what, circle in found.items()][:1]
    lines.append("communicators, and the most operations of a rank over one of them:")
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for program in programs.values():
        parts = (part for operation in program for part in operation.parts)
        for name, count in Counter(part.communicator for part in parts).items():
            kinds[re.sub("[0-9]+", "", name)] |= Counter({name: count})
    for names in kinds.values():
        lines.append(f"  {len(names)}: {few([*names], 2)}: {max(names.values())}")
    return not found, "\n".join(lines)


@click.command()
@click.argument("schedule")
@click.option(
    "--mesh",
    type=Listed(Assigned(click.IntRange(min=1))),
    default=(),
    help=f"Dimensions and their sizes: {', '.join(DIMENSIONS)}.",
)
@click.option("--microbatches", type=click.IntRange(min=1), help="In a step; a file has its own.")
@click.option(
    "--torch",
    "communicators",
    type=click.Choice([*COMMUNICATORS]),
    help="Run by torch.distributed.pipelining: what messages have a communicator for.",
)
@partial(typed_errors, verdicts=())
def check(
    schedule: str,
    mesh: tuple[tuple[str, int], ...],
    microbatches: int | None,
    communicators: str | None,
) -> None:
    """Prove that a step of SCHEDULE ends, or print what waits for itself.

    SCHEDULE is a CSV file as torch writes them, or the name of one of our schedules.

    \b
    The exit status is 0 where it ends, 1 where it never does or may hang,
    2 where that cannot be told: there is no such schedule, or an illegal one.
    """
    sizes = dict(mesh)
    check_dimensions([name for name, _ in mesh])
    try:
        found, rows = read_schedule(schedule, sizes.get(PIPELINE), microbatches)
    except DeadlockError as error:
        click.echo(f"never ends, whatever anything takes:\n{error}")
        raise click.exceptions.Exit(1) from error
    several = [name for name, size in mesh if size > 1 and name != PIPELINE]
    if communicators is None:
        programs = of_engine(found, several)
    else:
        check_memory(found)
        listed = add_communication(found) if rows is None else rows
        programs = of_torch(listed, found.placement, communicators, several)
    click.echo(f"{describe(found)}{''.join(f', {n}={s}' for n, s in mesh)}")
    if rows is not None and communicators is None:
        click.echo(
            "the sends and receives of the file are not judged, as this engine has its own; with "
            "--torch pair, group, direction or edge they are"
        )
    circle = stuck(programs)
    if circle is None:
        ends, text = certificate(found, programs)
    else:
        ends, text = False, f"never ends, whatever anything takes:\n{circle}"
    click.echo(text)
    if not ends:
        raise click.exceptions.Exit(1)
