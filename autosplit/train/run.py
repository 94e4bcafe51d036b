"""Start the ranks of a training run, or be one of them under torchrun."""

from __future__ import annotations

import os

from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline.engine.default_group import process_group
from autosplit.pipeline.engine.launch import launch

from .rank import train_on_rank
from .settings import TrainSettings
from .text_windows import read_content

_TIMEOUT = 21 * 24 * 3600.0
"""Seconds that launched ranks may take. Waits of a store are milliseconds in 31 bits."""


def train(settings: TrainSettings) -> str | None:
    """Train on processes of this machine, or as one rank of a torchrun launch.

    Returns:
        The report; None on ranks other than 0 under torchrun.

    Raises:
        PipelineError: a model, text or option that cannot be used, or a rank failed.
        CheckpointError: the checkpoint cannot be read, or is of another run.
    """
    if "RANK" in os.environ:
        _check_world(settings)
        with process_group():
            report = _value(train_on_rank(settings))
        return report if os.environ["RANK"] == "0" else None
    read_content(settings.data)  # what is no text is known before any process starts
    threads = max(1, (os.cpu_count() or 1) // settings.ranks)
    found = launch(train_on_rank, settings.ranks, (settings,), timeout=_TIMEOUT, threads=threads)
    return _value(found[0])


def _value(outcome: str | AutosplitError | None) -> str | None:
    """The report. A typed error came back as it is, for launch would wrap it."""
    if isinstance(outcome, AutosplitError):
        raise outcome
    return outcome


def _check_world(settings: TrainSettings) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != settings.ranks:
        raise PipelineError(
            f"torchrun started {world} processes, and --pp {settings.ranks} is for "
            f"{settings.ranks}: say --pp {world}, or start {settings.ranks} in all "
            "(--nproc-per-node times --nnodes)"
        )
