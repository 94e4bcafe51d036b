"""Training over real Gloo processes, held against a single process with plain autograd."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError, ScheduleError, SplitError
from autosplit.passes.graph import calls
from autosplit.pipeline import RunOptions, StageOptions
from autosplit.pipeline.engine import stages
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.stage import Stage
from tests.all_true import assert_all
from tests.pipeline import workers
from tests.pipeline.failing_workers import trip_stage
from tests.pipeline.training import training_workers
from tests.ranks import Ranks

ROW = tuple(map(Action.parse, ["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]))
WHOLE = Schedule("mine", 2, 1, (ROW,), (0, 0), True)
HALF = Schedule("mine", 2, 4, (ROW[:3] + ROW[4:],), (0, 0), True)

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(on_ranks: Ranks) -> Results:
    return on_ranks(training_workers.with_reference_stage, 2, timeout=90)


@pytest.fixture(scope="module")
def split(on_ranks: Ranks) -> Results:
    return on_ranks(training_workers.with_split_stage, 2, timeout=90)


@pytest.fixture(scope="module")
def three(on_ranks: Ranks) -> Results:
    return on_ranks(training_workers.three_ranks, 3, timeout=90)


def _cases(*counts: int, part: tuple[int, int] = (0, 1)) -> dict[str, str]:
    names = training_workers.one_part(
        part, ("naive", "gpipe", "1f1b"), ("False", "2bp", "fill"), [f"M={each}" for each in counts]
    )
    found = {" ".join(name): "equal" for name in names}
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_and_losses_equal_those_of_one_process(reference: Results, stages: int) -> None:
    """Of two and three stages, and of three on three ranks, each a third of all cases."""
    cases = _cases(1, 2, 5, part=(stages - 2, 3))
    assert [found[f"grid {stages}"] for found in reference] == [cases] * 2


def test_split_stages_give_the_gradients_of_one_process(split: Results) -> None:
    assert [found["grid 2"] for found in split] == [_cases(3, part=(0, 2))] * 2
    assert [found["grid 4"] for found in split] == [_cases(2, part=(1, 2))] * 2


def test_three_ranks(three: Results) -> None:
    assert [found["grid 3"] for found in three] == [_cases(1, 2, 5, part=(2, 3))] * 3
    assert [found["grid 4"] for found in three] == [_cases(2)] * 3
    assert all(value for found in three for value in found["shared 3"].values())


@pytest.mark.parametrize("case", ["clip 0.1", "clip 100", "shared 2", "shared 4", "several"])
def test_same_as_one_process(reference: Results, case: str) -> None:
    for found in reference:
        assert_all(found[case])
    names = [name for found in reference for name in found[case]]
    assert {"losses", "losses 0"} & set(names)


def test_modules_of_a_list_may_have_a_parameter_in_common(reference: Results) -> None:
    for found in reference:
        assert found["tied in a list"] == dict.fromkeys(found["tied in a list"], True)


def test_gradients_of_what_no_optimizer_moves_do_not_add_up(reference: Results) -> None:
    for found in reference:
        norms, expected = found["not moved"]
        assert norms == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("case", ["clip 0.1", "shared 3", "several", "frozen 0", "frozen 1"])
def test_same_as_one_process_with_split_stages(split: Results, case: str) -> None:
    for found in split:
        assert_all(found[case])


@pytest.mark.parametrize("stage", [0, 1])
def test_frozen_stage(reference: Results, stage: int) -> None:
    expected = {"losses": True, "none": True, "grads": True}
    assert [found[f"frozen {stage}"] for found in reference] == [expected] * 2


def test_hooks_of_parameters_change_gradients_of_microbatches(split: Results) -> None:
    assert [found["hooked"] for found in split] == [[True, True]] * 2


def test_evaluate_runs_in_eval_mode_and_leaves_everything_as_it_was(reference: Results) -> None:
    first, second = (found["evaluate"] for found in reference)
    inputs, targets = workers.data(8)
    expected = [
        nn.functional.mse_loss(x, y)
        for x, y in zip((4 * inputs).chunk(4), targets.chunk(4), strict=True)
    ]
    assert torch.equal(first["first"], torch.stack(expected))
    for name in ("first", "evaluated", "again", "trained"):
        assert torch.equal(first[name], second[name])
        assert first[name].shape == (4,)
    assert torch.equal(first["evaluated"], first["again"])
    # In training each stage doubles its input; in evaluation none does.
    assert first["modes"] == second["modes"] == [True, False]
    assert first["grads"] == second["grads"] == [None]


def test_autocast_reaches_modules_loss_and_messages(split: Results) -> None:
    for found in split:
        losses, evaluated, expected, dtypes = found["autocast"]
        assert torch.equal(losses, expected)
        assert torch.equal(evaluated, expected)
        assert set(dtypes) == {torch.float32}


def test_timeline_holds_what_all_ranks_ran(reference: Results) -> None:
    rank0 = ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    rank1 = ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    for found in reference:
        assert found["recorded"] == (rank0, rank1, True)


def test_steps_in_flight_give_the_same_losses_and_weights(reference: Results) -> None:
    """And rank 0 does not wait for the weight gradients that rank 1 has left."""
    expected = {"losses": True, "weights": True, "ahead": True}
    assert [found["async"] for found in reference] == [expected] * 2


def test_auto_measures_then_changes_the_schedule(split: Results) -> None:
    for found in split:
        auto = found["auto"]
        assert auto.pop("names") == ["zb-v"] * 2 + ["auto"] * 4
        assert auto.pop("wholes") == 4, "one to measure at each stage"
        assert auto == {"losses": True, "states": True, "same": True}


def test_batches_of_any_shape(split: Results) -> None:
    """A rank that takes none of the batch's inputs need not be given them."""
    for found in split:
        assert found["any shape"].pop("captures") == [2]
        assert found["any shape"] == {"losses": True, "grads": True, "evaluated": True}


def test_one_rank_of_many_can_hold_all_stages(reference: Results) -> None:
    assert reference[0]["one rank"]


def test_one_process_without_a_process_group() -> None:
    inputs, targets = workers.data(8)
    model = workers.whole(3)
    expected = workers.single_process(model, inputs, targets, 4)
    engine = workers.trainer(stages=3, ranks=1)
    assert torch.equal(engine.forward_backward((inputs, targets)), expected)
    assert sorted(engine.modules) == [0, 1, 2]
    assert workers.gradients_equal(engine.gradients(), model)
    one = workers.trainer(stages=1)
    assert one.step((inputs, targets)).shape == (4,)


@pytest.mark.parametrize(("weights", "computes"), [("fill", False), ("2bp", True)])
def test_whether_a_first_stage_has_an_input_half(
    weights: str, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ws fill waits nobody waits for its I, and W is all; 2BP places both by itself."""
    made: list[Stage] = []

    class Seen(Stage):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(stages, "Stage", Seen)
    inputs, targets = workers.data(8)
    model = workers.whole(2)
    workers.single_process(model, inputs, targets, 4)
    with workers.trainer(ranks=1, stage_factory=None, weights=weights) as engine:
        engine.forward_backward((inputs, targets))
        assert workers.gradients_equal(engine.gradients(), model)
    assert [each.index for each in made] == [0, 1]
    found = [any(calls(each.functions.graphs.backward_input.graph)) for each in made]
    assert found == [computes, True]


def test_how_weight_gradients_are_added_up() -> None:
    """Over 32 microbatches of a bfloat16 model, against float64: fused sums are rounded once
    less for each microbatch, and float32 sums once altogether.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    exact = copy.deepcopy(model).double()
    inputs, targets = torch.randn(64, 8).bfloat16(), torch.randn(64, 4).bfloat16()
    torch.nn.functional.mse_loss(exact(inputs.double()), targets.double()).backward()
    errors = {}
    for accumulation, dtype in (("exact", None), ("fused", None), ("exact", torch.float32)):
        with PipelineTrainer(
            [copy.deepcopy(model)],
            nn.functional.mse_loss,
            workers.sgd,
            microbatches=32,
            stage_options=StageOptions(accumulation=accumulation, grad_dtype=dtype),
        ) as engine:
            engine.forward_backward((inputs, targets))
            found = engine.gradients()[0]
        errors[accumulation, dtype] = (found["weight"].double() - exact.weight.grad).norm()
    assert errors["exact", torch.float32] < errors["fused", None] < errors["exact", None]


@pytest.mark.gpu
def test_stages_on_a_gpu() -> None:
    inputs, targets = workers.data(8)
    model = workers.whole(3).to("cuda")
    expected = workers.single_process(model, inputs.to("cuda"), targets.to("cuda"), 4)
    engine = workers.trainer(stages=3, ranks=1, device="cuda", record=True, max_grad_norm=9.0)
    assert torch.equal(engine.forward_backward((inputs, targets)), expected.cpu())
    assert workers.gradients_equal(engine.gradients(), model)
    engine.step((inputs, targets))
    assert len(engine.timeline().spans) == 3 * 3 * 4


def test_a_schedule_of_ones_own() -> None:
    inputs, targets = workers.data(2)
    model = workers.whole(2)
    workers.single_process(model, inputs, targets, 1)
    with workers.trainer(schedule=WHOLE, microbatches=1, ranks=1, record=True) as engine:
        engine.forward_backward((inputs, targets))
        assert workers.gradients_equal(engine.gradients(), model)
        assert tuple(span.action for span in engine.timeline().spans) == ROW


def test_failures_in_one_process_name_the_action() -> None:
    engine = workers.trainer(trip_stage, ranks=1)
    with pytest.raises(PipelineError, match=r"^rank 0 failed in 1F2: ValueError: bad weather$"):
        engine.step(workers.data(8))
    with pytest.raises(PipelineError, match=r"^this trainer has ended .*in 1F2: ValueError"):
        engine.step(workers.data(8))


def test_training_without_gradients_is_refused() -> None:
    engine = workers.trainer(ranks=1, stage_factory=None)
    with torch.no_grad(), pytest.raises(PipelineError, match=r"outside torch.no_grad\(\)"):
        engine.step(workers.data(8))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stages": 2}, PipelineError, "2 stages need a process group and there is none: run "),
        ({"stages": None}, PipelineError, "say how many: stages=N"),
        ({"stages": 0}, PipelineError, "at least one stage; got 0"),
        ({"ranks": 3}, PipelineError, "3 processes cannot hold 2 stages"),
        ({"ranks": 2}, PipelineError, "ranks=2 but the process group has no processes"),
        ({"schedule": "1f2b", "ranks": 1}, ScheduleError, "known: naive, gpipe, 1f1b"),
        ({"weights": "later", "ranks": 1}, ScheduleError, "2bp, fill"),
        ({"microbatches": 0, "ranks": 1}, ScheduleError, "0"),
        ({"autocast": torch.float16}, PipelineError, "None or torch.bfloat16; got torch.float16"),
        (
            {"schedule": "auto", "split_backward": False, "ranks": 1},
            PipelineError,
            "no effect beside schedule='auto'",
        ),
        ({"schedule": HALF, "ranks": 1}, ScheduleError, "stage 1 never runs 1W0"),
        (
            {"schedule": WHOLE, "weights": "fill", "microbatches": 1, "ranks": 1},
            PipelineError,
            "no effect beside the schedule 'mine', which places every action itself",
        ),
        (
            {"schedule": WHOLE, "ranks": 1},
            PipelineError,
            "is for (stages, microbatches) = (2, 1), but (2, 4) are asked for",
        ),
        ({"max_grad_norm": 0.0}, PipelineError, "positive number or None; got 0.0"),
        ({"timeout": 0}, PipelineError, "positive number of seconds; got 0"),
        ({"backend": "eager", "ranks": 1}, PipelineError, "no effect beside stage_factory"),
        (
            {"backend": "tpu", "stage_factory": None, "ranks": 1},
            SplitError,
            "unknown backend 'tpu'; known",
        ),
        ({"memory": "fast", "ranks": 1}, PipelineError, "memory='fast' has no effect beside"),
        ({"memory": "tight", "stage_factory": None, "ranks": 1}, SplitError, "got 'tight'"),
        ({"accumulation": "fused", "ranks": 1}, PipelineError, "accumulation='fused' has no effec"),
        (
            {"grad_dtype": torch.int8, "stage_factory": None, "ranks": 1},
            SplitError,
            "grad_dtype must be a floating-point dtype, got torch.int8",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        workers.trainer(**options)
    assert text in str(caught.value)


@pytest.mark.parametrize("face", [PipelineTrainer, StageOptions, RunOptions])
def test_an_option_that_is_none_is_refused(face: Any) -> None:
    assert len(inspect.signature(face).parameters) <= 14
    with pytest.raises(TypeError, match="unexpected keyword argument 'schedul'"):
        face(schedul="gpipe")


def test_stages_and_their_count_must_agree() -> None:
    with pytest.raises(PipelineError, match="got 1 stages, but stages=2"):
        PipelineTrainer([workers.block(0)], nn.MSELoss(), workers.sgd, microbatches=1, stages=2)


@pytest.mark.parametrize("call", ["step", "step_async", "forward_backward", "evaluate"])
def test_a_closed_trainer_runs_nothing(call: str) -> None:
    batch = workers.data(8)
    engine = workers.trainer(ranks=1)
    engine.step(batch)
    engine.close()
    engine.close()
    with pytest.raises(PipelineError, match="this trainer was closed: build a new one"):
        getattr(engine, call)(batch)
    assert set(engine.state_dict()) == {0, 1}
