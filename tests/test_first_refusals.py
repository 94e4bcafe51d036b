"""The refusals that users meet first show wrong and right code; the right code works."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import AutosplitError, PipelineTrainer, SplitPipelineStage, Stage, split
from autosplit.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
from autosplit.compare.example import example_of
from tests.zoo import Made

LOSS, ADAM = nn.functional.mse_loss, torch.optim.AdamW


def code_after(label: str, message: str) -> str:
    """The code that an error shows after ``wrong:`` or ``right:``."""
    lines = message.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"  {label}:"))
    more = iter(lines[start + 1 :])
    code = [lines[start][10:]]
    while (line := next(more, "")).startswith(" " * 10):
        code.append(line[10:])
    return "\n".join(code)


def trainer(loss: Any = LOSS, optimizer: Any = ADAM, stages: int = 1) -> PipelineTrainer:
    layers = [nn.Linear(16, 16) for _ in range(stages)]
    return PipelineTrainer(layers, loss, optimizer, microbatches=4, ranks=1)


def losses() -> dict[str, Any]:
    """Two losses of one call of a split model."""
    y = split(nn.Linear(16, 16))(torch.randn(8, 16))
    return {"first_loss": y.sum(), "second_loss": y.square().sum()}


def order() -> dict[str, Any]:
    x = torch.randn(8, 16)
    return {
        "stage": Stage(nn.Linear(16, 16), [x.clone().requires_grad_()]),
        "x": x,
        "output_grad": torch.ones(8, 16),
    }


def run_factory(namespace: dict[str, Any]) -> None:
    module = types.ModuleType("refused_factory")
    module.factory = namespace["factory"]  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        example_of("refused_factory:factory", {})
    finally:
        del sys.modules[module.__name__]


# By the call that is refused: the names that the code uses, and a call after the code.
Call = tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], object], str]
BATCH = {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}
CALLS: dict[str, Call] = {
    "a whole model without stages": (
        lambda: {
            "PipelineTrainer": partial(PipelineTrainer, ranks=1),
            "model": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
            "loss_fn": LOSS,
            "optimizer_fn": ADAM,
            "inputs": torch.randn(8, 16),
        },
        len,
        "PipelineTrainer(model, loss_fn, optimizer_fn, microbatches=4)",
    ),
    "an optimizer": (
        lambda: {"model": nn.Linear(16, 16), "torch": torch},
        lambda names: trainer(optimizer=names["optimizer_fn"]),
        "optimizer_fn = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    ),
    "no target": (lambda: {"trainer": trainer(), **BATCH}, len, "trainer.step(x)"),
    "a loss for each element": (
        dict,
        lambda names: trainer(names["loss_fn"]).step(BATCH["x"], target=BATCH["y"]),
        "loss_fn = lambda output, target: (output - target).square()",
    ),
    "two backwards": (losses, len, "first_loss.backward()\nsecond_loss.backward()"),
    "I before F": (order, len, "stage.backward_input(0, [output_grad])"),
    "W before I": (order, len, "stage.forward(0, [x])\nstage.backward_weight(0)"),
    "no example inputs": (
        lambda: {"Model": partial(nn.Linear, 16, 16), "torch": torch},
        run_factory,
        "def factory():\n    return Model()",
    ),
}


@pytest.mark.parametrize(("names", "then", "wrong"), CALLS.values(), ids=CALLS)
def test_right_code_of_a_refusal_works(
    names: Callable[[], dict[str, Any]], then: Callable[[dict[str, Any]], object], wrong: str
) -> None:
    def run(code: str) -> None:
        namespace = names()
        exec(code, namespace)
        then(namespace)

    with pytest.raises(AutosplitError) as caught:
        run(wrong)
    message = str(caught.value)
    assert code_after("wrong", message) == wrong
    run(code_after("right", message))


@pytest.mark.parametrize(
    "wrong", ["if x.sum() > 0:\n    x = 2 * x", "self.mean = x.mean()"], ids=["branch", "state"]
)
def test_right_code_of_a_refused_forward_works(wrong: str) -> None:
    def run(code: str) -> None:
        lines = code.splitlines()
        setup = [line for line in lines if line.endswith("# in __init__")]
        body = ["def forward(self, x):", *(line for line in lines if line not in setup), "return x"]
        names: dict[str, Any] = {"torch": torch}
        exec("\n    ".join(body), names)
        model = Made(names["forward"], weight=nn.Parameter(torch.ones(16)))
        exec("\n".join(setup), {"self": model, **names})
        Stage(nn.Sequential(nn.Linear(16, 16), model), [torch.randn(8, 16)])

    with pytest.raises(AutosplitError) as caught:
        run(wrong)
    message = str(caught.value)
    assert code_after("wrong", message) == wrong
    run(code_after("right", message))


def test_right_code_of_a_refused_checkpoint_works(tmp_path: Path) -> None:
    for call in (save_checkpoint, load_checkpoint):
        names = {"model": nn.Linear(16, 16), "trainer": trainer(), "path": tmp_path / "checkpoint"}
        names[call.__name__] = call
        with pytest.raises(AutosplitError) as caught:
            exec(f"{call.__name__}(model, path)", names)
        assert code_after("wrong", str(caught.value)) == f"{call.__name__}(model, path)"
        exec(code_after("right", str(caught.value)), names)


def test_right_code_of_stages_with_equal_names_works(tmp_path: Path) -> None:
    engine = trainer(stages=2)
    names = {"save_checkpoint": save_checkpoint, "trainer": engine, "path": tmp_path}
    with pytest.raises(AutosplitError, match="'weight' is one parameter in stage 0") as caught:
        exec("save_checkpoint(trainer, path)", names)
    exec(code_after("right", str(caught.value)), names)
    assert "CheckpointManager(folder, names=...)" in str(caught.value)
    runs = CheckpointManager(tmp_path / "runs", names=lambda stage, name: f"{stage}.{name}")
    runs.save(engine, step=1)


def test_a_missing_process_group_shows_how_to_start_one() -> None:
    layers = [nn.Linear(16, 16), nn.Linear(16, 16)]
    with pytest.raises(AutosplitError) as trains:
        PipelineTrainer(layers, LOSS, ADAM, microbatches=4)
    with pytest.raises(AutosplitError) as pipelines:
        SplitPipelineStage(layers[0], 0, 2, torch.device("cpu"))
    for caught in (trains, pipelines):
        right = code_after("right", str(caught.value))
        assert right.startswith("with autosplit.process_group():")
        assert "torchrun --nproc-per-node 2 train.py" in right
