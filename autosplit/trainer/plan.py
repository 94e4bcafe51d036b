"""A plan: a whole model cut for a schedule, and what a step of it is predicted to take.

And ``partition``, which makes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts
from autosplit.planner.cuts import Solution
from autosplit.planner.cutting import Partition, cut_model
from autosplit.runtime.build import SplitOptions
from autosplit.text.figures import few, milliseconds, parse_size, size_text
from autosplit.torch_internals.pytree import tree_flatten
from autosplit.trainer.options import StageOptions
from autosplit.trainer.rank_model import OptimizerFunction
from autosplit.trainer.stage_modules import LossFunction
from autosplit.trainer.trainer import PipelineTrainer

_LONGEST = 40  # characters of the name of a block


class Plan(Partition):
    """A whole model, cut for a schedule. A trainer takes it as a model, see ``trainer``.

    Args:
        whole: the model.
        found: its stages, and what a step of them is predicted to take.
        options: how stages are made.
        memory_limit: bytes that no rank is to hold more than, which a trainer is given: it moves or
            makes again what the schedule holds beyond it; None: any.

    Attributes:
        schedule: what the stages run.
        stage_times: per stage, seconds of F, I and W of a microbatch.
        predicted_step: seconds.
        bubble: predicted idle time over total time.
        peak_memory: per rank, the most bytes that it holds.
        batch: samples in a step.
    """

    def __init__(
        self,
        whole: WholeModel,
        found: Solution,
        options: BlockOptions,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(whole, found.firsts)
        self.schedule: Schedule = found.schedule
        self.stage_times = tuple(found.costs.times)
        self.predicted_step = found.step
        self.bubble = found.bubble
        self.peak_memory = found.peaks
        leaves = tree_flatten((whole.args, whole.kwargs))[0]
        sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        self.batch: int = found.schedule.microbatches * next(sizes, 1)
        self._found, self._limit = found, memory_limit
        self._split, self._autocast = options.split, options.autocast

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``partition``, as plain values, that give this plan again: nothing is
        measured then, and the schedule is built for the same times.
        """
        dtype = self._autocast
        return {
            "cut_at": [*self.cuts],
            "microbatches": self.schedule.microbatches,
            "schedule": self.schedule.name,
            "ranks": len(self.schedule.ranks),
            "split_backward": self.schedule.split_backward,
            "weights": self._found.request.weights,
            "memory": self._split.memory,
            "backend": self._split.backend,
            "autocast": None if dtype is None else str(dtype).removeprefix("torch."),
            "memory_limit": self._limit,
            "costs": self._found.blocks.plain,
        }

    def __repr__(self) -> str:
        """What is cut where and runs how, in one line."""
        return (
            f"Plan({type(self.whole.model).__name__} cut at {few(self.cuts, 2) or 'nothing'}, "
            f"{len(self.schedule.ranks)} ranks, {self.schedule.name!r}, "
            f"{self.schedule.microbatches} microbatches, {self.batch} samples)"
        )

    def report(self) -> str:
        """The stages with their times and sizes as a table, and the step in a line, as ``autosplit
        plan`` prints them.
        """
        line = (
            f"plan: {self.schedule.name}, N={self.stages}, M={self.schedule.microbatches}, a step "
            f"of {milliseconds(self.predicted_step)} ms, bubble {self.bubble:.1%}, "
            f"{size_text(round(max(self.peak_memory)))} on the fullest rank"
        )
        if self._limit is not None:
            line += ", with what operators take for themselves, messages and the batch on top"
        return f"{self._table()}\n\n{line}"

    def _table(self) -> str:
        """A row a stage: its blocks, times, parameters and what it sends."""
        mean = sum(map(sum, self.stage_times)) / self.stages
        names = [block.name for block in self.whole.blocks]
        sent: Any = self._found.costs.transfer.message_bytes
        rows = [
            [
                str(stage),
                str(self.schedule.placement[stage]),
                _short(names[first]),
                _short(names[last - 1]),
                *map(milliseconds, self.stage_times[stage]),
                f"{sum(self.stage_times[stage]) / mean:.3f}x" if mean else "",
                size_text(round(self._found.parameters[stage])),
                size_text(round(sent[stage])) if stage in sent else "",
            ]
            for stage, (first, last) in enumerate(pairwise([0, *self._found.firsts, len(names)]))
        ]
        headers = ["stage", "rank", "first block", "last block", "F ms", "I ms", "W ms", "of mean"]
        headers += ["parameters", "sends"]
        align = ("right", "right", "left", "left", *["right"] * 6)
        return tabulate(rows, headers, colalign=align, disable_numparse=True)

    def trainer(
        self, loss_fn: LossFunction, optimizer_fn: OptimizerFunction, **options: Any
    ) -> PipelineTrainer:
        """The trainer that runs this plan.

        Args:
            loss_fn: see ``PipelineTrainer``.
            optimizer_fn: see ``PipelineTrainer``.
            options: further ones of ``PipelineTrainer``.

        Raises:
            PlanError: there are not as many processes as the plan has ranks.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        ranks = len(self.schedule.ranks)
        if "ranks" not in options and ranks not in (1, world):
            raise PlanError(
                f"the plan is for {ranks} processes and there "
                f"{'is one' if world == 1 else f'are {world}'}: run under 'torchrun "
                f"--nproc-per-node {ranks}' inside autosplit.pipeline.process_group(), or "
                f"through autosplit.pipeline.launch; or partition the model with ranks={world}"
            )
        made = options.pop("stage_options", None) or StageOptions()
        given = {
            "microbatches": self.schedule.microbatches,
            "schedule": self.schedule,
            "ranks": ranks,
            "memory_limit": self._limit,
            "stage_options": replace(
                made,
                memory=self._split.memory if made.memory is None else made.memory,
                backend=self._split.backend if made.backend is None else made.backend,
                autocast=self._autocast if made.autocast is None else made.autocast,
            ),
        }
        return PipelineTrainer(self, loss_fn, optimizer_fn, **{**given, **options})


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


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
    autocast: torch.dtype | str | None = None,
    costs: str | ModelCosts | Mapping[str, Any] = "profile",
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
        autocast: the dtype of autocast under which the stages are to run, or its name, or None.
        costs: ``"profile"`` measures blocks, ``"estimate"`` goes by their FLOPs and bytes; or the
            costs themselves, if they are known, as in ``Plan.arguments``.
        seconds: how long to measure blocks.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than. Cuts that
            keep it win; where the schedule holds more however the model is cut, those with the
            shortest step do. The plan's ``trainer`` is given the limit: it has microbatches' state
            kept elsewhere or made again, counts what operators take for themselves, messages and
            the batch, too, and refuses a limit that it finds no way to keep before it trains.

    Returns:
        The plan: a trainer takes it in place of stages.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: more stages than blocks, a name in ``cut_at`` that cannot be cut at, an
            unknown option.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    if stages is None:
        if cut_at is None:
            raise PlanError("say how many stages: stages=N, or where they begin: cut_at=[...]")
        stages = len(cut_at) + 1
    limit = None
    if memory_limit is not None:
        limit = parse_size(memory_limit, "memory_limit", PlanError)
        if not split_backward:
            raise PlanError(
                "memory_limit searches a schedule of I and W: leave split_backward=False out"
            )
    count = 2 * stages if microbatches is None else microbatches
    options = BlockOptions(SplitOptions(backend, memory), _dtype(autocast))
    whole, found = cut_model(
        model,
        args,
        kwargs,
        stages,
        ScheduleRequest(schedule, count, ranks, split_backward, weights),
        options,
        costs=costs,
        seconds=seconds,
        cut_at=cut_at,
        cap=math.inf if limit is None else limit,
    )
    return Plan(whole, found, options, limit)


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of autocast, which arguments of plain values name.

    Raises:
        PlanError: there is no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if name is not None and not isinstance(dtype, torch.dtype):
        raise PlanError(f"autocast is a dtype, such as 'bfloat16', or None; got {name!r}")
    return dtype
