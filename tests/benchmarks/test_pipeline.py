"""The pipeline benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autosplit.pipeline.schedules import build
from benchmarks.pipeline import compute, engine, memory, page, peers, standin
from benchmarks.results import Results
from examples.decoder import LlamaConfig


def test_stand_ins_take_their_time_and_steps_in_flight_are_counted() -> None:
    times = (0.004, 0.004, 0.004)
    schedules = {
        "1f1b, fused": build("1f1b", 2, 2, split_backward=False),
        "zb-v": build("zb-v", 4, 2, ranks=2),
    }
    cases = [standin.Case(name, each, times) for name, each in schedules.items()]
    found = standin.measure(cases, steps=2)
    assert [each.name for each in found] == list(schedules)
    for each in found:
        assert each.measured >= each.simulated
        assert 0 < each.simulated_async <= each.simulated + 1e-9
        assert each.measured_async > 0.9 * each.simulated_async
    rows = [
        {**dataclasses.asdict(each), "name": f"N=2: {each.name}", "schedule": each.name}
        for each in found
    ]
    text = standin.render(rows)
    assert "### N=2" in text
    assert "1.000x" in text


def test_repeated_steps_follow_each_other_on_every_rank() -> None:
    once = build("1f1b", 2, 2)
    twice = standin.repeat(once, 2)
    assert twice.microbatches == 4
    for row, longer in zip(once.ranks, twice.ranks, strict=True):
        assert longer[: len(row)] == row
        shifted = [dataclasses.replace(a, microbatch=a.microbatch + 2) for a in row]
        assert list(longer[len(row) :]) == shifted


def test_engine_page(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "results.json")
    results.update("engine", engine.measure(soak=10), "command", "environment")
    text = page.page(results)
    assert "microseconds" in text
    assert "Soak: 10 steps" in text


def test_peers_say_who_is_ahead_and_what_fails() -> None:
    common = {"microbatches": 2, "spread": 0.1, "peak": 2**20, "error": "", "match": ""}
    rows = [
        {**common, "name": "eager, M=2: ours a", "schedule": "a", "ours": True, "seconds": 1.0},
        {**common, "name": "eager, M=2: ours d", "schedule": "d", "ours": True, "seconds": 1.3},
        {
            **common,
            "name": "eager, M=2: torch b",
            "schedule": "b",
            "ours": False,
            "seconds": 1.04,
            "match": "d",
        },
        {
            **common,
            "name": "eager, M=2: torch c",
            "schedule": "c",
            "ours": False,
            "seconds": float("nan"),
            "error": "ValueError: no",
        },
    ]
    text = peers.render(rows)
    assert "**1.040x** (target 1.05x)" in text
    assert "**0.800x**" in text  # the same schedule, behind
    assert "- c: ValueError: no" in text


def test_ranks_are_weighed_while_they_run_and_counted_where_they_are_many() -> None:
    cases = [
        dataclasses.replace(build("1f1b", 2, 4, split_backward=False), name=memory.BASELINE),
        dataclasses.replace(build("zb-h2", 2, 4), name="zb-h2", crosses_step=False),
    ]
    found = memory.measure(cases, LlamaConfig(dim=16, heads=2, kv_heads=2, hidden=16, seq=8))
    fused, deep = found
    assert 0 < fused.kept < deep.kept
    assert all(abs(row.kept / row.simulated - 1) < 0.05 for row in found)
    rows = [dataclasses.asdict(row) for row in (*found, *memory.projected(16))]
    text = memory.render(rows)
    assert "0.562x" in text  # V-Half of 16 ranks: 9 / 16


def test_the_engine_takes_no_less_than_its_replay() -> None:
    tiny = {"dim": "16", "heads": "2", "kv_heads": "2", "hidden": "16", "layers": "2", "seq": "8"}
    (row,) = compute.measure([compute.Case("1f1b", "1f1b", 1)], tiny, steps=2)
    assert row.replayed >= 1.0
    late = {**dataclasses.asdict(row), "simulated": 1.2, "shortest": 0.02}
    assert "**1.200**" in compute.render([late])
    assert "**1.200**" not in compute.render([{**late, "shortest": 0.01}])
