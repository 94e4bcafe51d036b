"""Schedules as torch writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.schedule import SHARDING
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation import torch_csv
from autosplit.pipeline.validation.torch_csv import add_communication, read_csv, write_csv
from autosplit.text import files as reading
from tests.pipeline.tables import rows_of, seconds

# --- schedules as torch's CSV files: torch reads and runs ours, and we read torch's ---------------


def of_two_a_rank(name: str) -> Any:
    """A schedule for two ranks."""
    return build(name, 2 * (SCHEDULES[name].chunks or 2), 4, ranks=2)


def stages_of(rank: int, ranks: int, stages: int) -> list[Any]:
    """As much of a stage as torch's schedules look at when they are made."""
    kept = range(rank, stages, ranks)
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=stages,
            group_size=ranks,
            group_rank=rank,
            is_last=index == stages - 1,
            submod=None,
            stage_index_to_group_rank=None,
        )
        for index in kept
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    schedule = of_two_a_rank(name)
    write_csv(schedule, tmp_path / "file.csv")
    returned = read_csv(tmp_path / "file.csv", name=schedule.name)
    assert rows_of(returned) == rows_of(schedule)
    assert returned.placement == schedule.placement


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_takes_ours(name: str, tmp_path: Path) -> None:
    """Its validation, its lowering and its simulation of sends and receives."""
    schedule = of_two_a_rank(name)
    write_csv(schedule, tmp_path / "file.csv")
    runtime = torch_schedules._PipelineScheduleRuntime(
        stages_of(0, 2, schedule.stages), schedule.microbatches
    )
    runtime._load_csv(str(tmp_path / "file.csv"), format="compute_only")
    mapping = runtime.stage_index_to_group_rank
    assert tuple(mapping[stage] for stage in range(schedule.stages)) == schedule.placement
    parse = torch_schedules._Action.from_str
    listed = [
        [parse(str(action)) for action in row if not action.kind.value.startswith("WAIT")]
        for row in add_communication(schedule)
    ]
    runtime.pipeline_order_with_comms = dict(enumerate(listed))
    runtime._simulate()  # of our order of sends and receives


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_we_take_torchs(kind: str, per_rank: int, form: str, tmp_path: Path) -> None:
    built = getattr(torch_schedules, kind)(stages_of(0, 2, 2 * per_rank), 4)
    built._dump_csv(str(tmp_path / f"{kind}.csv"), format=form)
    schedule = read_csv(tmp_path / f"{kind}.csv")
    assert (schedule.name, schedule.stages, schedule.microbatches) == (kind, 2 * per_rank, 4)
    busy = 4 * per_rank * 3
    assert busy <= simulate(schedule, seconds(1, 1, 1)).makespan <= busy + 6


def test_gathers_and_reductions_of_torch_are_kept(tmp_path: Path) -> None:
    built = torch_schedules.ScheduleInterleaved1F1B(stages_of(0, 2, 4), 4)
    for form in ("compute_comms", "compute_only"):
        built._dump_csv(str(tmp_path / f"{form}.csv"), format=form)
    listed, plain = (read_csv(file, name="torch") for file in sorted(tmp_path.iterdir()))
    texts = [str(action) for action in listed.ranks[0]]
    assert (texts[:2], texts[-2:]) == (["0UNSHARD", "2UNSHARD"], ["0REDUCE_GRAD", "0RESHARD"])
    without = [tuple(a for a in row if a.kind not in SHARDING) for row in listed.ranks]
    assert (add_gathers(listed, {0, 2}), without) == (listed, [*plain.ranks])


def test_dual_pipe_v_is_torchs(tmp_path: Path) -> None:
    built = torch_schedules.ScheduleDualPipeV(stages_of(0, 4, 8), 10)
    built._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    assert read_csv(tmp_path / "torch.csv").ranks == build("dualpipe-v", 8, 10).ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "expected an action such as '0F1'"),
        ("", "'file' has no F, I, W or B"),
        ("0F0,2F0", "has stages up to 2, but no action of stage 1:"),
        ("0F0,0I0", "stage 0 never runs 0W0"),
    ],
)
def test_files_that_are_no_schedule(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_csv(tmp_path / "file.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F999999999,0B999999999", "stage 0 never runs 0I0 and 0W0, nor 0B0"),
        (
            b"1000000000000F0",
            "numbers of at most 9 digits without leading zeros, got '1000000000000F0'",
        ),
        (b"0F0,0B0,999999999F0", "has stages up to 999999999, but no action of stage 1:"),
        (b"9" * 100_000, "expected an action such as '0F1'"),
        (b"\xff\xfe\x00", "not UTF-8 text .invalid start byte at byte 0."),
        (b"0F0,\x000B0", "expected an action such as|is no CSV file: line contains NUL"),
        (b'"' + b"0" * 200_000, "is no CSV file: field larger than field limit"),
    ],
    ids=["microbatch", "stage", "stages", "digits", "binary", "null", "field"],
)
def test_a_file_of_no_sense_is_refused_at_once(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file.csv").write_bytes(content)
    with pytest.raises(ScheduleError, match=message):
        read_csv(tmp_path / "file.csv")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("bad\0name")):
        with pytest.raises(ScheduleError, match="cannot read a schedule from "):
            read_csv(path)
    monkeypatch.setattr(reading, "LARGEST", 100)
    (tmp_path / "file.csv").write_text("," * 101)
    with pytest.raises(ScheduleError, match="it has more than 100 bytes, the limit"):
        read_csv(tmp_path / "file.csv")


def test_more_actions_than_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(build("1f1b", 2, 2), tmp_path / "file.csv")
    monkeypatch.setattr(torch_csv, "LARGEST", 10)
    with pytest.raises(ScheduleError, match="has more than 10 actions, the limit of a schedule"):
        read_csv(tmp_path / "file.csv")
