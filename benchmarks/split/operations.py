"""Floating-point operations of F, I and W, by the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..results import Rows, Target, table, verdicts
from .contenders import ACTIONS, Autograd, Autosplit, ByHand, Contender, microbatch
from .models import Settings, Subject

MEMORY = ("fast", "balanced", "lean")
ALL = Target("(F+I+W) / unsplit", at_most=1.005, at_least=0.995)
CONVOLUTIONS = Target("ResNet's weight gradients in W", at_least=0.95, style=".1%")
LEAN = Target("weight gradients in W at lean", at_least=0.55, style=".1%")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and way to split it."""
    for model in settings.models:
        subject = settings.subject(model)
        unsplit = flops(Autograd(subject.module), subject)
        whole = sum(unsplit.values())
        weights = whole - sum(_frozen(subject).values())
        ways: dict[str, Contender] = {
            f"autosplit {memory}": Autosplit(subject.module, subject.x, "eager", memory)
            for memory in MEMORY
        }
        for name, contender in (ways | {"by hand": ByHand(subject.module)}).items():
            found = flops(contender, subject)
            yield {
                "name": f"{model}, {name}",
                "model": model,
                "way": name,
                "unsplit": whole,
                "flops": found,
                "deferred": found["W"] / weights,
            }


def flops(contender: Contender, subject: Subject) -> dict[str, int]:
    """Action -> operations."""
    with _Counter():  # a stage traces the module again under a mode, once
        microbatch(contender, subject)
        contender.clear()
    counters = {action: _Counter() for action in ACTIONS}
    microbatch(contender, subject, lambda action: counters[action])
    contender.clear()
    return {action: counter.flops for action, counter in counters.items()}


class _Counter(TorchDispatchMode):
    """Adds up what runs inside. ``FlopCounterMode`` itself also hooks every module's forward,
    which makes another module of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _frozen(subject: Subject) -> dict[str, int]:
    """The same without weight gradients."""
    subject.module.requires_grad_(False)
    try:
        return flops(Autograd(subject.module), subject)
    finally:
        subject.module.requires_grad_(True)


def render(rows: Rows) -> str:
    headers = ["", "", "unsplit GFLOPs", *ACTIONS, ALL.title, "weight gradients in W"]
    cells = []
    totals: dict[str, float] = {}
    for row in rows:
        found = row["flops"]
        total = sum(found.values()) / row["unsplit"]
        fast = row["way"] == "autosplit fast"
        if fast:
            totals[row["model"]] = total
        cells.append(
            [
                row["model"],
                row["way"],
                f"{row['unsplit'] / 1e9:.2f}",
                *(f"{found[action] / 1e9:.2f}" for action in ACTIONS),
                ALL.cell(total) if fast else f"{total:.3f}",
                f"{row['deferred']:.1%}",
            ]
        )
    deferred = {(row["model"], row["way"]): row["deferred"] for row in rows}
    convolutions = {
        way: share
        for (model, way), share in deferred.items()
        if (model, way) in (("resnet", "autosplit fast"), ("resnet", "autosplit balanced"))
    }
    lean = {model: share for (model, way), share in deferred.items() if way == "autosplit lean"}
    checked = [(ALL, totals), (CONVOLUTIONS, convolutions), (LEAN, lean)]
    return f"{table(headers, cells)}\n\n{verdicts(checked)}"
