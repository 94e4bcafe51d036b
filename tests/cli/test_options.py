"""What commands say of errors."""

from __future__ import annotations

import click
import pytest

from autosplit.cli.options import typed_errors
from autosplit.errors import AutosplitError, PipelineError, ScheduleError

REPORT = "rank 1 failed: ValueError: why\nTraceback (most recent call last)\n  here"


@pytest.mark.parametrize(
    ("cause", "said"),
    [(ScheduleError("why"), REPORT.partition("\n")[0]), (None, REPORT)],
    ids=["an error of autosplit", "any other"],
)
def test_tracebacks_of_ranks_are_for_errors_that_do_not_say_all(
    cause: AutosplitError | None, said: str
) -> None:
    @typed_errors
    def command() -> None:
        raise PipelineError(REPORT) from cause

    with pytest.raises(click.ClickException) as failed:
        command()
    assert failed.value.message == f"PipelineError: {said}"
