"""A plan: where a model is cut, and how its stages run; as a file, or bound to a model.

Plans as JSON files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from autosplit.checkpoint.naming import Mismatch
from autosplit.errors import PlanError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.options import StageOptions
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.pipeline.training.stage_trainer import OptimizerFunction
from autosplit.pipeline.training.state.tied_parameters import Holder
from autosplit.pipeline.validation.validate import validate
from autosplit.planner.costs.trial_limit import without_memory
from autosplit.planner.meta_init.initialise import Init
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.model.stages import Partition, cut
from autosplit.text.files import read_text, write_text

from .plan_signature import Input, PlanSignature, inputs_of
from .validation import check_plan

_FORMAT = "autosplit plan 1"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write all fields of a plan but the model that it may be bound to.

    Raises:
        OutputError: the file cannot be written.
    """
    made = plan.made_for
    data = {"format": _FORMAT, **{name: getattr(plan, name) for name in _names(type(plan))}}
    data["made_for"] = {
        "model": made.model,
        "blocks": made.blocks,
        "inputs": [
            {"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in made.inputs
        ],
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_plan(kind: type[Plan], path: str | Path) -> Plan:
    """Read what ``write_plan`` wrote.

    Raises:
        PlanError: there is no such file, it cannot be read, or it is no plan.
    """
    text = read_text(path, "a plan", PlanError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"cannot read a plan from {str(path)!r}: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise PlanError(f'{str(path)!r} is no plan: expected JSON with "format": {_FORMAT!r}')
    names = _names(kind)
    odd = sorted(set(data) ^ set(names))
    if odd:
        what = "lacks" if odd[0] in names else "has the unknown"
        raise PlanError(f"{str(path)!r} is no whole plan: it {what} {odd[0]!r}")
    try:
        data["made_for"] = _made_for(data["made_for"])
        return kind(**{name: _frozen(value) for name, value in data.items()})
    except PlanError as error:
        raise PlanError(f"{str(path)!r} is no whole plan: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{str(path)!r} is no whole plan: {error!r}") from error


def _names(kind: type[Plan]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "partition"]


def _made_for(data: Any) -> PlanSignature:
    inputs = [Input(each["name"], tuple(each["shape"]), each["dtype"]) for each in data["inputs"]]
    return PlanSignature(data["model"], tuple(data["blocks"]), tuple(inputs))


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_frozen, value))
    return value


@dataclass(frozen=True)
class Plan:
    """How one model is trained on some ranks.

    A plan that is bound to a model is what a trainer takes as one, see ``bind`` and ``trainer``.

    Attributes:
        cuts: the name of the first block of every stage but the first, a module path.
        ranks: processes.
        placement: the rank of every stage.
        microbatches: M.
        microbatch_size: samples in each.
        schedule: its name.
        actions: what each rank runs, in order, as text.
        memory: the memory setting, see ``autosplit.split``.
        backend: how graphs are run.
        stage_times: per stage, seconds of F, I and W of a microbatch.
        stage_parameters: per stage, bytes.
        crossing: bytes over each cut of a microbatch.
        predicted_step: seconds.
        bubble: predicted idle time over total time.
        peak_memory: per rank, the most bytes that it holds.
        resting_memory: per rank, of these, parameters, gradients and optimizer state.
        made_for: the model and its inputs.
        memory_limit: bytes that no rank is to hold more than, for which a trainer searches again
            once it has measured; None: any.
        measures: per measure of memory that is taken, its name, the seconds by which the step is
            longer for it, and the bytes that each rank holds less.
        partition: the stages, of a plan that is bound to a model.

    Raises:
        PlanError: a value of another type, a number that is negative or not finite, or fields that
            do not belong together.
    """

    cuts: tuple[str, ...]
    ranks: int
    placement: tuple[int, ...]
    microbatches: int
    microbatch_size: int
    schedule: str
    actions: tuple[str, ...]
    memory: str | int
    backend: str
    stage_times: tuple[tuple[float, float, float], ...]
    stage_parameters: tuple[float, ...]
    crossing: tuple[float, ...]
    predicted_step: float
    bubble: float
    peak_memory: tuple[float, ...]
    resting_memory: tuple[float, ...]
    made_for: PlanSignature
    memory_limit: int | None = None
    measures: tuple[tuple[str, float, tuple[float, ...]], ...] = ()
    partition: Partition | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def batch(self) -> int:
        """Samples in a step."""
        return self.microbatches * self.microbatch_size

    @property
    def stages(self) -> int:
        """N."""
        return len(self.cuts) + 1

    @property
    def wiring(self) -> Wiring:
        """Who feeds whom; of a bound plan."""
        return self._bound.wiring

    @property
    def shared(self) -> Sequence[Sequence[Holder]]:
        """Parameters that several stages hold; of a bound plan."""
        return self._bound.shared

    def build(self, index: int) -> nn.Module:
        """The module of one stage; of a bound plan."""
        return self._bound.build(index)

    def initialise(self, init: Init | None = None, *, seed: int = 0) -> None:
        """See ``Partition.initialise``; of a bound plan."""
        self._bound.initialise(init, seed=seed)

    def load_checkpoint(self, path: str | Path, **options: Any) -> tuple[Mismatch, ...]:
        """See ``Partition.load_checkpoint``; of a bound plan."""
        return self._bound.load_checkpoint(path, **options)

    @property
    def _bound(self) -> Partition:
        if self.partition is None:
            raise PlanError(
                "the plan is not bound to a model: call plan.bind(model, args) with the inputs of "
                "one microbatch first"
            )
        return self.partition

    def bind(
        self, model: nn.Module, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Plan:
        """The plan with this model's stages, cut but not yet built.

        Args:
            model: the model that the plan was made for, or one like it.
            args: its positional inputs, of one microbatch, a tuple or one tensor; a dictionary is
                keyword inputs.
            kwargs: its keyword inputs.

        Raises:
            PlanError: another model, or inputs of another size; says what the plan was made for.
            CaptureError: the model cannot be captured whole.
        """
        whole = WholeModel.capture(model, args, kwargs)
        return self.bound_to(whole)

    def bound_to(self, whole: WholeModel) -> Plan:
        """The plan with the stages of a model that is captured already; as ``bind``."""
        if not set(self.cuts) <= {block.name for block in whole.blocks}:
            try:
                whole = whole.divided(self.cuts)
            except PlanError as error:
                raise PlanError(
                    f"the plan was made for a {self.made_for.model} that begins with "
                    f"{self.made_for.blocks[0]!r}; plan again for this model: {error}"
                ) from error
        self.made_for.check(made_for(whole))
        return replace(self, partition=cut(whole, [whole.index(name) for name in self.cuts]))

    def built_schedule(self) -> Schedule:
        """The schedule.

        Raises:
            ScheduleError: the file that the plan is from holds none that can run.
        """
        rows = tuple(tuple(map(Action.parse, row.split())) for row in self.actions)
        kinds = {action.kind for row in rows for action in row}
        schedule = Schedule(
            self.schedule,
            self.stages,
            self.microbatches,
            rows,
            self.placement,
            split_backward=ActionKind.BACKWARD_INPUT in kinds,
        )
        validate(schedule)
        return schedule

    def trainer(
        self, loss_fn: LossFunction, optimizer_fn: OptimizerFunction, **options: Any
    ) -> PipelineTrainer:
        """The trainer that runs this plan, which must be bound.

        Args:
            loss_fn: see ``PipelineTrainer``.
            optimizer_fn: see ``PipelineTrainer``.
            options: further ones of ``PipelineTrainer``.

        Raises:
            PlanError: there are not as many processes as the plan has ranks.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if "ranks" not in options and self.ranks not in (1, world):
            raise PlanError(
                f"the plan is for {self.ranks} processes and there "
                f"{'is one' if world == 1 else f'are {world}'}: run under 'torchrun "
                f"--nproc-per-node {self.ranks}' inside autosplit.pipeline.process_group(), or "
                f"through autosplit.pipeline.launch; or partition the model with ranks={world}"
            )
        schedule = self.built_schedule()
        if self.memory_limit is not None:
            schedule = without_memory(schedule)
            options = {"memory_limit": self.memory_limit, **options}
        made = options.pop("stage_options", None) or StageOptions()
        given = {
            "microbatches": self.microbatches,
            "schedule": schedule,
            "ranks": self.ranks,
            "stage_options": replace(
                made,
                memory=self.memory if made.memory is None else made.memory,
                backend=self.backend if made.backend is None else made.backend,
            ),
            **options,
        }
        return PipelineTrainer(self._bound, loss_fn, optimizer_fn, **given)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, without the model that it may be bound to.

        Raises:
            OutputError: the file cannot be written.
        """
        write_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote.

        Raises:
            PlanError: the file cannot be read_plan, or is no plan.
            ScheduleError: its schedule cannot run.
        """
        plan = read_plan(cls, path)
        plan.built_schedule()
        return plan


def made_for(whole: WholeModel) -> PlanSignature:
    """What a plan of this model is made for."""
    return PlanSignature(
        type(whole.model).__name__,
        tuple(block.name for block in whole.blocks),
        inputs_of(whole.args, whole.kwargs),
    )
