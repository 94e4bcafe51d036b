"""Damaged files of schedules and plans are read as they say, or refused with a typed error."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockCost, ModelCosts
from autosplit.planner.plan import Plan, partition
from tests.damage import damaged, looked_at

COMPUTE = re.compile(r"(\d+)([FIWB])(\d+)", re.ASCII)
TOKENS = (
    *("0F0", "1B0", "0W0", "2I1", "0F999999999", "1000000000000F0", "0F1000000000000", "7X0"),
    *(",", ",,,,", "\n", "\n\n", "\r", '"', "\x00", " ", "-1F0", "²F1", "0SEND_F0", "1RECV_F0"),
    *("(0F0;1B0)OVERLAP_F_B", "0UNSHARD", "0WAIT_SEND_F0", "9" * 5000, "[", "{", "null", "NaN"),
)
"""What a slip of the hand, another program or an attacker may put into a text."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 10**9, 10**18, 10**30, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "fast", "inductor", "0F0", "0F999999999", "layers.1"),
    *([], {}, [[]], [None], [0, 1], [1, 0], ["x"], [[1.0, 2.0, 3.0]], {"x": 1}),
)


def assert_says(schedule: Schedule, expected: list[list[str]]) -> None:
    """The same actions in the same order, each needed one once, and none that waits for ever."""
    found = [[str(action) for action in row] for row in schedule.ranks]
    assert found == expected
    counts = Counter(action for row in found for action in row)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            made = [counts.pop(f"{stage}{kind}{microbatch}", 0) for kind in "FIWB"]
            assert made in ([1, 1, 1, 0], [1, 0, 0, 1])
    assert not counts
    simulate(schedule, lambda action: 1.0)


@pytest.mark.parametrize(
    ("form", "name"),
    [("compute_only", "zb-v"), ("compute_comms", "zb-v"), ("compute_only", "interleaved")],
)
def test_schedules(form: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    write_csv(build(name, 4, 4), file, form)

    def read(content: bytes) -> str:
        file.write_bytes(content)
        try:
            schedule = read_csv(file)
        except AutosplitError:
            return "refused"
        cells = csv.reader(io.StringIO(content.decode(), newline=""))
        rows = [COMPUTE.findall(re.sub(r"\d+[A-Z_]*_[FB]\d+", "", " ".join(row))) for row in cells]
        assert_says(schedule, [[f"{int(s)}{kind}{int(m)}" for s, kind, m in row] for row in rows])
        write_csv(schedule, file, form)
        assert read_csv(file, name=schedule.name) == schedule
        return "read"

    said = looked_at(damaged(file.read_bytes(), TOKENS), 100, read)
    assert min(said["read"], said["refused"]) > 0


@st.composite
def changed(draw: st.DrawFn, sound: bytes) -> bytes:
    """A JSON text after one to four changes of its values, names or lists."""
    data = json.loads(sound)
    for _ in range(draw(st.integers(1, 4))):
        data = _changed(draw, data)
    return json.dumps(data).encode()


def _changed(draw: st.DrawFn, data: Any) -> Any:
    if not isinstance(data, (dict, list)) or not data or draw(st.integers(0, 5)) == 0:
        return copy.deepcopy(draw(st.sampled_from(VALUES)))
    keys = list(data) if isinstance(data, dict) else range(len(data))
    key, other = draw(st.sampled_from(keys)), draw(st.sampled_from(keys))
    match draw(st.sampled_from(["within", "delete", "repeat", "exchange"])):
        case "within":
            data[key] = _changed(draw, data[key])
        case "delete":
            del data[key]
        case "exchange":
            data[key], data[other] = data[other], data[key]
        case _ if isinstance(data, dict):
            data[f"{key} again"] = data[key]
        case _:
            data.insert(key, data[key])
    return data


def test_plans(tmp_path: Path) -> None:
    """What is read is the plan of the file, and cuts its model into as many stages as it says."""
    file = tmp_path / "plan.json"
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    inputs = torch.randn(2, 8)
    whole = WholeModel.capture(model, inputs)
    count = len(whole.blocks)
    cost = BlockCost(1.0, 1.0, 1.0, 4.0, 3.0, 1.0)
    costs = ModelCosts((cost,) * count, (2.0,) * (count - 1))
    partition(model, inputs, stages=2, microbatches=3, costs=costs).save(file)
    bound: dict[Any, int | AutosplitError] = {}

    def stages_of(plan: Plan) -> int | AutosplitError:
        try:
            return len(plan.bound_to(whole).wiring.inputs)
        except AutosplitError as error:
            return error

    def read(content: bytes) -> str:
        file.write_bytes(content)
        try:
            plan = Plan.load(file)
            schedule = plan.built_schedule()
        except AutosplitError:
            return "refused"
        said = json.loads(content)
        assert_says(schedule, [row.split() for row in said["actions"]])
        plan.save(file)
        assert json.loads(file.read_text()) == said
        key = plan.cuts, plan.model, plan.blocks, plan.inputs
        found = bound[key] = bound.get(key) or stages_of(plan)
        assert isinstance(found, AutosplitError) or found == plan.stages
        return "refused" if isinstance(found, AutosplitError) else "read"

    sound = file.read_bytes()
    said = looked_at(st.one_of(damaged(sound, TOKENS), changed(sound)), 100, read)
    assert min(said["read"], said["refused"]) > 0
