"""A whole model that a trainer cuts into stages itself, for the schedule that it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring

from .tied_parameters import Holder

Example: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"
"""Example inputs of a whole model: one tensor, several, or keyword arguments by name."""

PLANNING = ("costs", "seconds", "rehearse", "targets", "limits", "cut_at")
"""Options of ``autosplit.partition`` that a trainer does not know by itself."""


@runtime_checkable
class Partitioned(Protocol):
    """A model that is cut into stages, as ``autosplit.partition`` returns one."""

    @property
    def wiring(self) -> Wiring:
        """Who feeds whom."""
        ...

    @property
    def shared(self) -> Sequence[Sequence[Holder]]:
        """Parameters that several stages hold: groups of (stage, name)."""
        ...

    @property
    def stages(self) -> int:
        """How many stages there are."""
        ...

    def build(self, index: int) -> nn.Module:
        """The module of one stage."""
        ...


class Planned(Partitioned, Protocol):
    """One that also knows in which order its stages are best run."""

    def built_schedule(self) -> Schedule:
        """The schedule that it was cut for."""
        ...


@dataclass(frozen=True)
class Uncut:
    """A whole model, and what the user says of how it is to be cut.

    Attributes:
        model: the module.
        count: into how many stages.
        example: the inputs of one microbatch.
        planning: options of ``autosplit.partition``, by the names in ``PLANNING``.
    """

    model: nn.Module
    count: int
    example: Example
    planning: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        count: int | None,
        example: Example | None,
        planning: Mapping[str, Any] | None,
    ) -> Uncut:
        """What a trainer was given.

        Raises:
            PipelineError: something is missing, or an unknown option.
        """
        if count is None or example is None:
            raise PipelineError(
                f"a {type(model).__name__} is one module, to be cut into stages: say how many, "
                "stages=N, and give the inputs of one microbatch as example=...; a module whose "
                "children are the stages is given as a list, [*module]"
            )
        planning = dict(planning or {})
        for name in planning:
            if name not in PLANNING:
                raise PipelineError(
                    f"unknown option {name!r} in planning; known: {', '.join(PLANNING)} (the rest "
                    "of what autosplit.partition takes, the trainer tells it)"
                )
        return cls(model, count, example, planning)

    def cut(self, **known: Any) -> Planned:
        """The stages.

        Args:
            known: what the trainer knows, by the names that ``autosplit.partition`` has for it.
        """
        # Imported here: the planner stands above the engine, which runs without it.
        partition: Callable[..., Planned] = importlib.import_module("autosplit.planner").partition
        return partition(self.model, self.example, stages=self.count, **self.planning, **known)
