"""``autosplit replay`` runs a recorded step again, and finds the action that went wrong first."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import click

from autosplit.cli.options import FILE, Read, json_option, typed_errors
from autosplit.compare.example import failures_of, search_working_directory
from autosplit.errors import FactoryError, ReplayError
from autosplit.pipeline.schedule.schedule import Action
from autosplit.recorder.bundle import differing_copies, read_parts
from autosplit.recorder.faults import FaultSearch
from autosplit.recorder.replay import StepReplay
from autosplit.report import draw_timelines
from autosplit.text.files import write_json, write_text

_ACTION = Read("ACTION", Action.parse)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--action", type=_ACTION, help="Run this action only, such as 1F2.")
@click.option("--from", "first", type=_ACTION, help="Run only what depends on this action.")
@click.option("--to", "last", type=_ACTION, help="Run only what this action depends on.")
@click.option("--bound", default=math.inf, help="The largest magnitude that is right.")
@click.option("--pipeline", type=int, help="Run only the replica of this number; all by default.")
@click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="Import a module that registers operators; may be repeated.",
)
@click.option("--python", type=FILE, help="Write the action, with its tensors, to this file.")
@click.option("--no-tensors", is_flag=True, help="Write zeros in place of tensors.")
@click.option("--picture", type=FILE, help="Draw the step's timeline, the faulty action marked.")
@json_option
@typed_errors
def replay(
    folder: Path,
    action: Action | None,
    first: Action | None,
    last: Action | None,
    bound: float,
    pipeline: int | None,
    modules: tuple[str, ...],
    python: Path | None,
    no_tensors: bool,
    picture: Path | None,
    json_file: Path | None,
) -> None:
    """Run the step of a bundle again, action by action, and stop at the first that is wrong.

    A bundle has programs, which this command runs: replay only folders that you trust.
    """
    for module in modules:
        search_working_directory()
        with failures_of(f"importing {module} in {os.getcwd()}", FactoryError):
            importlib.import_module(module)
    parts = read_parts(folder)
    pipelines = sorted({part.facts["pipeline"] for part in parts.values()})
    steps = [StepReplay(parts, number) for number in pipelines if pipeline in (None, number)]
    if not steps:
        raise ReplayError(f"no part of pipeline {pipeline}: expected --pipeline {pipelines}")
    facts = steps[0].facts
    click.echo(f"step {facts['steps'][-1]['step']}, {facts['alarm']}: {facts['text']}")
    if missing := sorted({*range(facts["ranks"])} - parts.keys()):
        click.echo(f"no part of the ranks {missing}, which were not alive to write one")
    for line in differing_copies(parts)[:4]:
        click.echo(line)
    count, refusal, unfinished = 0, None, list[str]()
    for step in steps:
        if action is not None:
            step.check_recorded(action)
        actions = [action] if action is not None else step.actions(first, last)
        raising = [a for a in actions if a in step.unfinished]
        unfinished += [f"{a} on rank {step.rank_of(a)} did not finish" for a in raising]
        count += len(actions) - len(raising)
        shown, fault, error = _examine(FaultSearch(step, bound), actions, shows=bool(first or last))
        refusal = error if fault else refusal or error
        if fault:
            break
    nothing = "all recorded results are finite" if refusal else f"{count} actions have no fault"
    click.echo(fault or "; ".join([nothing, *unfinished]))
    if json_file:
        row = {"action": str(shown), "rank": step.rank_of(shown), "text": fault} if fault else None
        write_json(json_file, {"actions": count, "fault": row})
    if picture:
        title = f"step {facts['steps'][-1]['step']}"
        draw_timelines([(title, step.timeline)], picture, marked=[shown] if fault else [])
    if refusal:
        raise refusal
    if python:
        write_text(python, step.reproducer(shown, tensors=not no_tensors))
    if fault or unfinished:
        raise click.exceptions.Exit(1)


def _examine(
    search: FaultSearch, actions: Sequence[Action], *, shows: bool
) -> tuple[Action, str, ReplayError | None]:
    """Run actions up to the first that is wrong.

    Args:
        search: compares the actions with their replay.
        actions: the actions.
        shows: whether to print each action that is right.

    Returns:
        The last action that ran; text on its fault, empty if it has none; and the error if an
        action cannot be run again.
    """
    shown, fault = actions[0], ""
    try:
        for shown, fault in search.findings(actions):
            if fault:
                break
            if shows:
                click.echo(f"{shown}: as recorded")
    except ReplayError as error:
        return *(search.recorded_fault(actions) or (shown, "")), error
    return shown, fault, None
