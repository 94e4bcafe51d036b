"""The command line, as a person uses it."""

from __future__ import annotations

import json
import pathlib
import shlex
from typing import Any

import pytest
from click.testing import CliRunner, Result

import autosplit.cli.plan
import autosplit.compare.run  # noqa: F401  # both launch ranks, and are imported late otherwise
from autosplit.cli import main
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.planner import partition
from autosplit.text.figures import milliseconds
from tests.planner import planned_models

pytestmark = pytest.mark.usefixtures("launched_on_ranks")

TINY = "--set dim=32 --set layers=2 --set heads=2 --set kv_heads=2 --set hidden=48 --set seq=16"


def run(command: str, *more: object) -> Result:
    return CliRunner().invoke(main, [*shlex.split(command), *map(str, more)])


def test_compare(tmp_path: pathlib.Path) -> None:
    """Two ranks, fused and split, every promised field and file."""
    options = "--stages 2 --schedule 1f1b --microbatches 2 --steps 2"
    files = f"--output {tmp_path}/out --json {tmp_path}/rows.json"
    result = run(f"compare {PERCEPTRON} {options} {files}")
    assert result.exit_code == 0, result.output
    for word in ("schedule", "speed-up", "ideal bubble", "peak memory by rank", "grad diff"):
        assert word in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["schedule"], row["split"]) for row in rows] == [("1f1b", False), ("1f1b", True)]
    for row in rows:
        assert (row["stages"], row["microbatches"]) == (2, 2)
        assert row["max_grad_diff"] == 0.0
        assert len(row["peak_bytes"]) == 2
        assert min(row["peak_bytes"]) > 0
        assert 0.0 < row["ideal_bubble"] < 1.0
        assert 0.0 < row["bubble"] < 1.0
    fused, split = rows
    assert fused["speedup"] == 1.0
    assert sorted(fused["durations_s"]) == ["B", "F"]
    assert sorted(split["durations_s"]) == ["F", "I", "W"]
    built = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert {"timeline.png", "trace.json", "results.json"} <= built
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    shown = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    (step,) = {row["drawn_step"] for row in rows}  # of a pair
    titles = [f"1f1b {backward}, M=2" for backward in ("fused", "split")]
    hows = (f"step {step}, measured", "simulated")
    assert shown == [f"{title}, {how}" for title in titles for how in hows]
    assert {event.get("name") for event in events} >= {"0F0", "1I0", "1W1", "0B1"}


LLAMA = "compare examples.models:llama"
SMALL = f"examples.models:llama {TINY}"
PERCEPTRON = "examples.models:mlp --set layers=4 --set width=8 --set microbatch_size=4"
FACTORY = "plan tests.planner.planned_models:factory"
MEASURED = f"{FACTORY} --devices 2 --batch 8"
PLAN = f"{MEASURED} --estimate"
ONE_PLAN = f"{PLAN} --schedule gpipe --microbatches 4 --memory balanced"
STEP = "simulate --stages 4 --microbatches 8"
PIPELINE = f"{STEP} --times 18.5,18.1,9.3"


def simulated(path: pathlib.Path, options: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    """The rows that the command writes, by schedule and placement of W."""
    result = run(f"{PIPELINE} {options} --json {path}/rows.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((path / "rows.json").read_text())["rows"]
    return {(row["schedule"], row["weights"]): row for row in rows}


def test_simulate(tmp_path: pathlib.Path) -> None:
    """Every schedule by its published bubble, and the pictures."""
    rows = simulated(tmp_path, f"--memory 2,1.5 --output {tmp_path}/out")
    fused, split = rows["1f1b", "fused"], rows["zb-h1", "fill"]
    forms = {name: [w for other, w in rows if other == name] for name in SCHEDULES}
    assert forms["1f1b"] == ["fused", "2bp", "fill"]
    assert (forms["interleaved"], forms["zb-v"]) == (["fused", "fill"], ["fill"])
    assert fused["makespan"] == pytest.approx((8 + 3) * 45.9)
    assert fused["bubble"] == pytest.approx(3 / 11)
    assert fused["peak_memory"] == [8.0, 6.0, 4.0, 2.0]
    assert split["makespan"] == pytest.approx(8 * 45.9 + 3 * (18.5 + 18.1 - 9.3))
    assert rows["zb-h2", "fill"]["step_time"] < rows["zb-h2", "fill"]["makespan"]
    one_stage = [row["makespan"] for row in rows.values() if row["stages_per_rank"] == 1]
    assert rows["auto", "searched"]["makespan"] == min(one_stage)
    for row in rows.values():
        assert max(row["peak_memory"]) > 0
        assert 0.0 <= row["bubble"] < 1.0
    built = {path.name for path in (tmp_path / "out").iterdir()}
    assert built == {"timeline.png", "trace.json"}


def test_simulate_says_which_steps_overlap() -> None:
    result = run("simulate --stages 3 --microbatches 5 --times 1,1,1")
    assert "steps of zb-h2 overlap, and one\n            by itself takes 17.0 ms" in result.output
    assert "not dualpipe-v: " in result.output


def test_simulate_options_have_effects(tmp_path: pathlib.Path) -> None:
    plain = simulated(tmp_path)
    slow = simulated(tmp_path, "--latency 1")
    assert slow["1f1b", "fused"]["makespan"] > plain["1f1b", "fused"]["makespan"] + 5
    narrow = simulated(tmp_path, "--bandwidth 1 --message 1")  # one millisecond
    assert narrow["gpipe", "fused"]["makespan"] == pytest.approx(slow["gpipe", "fused"]["makespan"])
    step = plain["gpipe", "fused"]["makespan"]
    reduced = simulated(tmp_path, "--collectives 0,20 --buckets 2")
    assert reduced["gpipe", "fused"]["makespan"] == pytest.approx(step + 10)
    sharded = simulated(tmp_path, "--collectives 4,20 --buckets 2")
    assert sharded["gpipe", "fused"]["makespan"] == pytest.approx(step + 4 + 20)
    again = simulated(tmp_path, "--collectives 40,20 --buckets 4 --regather")
    assert again["gpipe", "fused"]["makespan"] > 15 * 40 + 20  # two blocks stay at the turn
    deeper = simulated(tmp_path, "--chunks 4")
    assert deeper["interleaved", "fused"]["makespan"] < plain["interleaved", "fused"]["makespan"]
    uneven = simulated(tmp_path, "--memory 1,1,1,1,1,1,9,9")
    assert uneven["1f1b", "fused"]["peak_memory"] == [4.0, 3.0, 2.0, 9.0]
    capped = run(f"{PIPELINE} --cap 3.5 --output {tmp_path}/capped").output
    rows = {line.split()[0]: line.split() for line in capped.splitlines() if "x  " in line}
    assert (rows["v-half"][5], rows["v-half"][-1], rows["gpipe"][-1]) == ("1.000x", "*", "cap")
    assert "over cap: a rank exceeds the cap" in capped
    assert '"v-half, fill"' in (tmp_path / "capped" / "trace.json").read_text()
    capped = simulated(tmp_path, "--cap 3.5")
    over = {name: row["over_cap"] for name, row in capped.items()}
    assert over == {name: max(row["peak_memory"]) > 3.5 for name, row in capped.items()}
    assert set(over.values()) == {True, False}
    kinds = (("zb-h1", "fill"), ("zb-v", "fill"))
    assert [capped[name]["stages_per_rank"] for name in kinds] == [1, 2]
    result = run(f"{PIPELINE} --schedule v-min")
    assert "v-min: 8 stages, 8 microbatches, 4 ranks" in result.output
    assert "7F0" in result.output
    run(f"{PIPELINE} --schedule naive --output {tmp_path}")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"name": "naive, fill"} in [event.get("args") for event in trace["traceEvents"]]


def test_plan(tmp_path: pathlib.Path) -> None:
    """A table, why others lost, and the file of the figures."""
    figures = tmp_path / "plan.json"
    options = "--batch 8 --estimate --memory balanced --microbatches 2,4 --rows 3"
    command = f"{FACTORY} {options} --output {figures}"
    result = run(f"{command} --devices 2 --limit 1GiB")
    assert result.exit_code == 0, result.output
    texts = (
        "1.000x",
        " more (--rows shows them)",
        "not dualpipe-v",
        "first block",
        "layers.1",
    )
    for text in texts:
        assert text in result.output
    actual = json.loads(figures.read_text())
    arguments = actual["partition"]
    assert len(actual["stage_times"]) == len(arguments["cut_at"]) + 1
    assert (
        actual["predicted_step"]
        > arguments["microbatches"] * max(map(sum, actual["stage_times"])) / 2
    )
    narrow = f"{command} --devices 3 --schedule gpipe --stages 3"
    assert run(narrow).exit_code == 0
    other = json.loads(figures.read_text())
    arguments = other["partition"]
    assert (arguments["schedule"], len(arguments["cut_at"])) == ("gpipe", 2)
    model, inputs = planned_models.factory()
    plan = partition(model, inputs, **arguments | {"ranks": 1})
    assert json.loads(json.dumps(plan.arguments)) == arguments | {"ranks": 1}
    assert run(f"{narrow} --link 1e-6 --device 989,3350 --optimizer-state 0").exit_code == 0
    later = json.loads(figures.read_text())
    assert later["predicted_step"] > other["predicted_step"] + 0.2
    assert max(later["peak_memory"]) < max(other["peak_memory"])


def test_a_plan_has_the_limit_that_it_keeps(tmp_path: pathlib.Path) -> None:
    files = f"--output {tmp_path}/plan.json"
    one = f"{ONE_PLAN} {files}"
    assert run(one).exit_code == 0
    most = max(json.loads((tmp_path / "plan.json").read_text())["peak_memory"])
    assert run(one, "--limit", int(most) + 1).exit_code == 0
    assert (
        json.loads((tmp_path / "plan.json").read_text())["partition"]["memory_limit"]
        == int(most) + 1
    )
    refused = run(one, "--limit", int(0.62 * most))
    assert refused.exit_code == 1
    assert "; the least cap that works is " in refused.output


def test_plan_for_a_machine_that_is_not_here(tmp_path: pathlib.Path) -> None:
    """A plan by a data sheet measures nothing."""
    figures = tmp_path / "out.json"
    command = f"{MEASURED} --set layers=1 --memory balanced --microbatches 2 --schedule 1f1b"
    free = "links take no time (give their bandwidth as --link)"

    def step(options: str) -> float:
        result = run(f"{command} {options} --output {figures}")
        assert result.exit_code == 0, result.output
        assert "measuring" not in result.output
        assert (free in result.output) is ("--link" not in options)
        return float(json.loads(figures.read_text())["predicted_step"])

    sheet = step("--device 989,3350")
    assert sheet < step("--device 989,3350 --link 1e-6")
    assert sheet < step("--device 1e-3,1")
    assert step("--estimate") < step("--estimate --link 1e-6")
    for options, text in (
        ("--device h101", "expected one of a100, h100, h200, b200, l40s, mi300x, or teraflops"),
        ("--device 989", "such as 989,3350 for an H100; got '989'"),
        ("--link string", "'string' is not a valid float range"),
    ):
        result = run(f"{command} {options}")
        assert result.exit_code in (1, 2)
        assert text in result.output


def test_plan_of_ranks_that_measure(tmp_path: pathlib.Path) -> None:
    one = "--schedule 1f1b --memory balanced --microbatches 2 --seconds 0.1"
    command = f"{MEASURED} {one} --output {tmp_path}/plan.json --json {tmp_path}/rows.json"
    result = run(f"{command} --set layers=1")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows[0]["step"] == json.loads((tmp_path / "plan.json").read_text())["predicted_step"]
    step = milliseconds(json.loads((tmp_path / "plan.json").read_text())["predicted_step"])
    assert f"a step of {step} ms, " in result.output
    assert "; measured block by block" in result.output
    best = next(row for row in result.output.splitlines() if " 1.000x " in row)
    assert f" {step} " in best  # one figure for a step
    refused = run(f"{command} --stages 9")
    assert "no configuration can run: cannot cut 4 blocks into 9 stages" in refused.output


def test_a_schedule_that_is_always_split_is_held_against_1f1b(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "out.json"
    options = f"--stages 2 --ranks 1 --schedule zb-v --steps 1 --json {file}"
    result = run(f"compare {PERCEPTRON} {options}")
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["schedule"], row["split"]) for row in rows] == [("1f1b", False), ("zb-v", True)]
    assert [row["max_grad_diff"] for row in rows] == [0.0, 0.0]


def test_your_loss_of_your_target_under_a_searched_schedule(tmp_path: pathlib.Path) -> None:
    options = "--ranks 1 --steps 1 --schedule auto --loss torch.nn.functional:cross_entropy"
    result = run(f"compare tests.failing:with_target {options} --json {tmp_path}/rows.json")
    assert result.exit_code == 0, result.output
    fused, split = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (fused["schedule"], split["schedule"]) == ("1f1b", "auto")
    assert split["samples_per_s"] == pytest.approx(8 / split["median_s"])
    assert split["tokens_per_s"] == pytest.approx(24 / split["median_s"])
    assert fused["max_grad_diff"] == split["max_grad_diff"] == 0.0


def test_a_model_that_differs_from_call_to_call_is_said_to() -> None:
    options = "--ranks 1 --steps 1 --microbatches 1"
    result = run(f"compare tests.failing:dropping {options}")
    assert result.exit_code == 0, result.output
    assert result.output.count(" random") == 2


def test_inspect_a_model(tmp_path: pathlib.Path) -> None:
    result = run(f"inspect {SMALL} --dump {tmp_path}/d --fold-views --json {tmp_path}/split.json")
    assert result.exit_code == 0, result.output
    assert "aten.mm.default(aten." in (tmp_path / "d" / "backward_weight.py").read_text()
    (figures,) = json.loads((tmp_path / "split.json").read_text())["captures"]
    graphs = figures["graphs"]
    assert graphs["backward"]["flops"] == 2 * graphs["forward"]["flops"]
    assert figures["weight_gradient_flops"]["in_w"] == graphs["backward_weight"]["flops"]
    assert max(row["bytes"] for row in figures["deferred"]) > 0
    assert "WithLoss: args[0], args[1] -> output" in result.output
    assert "model.layers.*.feed_forward.gate.weight" in result.output
    assert (tmp_path / "d" / "backward_input.py").exists()


def test_inspect_a_model_that_no_graph_holds() -> None:
    result = run("inspect tests.dynamo.breaking:factory")
    assert result.exit_code == 0, result.output
    assert "is split graph by graph" in result.output
    assert "100.0 % of the weight gradients" in result.output


def test_inspect_takes_bytes_with_a_unit() -> None:
    named = "tests.failing:dropping"
    none, all_ = (run(f"inspect {named} --memory {most}") for most in ("1KiB", "1MiB"))
    assert none.exit_code == all_.exit_code == 0, none.output + all_.output
    assert none.output != all_.output == run(f"inspect {named} --memory 1048576").output
    refused = run(f"inspect {named} --memory 3lots")
    assert "expected bytes such as 80GiB" in " ".join(refused.output.split())


def test_inspect_without_gradients_of_inputs() -> None:
    command = "inspect examples.models:mlp"
    with_grads = run(command)
    without = run(f"{command} --no-input-grads")
    assert with_grads.exit_code == without.exit_code == 0
    rows = [
        next(row for row in result.output.splitlines() if row.startswith("I  ")).split()
        for result in (with_grads, without)
    ]
    # Without, the chain ends at the first parameters: not all that leads to the input is computed.
    assert int(rows[0][2]) > int(rows[1][2]) > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare examples.models", "expected MODULE:FACTORY"),
        (
            "compare examples.nothing:llama",
            "No module named 'examples.nothing'",
        ),
        (
            "compare examples.models:lama",
            "'examples.models' has no attribute 'lama'",
        ),
        (f"{LLAMA} --schedule zigzag", "unknown schedule 'zigzag'; known: naive, gpipe, 1f1b"),
        (
            f"compare {SMALL} --loss torch.nn:Nothing",
            "the loss torch.nn:Nothing raised",
        ),
        (
            "compare tests.failing:with_target",
            "name the loss, as in --loss torch",
        ),
        ("check zb-v --mesh pp=x", "'x' is not a valid integer range"),
        ("check zb-v --mesh pp=2,pp=2", "mesh_dim_names must be different, got pp, pp"),
        (f"{LLAMA} --steps 0", "0 is not in the range x>=1"),
        (f"{LLAMA} --microbatches two", "'two' is not a valid integer range"),
        (f"{LLAMA} --set dim", "expected NAME=VALUE, got 'dim'"),
        ("compare tests.failing:sized --microbatches 1,0", "0 is not in the range x>=1"),
        ("compare tests.failing:listed", "returned a tuple of Linear, tuple, list; return (model,"),
        (f"{STEP} --times 1,2", "times needs 3 numbers, or 3 for each of the 4"),
        (f"{STEP} --times 1,2,x", "'x' is not a valid float"),
        (f"{STEP} --times 1,2,-3", "-3.0 is not in the range x>=0.0"),
        (f"{PIPELINE} --memory 1,2,3", "memory needs 2 numbers, or 2 for each of the 4"),
        (f"{PIPELINE} --message 1", "--bandwidth and --message work only together"),
        (f"{PIPELINE} --schedule zigzag", "no simulated schedule 'zigzag'; simulated: naive,"),
        (f"{PLAN} --limit '80 lots'", "expected bytes such as 80GiB, '800 MB' or a"),
        (
            f"{PLAN} --limit 20KiB --microbatches 2,4 --memory lean",
            "; the least cap that works is ",
        ),
        (
            f"{ONE_PLAN} --limit 1KiB",
            "fit under a cap of 1,024 bytes a rank; the least cap that works is",
        ),
        (f"{PLAN} --backend tpu", "'tpu' is not one of 'eager', 'inductor'"),
        (f"{PIPELINE} --json nowhere/rows.json", "there is no folder nowhere to write rows"),
        (
            "plan tests.planner.planned_models:bare --devices 2 --batch 8 --estimate",
            "returned a Net without example inputs; return (model, args) or (model, args, kwargs)",
        ),
        (
            "inspect torch.nn:Identity",
            "returned a Identity without example inputs; return (model, args)",
        ),
        (
            "inspect tests.planner.planned_models:factory --set layer=2",
            "planned_models:factory(layers: 'str' = '2') -> 'tuple[nn.Module, Tensor]' cannot be "
            "called with layer=2: got an unexpected keyword argument 'layer'",
        ),
        (
            "simulate --stages 1000000000 --microbatches 8 --times 18.5,18.1,9.3",
            "make a step of 48,000,000,000 actions",
        ),
        (
            f"{PIPELINE} --microbatches 1000000000",
            "more than the limit of 200,000: use fewer",
        ),
        (f"{PIPELINE} --chunks 1000000", "4,000,000 stages and 8 microbatches make a step"),
        (f"{PIPELINE} --cap nan", "a memory limit is a number >= 0"),
        (f"{PIPELINE} --cap 0.5", "no schedule is within the cap 0.5; the most frugal"),
        (f"{PIPELINE} --output README.md/x", "cannot write into a folder README.md/x"),
        (f"{PIPELINE} --output /proc/x", "cannot write '/proc/x': No such file"),
        (f"{PLAN} --batch 99999999999999999999", "is not in the range 1<=x<=1000000"),
        (f"{PLAN} --limit {'9' * 400}", "(units: B, KiB to TiB, KB to TB), got '999"),
        (f"{PLAN} --schedule ,", "expected one or more values with commas, got ','"),
        (f"{PLAN} --rows -1", "-1 is not in the range x>=1"),
        (f"{PLAN} --output /proc/x", "cannot write '/proc/x': No such file"),
        (
            "plan tests.failing:raises --devices 2 --batch 8 --estimate",
            "tests.failing:raises raised RuntimeError: my own fail",
        ),
        (
            "plan tests.failing:nothing --devices 2 --batch 8 --estimate",
            "returned a NoneType; return (model, args) or",
        ),
        (
            "plan tests.failing:listed --devices 2 --batch 8 --estimate",
            "returned a tuple of Linear, tuple, list; return",
        ),
        ("inspect tests.failing:raises", "raised RuntimeError: my own failure ("),
        ("inspect tests.failing:sized --set size=x", "raised ValueError: invalid literal"),
        ("inspect tests.failing:fails", "called without autosplit, raised TypeError: linear()"),
        ("inspect tests.failing:sized --memory '²'", "memory must be 'fast', 'balanced'"),
        ("inspect tests.failing:sized --dump /proc/x", "cannot write '/proc/x': No such"),
        ("compare tests.failing:sized --schedule ''", "expected one or more values with"),
        (
            "compare tests.failing:sized --ranks 1000000000",
            "1000000000 is not in the range 1<=x<=256",
        ),
        (
            "compare tests.failing:sized --microbatches 1000000000",
            "make a step of 6,000,000,000",
        ),
    ],
    ids=lambda value: value[:60],
)
def test_bad_input_is_refused_at_once(command: str, message: str) -> None:
    result = run(command)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("inspect tests.failing:nowhere", 2),
        ("inspect tests.failing:raises", 2),
        ("inspect tests.failing:fails", 1),
        ("inspect tests.failing:sized --memory bogus", 2),
        (f"{PLAN} --memory bogus", 2),
        ("compare tests.failing:nowhere", 2),
        ("compare tests.failing:sized --schedule zbv", 2),
        ("compare tests.failing:sized --stages 9 --ranks 1", 1),
        (f"{PLAN} --schedules zbv", 2),
        (f"{ONE_PLAN} --limit 1", 1),
        ("simulate --stages 2 --microbatches 2 --times 1,1", 2),
        ("simulate --stages 2 --microbatches 4 --times 1,1,1 --cap 0.1", 1),
        ("check zbv --mesh pp=4", 2),
        ("check 1f1b --mesh pp=2,tensor=2", 2),
    ],
)
def test_a_verdict_exits_with_1_and_a_wrong_command_with_2(command: str, status: int) -> None:
    result = run(command)
    assert result.exit_code == status, result.output


def test_a_full_disk() -> None:
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    result = run(f"{PIPELINE} --json /dev/full")
    assert result.exit_code == 2
    assert "OutputError: cannot write '/dev/full': No space left on device" in result.output


def test_a_plan_is_written_where_asked_and_has_the_examples_batch(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"{FACTORY} --devices 2 --schedule 1f1b --memory balanced --estimate"
    result = run(command)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    assert "written" not in result.output
    result = run(f"{command} --output p.json")
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "p.json").read_text())
    assert 2 % plan["partition"]["microbatches"] == 0


@pytest.mark.parametrize("command", ["compare", "inspect"])
def test_unknown_backend(command: str) -> None:
    result = run(f"{command} {SMALL} --backend tpu")
    assert result.exit_code == 2
    assert "'tpu' is not one of 'eager', 'inductor'" in result.output


def test_inspect_writes_what_inductor_generated(tmp_path: pathlib.Path) -> None:
    named = "tests.backends.test_backends:linear"
    result = run(f"inspect {named} --backend inductor --dump {tmp_path}")
    assert result.exit_code == 0, result.output
    for name in ("forward", "backward_input", "backward_weight"):
        assert "def call(self, args)" in (tmp_path / f"{name}.generated.py").read_text()
    assert not (tmp_path / "backward.generated.py").exists()


def test_check(tmp_path: pathlib.Path) -> None:
    """Schedules are checked by name and from a file of torch's; some end, some hang."""
    file = tmp_path / "check.json"
    result = run(f"check zb-v --mesh pp=2,dp_shard=2 --microbatches 4 --json {file}")
    assert json.loads(file.read_text())["ends"]
    assert result.exit_code == 0, result.output
    for line in (
        "zb-v: 4 stages, 4 microbatches, 2 ranks, pp=2, dp_shard=2",
        "  one NCCL kernel at a time, as launched (NCCL_LAUNCH_ORDER_IMPLICIT=1): ends",
        "  2: 0 to 1, 1 to 0: 8",
        "  2: dp_shard of rank 0, dp_shard of rank 1: 2",
    ):
        assert line in result.output.splitlines()
    crossed = tmp_path / "crossed.csv"
    crossed.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    result = run("check", crossed, "--mesh", "pp=2", "--torch", "pair")
    assert result.exit_code == 1
    assert "never ends" in result.output
    assert "1. rank 0: 0SEND_F1 <-- waits for 1RECV_F1 of rank 1" in result.output
    result = run("check", crossed, "--mesh", " pp = 2 ", "--microbatches", "2")
    assert result.exit_code == 0  # our engine has messages of its own
    assert "receives of the file are not judged" in result.output
    result = run("check", crossed, "--torch", "edge")
    assert result.exit_code == 1
    assert "may hang with one NCCL kernel at a time" in result.output.splitlines()[1]
    assert "1. rank 0: " in result.output  # and why
    circle = tmp_path / "circle.csv"
    circle.write_text("\ufeff0B0,0F0\n1F0,1B0\n", encoding="utf-8")
    result = run("check", circle)
    assert (result.exit_code, result.output.splitlines()[0]) == (
        1,
        "never ends, whatever anything takes:",
    )
    offloaded = tmp_path / "offloaded.csv"
    offloaded.write_text("0F0,0OFFLOAD0,0F1,0RELOAD0,0B0,0B1\n")
    assert "not judged, because moves have threads" in run("check", offloaded).output
    for command, message in (
        (("check", crossed, "--mesh", "pp=3"), "has 2 ranks, not the 3 of the command"),
        (("check", crossed, "--microbatches", "3"), "has 2 microbatches, not the 3 of the"),
        (("check", offloaded, "--torch", "pair"), "memory actions such as 0OFFLOAD0, which"),
        (("check", "zbv", "--mesh", "pp=4"), "did you mean 'zb-v'?"),
        (
            ("check", "1f1b", "--mesh", "pp=2,tensor=2"),
            "'tensor' is not supported; supported: 'pp'",
        ),
        (("check", "1f1b", "--mesh", "pp=2,dp_shards=2"), "did you mean 'dp_shard'"),
        (("check", "1f1b", "--mesh", "pp=2,dp=2"), "did you mean 'dp_replicate' or 'dp_shard'?"),
        (("check", "1f1b"), "--mesh pp=..."),
    ):
        result = run(*command)
        assert (result.exit_code, message in result.output) == (2, True), result.output
