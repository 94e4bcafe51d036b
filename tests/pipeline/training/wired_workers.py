"""Training of models wired as graphs, for spawned processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline.schedule.wiring import Source, Wiring
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline import workers
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.pipeline.training import wired

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-v": {"schedule": "zb-v"},
    "interleaved": {"schedule": "interleaved"},
    "fused": {"schedule": "gpipe", "split_backward": False},
    "2bp": {"weights": "2bp"},
}


def _loss(output: Tensor, targets: object) -> Tensor:
    return output


def _trainer(model: Any, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model,
        options.pop("loss_fn", _loss),
        workers.sgd,
        microbatches=4,
        **grouped(timeout=60.0, **options),
    )


def _case(**options: Any) -> dict[str, Any]:
    batch = wired.unet_batch(8)
    expected, grads = wired.reference(wired.UNet(), list(batch.values()), None, 4)
    with _trainer(wired.UNet(), **options) as engine:
        # Each rank only gives what its stages take.
        own = [wired.UNet.wiring.inputs[stage] for stage in engine.modules]
        taken = {s.position for sources in own for s in sources if s.stage is None}
        some = {n: t for at, (n, t) in enumerate(batch.items()) if at in taken}
        losses = engine.forward_backward((some, ()))
        evaluated = engine.evaluate((tuple(batch.values()), ()))
        return {
            "losses": torch.equal(losses, expected),
            "evaluated": torch.equal(evaluated, expected),
            "differences": wired.differences(engine.gradients(), grads),
        }


def _steps() -> dict[str, bool]:
    """Five steps in ways that should make no difference."""
    batches = [wired.unet_batch(8, seed) for seed in range(5)]

    def run(call: str = "step", **options: Any) -> list[Tensor]:
        with _trainer(wired.UNet(), stage_factory=ReferenceStage, **options) as engine:
            results = [getattr(engine, call)((batch, ())) for batch in batches]
            return [each if isinstance(each, Tensor) else each.wait() for each in results]

    modules = [wired.UNet().build(index) for index in range(4)]
    optimizer = workers.sgd([p for module in modules for p in module.parameters()])
    expected = []
    for batch in batches:
        losses = [
            wired.forward(modules, wired.UNet.wiring, [piece[m] for piece in pieces])
            for pieces in [[each.chunk(4) for each in batch.values()]]
            for m in range(4)
        ]
        torch.autograd.backward([loss / 4 for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
        expected.append(torch.stack(losses).detach())

    def close(found: list[Tensor]) -> bool:
        return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))

    return {
        "step": close(run()),
        "step_async": close(run("step_async")),
        "auto": close(run(schedule="auto")),
        "shapes": _shapes(),
    }


def _shapes() -> bool:
    same = True
    with _trainer(wired.UNet(), stage_factory=ReferenceStage) as engine:
        for rows in (8, 4, 8):
            batch = wired.unet_batch(rows)
            expected, _ = wired.reference(wired.UNet(), list(batch.values()), None, 4)
            same &= torch.equal(engine.forward_backward((batch, ())), expected)
    return same


class Ends(wired.Wired):
    """The scale of the first stage's input is that of the last one's second input."""

    shared = (((0, "scales.0"), (2, "scales.1")),)

    def __init__(self) -> None:
        super().__init__(
            Wiring(
                inputs=((Source(None, 0),), (Source(0, 0),), (Source(0, 0), Source(1, 0))),
                outputs=(1, 1),
            )
        )


def _tied() -> dict[str, bool]:
    inputs, targets = workers.data(8)
    model = Ends()
    modules = [model.build(index) for index in range(3)]
    first, last = modules[0], modules[2]
    last.scales[1] = first.scales[0]  # type: ignore[index, union-attr]
    tied = nn.ModuleList(modules)
    model.build = modules.__getitem__  # type: ignore[method-assign]
    expected, grads = wired.reference(model, [inputs], targets, 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in tied.parameters() if p.grad is not None])
    with _trainer(
        Ends(), loss_fn=nn.functional.mse_loss, max_grad_norm=1e9, stage_factory=ReferenceStage
    ) as engine:
        losses = engine.forward_backward((inputs, targets))
        mine = engine.gradients()
        found = {"losses": torch.equal(losses, expected)}
        found["norm"] = abs((engine.grad_norm or 0.0) - float(norm)) < 1e-6
    for index, own in mine.items():
        for name, gradient in own.items():
            found[f"{index}.{name}"] = torch.allclose(gradient, grads[index][name], rtol=1e-5)
    return found


def everything() -> dict[str, Any]:
    return {
        **{name: _case(**options) for name, options in CASES.items()},
        "reference": _case(stage_factory=ReferenceStage),
        "steps": _steps(),
        "tied": _tied(),
    }
