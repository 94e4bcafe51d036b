"""Training over real Gloo processes, held against a single process with plain autograd."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, ScheduleError, SplitError
from autosplit.passes.graph import calls
from autosplit.pipeline import RunOptions, StageOptions
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.pipeline.workers import Tied
from tests.ranks.test_first_error import second
from tests.zoo import Made

ROW = tuple(map(Action.parse, ["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]))
WHOLE = Schedule("mine", 2, 1, (ROW,), (0, 0), True)
HALF = Schedule("mine", 2, 4, (ROW[:3] + ROW[4:],), (0, 0), True)


def named(grads: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{stage}.{name}": g for stage, local in grads.items() for name, g in local.items()}


def assert_gradients(engine: PipelineTrainer, model: nn.Module, times: int = 1) -> None:
    """Assert that gradients are those of the whole model, but for the order of sums."""
    for name, grad in named(engine.gradients()).items():
        torch.testing.assert_close(grad, times * model.get_parameter(name).grad)


def assert_state(engine: PipelineTrainer, model: nn.Sequential) -> None:
    for index, state in engine.state_dict().items():
        for name, value in model[index].state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)


OWN: dict[str, Any] = {"stage_factory": None}


FUSED, PAPER = {"split_backward": False}, {"weights": "2bp"}


def one_step(stages: int, count: int, **options: Any) -> None:
    """Losses and gradients are those of one process, bit for bit."""
    inputs, targets = workers.data(2 * count)
    model = workers.whole(stages)
    expected = workers.single_process(model, inputs, targets, count)
    with workers.trainer(stages=stages, microbatches=count, **options) as engine:
        assert torch.equal(engine.forward_backward((inputs, targets)), expected)
        assert workers.gradients_equal(engine.gradients(), model)


@pytest.mark.parametrize(
    ("stages", "count", "options"),
    [
        (2, 1, {"schedule": "naive", **FUSED}),
        (2, 5, {"schedule": "gpipe"}),
        (3, 2, {"schedule": "1f1b", **PAPER}),
        (3, 5, {"schedule": "1f1b", **FUSED}),
        (2, 3, {"schedule": "naive", **PAPER, **OWN}),
        (4, 2, {"schedule": "1f1b", "backend": "eager", **OWN}),
        (4, 3, {"schedule": "gpipe", **FUSED, **OWN}),
    ],
)
@ranks(2)
def test_gradients_and_losses_equal_those_of_one_process(
    stages: int, count: int, options: dict[str, Any]
) -> None:
    one_step(stages, count, **options)


@pytest.mark.parametrize(("stages", "norm", "options"), [(3, 100.0, {}), (2, 0.1, OWN)])
@ranks(2)
def test_clipped_steps(stages: int, norm: float, options: dict[str, Any]) -> None:
    model = workers.whole(stages)
    optimizer = workers.sgd(list(model.parameters()))
    with workers.trainer(stages=stages, microbatches=2, max_grad_norm=norm, **options) as engine:
        for step in range(3):
            inputs, targets = workers.data(8, seed=step)
            expected = workers.single_process(model, inputs, targets, 2)
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(engine.step((inputs, targets)), expected)
            assert engine.grad_norm == pytest.approx(float(total), abs=1e-5)
            assert not any(engine.gradients().values())
        assert_state(engine, model)


def shared(stages: int, **options: Any) -> None:
    """Stage 0 and the last one share their weight; held against a model with one weight."""
    last = stages - 1
    inputs, targets = workers.data(8)
    ends = Tied(0)
    model = nn.Sequential(ends, *[workers.block(index) for index in range(1, last)], ends)
    expected = workers.single_process(model, inputs, targets, 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with workers.trainer(
        lambda index: Tied(index) if index in (0, last) else workers.block(index),
        stages=stages,
        shared_parameters=[[(0, "tied"), (last, "tied")]],
        max_grad_norm=1e9,
        **options,
    ) as engine:
        assert torch.equal(engine.forward_backward((inputs, targets)), expected)
        assert engine.grad_norm == pytest.approx(float(norm), abs=1e-5)
        # A second pass without a step in between adds the same again, and once.
        engine.forward_backward((inputs, targets))
        assert_gradients(engine, model, 2)


@pytest.mark.parametrize(("stages", "options"), [(2, {}), (4, {}), (3, OWN)])
@ranks(2)
def test_shared_parameters(stages: int, options: dict[str, Any]) -> None:
    shared(stages, **options)


@ranks(3)
def test_shared_parameters_of_ranks_that_are_no_neighbours() -> None:
    shared(3)


def train_beside(engine: PipelineTrainer, model: nn.Module, steps: int) -> list[str]:
    """Train for some steps, whose losses are those of a single process with the whole model; the
    name of the schedule behind each.
    """
    names = []
    optimizer = workers.sgd(list(model.parameters()))
    for step in range(steps):
        inputs, targets = workers.data(8, seed=step)
        expected = workers.single_process(model, inputs, targets, 4)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(engine.step((inputs, targets)), expected)
        names.append(engine.schedule.name)
    return names


@ranks(2)
def test_modules_of_a_list_may_have_a_parameter_in_common() -> None:
    """Nobody says so."""

    def build() -> list[nn.Module]:
        ends = Tied(0), Tied(2)
        ends[1].tied = ends[0].tied
        return [ends[0], workers.block(1), ends[1]]

    model = nn.Sequential(*build())
    with workers.trainer(build()) as engine:
        train_beside(engine, model, 2)
        assert_state(engine, model)


@ranks(2)
def test_buffers_that_ranks_would_write_apart_are_refused() -> None:
    norm = nn.BatchNorm1d(6)
    stages = [nn.Sequential(nn.Linear(6, 6), norm) for _ in range(2)]
    with (
        workers.trainer(stages, stage_factory=None) as engine,
        pytest.raises(PipelineError, match=r"stage 0 writes into its buffer '1.running_mean', "),
    ):
        engine.step(workers.data(8))


@ranks(2)
def test_optimizers_move_a_tied_parameter_alike() -> None:
    def apart(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 * (1 + dist.get_rank()))

    ends = Tied(0), Tied(1)
    ends[1].tied = ends[0].tied
    with pytest.raises(PipelineError, match=r"'tied' of stage 0 .* different options: lr is"):
        workers.trainer([*ends], optimizer_fn=apart)


@ranks(2)
def test_gradients_of_what_no_optimizer_moves_do_not_add_up() -> None:
    """In three clipped steps whose optimizer leaves biases alone."""

    def matrices(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return workers.sgd([p for p in parameters if p.dim() > 1])

    model = workers.whole(2)
    optimizer = matrices(list(model.parameters()))
    with workers.trainer(optimizer_fn=matrices, max_grad_norm=0.1) as engine:
        for step in range(3):
            inputs, targets = workers.data(8, seed=step)
            workers.single_process(model, inputs, targets, 4)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()
            engine.step((inputs, targets))
            assert engine.grad_norm == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_a_frozen_stage_of_three(stage: int) -> None:
    """Nothing comes back to the first, but through the others."""
    inputs, targets = workers.data(8)
    model, stages = workers.whole(3), list(workers.whole(3))
    model[stage].requires_grad_(False)
    stages[stage].requires_grad_(False)
    expected = workers.single_process(model, inputs, targets, 4)
    with workers.trainer(stages, **OWN) as engine:
        assert torch.equal(engine.forward_backward((inputs, targets)), expected)
        grads = engine.gradients()
        assert not grads.pop(stage, {})
        assert workers.gradients_equal(grads, model)


@pytest.mark.parametrize("split", [True, False])
@ranks(2)
def test_hooks_of_parameters_change_gradients_of_microbatches(split: bool) -> None:
    model, stages = workers.whole(2), [workers.block(0), workers.block(1)]
    for module in (*model, *stages):
        module.get_parameter("0.weight").register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    inputs, targets = workers.data(8)
    workers.single_process(model, inputs, targets, 4)
    with workers.trainer(stages, split_backward=split, **OWN) as engine:
        engine.forward_backward((inputs, targets))
        assert workers.gradients_equal(engine.gradients(), model)


def doubling(_: int) -> nn.Module:
    """Tells training from evaluation: doubles its input in training only."""
    return Made(
        lambda m, x: x * m.weight * (2 if m.training else 1),
        weight=nn.Parameter(torch.ones(workers.WIDTH)),
        frozen=nn.Dropout(0.5).eval(),
    )


@ranks(2)
def test_evaluate_runs_in_eval_mode_and_leaves_everything_as_it_was() -> None:
    inputs, targets = workers.data(8)

    def losses(rows: int, factor: int) -> Tensor:
        pairs = zip((factor * inputs)[:rows].chunk(4), targets[:rows].chunk(4), strict=True)
        return torch.stack([nn.functional.mse_loss(x, y) for x, y in pairs])

    with workers.trainer(doubling, optimizer_fn=no_step) as engine:
        assert torch.equal(engine.step((inputs, targets)), losses(8, 4))
        for _ in range(2):
            assert torch.equal(engine.evaluate((inputs[:4], targets[:4])), losses(4, 1))
        assert torch.equal(engine.step((inputs, targets)), losses(8, 4))
        for module in engine.modules.values():
            assert [part.training for part in module.modules()] == [True, False]
            assert module.get_parameter("weight").grad is None


def no_step(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@ranks(2)
def test_autocast_reaches_modules_loss_and_messages() -> None:
    inputs, targets = workers.data(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = workers.single_process(workers.whole(2), inputs, targets, 4)
    with workers.trainer(autocast=torch.bfloat16, **OWN) as engine:
        assert torch.equal(engine.forward_backward((inputs, targets)), expected)
        assert {g.dtype for g in named(engine.gradients()).values()} == {torch.float32}
        assert torch.equal(engine.evaluate((inputs, targets)), expected)


@ranks(2)
def test_auto_measures_then_changes_the_schedule() -> None:
    """In six steps, which are those of a single process."""
    model = workers.whole(4)
    with workers.trainer(stages=4, schedule="auto", **OWN) as engine:
        names = train_beside(engine, model, 6)
        assert_state(engine, model)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, engine.schedule)
    assert names == ["zb-v"] * 2 + ["auto"] * 4
    assert rows[0] == rows[1]


@ranks(2)
def test_batches_of_any_shape() -> None:
    """A rank that takes none of the batch's inputs need not be given them; two captures a stage."""
    with workers.trainer(microbatches=2, **OWN) as engine:
        for step, rows in enumerate((8, 4, 12, 16, 8, 20)):
            inputs, targets = workers.data(rows, seed=step)
            model = workers.whole(2)
            expected = workers.single_process(model, inputs, targets, 2)
            batch = (inputs, targets) if engine.rank == 0 or step < 2 else (None, targets)
            assert torch.equal(engine.forward_backward(batch), expected)
            assert workers.gradients_equal(engine.gradients(), model)
            assert torch.equal(engine.evaluate(batch), expected)
            for module in engine.modules.values():
                module.zero_grad()
        assert [len(stage.captured) for stage in engine.stages.values()] == [2]


@ranks(2)
def test_one_rank_of_many_can_hold_all_stages() -> None:
    """And talks to nobody."""
    if dist.get_rank() == 0:
        one_step(3, 4, ranks=1)


def test_one_process_without_a_process_group() -> None:
    one_step(3, 4, ranks=1)
    assert workers.trainer(stages=1).step(workers.data(8)).shape == (4,)


@pytest.mark.parametrize(("weights", "computes"), [("fill", False), ("2bp", True)])
def test_a_first_stage_has_an_input_half_under_2bp_only(weights: str, computes: bool) -> None:
    """If Ws fill waits, the first stage runs W only; 2BP places I and W apart."""
    inputs, targets = workers.data(8)
    model = workers.whole(2)
    workers.single_process(model, inputs, targets, 4)
    with workers.trainer(ranks=1, stage_factory=None, weights=weights) as engine:
        engine.forward_backward((inputs, targets))
        assert workers.gradients_equal(engine.gradients(), model)
        graphs = [stage.functions.graphs.backward_input for stage in engine.stages.values()]
    assert [any(calls(graph.graph)) for graph in graphs] == [computes, True]


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
    engine = workers.trainer(second(2, "raise"), ranks=1)
    with pytest.raises(
        PipelineError, match=r"^rank 0 failed in 1F2: ValueError: bad weather\nMore: "
    ):
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
        ({"stages": None}, PipelineError, "pass stages=N"),
        ({"stages": 0}, PipelineError, "at least one stage; got 0"),
        ({"ranks": 3}, PipelineError, "(mesh= with pp and dp_replicate)"),
        ({"ranks": 2}, PipelineError, "ranks=2 but the process group has no processes"),
        ({"schedule": "1f2b", "ranks": 1}, PipelineError, "known: naive, gpipe, 1f1b"),
        ({"weights": "later", "ranks": 1}, ScheduleError, "2bp, fill"),
        ({"microbatches": 0, "ranks": 1}, ScheduleError, "0"),
        (
            {"autocast": torch.float64},
            PipelineError,
            "torch.bfloat16 or torch.float16; got torch.float64",
        ),
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
            "is for (stages, microbatches) = (2, 1), but the request is for (2, 4)",
        ),
        ({"max_grad_norm": 0.0}, PipelineError, "positive number or None; got 0.0"),
        ({"max_grad_norm": True}, PipelineError, "positive number or None; got True"),
        ({"timeout": 0}, PipelineError, "seconds, at most 100,000,000; got 0"),
        ({"timeout": "300"}, PipelineError, "; got '300'"),
        ({"timeout": float("inf")}, PipelineError, "; got inf"),
        ({"device": "meta", "ranks": 1}, PipelineError, "'meta' cannot hold stages"),
        ({"backend": "eager", "ranks": 1}, PipelineError, "no effect together with stage_factory"),
        (
            {"backend": "tpu", "stage_factory": None, "ranks": 1},
            SplitError,
            "unknown backend 'tpu'; known",
        ),
        ({"memory": "fast", "ranks": 1}, PipelineError, "memory='fast' has no effect together"),
        ({"memory": "tight", "stage_factory": None, "ranks": 1}, SplitError, "got 'tight'"),
        (
            {"grad_dtype": torch.int8, "stage_factory": None, "ranks": 1},
            SplitError,
            "grad_dtype must be a floating-point dtype such as torch.float32, got torch.int8",
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
    with pytest.raises(PipelineError, match="the model has 1 stages, but stages=2"):
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


class WithPenalty(nn.Module):
    """Hands on a number in float64 beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = workers.block(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.block(x)
        return output, output.double().square().mean()


def test_numbers_in_float64_without_dimensions() -> None:
    """From a stage and as a target, beside a coefficient that is another in each step."""
    coefficient = [0.0]
    ends = Made(lambda m, x, penalty: (m.block(x), penalty), block=workers.block(1))

    def loss_fn(output: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        (x, penalty), (target, weight) = output, targets
        return nn.functional.mse_loss(x, target) * weight * coefficient[0] + penalty

    stages = [WithPenalty(), ends]
    inputs, targets = workers.data(4)
    with workers.trainer(
        stages, microbatches=2, loss_fn=loss_fn, stage_factory=None, ranks=1
    ) as trainer:
        for coefficient[0] in (1.0, 0.5):
            weight = torch.tensor(3 * coefficient[0], dtype=torch.float64)
            batches = zip(inputs.chunk(2), targets.chunk(2), strict=True)
            losses = [loss_fn(ends(*stages[0](x)), (y, weight)) for x, y in batches]
            assert torch.equal(trainer.step(inputs, (targets, weight)), torch.stack(losses))
