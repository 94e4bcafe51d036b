"""Calls that newcomers write: accepted if unambiguous, else refused with the right form."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from autosplit.errors import AutosplitError, BatchError, DeferralWarning, PipelineError
from autosplit.pipeline import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers

X, Y = torch.randn(4, 8), torch.randn(4, 8)


def trainer(**options: Any) -> PipelineTrainer:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
    inputs = {"model": stages, "optimizer_fn": torch.optim.SGD, "microbatches": 2, "ranks": 1}
    return workers.trainer(**{**inputs, "stage_factory": None, **options})


def test_inputs_and_target_are_taken_as_torch_takes_them() -> None:
    pair = trainer().step((X, Y))
    assert torch.equal(trainer().step(X, Y), pair)
    assert torch.equal(trainer().step((X,), target=Y), pair)
    assert torch.equal(trainer().evaluate(X, target=Y), pair)
    assert torch.equal(trainer().step_async(X, target=Y).wait(), pair)


def test_a_trainer_is_told_in_one_line() -> None:
    assert repr(trainer()) == (
        "PipelineTrainer(rank 0 of 1, stages [0, 1] of 2, schedule '1f1b', 2 microbatches)"
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_tied_after_the_trainer_was_built_are_refused(stage: int) -> None:
    """Also within a stage, where each copy of the model has one place for their gradient."""
    engine = trainer(model=[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
    engine.step((X, Y))
    engine.modules[stage][1].weight = engine.modules[0][0].weight
    with pytest.raises(PipelineError, match=f"'1.weight' of stage {stage} was tied to another"):
        engine.step((X, Y))


LATER_LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "detached": (lambda loss: loss.detach(), r"float32\[\] without gradient"),
    "none": (lambda loss: None, "no tensor"),
    "vector": (lambda loss: loss.expand(3), r"float32\[3\]"),
    "integer": (lambda loss: loss.to(torch.int64), r"int64\[\] without gradient"),
}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", LATER_LOSSES)
def test_a_loss_that_cannot_be_trained_is_refused_in_later_steps(name: str, breaks: bool) -> None:
    change, came = LATER_LOSSES[name]
    changes = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        if breaks:
            torch._dynamo.graph_break()
        loss = nn.functional.mse_loss(output, target)
        return change(loss) if changes[0] else loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeferralWarning)
        engine = trainer(loss_fn=loss_fn)
        engine.step((X, Y))
        changes[0] = True
        with pytest.raises(PipelineError, match=rf"(?s)1F0.*loss_fn\(output, .*; got {came}"):
            engine.step((X, Y))


class ByName(nn.Linear):
    """Its values would reach the next stage in the order of the dictionary."""

    def forward(self, x: Tensor) -> Any:
        return {"b": super().forward(x), "a": x}


class Doing(nn.Linear):
    """A user's stage."""

    def __init__(self, returns: Callable[[Doing, Tensor], Any]) -> None:
        super().__init__(8, 8)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(self, x)


def leaves_something(stage: Doing, x: Tensor) -> Tensor:
    stage.aux = nn.functional.linear(x, stage.weight)
    return stage.aux


def hooked() -> nn.Module:
    stage = nn.Linear(8, 8)
    stage.register_full_backward_hook(lambda *args: None)
    return stage


def complex_loss(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) * 1j).mean()


PARTS: dict[str, Tensor] = {}


def noting_loss(output: Tensor, targets: Tensor) -> Tensor:
    PARTS["mse"] = nn.functional.mse_loss(output, targets)
    return PARTS["mse"]


class NotingLoss(nn.Module):
    """Does the same as the errors of ``noting_loss`` and ``adding_loss`` advise."""

    mse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mse", torch.zeros(()), persistent=False)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        mse = nn.functional.mse_loss(output, targets)
        self.mse.add_(mse.detach())
        return mse


TOTAL = torch.zeros(())


def adding_loss(output: Tensor, targets: Tensor) -> Tensor:
    mse = nn.functional.mse_loss(output, targets)
    TOTAL.add_(mse.detach())
    return mse


def of_keys(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["logits"], targets)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (
            lambda: trainer(loss_fn=of_keys).step((X, Y)),
            rf"loss_fn\(output, targets\) raised IndexError: .*\n  at {__file__}:"
            rf"{of_keys.__code__.co_firstlineno + 1}, output: float32\[2, 8\], targets: "
            r"float32\[2, 8\]",
        ),
        (
            lambda: trainer().step((X, ())),
            r"loss_fn\(output, targets\) raised AttributeError: 'tuple' .*"
            r"\n  output: float32\[2, 8\], targets: \(\)",
        ),
        (
            lambda: trainer(optimizer_fn=torch.optim.SGD([nn.Parameter(X)])),
            r"optimizer_fn must be a function, such as lambda parameters: .*; got a SGD",
        ),
        (
            lambda: trainer(schedule=ScheduleZBVZeroBubble),
            r"unknown schedule 'ScheduleZBVZeroBubble'; known: .*, auto; torch's "
            "ScheduleZBVZeroBubble is 'zb-v' here",
        ),
        (lambda: trainer(schedule="1F1B"), "torch's 1F1B is '1f1b' here"),
        (
            lambda: trainer(
                model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
                stages=2,
                example=X[:2],
                planning={"costs": "estimate"},
            ).step((X.cpu().numpy(), Y)),
            "got a ndarray: torch.from_numpy",
        ),
        (
            lambda: trainer(model=[nn.Linear(8, 8), nn.Linear(4, 4)]).step((X, Y)),
            r"stage 1 cannot take its inputs, .*float32\[2, 8\].*: Linear cannot run "
            r"on these inputs\.\n  at .*linear\.py:\d+\n  because linear fails: .*\n  Pass inputs",
        ),
        (
            lambda: trainer(loss_fn=noting_loss, fullgraph=True).step((X, Y)),
            rf"^stage 1: noting_loss \(at {__file__}:{noting_loss.__code__.co_firstlineno + 1}\) "
            r"changes Python state, .*PARTS\['mse'\], .* a loss can be an nn\.Module with buffers",
        ),
        (
            lambda: trainer(loss_fn=adding_loss, fullgraph=True).step((X, Y)),
            rf"^stage 1: .*\n  at {__file__}:{adding_loss.__code__.co_firstlineno + 2}\n  because "
            r"it writes into a tensor .*\n  The .*\(a loss that is an nn\.Module may have buffers",
        ),
        (
            lambda: trainer(autocast=torch.float16),
            r"torch\.float16 needs loss scaling, .*: pass RunOptions\(grad_scaler=.*, or use torch",
        ),
        (
            lambda: trainer().step(X, target={"labels": Y}),
            r"a tensor for the batch's targets, got a dictionary: .*: target=targets\['labels'\]\n",
        ),
        (
            lambda: trainer().step((X, {"a": Y, "b": Y})),
            r"got a dictionary: .*: target=\(targets\['a'\], targets\['b'\]\)\n",
        ),
        (
            lambda: trainer().step((X.double(), Y.double())),
            r"addmm of a torch\.float64 tensor and a torch\.float32 tensor: .*x\.float\(\)",
        ),
        (
            lambda: trainer(model=[Doing(lambda stage, x: None), nn.Linear(8, 8)]).step((X, Y)),
            rf"^stage 0: Doing\.forward \(at {__file__}:\d+\) computes no tensor and returns",
        ),
        (
            lambda: trainer(model=[Doing(lambda stage, x: (x, -x)), nn.Linear(8, 8)]).step((X, Y)),
            r"^stage 1 \(Linear\) takes \(input: .*: too many positional arguments; "
            r"the previous stage returns 2 tensor\(s\)",
        ),
        (
            lambda: trainer(model=[nn.Linear(8, 8), Doing(leaves_something)]).step((X, Y)),
            rf"^stage 1: leaves_something \(at {__file__}:.* changes .*aux, .*return the tensor",
        ),
        (
            lambda: trainer(model=[nn.Linear(8, 8), hooked()], fullgraph=True).step((X, Y)),
            rf"^stage 1: Linear cannot be captured in one graph: Linear has a backward hook .at "
            rf"{__file__}:.*In a pipeline stage, hook its parameters, or tensors in its forward",
        ),
        (
            lambda: trainer(loss_fn=complex_loss).step((X, Y)),
            r"must return one real scalar .*; got complex64\[\]",
        ),
        (
            lambda: trainer(loss_fn=complex_loss).evaluate((X, Y)),
            r"must return one real scalar .*; got complex64\[\]",
        ),
        (lambda: trainer().step(X), r"(?s)a tuple of .*right:  trainer\.step\(x, target=y\)"),
        (
            lambda: trainer().step(x=X, target=Y),
            r"inputs have names \(x\), and this trainer takes them in order: step\(\(x, y\)",
        ),
        (
            lambda: trainer(model=[ByName(8, 8), nn.Bilinear(8, 8, 8)]).step((X, Y)),
            "stage 0 must return a tensor or a tuple of tensors, .*; got a dict",
        ),
        (
            lambda: PipelineTrainer(
                [], of_keys, of_keys, microbatches=1, run_options={"record": 1}
            ),
            r"run_options must be an autosplit.RunOptions\(...\)",
        ),
        (
            lambda: trainer(max_grad_norm="1"),
            "max_grad_norm must be a positive number or None;",
        ),
        (
            lambda: trainer(device="gpu"),
            "device='gpu' cannot hold stages here: Expected one of",
        ),
    ],
    ids=[
        "loss",
        "no targets",
        "optimizer",
        "torch's class",
        "torch's name",
        "an array for a model to cut",
        "widths",
        "a loss that notes",
        "a loss that adds",
        "float16",
        "targets by name",
        "several targets by name",
        "float64",
        "nothing returned",
        "two for one",
        "an attribute",
        "a hook",
        "a complex loss",
        "a complex loss in evaluation",
        "no pair",
        "a name",
        "a dictionary",
        "options",
        "a norm",
        "a device",
    ],
)
def test_a_mistake_is_told(mistake: Callable[[], object], text: str) -> None:
    with pytest.raises(AutosplitError, match=text):
        mistake()


def test_a_loss_keeps_its_parts_in_a_buffer() -> None:
    loss = NotingLoss()
    losses = trainer(loss_fn=loss).step((X, Y))
    assert torch.allclose(loss.mse, losses.sum())


def test_too_many_inputs_are_refused_before_the_step() -> None:
    with trainer(model=[nn.Linear(8, 8), nn.Linear(8, 8)]) as engine:
        with pytest.raises(BatchError, match=r"stage 0 takes \(input: .*; the batch has 2 input"):
            engine.step((X, X), target=Y)
        engine.step((X,), target=Y)


def test_hooks_in_a_stage_are_called_as_advised() -> None:
    def doubled(stage: Doing, x: Tensor) -> Tensor:
        built = nn.functional.linear(x, stage.weight)
        built.register_hook(lambda grad: 2 * grad)
        return built

    results = []
    for returns in (lambda stage, x: nn.functional.linear(x, stage.weight), doubled):
        seen: list[Tensor] = []
        torch.manual_seed(0)
        stages = [Doing(returns), nn.Linear(8, 8)]
        stages[0].weight.register_hook(seen.append)
        trainer(model=stages).forward_backward((X, Y))
        assert len(seen) == 2
        results.append(stages[0].weight.grad)
    assert torch.equal(results[1], 2 * results[0])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("call", "told"), [("evaluate", "the evaluation"), ("step", "the optimizer step")]
)
@ranks(2)
def test_calls_that_only_one_rank_makes(replicas: int, call: str, told: str) -> None:
    """Neither rank mistakes the other's messages for part of its own call."""
    rank, stages = dist.get_rank(), 2 // replicas
    mesh = init_device_mesh("cpu", (stages, replicas), mesh_dim_names=("pp", "dp_replicate"))
    with trainer(model=[nn.Linear(8, 8)] * stages, ranks=None, mesh=mesh) as engine:
        engine.step((X, Y))
        built = engine.forward_backward if rank else getattr(engine, call)
        with pytest.raises(PipelineError) as caught:
            list(map(built, [(X, Y)] * 2))
    assert f"rank 0 in {told}; rank 1 in the forward and backward." in str(caught.value)
