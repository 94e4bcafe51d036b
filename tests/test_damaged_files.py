"""Damaged files of schedules are read as they say, or refused with a typed error."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from pathlib import Path

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from tests.damage import damaged, looked_at

COMPUTE = re.compile(r"(\d+)([FIWB])(\d+)", re.ASCII)
TOKENS = (
    *("0F0", "1B0", "0W0", "2I1", "0F999999999", "1000000000000F0", "0F1000000000000", "7X0"),
    *(",", ",,,,", "\n", "\n\n", "\r", '"', "\x00", " ", "-1F0", "²F1", "0SEND_F0", "1RECV_F0"),
    *("(0F0;1B0)OVERLAP_F_B", "0UNSHARD", "0WAIT_SEND_F0", "9" * 5000, "[", "{", "null", "NaN"),
)
"""What a slip of the hand, another program or an attacker may put into a text."""


def assert_says(schedule: Schedule, expected: list[list[str]]) -> None:
    """The same actions in the same order, each needed one once, and none that waits for ever."""
    results = [[str(action) for action in row] for row in schedule.ranks]
    assert results == expected
    counts = Counter(action for row in results for action in row)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            built = [counts.pop(f"{stage}{kind}{microbatch}", 0) for kind in "FIWB"]
            assert built in ([1, 1, 1, 0], [1, 0, 0, 1])
    assert not counts
    simulate(schedule, lambda action: 1.0)


@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_schedules(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    write_csv(build(name, 4, 4), file)

    def read(content: bytes) -> str:
        file.write_bytes(content)
        try:
            schedule = read_csv(file)
        except AutosplitError:
            return "refused"
        cells = csv.reader(io.StringIO(content.decode(), newline=""))
        rows = [COMPUTE.findall(re.sub(r"\d+[A-Z_]*_[FB]\d+", "", " ".join(row))) for row in cells]
        assert_says(schedule, [[f"{int(s)}{kind}{int(m)}" for s, kind, m in row] for row in rows])
        write_csv(schedule, file)
        assert read_csv(file, name=schedule.name) == schedule
        return "read"

    message = looked_at(damaged(file.read_bytes(), TOKENS), 100, read)
    assert min(message["read"], message["refused"]) > 0
