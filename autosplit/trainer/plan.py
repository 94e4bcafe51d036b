"""``partition`` cuts a whole model for a schedule; the result is a ``Plan`` with predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import few, milliseconds, parse_size, size_text
from autosplit.torch_internals.pytree import tree_flatten
from autosplit.trainer.options import StageOptions
from autosplit.trainer.stage_modules import LossFunction
from autosplit.trainer.trained_parameters import OptimizerFunction
from autosplit.trainer.trainer import PipelineTrainer

_LONGEST = 40  # characters of the name of a block


class Plan(Partition):
    """A whole model that is cut for a schedule, with predictions; ``partition`` returns one.

    ``PipelineTrainer`` accepts a plan as its model; ``trainer`` builds one with the plan's options.

    Args:
        whole: the captured model.
        solution: the cuts, and the predicted times and memory of a step.
        options: how the stages are compiled.
        memory_limit: the most bytes of a rank, which ``trainer`` passes on; None: no limit.

    Attributes:
        schedule: the schedule of the stages.
        stage_times: per stage, the seconds of F, I and W of one microbatch.
        predicted_step: the predicted seconds of a step.
        bubble: the predicted idle time of all ranks over their total time, 0 to 1.
        peak_memory: per rank, the predicted peak in bytes.
        batch: the number of samples in a step.
    """

    def __init__(
        self,
        whole: WholeModel,
        solution: Solution,
        options: BlockOptions,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(whole, solution.firsts)
        self.schedule: Schedule = solution.schedule
        self.stage_times = tuple(solution.costs.times)
        self.predicted_step = solution.step
        self.bubble = solution.bubble
        self.peak_memory = solution.peaks
        leaves = tree_flatten((whole.args, whole.kwargs))[0]
        sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        self.batch: int = solution.schedule.microbatches * next(sizes, 1)
        self._solution, self._memory_limit = solution, memory_limit
        self._split, self._autocast = options.split, options.autocast

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``partition``, as plain values, that reproduce this plan.

        They contain the costs, so nothing is measured, and the schedule is built for the same
        times.
        """
        dtype = self._autocast
        return {
            "cut_at": [*self.cuts],
            "microbatches": self.schedule.microbatches,
            "schedule": self.schedule.name,
            "ranks": len(self.schedule.ranks),
            "split_backward": self.schedule.split_backward,
            "weights": self._solution.request.weights,
            "memory": self._split.memory,
            "backend": self._split.backend,
            "autocast": None if dtype is None else str(dtype).removeprefix("torch."),
            "memory_limit": self._memory_limit,
            "costs": self._solution.blocks.plain,
        }

    def __repr__(self) -> str:
        """The model, its cuts and its schedule, in one line."""
        return (
            f"Plan({type(self.whole.model).__name__} cut at {few(self.cuts, 2) or 'nothing'}, "
            f"{len(self.schedule.ranks)} ranks, {self.schedule.name!r}, "
            f"{self.schedule.microbatches} microbatches, {self.batch} samples)"
        )

    def report(self) -> str:
        """Text with a table of the stages, their times and sizes, and a line on the step, as
        ``autosplit plan`` prints it.
        """
        line = (
            f"plan: {self.schedule.name}, N={self.stages}, M={self.schedule.microbatches}, a step "
            f"of {milliseconds(self.predicted_step)} ms, bubble {self.bubble:.1%}, "
            f"{size_text(round(max(self.peak_memory)))} on the fullest rank"
        )
        if self._memory_limit is not None:
            line += ", without messages, the batch and the temporary memory of operators"
        return f"{self._table()}\n\n{line}"

    def _table(self) -> str:
        """Table with one row per stage: its blocks, times, parameters and messages."""
        mean = sum(map(sum, self.stage_times)) / self.stages
        names = [block.name for block in self.whole.blocks]
        sent: Any = self._solution.costs.transfer.message_bytes
        rows = [
            [
                str(stage),
                str(self.schedule.placement[stage]),
                _short(names[first]),
                _short(names[last - 1]),
                *map(milliseconds, self.stage_times[stage]),
                f"{sum(self.stage_times[stage]) / mean:.3f}x" if mean else "",
                size_text(round(self._solution.parameters[stage])),
                size_text(round(sent[stage])) if stage in sent else "",
            ]
            for stage, (first, last) in enumerate(pairwise([0, *self._solution.firsts, len(names)]))
        ]
        headers = ["stage", "rank", "first block", "last block", "F ms", "I ms", "W ms", "of mean"]
        headers += ["parameters", "sends"]
        align = ("right", "right", "left", "left", *["right"] * 6)
        return tabulate(rows, headers, colalign=align, disable_numparse=True)

    def trainer(
        self, loss_fn: LossFunction, optimizer_fn: OptimizerFunction, **options: Any
    ) -> PipelineTrainer:
        """Build the trainer that runs this plan; collective over the plan's ranks.

        Args:
            loss_fn: see ``PipelineTrainer``.
            optimizer_fn: see ``PipelineTrainer``.
            options: more arguments of ``PipelineTrainer``; they override the plan's.

        Raises:
            PlanError: the number of processes is not the plan's number of ranks.
            PipelineError: see ``PipelineTrainer``.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        ranks = len(self.schedule.ranks)
        if "ranks" not in options and ranks not in (1, world):
            raise PlanError(
                f"the plan is for {ranks} processes and there "
                f"{'is one' if world == 1 else f'are {world}'}: run under 'torchrun "
                f"--nproc-per-node {ranks}' inside autosplit.process_group(), or "
                f"through autosplit.launch; or partition the model with ranks={world}"
            )
        stage_options = options.pop("stage_options", None) or StageOptions()
        arguments = {
            "microbatches": self.schedule.microbatches,
            "schedule": self.schedule,
            "ranks": ranks,
            "memory_limit": self._memory_limit,
            "stage_options": stage_options.with_defaults(self._split, self._autocast),
        }
        return PipelineTrainer(self, loss_fn, optimizer_fn, **{**arguments, **options})


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


def partition(
    model: nn.Module | WholeModel,
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
    """Cut a model into pipeline stages, so that a step of the schedule is short.

        plan = partition(model, example, stages=4, microbatches=8)
        print(plan.report())
        trainer = plan.trainer(loss_fn, optimizer_fn)

    With a process group, all ranks must call it, except with ``ranks=1``. They measure at the same
    time, as the stages will run; rank 0 estimates for all. All get the same cuts. The model is not
    changed.

    Training and evaluation are captured separately, evaluation at its first use. Everything else
    that the forward reads, such as an attribute or the rate of a dropout, is fixed in the stages:
    cut the model again after a change of it.

    Args:
        model: the model; its parameters may be on the meta device. Or, without ``args``, a capture
            of the model by ``WholeModel.capture``, which several plans can share.
        args: example positional inputs of one microbatch: a tuple of tensors or one tensor. A
            dictionary is passed as keyword inputs.
        kwargs: example keyword inputs of one microbatch.
        stages: the number of stages; None: one more than ``cut_at`` has names.
        cut_at: the names of the modules that begin the stages after the first, such as
            ``model.layers.8``. None: the cuts that make the step shortest.
        microbatches: M, the number of microbatches in a step; None: two for each stage.
        schedule: a key of ``pipeline.SCHEDULES``, which is built for the stages' times, or a
            Schedule, which is used unchanged.
        ranks: the number of processes, see ``pipeline.build``.
        split_backward: False: full backwards instead of separate I and W.
        weights: the placement of the weight gradients, see ``pipeline.build``.
        memory: see ``autosplit.split``.
        backend: see ``autosplit.split``.
        autocast: the dtype of the autocast under which the stages run, or its name, such as
            ``"bfloat16"``; None: no autocast.
        costs: ``"profile"``: measure the blocks. ``"estimate"``: derive their times from FLOPs and
            bytes. Or known costs, as in ``Plan.arguments``.
        seconds: the time to measure the blocks.
        memory_limit: the most bytes that a rank may hold, or a text such as ``"12GiB"``. Cuts
            within the limit are preferred. If there are none, the cuts with the shortest step are
            taken. The plan's ``trainer`` gets the limit, and searches offloads and recomputation
            that keep it. The trainer also counts messages, the batch and the temporary memory of
            operators. It raises before the first step if it finds no schedule within the limit.

    Returns:
        The plan, which ``PipelineTrainer`` accepts as its model.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: there are more stages than blocks, the model cannot be cut at a name of
            ``cut_at``, or an option is unknown.
        ScheduleError: the schedule is unknown, or does not support these numbers of stages, ranks
            and microbatches.
    """
    if stages is None:
        if cut_at is None:
            raise PlanError(
                "pass the number of stages, stages=N, or the modules where they begin, cut_at=[...]"
            )
        stages = len(cut_at) + 1
    if memory_limit is not None:
        memory_limit = parse_size(memory_limit, "memory_limit", PlanError)
        if not split_backward:
            raise PlanError("memory_limit needs separate I and W: leave split_backward=False out")
    count = 2 * stages if microbatches is None else microbatches
    options = BlockOptions(SplitOptions(backend=backend, memory=memory), _dtype(autocast))
    whole, solution = cut_model(
        model,
        args,
        kwargs,
        stages,
        ScheduleRequest(schedule, count, ranks, split_backward, weights),
        options,
        costs=costs,
        seconds=seconds,
        cut_at=cut_at,
        memory_limit=math.inf if memory_limit is None else memory_limit,
        alone=ranks == 1,
    )
    return Plan(whole, solution, options, memory_limit)


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of autocast, from a dtype or its name.

    Raises:
        PlanError: no dtype has this name.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if name is not None and not isinstance(dtype, torch.dtype):
        raise PlanError(f"autocast must be a dtype, such as 'bfloat16', or None; got {name!r}")
    return dtype
