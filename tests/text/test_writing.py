"""Files that are written, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import autosplit
from autosplit.chrome_trace import write_chrome_trace
from autosplit.errors import OutputError, PipelineError, PlanError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.torch_csv import write_csv
from autosplit.text.figures import parse_size
from autosplit.text.files import check_file, check_folder

# --- files and folders that cannot be written, asked for through every face that writes one -------


ROWS = [("1f1b", simulate(build("1f1b", 2, 2), lambda action: 1.0))]


def dump(folder: Path) -> None:
    autosplit.split(nn.Linear(2, 2), (torch.randn(3, 2),)).dump(folder)


@pytest.mark.parametrize(
    "write",
    [
        dump,
        lambda path: write_csv(build("1f1b", 2, 2), path),
        lambda path: write_chrome_trace(ROWS, path),
    ],
    ids=["dump", "schedule", "trace"],
)
def test_a_failed_write_is_a_typed_error(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write '.*file/below.*': Not a directory"):
        write(tmp_path / "file" / "below")


def test_the_folder_of_dumped_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSPLIT_DUMP", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"cannot write into a folder .*file is a file"):
        dump(tmp_path / "graphs")


def test_checking_leaves_all_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    check_file(tmp_path / "file")
    check_file(tmp_path / "new")
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("check", [check_file, check_folder])
@pytest.mark.parametrize("place", ["/proc/x", "/proc/self/x", "file/below"])
def test_a_place_that_nothing_can_be_written_to(
    check: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write|there is no folder"):
        check(tmp_path / place)


# --- sizes in bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("512MiB", 512 * 2**20),
        (" 1.5 kib ", 1536),
        ("16GB", 16 * 10**9),
        ("800 MB", 800 * 10**6),
        ("2TiB", 2**41),
        ("700", 700),
        ("700B", 700),
        ("1.5B", 1),
        ("0.1TB", 10**11),
        ("12gib", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("1_000_000", 10**6),
        ("9223372036854775807", 2**63 - 1),
        (123, 123),
        (numpy.int64(123), 123),
        (torch.Size([3, 4])[1], 4),
    ],
)
def test_sizes_as_people_write_them(size: str | int, count: int) -> None:
    result = parse_size(size)
    assert result == count
    assert isinstance(result, int)


@pytest.mark.parametrize(
    "size",
    [
        *("", "  ", "80 GiBs", "12G", "12 gi", "GiB", "1e3", "1__0", "\u0663GiB", "14,311,588"),
        *("60%", "-1GiB", "0MiB", "0.5B", "9" * 40, "99999999TiB"),
        *(0, -1, 2**63, True, 1.5e9, 0.6, float("nan"), float("inf"), b"1GiB", [1, 2], None),
    ],
)
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(PlanError, match=r"expected a size such as 80GiB, .* got "):
        parse_size(size)


def test_the_message_names_the_option_and_is_of_the_callers_type() -> None:
    with pytest.raises(PipelineError) as raised:
        parse_size("12 gigs", "memory_limit", PipelineError)
    assert str(raised.value) == (
        "expected memory_limit such as 80GiB, '800 MB' or a whole number of bytes (units: B, KiB "
        "to TiB, KB to TB), got '12 gigs'"
    )
