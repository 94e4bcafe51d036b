"""A generated module: a plan that can be read, and the module that carries it out."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..subject import Call, Subject
from .functions import FUNCTIONS, RANDOM
from .layers import BATCH, LAYERS, TIME, WIDTH


@dataclasses.dataclass(frozen=True)
class Step:
    """One value computed from earlier ones.

    Attributes:
        name: a layer or a function.
        sources: which values, counted back from the latest; counted around if too far.
        number: two steps with one name and number share one layer.
        frozen: the layer's parameters need no gradient.
        evaluating: the layer is in eval mode whatever the module is in.
    """

    name: str
    sources: tuple[int, ...] = (0,)
    number: int = 0
    frozen: bool = False
    evaluating: bool = False

    @property
    def layer(self) -> str | None:
        return f"{self.name}_{self.number}" if self.name in LAYERS else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Attributes:
    steps: what the forward does; the inputs ``y`` and ``x`` are there before the first.
    outputs: values returned, counted back from the latest, each with what is done to it.
    container: how several outputs are returned.
    tied: the first linear layers and the embedding share one weight.
    needs_grad: of ``x`` and of ``y``.
    strided: the inputs are transposed views, not contiguous.
    """

    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, int], ...] = (("value", 0),)
    container: str = "tuple"
    tied: bool = False
    needs_grad: tuple[bool, bool] = (True, False)
    strided: bool = False
    training: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """The plan as code."""
        names = ["y", "x"]
        wanted = [name for name, needed in zip("xy", self.needs_grad, strict=True) if needed]
        mode = "train" if self.training else "eval"
        lines = [f"def forward(x, y):  # {self.dtype}, {mode}, gradient wanted: {wanted}"]
        lines[0] += ", transposed inputs" if self.strided else ""
        for step in self.steps:
            notes = [word for word in ("frozen", "evaluating") if getattr(step, word)]
            given = ", ".join(_pick(names, source) for source in step.sources)
            comment = f"  # {', '.join(notes)}" if notes else ""
            lines.append(f"    v{len(names) - 2} = {step.layer or step.name}({given}){comment}")
            names.append(f"v{len(names) - 2}")
        outputs = self.outputs[:1] if self.container == "single" else self.outputs
        returned = [f"{what}({_pick(names, source)})" for what, source in outputs]
        lines.append(f"    return {self.container} of {', '.join(returned)}")
        return "\n".join([*lines, "    # tied weights"] if self.tied else lines)

    @property
    def draws_for_nobody(self) -> bool:
        """Whether a random step's result is never used. Dynamo leaves such steps out, so the
        generator is behind eager's afterwards.
        """
        returned = self.outputs[:1] if self.container == "single" else self.outputs
        numbers = list(range(len(self.steps) + 2))
        used = [_pick(numbers, source) for what, source in returned if what != "none"]
        for index in range(len(self.steps) - 1, -1, -1):
            step, number = self.steps[index], index + 2
            if number in used:
                used += [_pick(list(range(number)), source) for source in step.sources]
            elif step.name in RANDOM:
                return True
        return False

    def subject(self) -> Subject:
        return Subject(str(self), lambda: Generated(self), self.call)

    def call(self) -> Call:
        shape = (BATCH, WIDTH, TIME) if self.strided else (BATCH, TIME, WIDTH)
        drawn = [torch.randn(shape, dtype=self.dtype) for _ in range(2)]
        if self.strided:
            drawn = [tensor.transpose(1, 2) for tensor in drawn]
        pairs = zip(drawn, self.needs_grad, strict=True)
        x, y = (tensor.requires_grad_(needed) for tensor, needed in pairs)
        return (x,), {"y": y}


class Generated(nn.Module):
    """Carries a plan out."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleDict()
        for step in plan.steps:
            if step.layer is not None and step.layer not in self.layers:
                self.layers[step.layer] = LAYERS[step.name]()
        if plan.tied:
            self._tie()
        self.to(plan.dtype).train(plan.training)
        for step in plan.steps:
            if step.layer is not None and step.frozen:
                self.layers[step.layer].requires_grad_(False)
            if step.layer is not None and step.evaluating:
                self.layers[step.layer].eval()

    def forward(self, x: Tensor, *, y: Tensor) -> Any:
        values = [y, x]
        for step in self.plan.steps:
            given = [_pick(values, source) for source in step.sources]
            if step.layer is not None:
                values.append(self.layers[step.layer](*given))
            else:
                values.append(FUNCTIONS[step.name](*given))
        made = [_output(what, _pick(values, source)) for what, source in self.plan.outputs]
        if self.plan.container == "dict":
            return {f"output{index}": value for index, value in enumerate(made)}
        return made[0] if self.plan.container == "single" else tuple(made)

    def _tie(self) -> None:
        weights = [
            module
            for module in self.modules()
            if isinstance(module, (nn.Linear, nn.Embedding))
            and type(module) in (nn.Linear, nn.Embedding)
            and module.weight.shape == (WIDTH, WIDTH)
        ]
        for module in weights[1:]:
            module.weight = weights[0].weight


def _pick(values: list[Any], source: int) -> Any:
    return values[-1 - source % len(values)]


def _output(what: str, value: Tensor) -> Any:
    match what:
        case "value":
            return value
        case "view":
            return value[:, 0]
        case "mean":
            return value.mean()
        case "detached":
            return value.detach()
        case "index":
            return value.argmax(-1)
        case "nested":
            return [value, {"again": value}]
    return None
