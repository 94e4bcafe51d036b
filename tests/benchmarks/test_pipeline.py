"""The pipeline benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B

from autosplit.pipeline.builders.build import build
from benchmarks.pipeline import memory, peers, standin
from benchmarks.pipeline.contenders import Contender
from examples.decoder import LlamaConfig

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_stand_ins_take_their_time_and_steps_in_flight_are_counted() -> None:
    times = (0.004, 0.004, 0.004)
    schedules = {
        "1f1b, fused": build("1f1b", 2, 2, split_backward=False),
        "zb-v": build("zb-v", 4, 2, ranks=2),
    }
    cases = [standin.Case(name, item, times) for name, item in schedules.items()]
    result = standin.measure(cases, steps=2)
    assert [item.name for item in result] == list(schedules)
    for element in result:
        assert element.measured >= element.simulated
        assert 0 < element.simulated_async <= element.simulated + 1e-9
        assert element.measured_async > 0.9 * element.simulated_async
    rows = [
        {**dataclasses.asdict(item), "name": f"N=2: {item.name}", "schedule": item.name}
        for item in result
    ]
    text = standin.render(rows)
    assert "### N=2" in text
    assert "1.000x" in text


TINY = {"features": "8", "width": "8", "layers": "2", "microbatch_size": "2"}


def fails_on_the_last_rank(stage: Any, microbatches: int, loss_fn: Any) -> Schedule1F1B:
    def fail(output: Any, target: Any) -> Any:
        raise ValueError("this rank only")

    return Schedule1F1B(stage, microbatches, loss_fn=fail)


def test_peers_take_turns_and_one_that_fails_on_one_rank_is_a_row() -> None:
    chosen = [
        Contender("1f1b", True, "1f1b"),
        Contender("in flight: 1f1b", True, "1f1b", in_flight=True),
        Contender("fails", False, fails_on_the_last_rank),
        Contender("1F1B", False, Schedule1F1B, split_backward=False, match="1f1b"),
        Contender("in flight: 1F1B", False, Schedule1F1B, match="in flight: 1f1b", in_flight=True),
    ]
    factory = "examples.models:mlp_workload"
    rows = peers.measure(factory, (2,), 2, "eager", TINY, chosen)
    assert [row.schedule for row in rows] == [item.name for item in chosen]
    for row in rows:
        assert (row.seconds > 0) is not bool(row.error)
        assert len(row.rounds) == (0 if row.schedule == "fails" else 2)
        assert ("this rank only" in row.error) is (row.schedule == "fails")


ON_RANK = memory._on_rank


def one_layer(*args: Any) -> list[int]:
    """What a rank does, with half as many layers as the benchmark."""
    with mock.patch.object(memory, "LAYERS", 1):
        return ON_RANK(*args)


def test_allocations_of_a_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_on_rank", one_layer)
    cases = [
        dataclasses.replace(build("1f1b", 2, 4, split_backward=False), name=memory.BASELINE),
        dataclasses.replace(build("zb-h2", 2, 4), name="zb-h2", crosses_step=False),
    ]
    rows = memory.measure(cases, LlamaConfig(dim=16, heads=2, kv_heads=2, hidden=16, seq=8))
    assert 0 < rows[0]["allocated"] < rows[1]["allocated"]
    assert "1.500x" in memory.render(rows)  # ZB-H2's formula on two ranks
