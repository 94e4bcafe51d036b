"""``autosplit check`` proves that a schedule ends under NCCL's rules, on a mesh of GPUs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from autosplit.cli.options import Assigned, Listed, json_option, typed_errors
from autosplit.errors import DeadlockError, ScheduleError
from autosplit.mesh.dimensions import DIMENSIONS, PIPELINE, check_dimensions
from autosplit.pipeline.builders.build import SCHEDULES, ScheduleRequest
from autosplit.pipeline.preparation import prepare_schedule
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.validation.communicators import Programs, Sharing, find_deadlock
from autosplit.pipeline.validation.grid import describe
from autosplit.pipeline.validation.programs import COMMUNICATORS, engine_programs, torch_programs
from autosplit.pipeline.validation.torch_csv import add_communication, check_memory, read_actions
from autosplit.text.figures import few, nearest
from autosplit.text.files import write_json

_RULES: dict[Sharing, str] = {
    "streams": "a stream for each communicator",
    "launches": "one connection to the device (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "kernels": "one NCCL kernel at a time, as launched (NCCL_LAUNCH_ORDER_IMPLICIT=1)",
}


def read_schedule(
    source: str, ranks: int | None, microbatches: int | None
) -> tuple[Schedule, Sequence[Sequence[Action]] | None]:
    """Read a schedule from a file, or build one by name. Return (schedule, the file's actions per
    rank if it lists sends and receives, else None).

    Args:
        source: a CSV file, with or without sends and receives, or a name.
        ranks: the expected number of ranks; None: as in the file.
        microbatches: the expected number of microbatches; None: as in the file, or two per rank for
            a name.

    Raises:
        ScheduleError: the schedule does not exist, is illegal, or has another number of ranks or
            microbatches than expected.
    """
    if source in SCHEDULES and ranks is not None:
        stages = ranks * (SCHEDULES[source].chunks or 2)
        request = ScheduleRequest(source, microbatches or 2 * ranks, ranks)
        return prepare_schedule(request, stages), None
    if not Path(source).is_file():
        raise ScheduleError(
            f"{source!r} is neither a file nor, with --mesh {PIPELINE}=..., one of the schedules "
            f"{', '.join(SCHEDULES)}{nearest(source, () if source in SCHEDULES else SCHEDULES)}"
        )
    schedule, rows = read_actions(source)
    for noun, requested, actual in (
        ("ranks", ranks, len(schedule.ranks)),
        ("microbatches", microbatches, schedule.microbatches),
    ):
        if requested not in (None, actual):
            raise ScheduleError(
                f"{source!r} has {actual} {noun}, not the {requested} of the command: pass "
                f"{actual}, or "
                f"leave the option for {noun} out"
            )
    return schedule, rows


def certificate(schedule: Schedule, programs: Programs) -> tuple[dict[str, str], str]:
    """Decide whether a step still ends if all communicators share one connection to the device, or
    one kernel slot. Return (verdict by rule of sharing, text with the proof and the communicators).

    Args:
        schedule: the schedule.
        programs: the programs of a step that ends if each communicator has its own stream.
    """
    verdicts = dict.fromkeys(_RULES, "ends")
    circles = {}
    for sharing in ("launches", "kernels"):
        if has_moves(schedule):
            verdicts[sharing] = "not judged, because moves have threads of their own"
        elif circle := find_deadlock(programs, sharing):
            verdicts[sharing] = "may hang"
            circles[_RULES[sharing]] = circle
    ends = "ends" if not circles else f"may hang with {' or '.join(circles)}, else ends"
    lines = [f"{ends}, whatever anything takes, with any buffers in the network or none:"]
    lines += [f"  {rule}: {verdicts[sharing]}" for sharing, rule in _RULES.items()]
    lines += [f"with {rule}:\n{circle}" for rule, circle in circles.items()][:1]
    lines.append("communicators, and the most operations of a rank over one of them:")
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for program in programs.values():
        parts = (part for operation in program for part in operation.parts)
        for name, count in Counter(part.communicator for part in parts).items():
            kinds[re.sub("[0-9]+", "", name)] |= Counter({name: count})
    for names in kinds.values():
        lines.append(f"  {len(names)}: {few([*names], 2)}: {max(names.values())}")
    return {rule: verdicts[sharing] for sharing, rule in _RULES.items()}, "\n".join(lines)


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
    help="Check torch.distributed.pipelining's runtime, with these communicators.",
)
@json_option
@partial(typed_errors, verdicts=())
def check(
    schedule: str,
    mesh: tuple[tuple[str, int], ...],
    microbatches: int | None,
    communicators: str | None,
    json_file: Path | None,
) -> None:
    """Prove that a step of SCHEDULE ends, or print the operations that wait for each other.

    SCHEDULE is a CSV file in torch's format, or the name of one of our schedules.

    \b
    The exit status is 0 if the step ends, 1 if it never ends or may hang,
    2 if the schedule does not exist or is illegal.
    """
    sizes = dict(mesh)
    check_dimensions([name for name, _ in mesh])
    try:
        plan, rows = read_schedule(schedule, sizes.get(PIPELINE), microbatches)
    except DeadlockError as error:
        click.echo(f"never ends, whatever anything takes:\n{error}")
        raise click.exceptions.Exit(1) from error
    several = [name for name, size in mesh if size > 1 and name != PIPELINE]
    if communicators is None:
        programs = engine_programs(plan, several)
    else:
        check_memory(plan)
        listed = add_communication(plan) if rows is None else rows
        programs = torch_programs(listed, plan.placement, communicators, several)
    click.echo(f"{describe(plan)}{''.join(f', {n}={s}' for n, s in mesh)}")
    if rows is not None and communicators is None:
        click.echo(
            "the sends and receives of the file are not judged, because this engine has its own; "
            "to judge them, give --torch pair, group, direction or edge"
        )
    circle = find_deadlock(programs)
    verdicts = dict.fromkeys(_RULES.values(), "never ends")
    text = f"never ends, whatever anything takes:\n{circle}"
    if circle is None:
        verdicts, text = certificate(plan, programs)
    click.echo(text)
    ends = not {"may hang", "never ends"} & {*verdicts.values()}
    if json_file:
        data = {"schedule": describe(plan), "mesh": sizes, "ends": ends, "rules": verdicts}
        write_json(json_file, data)
    if not ends:
        raise click.exceptions.Exit(1)
