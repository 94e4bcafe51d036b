"""A plan: where a model is cut, and how its stages run; bound to a model, or as a JSON file.

And ``partition``: a whole model in, stages and what they will take out.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from autosplit.dump.tables import milliseconds
from autosplit.errors import PlanError, SplitError
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.batches import Part
from autosplit.pipeline.training.options import StageOptions
from autosplit.pipeline.training.rank_state import OptimizerFunction
from autosplit.pipeline.training.shared_parameters import Holder
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.pipeline.validation.validate import validate
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts
from autosplit.planner.cuts import Solution
from autosplit.planner.cutting import Planning, cut_model, stage_count
from autosplit.planner.stages import Partition, cut
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.figures import few, parse_size, size_text
from autosplit.text.files import read_text, write_text
from autosplit.torch_internals.pytree import flatten_named

_FORMAT = "autosplit plan 2"
_LONGEST = 40  # characters of the name of a block


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_frozen, value))
    return value


@dataclass(frozen=True, repr=False)
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
        model: the class of the model, for messages.
        blocks: the names of its blocks in order.
        inputs: the tensors among its inputs, of one microbatch: name, shape and dtype.
        memory_limit: bytes that no rank is to hold more than, which a trainer is given: it moves or
            makes again what the schedule holds beyond it; None: any.
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
    model: str
    blocks: tuple[str, ...]
    inputs: tuple[str, ...]
    memory_limit: int | None = None
    partition: Partition | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        blocks = iter(self.blocks[1:])
        if not all(cut in blocks for cut in self.cuts):
            raise PlanError(
                "'cuts' must be names of blocks of the model behind its first, in their order; got "
                f"{reprlib.repr(self.cuts)}"
            )
        try:
            SplitOptions(self.backend, self.memory)
        except SplitError as error:
            raise PlanError(str(error)) from error

    def __repr__(self) -> str:
        """What is cut where and runs how, in one line."""
        bound = "" if self.partition is None else ", bound"
        return (
            f"Plan({self.model} cut at {few(self.cuts, 2) or 'nothing'}, {self.ranks} "
            f"ranks, {self.schedule!r}, {self.microbatches} microbatches of "
            f"{self.microbatch_size}{bound})"
        )

    def report(self) -> str:
        """The stages with their times and sizes as a table, and the step in a line, as ``autosplit
        plan`` prints them.
        """
        line = (
            f"plan: {self.schedule}, N={self.stages}, M={self.microbatches}, a step of "
            f"{milliseconds(self.predicted_step)} ms, bubble {self.bubble:.1%}, "
            f"{size_text(round(max(self.peak_memory)))} on the fullest rank"
        )
        if self.memory_limit is not None:
            line += ", with what operators take for themselves, messages and the batch on top"
        return f"{self._table()}\n\n{line}"

    def _table(self) -> str:
        """A row a stage: its blocks, times, parameters and what it sends."""
        mean = sum(map(sum, self.stage_times)) / self.stages
        firsts = [0, *map(self.blocks.index, self.cuts), len(self.blocks)]
        rows = [
            [
                str(stage),
                str(self.placement[stage]),
                _short(self.blocks[first]),
                _short(self.blocks[last - 1]),
                *map(milliseconds, self.stage_times[stage]),
                f"{sum(self.stage_times[stage]) / mean:.3f}x" if mean else "",
                size_text(round(self.stage_parameters[stage])),
                size_text(round(self.crossing[stage])) if stage < self.stages - 1 else "",
            ]
            for stage, (first, last) in enumerate(pairwise(firsts))
        ]
        headers = ["stage", "rank", "first block", "last block", "F ms", "I ms", "W ms", "of mean"]
        headers += ["parameters", "sends"]
        align = ("right", "right", "left", "left", *["right"] * 6)
        return tabulate(rows, headers, colalign=align, disable_numparse=True)

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

    def initialise(self, *, seed: int = 0) -> None:
        """See ``Partition.initialise``; of a bound plan."""
        self._bound.initialise(seed=seed)

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
        return self.bound_to(WholeModel.capture(model, args, kwargs))

    def bound_to(self, whole: WholeModel) -> Plan:
        """The plan with the stages of a model that is captured already; as ``bind``."""
        if not set(self.cuts) <= {block.name for block in whole.blocks}:
            try:
                whole = whole.divided(self.cuts)
            except PlanError as error:
                raise PlanError(
                    f"the plan was made for a {self.model} that begins with {self.blocks[0]!r}; "
                    f"plan again for this model: {error}"
                ) from error
        _, came, inputs = made_for(whole)
        if self.blocks != came:
            raise PlanError(
                f"the plan was made for a {self.model} of {len(self.blocks)} blocks, but this "
                f"{type(whole.model).__name__} has {len(came)}: {_difference(self.blocks, came)}; "
                "plan again for this model"
            )
        if self.inputs != inputs:
            raise PlanError(
                f"the plan was made for microbatches of {_listed(self.inputs)}, but came "
                f"{_listed(inputs)}: give inputs of that size, or plan again"
            )
        return replace(self, partition=cut(whole, [*map(self.blocks.index, self.cuts)]))

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
        names = _fields_in_files()
        data = {"format": _FORMAT, **{name: getattr(self, name) for name in names}}
        write_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote.

        Raises:
            PlanError: there is no such file, it cannot be read, or it is no plan.
            ScheduleError: its schedule cannot run.
        """
        text = read_text(path, "a plan", PlanError)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"cannot read a plan from {str(path)!r}: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise PlanError(f'{str(path)!r} is no plan: expected JSON with "format": {_FORMAT!r}')
        try:
            plan = _parsed(data)
            plan.built_schedule()
        except PlanError as error:
            raise PlanError(f"{str(path)!r} is no whole plan: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{str(path)!r} is no whole plan: {error!r}") from error
        return plan


def _fields_in_files() -> list[str]:
    return [field.name for field in fields(Plan) if field.name != "partition"]


def _parsed(data: dict[str, Any]) -> Plan:
    names = _fields_in_files()
    if odd := sorted(data.keys() ^ set(names)):
        raise PlanError(f"it {'lacks' if odd[0] in names else 'has the unknown'} {odd[0]!r}")
    return Plan(**{name: _frozen(value) for name, value in data.items()})


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


def _difference(made: Sequence[str], came: Sequence[str]) -> str:
    for place, (one, other) in enumerate(zip(made, came, strict=False)):
        if one != other:
            return f"block {place} was {one!r}, and is {other!r}"
    longer, what = (made, "has no") if len(made) > len(came) else (came, "has the further")
    return f"it {what} {longer[min(len(made), len(came))]!r}"


def _listed(inputs: Sequence[str]) -> str:
    return ", ".join(inputs) or "no tensors"


def made_for(whole: WholeModel) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The class of a model, its blocks and its inputs, as a plan has them."""
    inputs = (
        f"{path} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for path, leaf in _tensors(whole)
    )
    blocks = tuple(block.name for block in whole.blocks)
    return type(whole.model).__name__, blocks, tuple(inputs)


def _tensors(whole: WholeModel) -> Iterator[tuple[str, Tensor]]:
    named = {f"args[{place}]": value for place, value in enumerate(whole.args)} | whole.kwargs
    for name, value in named.items():
        for path, leaf in flatten_named(name, value):
            if isinstance(leaf, Tensor):
                yield path, leaf


def make_plan(
    found: Solution, whole: WholeModel, split: SplitOptions, memory_limit: int | None = None
) -> Plan:
    """The plan of a solution, not bound to a model.

    Args:
        found: the solution.
        whole: the model.
        split: how its stages are split.
        memory_limit: what a trainer is given.
    """
    model, blocks, inputs = made_for(whole)
    schedule = found.schedule
    sent: Any = found.costs.transfer.message_bytes
    return Plan(
        cuts=tuple(blocks[first] for first in found.firsts),
        ranks=len(schedule.ranks),
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        microbatch_size=next((t.shape[0] for _, t in _tensors(whole) if t.shape), 1),
        schedule=schedule.name,
        actions=tuple(" ".join(map(str, row)) for row in schedule.ranks),
        memory=split.memory,
        backend=split.backend,
        stage_times=tuple(found.costs.times),
        stage_parameters=found.parameters,
        crossing=tuple(sent.values()),
        predicted_step=found.step,
        bubble=found.bubble,
        peak_memory=found.peaks,
        model=model,
        blocks=blocks,
        inputs=inputs,
        memory_limit=memory_limit,
    )


def partition(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    cut_at: Sequence[str] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    ranks: int | None = None,
    split_backward: bool = True,
    weights: str | None = None,
    memory: str | int = "balanced",
    backend: str = "eager",
    autocast: torch.dtype | None = None,
    loss_fn: LossFunction | None = None,
    targets: Part | None = None,
    costs: str | ModelCosts = "profile",
    seconds: float = 10.0,
    memory_limit: int | str | None = None,
) -> Plan:
    """Cut a model into stages, so that a step of a schedule is short.

    Where a process group is up, all ranks must call it, but for ``ranks=1``: they measure at the
    same time, as they will run, and all cut alike. The model stays as it is.

    Training and evaluation are captured each. What the forward reads besides, such as an attribute
    or the rate of a dropout, stays in the stages as it was: cut the model again after changing it.

    Args:
        model: what to cut; its parameters may be on the meta device.
        args: example positional inputs of one microbatch, a tuple or one tensor; a dictionary is
            keyword inputs.
        kwargs: example keyword inputs.
        stages: how many stages.
        cut_at: the modules with which the stages after the first begin, as ``model.layers.8``.
            None: where it makes the step shortest.
        microbatches: M; None: two for each stage.
        schedule: a key of ``pipeline.SCHEDULES``, or a schedule that is to be run as it is.
        ranks: processes, see ``pipeline.build``.
        split_backward: False for full backwards.
        weights: where the weight gradients go, see ``pipeline.build``.
        memory: see ``autosplit.split``.
        backend: see ``autosplit.split``.
        autocast: the dtype of autocast under which the stages are to run, or None.
        loss_fn: as for the trainer; it counts in the last stage where there are ``targets``.
        targets: example targets of one microbatch; ``()`` for a loss that takes none. None: what
            the model puts out stands in for the loss.
        costs: ``"profile"`` measures blocks, ``"estimate"`` goes by their FLOPs and bytes; or the
            costs themselves, if they are known.
        seconds: how long to measure blocks.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than. Cuts that
            keep it win; where the schedule holds more however the model is cut, those with the
            shortest step do. The plan's ``trainer`` is given the limit: it has microbatches' state
            kept elsewhere or made again, counts what operators take for themselves, messages and
            the batch, too, and refuses a limit that it finds no way to keep before it trains.

    Returns:
        The plan, bound to the model: a trainer takes it in place of stages.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: more stages than blocks, a name in ``cut_at`` that cannot be cut at, an
            unknown option.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    count = stage_count(stages, cut_at)
    limit = None
    if memory_limit is not None:
        limit = parse_size(memory_limit, "memory_limit", PlanError)
        if not split_backward:
            raise PlanError(
                "memory_limit searches a schedule of I and W: leave split_backward=False out"
            )
    planning = Planning(costs, seconds, targets, cut_at)
    request = ScheduleRequest(
        schedule,
        2 * count if microbatches is None else microbatches,
        ranks,
        split_backward,
        weights,
    )
    options = BlockOptions(SplitOptions(backend, memory), autocast, loss_fn)
    cap = math.inf if limit is None else float(limit)
    parts, found = cut_model(model, args, kwargs, count, request, planning, options, cap)
    plan = make_plan(found, parts.whole, options.split, limit)
    return replace(plan, partition=parts)
