"""``TrainerOptions``: all options of a trainer, and the combinations that are refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError, ScheduleError
from autosplit.mesh.dimensions import REPLICATE, SHARD, RankLayout
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.offload_target import OffloadTarget, open_offload_target
from autosplit.pipeline.engine.stage_factory import SplitStage
from autosplit.pipeline.engine.stage_protocols import StageFactory
from autosplit.pipeline.preparation import prepare_schedule
from autosplit.pipeline.schedule.moves import has_moves, offloads
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.default_group import is_positive, process_count, wait_limit
from autosplit.trainer.default_shards import sharding_problem
from autosplit.trainer.options import NonFinite, RunOptions, StageOptions
from autosplit.trainer.sharded_optimizer import check_mesh
from autosplit.trainer.stage_modules import Holder, StageSource
from autosplit.trainer.tuning import first_schedule, usual_times


def _is_path(store: object) -> bool:
    return isinstance(store, str | os.PathLike) and bool(os.fspath(store))


def _refusals(o: TrainerOptions, schedule: Schedule | None) -> Iterator[str]:
    """Yield an error text for each option or combination of options that no trainer supports.

    Args:
        o: the options.
        schedule: the schedule; None before it is built.
    """
    scaler = o.run.grad_scaler
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        yield f"grad_scaler must be a torch.amp.GradScaler or None; got a {type(scaler).__name__}"
    elif o.run.scales and o.run.nonfinite == "ignore":
        yield (
            "nonfinite='ignore' has no effect together with grad_scaler, which drops steps whose "
            "gradients are not finite: leave one of the two out"
        )
    elif o.stages.autocast == torch.float16 and not o.run.scales:
        yield (
            "autocast=torch.float16 needs loss scaling, without which small gradients become "
            "zeros: pass RunOptions(grad_scaler=torch.amp.GradScaler(device)), or use "
            "torch.bfloat16, which has the range of float32"
        )
    elif o.stages.autocast not in (None, torch.bfloat16, torch.float16):
        yield (f"autocast must be None, torch.bfloat16 or torch.float16; got {o.stages.autocast}")
    norm = o.max_grad_norm
    if norm is not None and not is_positive(norm):
        yield f"max_grad_norm must be a positive number or None; got {norm!r}"
    if not (o.run.store is None or _is_path(o.run.store)):
        yield (
            "store must be a folder for offloaded tensors, such as '/mnt/fast', or None for the "
            f"folder of temporary files; got {o.run.store!r}"
        )
    if o.run.nonfinite not in get_args(NonFinite):
        choices = ", ".join(map(repr, get_args(NonFinite)))
        yield f"nonfinite must be one of {choices}; got {o.run.nonfinite!r}"
    wait_limit(o.run.timeout)
    if o.run.audit:
        yield from _audit_refusals(o, schedule)
    if o.run.shard_optimizer:
        check_mesh(o.mesh)
    if text := sharding_problem(o.stages.sharding, o.mesh):
        yield text
    if o.stages.stage_factory is not None and o.stages.options is not None:
        arguments = o.stages.changes or {"options": o.stages.options}
        names = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        yield f"{names} has no effect together with stage_factory: pass one of the two"
    if o.mesh is not None and o.schedule.ranks is not None:
        yield f"ranks={o.schedule.ranks} has no effect together with mesh, which defines the ranks"
    if o.memory_limit is None:
        return
    limits = o.memory_limit
    if schedule is not None and isinstance(limits, tuple) and len(limits) != len(schedule.ranks):
        yield (
            f"memory_limit has {len(limits)} limits for {len(schedule.ranks)} ranks of the "
            "pipeline: pass one size, or one for each rank"
        )
    if schedule is not None and (not schedule.split_backward or has_moves(schedule)):
        yield (
            "memory_limit searches a schedule with separate I and W, and chooses its moves itself; "
            f"{schedule.name!r} has {'moves' if schedule.split_backward else 'full backwards'}: "
            "pass a schedule such as '1f1b'"
        )


def _audit_refusals(o: TrainerOptions, schedule: Schedule | None) -> Iterator[str]:
    """The errors of options with which actions cannot be audited."""
    if o.run.audit not in (True, "mark"):
        yield f"audit must be True, False or 'mark'; got {o.run.audit!r}"
    if o.memory_limit is not None or (schedule is not None and has_moves(schedule)):
        yield "audit=True keeps tensors that moves and memory_limit do not count: leave one out"
    if o.exchanges:
        yield "audit=True runs an action on one rank alone, but ranks of this mesh exchange tensors"
    if o.stages.split.accumulation != "exact":
        yield (
            "audit=True compares the weight gradients of each microbatch, which needs "
            f"accumulation='exact'; got {o.stages.split.accumulation!r}"
        )


@dataclass(frozen=True)
class TrainerOptions:
    """All options of a trainer, see ``PipelineTrainer``.

    Attributes:
        schedule: the requested schedule.
        stages: how stages are built.
        run: how steps run.
        max_grad_norm: the largest norm of the gradient; None: gradients are not clipped.
        memory_limit: the most bytes of a rank, or of each rank; None: no limit.
        mesh: the mesh of the ranks; None: one pipeline.

    Raises:
        PipelineError: a wrong value, or an option without effect.
    """

    schedule: ScheduleRequest
    stages: StageOptions = field(default_factory=StageOptions)
    run: RunOptions = field(default_factory=RunOptions)
    max_grad_norm: float | None = None
    memory_limit: int | tuple[int, ...] | None = None
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        self._refuse(None)

    def _refuse(self, schedule: Schedule | None) -> None:
        for text in _refusals(self, schedule):
            raise PipelineError(text)

    @cached_property
    def mesh_layout(self) -> RankLayout | None:
        """The layout of the mesh's ranks; None without a mesh."""
        if self.mesh is None:
            return None
        return RankLayout.of(self.mesh, shards_replicas=self.run.shard_optimizer)

    @property
    def optimizer_mesh(self) -> DeviceMesh | None:
        """The mesh of the replicas among which the optimizer's state is divided; None if it is not
        divided.
        """
        if self.mesh is None or not self.run.shard_optimizer:
            return None
        replicas = self.mesh[REPLICATE]
        return replicas if replicas.size() > 1 else None

    def layout(self, stages: int) -> RankLayout:
        """The layout of the ranks that hold ``stages`` stages.

        Raises:
            PipelineError: a process group is needed and missing, or there are more ranks than
                stages.
        """
        if self.mesh_layout is None:
            return RankLayout.alone(process_count(self.schedule.ranks, stages))
        ranks = len(self.mesh_layout.pipeline)
        if ranks > stages:
            raise PipelineError(
                f"the mesh has {ranks} ranks along 'pp' for {stages} stages: each rank needs at "
                "least one stage; use a shorter 'pp', or cut the model into more stages"
            )
        return self.mesh_layout

    @property
    def shards(self) -> bool:
        """Whether the trainer shards stages that the user has not sharded."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return SHARD in names and self.mesh_layout is not None and self.mesh_layout.shards > 1

    @property
    def exchanges(self) -> bool:
        """Whether graphs contain collectives, as with ranks along "tp", "cp" or "ep"."""
        return self.mesh_layout is not None and self.mesh_layout.exchanges

    @property
    def tunes(self) -> bool:
        """Whether the trainer measures its first steps, and searches a schedule for their times."""
        return self.schedule.searches or self.memory_limit is not None

    def schedule_for(self, stages: int, ranks: int) -> Schedule:
        """The schedule for these numbers of stages and processes, built for usual times.

        Raises:
            ScheduleError: the name is unknown, or the schedule is not valid.
            PipelineError: the schedule does not fit the other options.
        """
        if self.schedule.searches:
            schedule = first_schedule(stages, self.schedule.microbatches, ranks)
        else:
            with as_pipeline_error():
                request = replace(self.schedule, ranks=ranks)
                request.check_fits(stages)
            schedule = prepare_schedule(request, stages, usual_times(stages))
        self._refuse(schedule)
        return schedule

    def limits(self, ranks: int) -> tuple[int, ...]:
        """The memory limit of each rank of a pipeline; empty without a limit."""
        if isinstance(self.memory_limit, tuple):
            return self.memory_limit
        return () if self.memory_limit is None else (self.memory_limit,) * ranks

    def shared_settings(
        self,
        stages: StageSource,
        schedule: Schedule,
        shared_parameters: Sequence[Sequence[Holder]],
        factory: StageFactory,
    ) -> dict[str, Any]:
        """Options that must be equal on all ranks, because they change results.

        ``memory`` and ``overlap`` do not change results, and may differ between ranks. If ranks
        share tensors, they must be equal: the ranks' graphs need the same order of collectives.
        """
        graph_options = ("memory", "overlap") if self.exchanges else ()
        factory_options = ("backend", "grad_dtype", *graph_options)
        split = factory.options if isinstance(factory, SplitStage) else None
        return {
            "stages": stages.count,
            "microbatches": self.schedule.microbatches,
            "schedule": schedule,
            "memory_limit": self.memory_limit,  # first: a limit turns on measurements, too
            "schedule='auto'": self.tunes,
            "autocast": self.stages.autocast,
            "max_grad_norm": self.max_grad_norm,
            "shard_optimizer": self.run.shard_optimizer,
            "nonfinite": self.run.on_nonfinite,
            "recorder": self.run.recorder and (self.run.recorder.steps, *self.run.recorder.names),
            "audit": self.run.audit,
            "grad_scaler": self.run.grad_scaler.state_dict() if self.run.grad_scaler else None,
            "aux_losses": self.stages.aux_losses,
            "sharding": {
                name: "given" if callable(value) else repr(value)
                for name, value in self.stages.sharding.items()
            },
            "parameter groups": stages.groups,
            "shared_parameters": [*map(list, shared_parameters)],
            "wiring": stages.wiring,
            "stage_factory": None if isinstance(factory, SplitStage) else "given",
            "passes": split and [entry.name for entry in split.passes],
            **{name: getattr(split, name, None) for name in factory_options},
        }

    def factory(self, *, cut: bool) -> StageFactory:
        """The factory of stages: the user's, or ``autosplit.Stage`` with these options.

        If no stage waits for the input gradient of a stage, W is the stage's whole backward. Where
        Ws fill waits, a longer W never makes the step longer, and forwards come earlier. With
        ``weights="2bp"``, most Ws come at the end; each stage then has an I, as in the paper of
        2BP.

        Args:
            cut: whether the trainer has cut the stages from a whole model. Cuts balance the stages
                for a W that is the whole backward.
        """
        if self.stages.stage_factory is not None:
            return self.stages.stage_factory
        defers = cut or self.schedule.weights != "2bp"
        split = self.stages.split.in_pipeline(defers=defers)
        # A limit is kept by schedules in which each W frees the memory of its microbatch.
        if self.memory_limit is not None:
            return SplitStage(split.without_joins(), "memory_limit")
        exchanges = "a mesh along which ranks share tensors" if self.exchanges else False
        return SplitStage(split, cut or self.stages.fullgraph or exchanges)


@contextlib.contextmanager
def as_pipeline_error() -> Iterator[None]:
    """Context that turns a ScheduleError into a PipelineError, because it comes from the trainer's
    options.
    """
    try:
        yield
    except ScheduleError as error:
        raise PipelineError(str(error)) from error


def store_for(
    options: TrainerOptions, schedule: Schedule, device: torch.device
) -> OffloadTarget | None:
    """The offload target of a rank; None if the schedule cannot offload.

    Raises:
        OutputError: the folder cannot hold the file.
        PipelineError: the option ``store`` has no effect.
    """
    folder = options.run.store
    if options.memory_limit is not None or offloads(schedule):
        return open_offload_target(device, folder)
    if folder is not None:
        raise PipelineError(
            f"store={str(folder)!r} has no effect: schedule {schedule.name!r} offloads nothing. "
            "Omit store="
        )
    return None
