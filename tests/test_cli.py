"""The command line, as a person uses it."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner, Result

from autosplit.cli import main

TINY = [
    part
    for setting in ("dim=32", "layers=2", "heads=2", "kv_heads=2", "hidden=48", "seq=16")
    for part in ("--set", setting)
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_compare(tmp_path: pathlib.Path) -> None:
    """Two ranks, fused and split, every promised field and file."""
    result = run(
        *("compare", "examples.models:llama", *TINY, "--stages", "2", "--schedule", "1f1b,gpipe"),
        *("--microbatches", "2", "--steps", "3", "--warmup", "1"),
        *("--output", str(tmp_path / "out"), "--json", str(tmp_path / "rows.json")),
    )
    assert result.exit_code == 0, result.output
    for word in ("schedule", "speed-up", "ideal bubble", "peak memory by rank", "grad diff"):
        assert word in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["schedule"], row["split"]) for row in rows] == [
        ("1f1b", False),
        ("1f1b", True),
        ("gpipe", False),
        ("gpipe", True),
    ]
    for row in rows:
        assert (row["stages"], row["microbatches"]) == (2, 2)
        assert row["max_grad_diff"] == 0.0
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["median_s"])
        assert len(row["peak_bytes"]) == 2
        assert min(row["peak_bytes"]) > 0
        assert 0.0 < row["ideal_bubble"] < 1.0
        assert 0.0 < row["bubble"] < 1.0
    assert [row["speedup"] for row in rows if not row["split"]] == [1.0, 1.0]
    fused, split = rows[:2]
    assert fused["last_loss"] == split["last_loss"]
    assert sorted(fused["durations_s"]) == ["B", "F"]
    assert sorted(split["durations_s"]) == ["F", "I", "W"]
    made = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert {"timeline.png", "timeline.html", "trace.json", "results.json"} <= made
    page = (tmp_path / "out" / "timeline.html").read_text()
    assert all(f"{row['schedule']} split, M=2, simulated" in page for row in rows)
    assert {f"graphs/stage{n}/backward_weight.py" for n in (0, 1)} <= made
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {event.get("name") for event in trace["traceEvents"]} >= {"0F0", "1I0", "1W1", "0B1"}


def test_inspect_a_model(tmp_path: pathlib.Path) -> None:
    result = run("inspect", "examples.models:llama_whole", *TINY, "--dump", str(tmp_path / "d"))
    assert result.exit_code == 0, result.output
    assert "Decoder: args[0] -> output" in result.output
    assert "layers.1.feed_forward.down.weight" in result.output
    assert (tmp_path / "d" / "backward_input.py").exists()


def test_inspect_a_stage() -> None:
    command = ["inspect", "examples.models:llama", *TINY, "--stages", "2", "--stage", "1"]
    with_grads = run(*command)
    without = run(*command, "--no-input-grads")
    assert with_grads.exit_code == without.exit_code == 0
    row = next(row for row in without.output.splitlines() if row.startswith("I  "))
    assert row.split()[2:4] == ["0", "0"]
    assert row not in with_grads.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "examples.models"], "expected MODULE:FACTORY"),
        (["compare", "examples.nothing:llama"], "no module named 'examples.nothing'"),
        (["compare", "examples.models:lama"], "has no 'lama'; callables there:"),
        (
            ["compare", "examples.models:llama", "--schedule", "zigzag"],
            "unknown schedule 'zigzag'; known: naive, gpipe, 1f1b",
        ),
        (
            ["compare", "examples.models:llama", "--weights", "later"],
            "unknown weights 'later'; known: 2bp, fill",
        ),
        (
            ["compare", "examples.models:llama", "--set", "size=3"],
            "unknown setting 'size' of LlamaConfig; known: vocabulary, dim,",
        ),
        (["compare", "examples.models:llama", "--steps", "0"], "steps must be at least 1, got 0"),
        (["compare", "examples.models:llama", "--microbatches", "two"], "expected counts such as"),
        (["compare", "examples.models:llama", "--set", "dim"], "expected NAME=VALUE, got 'dim'"),
        (
            ["compare", "examples.models:llama_whole", "--steps", "1"],
            "expected a factory that returns an autosplit.workload.Workload",
        ),
        (
            ["inspect", "torch.nn:Identity"],
            "returned a module without inputs; return (model, args)",
        ),
        (
            ["inspect", "examples.models:llama", "--stage", "4"],
            "no stage 4 of 1; stages count from 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
