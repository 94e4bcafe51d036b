"""Options that several commands have, and the inputs that they are given."""

from __future__ import annotations

import click
import pytest
import torch

from autosplit.cli.options import setting, typed_errors
from autosplit.compare.example import resized
from autosplit.errors import AutosplitError, PipelineError, PlanError, ScheduleError

# --- what commands say of errors ------------------------------------------------------------------


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


# --- settings of a factory ------------------------------------------------------------------------


def test_settings_are_literals_or_texts() -> None:
    command = click.Command("set", callback=lambda overrides: overrides)
    options = {
        "n": "4",
        "tied": "false",
        "late": "True",
        "by": "(1, 2)",
        "act": "relu",
        "to": "a=b",
    }
    read = setting(command).main(
        [word for item in options.items() for word in ("--set", "=".join(item))],
        standalone_mode=False,
    )
    expected = {"n": 4, "tied": False, "late": True, "by": (1, 2), "act": "relu", "to": "a=b"}
    assert read == expected


# --- example inputs of another size ---------------------------------------------------------------


def test_samples_are_repeated_or_cut() -> None:
    mask, inputs = torch.ones(5, 5), torch.arange(6).reshape(3, 2)
    (more, same, name), kwargs = resized(((inputs, mask, "a"), {"labels": inputs[:, 0]}), 4)
    assert more.tolist() == [[0, 1], [2, 3], [4, 5], [1, 0]]  # a repeated sample is rolled
    assert kwargs["labels"].tolist() == [0, 2, 4, 0]
    assert same is mask
    assert name == "a"
    assert resized((inputs,), 1)[0].tolist() == [[0, 1]]


def test_inputs_without_samples() -> None:
    with pytest.raises(PlanError, match="no tensor with samples along dimension 0"):
        resized((torch.tensor(1.0), "a"), 4)


def test_inputs_that_no_machine_has_room_for_are_refused() -> None:
    with pytest.raises(PlanError, match=r"of 1,000,000,000,000 samples take .* GiB, more"):
        resized(torch.zeros(2, 8), 10**12)
