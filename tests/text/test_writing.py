"""Files and folders that cannot be written, asked for through every face that writes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autosplit
from autosplit.errors import OutputError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.torch_csv import write_csv
from autosplit.report.timeline_picture import draw_timelines
from autosplit.report.timelines import write_chrome_trace
from autosplit.text.files import check_file, check_folder

ROWS = [("1f1b", simulate(build("1f1b", 2, 2), lambda action: 1.0))]


def dump(folder: Path) -> None:
    autosplit.split(nn.Linear(2, 2), (torch.randn(3, 2),)).dump(folder)


@pytest.mark.parametrize(
    "write",
    [
        dump,
        lambda path: write_csv(build("1f1b", 2, 2), path),
        lambda path: draw_timelines(ROWS, path.with_suffix(".svg")),
        lambda path: write_chrome_trace(ROWS, path),
    ],
    ids=["dump", "schedule", "picture", "trace"],
)
def test_what_cannot_be_written_is_a_typed_error(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
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
