"""What ``autosplit plan`` computes and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .compat import tree_flatten, tree_unflatten
from .errors import PlanError
from .pipeline.transfer import Transfer
from .planner.configuration import Configuration
from .planner.costs import ModelCosts
from .planner.device import Device, measure_device
from .planner.estimate import estimate
from .planner.limits import Limits
from .planner.links import profile_transfer
from .planner.made_for import MadeFor
from .planner.making import make_plan
from .planner.plan import Plan, made_for
from .planner.profile import profile
from .planner.search import Wishes, search, settings_of
from .planner.skeleton import skeleton
from .planner.specimen import Conditions
from .planner.whole import WholeModel


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        devices: one rank each.
        batch: samples in a step.
        wishes: what is settled.
        limits: memory and links; links that take no time are measured, unless costs are estimated.
        estimated: from FLOPs and bytes, rather than measured.
        seconds: to measure for, in all.
        backend: how graphs are run.
    """

    devices: int
    batch: int
    wishes: Wishes
    limits: Limits
    estimated: bool = False
    seconds: float = 60.0
    backend: str = "eager"


@dataclass(frozen=True)
class Planned:
    """All configurations, the best first, and the plan of the best."""

    configurations: list[Configuration]
    plan: Plan


def plan_factory(build: Callable[[], Any], name: str, request: Request) -> Planned:
    """Plan what a factory builds, without the memory of its parameters.

    Args:
        build: returns ``(model, args)``, ``(model, args, kwargs)``, or a model that has
            ``dummy_inputs``, as those of transformers do.
        name: of the factory, for messages.
        request: what for.

    Raises:
        PlanError: no example inputs, or nothing that can be done, see ``search``.
        CaptureError: the model cannot be captured whole.
    """
    model, args, kwargs = _example(skeleton(build), name)
    limits = request.limits
    if not request.estimated and limits.links == Transfer():
        limits = replace(limits, links=profile_transfer())
    source = _Costs(model, args, kwargs, request)
    found = search(
        source,
        request.devices,
        request.batch,
        wishes=request.wishes,
        cap=limits.cap,
        links=limits.links,
        optimizer_state=limits.optimizer_state,
    )
    made = source.made_for[found[0].microbatch_size]
    return Planned(found, make_plan(found[0], made, limits, backend=request.backend))


class _Costs:
    """The costs of a model by microbatch size and memory setting, each found once."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
    ) -> None:
        self.made_for: dict[int, MadeFor] = {}
        self._model, self._args, self._kwargs = model, args, kwargs
        self._request = request
        self._wholes: dict[int, WholeModel] = {}
        self._known: dict[tuple[int, str | int], ModelCosts] = {}
        self._device: Device | None = None
        self._share = request.seconds / settings_of(request.wishes, request.devices, request.batch)

    def __call__(self, size: int, memory: str | int) -> ModelCosts:
        if (size, memory) not in self._known:
            self._known[size, memory] = self._find(self._whole(size), memory)
        return self._known[size, memory]

    def _whole(self, size: int) -> WholeModel:
        if size not in self._wholes:
            args, kwargs = resized((self._args, self._kwargs), size)
            self._wholes[size] = WholeModel.capture(self._model, args, kwargs)
            self.made_for[size] = made_for(self._wholes[size])
        return self._wholes[size]

    def _find(self, whole: WholeModel, memory: str | int) -> ModelCosts:
        conditions = Conditions(backend=self._request.backend, memory=memory)
        if not self._request.estimated:
            return profile(whole, conditions, seconds=self._share)
        self._device = self._device or measure_device()
        return estimate(whole, conditions, device=self._device)


def resized(inputs: Any, size: int) -> Any:
    """Example inputs with ``size`` samples: repeated or cut along dimension 0.

    Only tensors with as many samples as the first one are; others, such as a mask that all samples
    share, stay as they are.

    Raises:
        PlanError: there is no tensor with samples.
    """
    leaves, spec = tree_flatten(inputs)
    counts = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not counts or not counts[0]:
        raise PlanError(
            "the example inputs hold no tensor with samples along dimension 0, so microbatches of "
            f"{size} samples cannot be made of them"
        )
    rows = torch.arange(size) % counts[0]

    def of_size(leaf: Any) -> Any:
        has = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == counts[0]
        return leaf[rows.to(leaf.device)] if has else leaf

    return tree_unflatten(list(map(of_size, leaves)), spec)


def summary(plan: Plan) -> dict[str, Any]:
    """What ``--json`` gives; ``stage_times`` are seconds of F, I and W together."""
    return {
        "stage_times": [sum(times) for times in plan.stage_times],
        "predicted_step_s": plan.predicted_step,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "memory": plan.memory,
        "cuts": list(plan.cuts),
        "bubble": plan.bubble,
        "peak_memory": list(plan.peak_memory),
    }


def write_summary(plan: Plan, path: Path) -> None:
    """``summary`` as a JSON file."""
    path.write_text(json.dumps(summary(plan), indent=2) + "\n", encoding="utf-8")


def _example(made: Any, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model with its positional and keyword inputs."""
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        args = made[1] if isinstance(made[1], tuple) else (made[1],)
        return made[0], args, dict(made[2]) if len(made) == 3 else {}
    model = made[0] if isinstance(made, tuple) else made
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping):
        return model, (), dict(dummy)
    raise PlanError(
        f"{name} returned a {type(model).__name__} without example inputs, which tell the shapes "
        "to plan for: return (model, args) or (model, args, kwargs), args of any number of samples"
    )
