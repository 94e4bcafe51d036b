"""Options of a trainer, checked where they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autosplit.device import has_streams
from autosplit.errors import PipelineError, ScheduleError
from autosplit.mesh.costs import Overlap, device_of_group
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.builders.schedule_request import AUTO, ScheduleRequest
from autosplit.pipeline.engine.default_group import process_count
from autosplit.pipeline.engine.host_store import HostStore, open_store
from autosplit.pipeline.engine.stages import SplitStage, StageFactory
from autosplit.pipeline.schedule.moves import has_moves, offloads
from autosplit.pipeline.schedule.schedule import Schedule

from .auto_schedule import first_schedule, usual_times
from .memory.rank_ledger import Record
from .state.tied_parameters import Holder


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a trainer's stages are made.

    Attributes:
        backend: how stages are compiled, see ``autosplit.Stage``; None means ``"eager"``.
        memory: what a microbatch holds, see ``autosplit.split``; None means ``"balanced"``.
        accumulation: how weight gradients of microbatches are added up, see ``autosplit.Stage``;
            None means ``"exact"``. ``"concatenated"`` makes one call of those Ws of a stage that
            the schedule has next to each other on a rank.
        grad_dtype: in which dtype they are, see ``autosplit.Stage``; None means each parameter's.
        overlap: what weight gradients hide in stages whose tensors ranks share, see
            ``autosplit.split``; None means ``"collectives"``. The same on all ranks.
        autocast: ``torch.bfloat16`` runs modules and loss under autocast.
        shared_parameters: groups of (stage, name) that are one parameter of the model. They start
            with the values of the first holder, and each gets the sum of the gradients. Those that
            modules of a list, or a model that is cut, have in common are found.
        planning: further options of ``autosplit.partition`` for a whole model, such as ``{"costs":
            "estimate", "limits": Limits(cap=8e9)}``; what the trainer knows, it hands on itself.
        stage_factory: makes stages in place of ``autosplit.Stage``.
    """

    backend: str | None = None
    memory: str | int | None = None
    accumulation: str | None = None
    grad_dtype: torch.dtype | None = None
    overlap: Overlap | None = None
    autocast: torch.dtype | None = None
    shared_parameters: Sequence[Sequence[Holder]] = ()
    planning: Mapping[str, Any] | None = None
    stage_factory: StageFactory | None = None

    def factory(self) -> StageFactory:
        """What makes a stage: the user's, or ``autosplit.Stage`` with these options.

        Raises:
            PipelineError: options without effect beside the user's.
            SplitError: see ``SplitStage``.
        """
        names = ("backend", "memory", "accumulation", "grad_dtype", "overlap")
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stage_factory is None:
            return SplitStage(**said)
        for name, value in said.items():
            raise PipelineError(
                f"{name}={value!r} has no effect beside stage_factory; pass one of the two"
            )
        return self.stage_factory


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a trainer's steps run.

    Attributes:
        split_backward: run input and weight gradients as separate actions.
        weights: where the weight gradients go, see ``schedules.build``.
        timeout: seconds to wait for another rank, and for each stage to be built.
        store: the folder of the file in which stages on the CPU keep what the schedule offloads;
            None means that of temporary files. The file has no name there and ends with the
            process. On a GPU it is pinned memory.
        record: what to record of each step; ``trainer.record`` may be changed between steps. True:
            when what ran, for ``timeline``. ``"memory"``: what each rank holds as well, for
            ``memory``; on the CPU by torch's profiler, which makes such a step slower and cannot
            run twice at once.
    """

    split_backward: bool = True
    weights: str | None = None
    timeout: float = 300.0
    store: str | os.PathLike[str] | None = None
    record: Record = False


@dataclass(frozen=True)
class TrainerOptions:
    """How a trainer runs; ``PipelineTrainer`` says what each means.

    Attributes:
        schedule: the schedule that is asked for.
        factory: makes a stage of a module.

    Raises:
        PipelineError: a value that cannot be, or an option without effect.
    """

    schedule: ScheduleRequest
    factory: StageFactory = field(default_factory=SplitStage)
    autocast: torch.dtype | None = None
    max_grad_norm: float | None = None
    timeout: float = 300.0
    store: str | os.PathLike[str] | None = None
    memory_limit: int | None = None
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        norm = self.max_grad_norm
        if self.autocast not in (None, torch.bfloat16):
            raise PipelineError(f"autocast is None or torch.bfloat16; got {self.autocast}")
        if norm is not None and not norm > 0:
            raise PipelineError(f"max_grad_norm is a positive number or None; got {norm}")
        _check_folder(self.store)
        if not self.timeout > 0:
            raise PipelineError(f"timeout is a positive number of seconds; got {self.timeout}")
        layout = self._layout or RankLayout.alone(1)
        if self.mesh is not None and self.schedule.ranks is not None:
            raise PipelineError(
                f"ranks={self.schedule.ranks} has no effect beside mesh, which says who takes part"
            )
        if self.memory_limit is not None and layout.shards > 1:
            raise PipelineError(
                "memory_limit counts parameters as each rank holds them between steps, and those "
                "that are sharded along 'dp_shard' are gathered in a step: leave one of the two out"
            )

    @cached_property
    def _layout(self) -> RankLayout | None:
        return None if self.mesh is None else RankLayout.of(self.mesh)

    def layout(self, stages: int) -> RankLayout:
        """Which ranks hold so many stages.

        Raises:
            PipelineError: no process group, or a count that does not fit.
        """
        if self._layout is None:
            return RankLayout.alone(process_count(self.schedule.ranks, stages))
        ranks = len(self._layout.pipeline)
        if ranks > stages:
            raise PipelineError(
                f"the mesh has {ranks} ranks along 'pp' for {stages} stages: each needs at least "
                "one stage; take a shorter 'pp' or cut the model into more stages"
            )
        return self._layout

    @property
    def cuts_weights(self) -> bool:
        """Whether Ws may be cut so that their gradients are reduced early, where that can help:
        nothing depends on whole Ws.
        """
        factory = self.factory
        whole = isinstance(factory, SplitStage) and factory.accumulation == "concatenated"
        return not (whole or self.tunes)

    @property
    def tunes(self) -> bool:
        """Whether the trainer measures its first steps and searches a schedule for them."""
        return self.schedule.name == AUTO or self.memory_limit is not None

    def schedule_for(self, stages: int, ranks: int) -> Schedule:
        """The schedule for so many stages and processes, before it is known what stages take.

        Raises:
            ScheduleError: an unknown name, or a schedule that is not legal.
            PipelineError: a schedule that does not fit the other options.
        """
        if self.schedule.name == AUTO:
            return first_schedule(stages, self.schedule.microbatches, ranks)
        try:
            request = replace(self.schedule, ranks=ranks)
            request.check_fits(stages)
        except ScheduleError as error:
            raise PipelineError(str(error)) from error
        schedule = request.build(stages, usual_times(stages))
        _check_both_run(schedule)
        _check_joining(self.factory, schedule)
        if self.memory_limit is not None:
            _check_searched(schedule)
        return schedule

    def factory_for(self, *, cut: bool) -> StageFactory:
        """The factory, told whether W of a stage that nobody waits for is its whole backward.

        Where Ws fill waits, the step is never longer for that, and forwards come earlier. 2BP's
        own placement has most Ws at the end, whatever they take: there the stage has an I of its
        own, as in the paper.

        Args:
            cut: whether the stages were cut from a whole model, which balances them for that.
        """
        late = cut or self.schedule.weights != "2bp"
        if isinstance(self.factory, SplitStage):
            return replace(self.factory, late_input=late)
        return self.factory


def schedule_request(
    schedule: str | Schedule,
    microbatches: int,
    ranks: int | None,
    split_backward: bool,
    weights: str | None,
) -> ScheduleRequest:
    """What a trainer's options of these names ask for.

    Raises:
        PipelineError: options without effect.
    """
    try:
        return ScheduleRequest(schedule, microbatches, ranks, split_backward, weights)
    except ScheduleError as error:
        raise PipelineError(str(error)) from error


def _check_folder(store: object) -> None:
    if store is not None and not (isinstance(store, str | os.PathLike) and os.fspath(store)):
        raise PipelineError(
            "store is the folder for what is offloaded, a path such as '/mnt/fast', or None for "
            f"that of temporary files; got {store!r}"
        )


def _check_both_run(schedule: Schedule) -> None:
    if schedule.mirror is not None and schedule.microbatches < 2:
        raise PipelineError(
            f"schedule {schedule.name!r} has two copies of the stages and one microbatch, so that "
            "one copy runs nothing: take 2 microbatches or more, or leave its mirror out"
        )


def _check_searched(schedule: Schedule) -> None:
    if schedule.mirror is not None or not schedule.split_backward or has_moves(schedule):
        raise PipelineError(
            "memory_limit searches a schedule with one copy of the stages, of I and W, for which "
            f"it chooses the moves itself; {schedule.name!r} is another: name one such as '1f1b'"
        )


def _check_joining(factory: StageFactory, schedule: Schedule) -> None:
    """Refuse to concatenate over microbatches where nothing could be."""
    if not isinstance(factory, SplitStage) or factory.accumulation != "concatenated":
        return
    if not schedule.split_backward:
        raise PipelineError(
            "accumulation='concatenated' joins weight gradients (W) of several microbatches, and a "
            "schedule with split_backward=False has no W: use accumulation='fused', or leave "
            "split_backward=False out"
        )


def choose_device(device: torch.device | str | None, layout: RankLayout) -> torch.device:
    """The device that the user named, else this process's GPU if the process group has NCCL, and
    torch's default device where there is one rank.

    Raises:
        PipelineError: the mesh is of another kind of device.
    """
    if device is not None:
        found = torch.device(device)
        # Tensors have a number there, and are compared with this.
        if found.index is None and (found.type == "cuda" or has_streams(found)):
            found = torch.device(found.type, torch.get_device_module(found).current_device())
        _check_kind(found, layout)
        return found
    found = device_of_group() if len(layout.ranks) > 1 else _default()
    if layout.device_type == "cpu":
        return torch.device("cpu")
    _check_kind(found, layout)
    return found


def _default() -> torch.device:
    """Torch's, but for models that are built without memory under ``torch.device("meta")``."""
    found = torch.get_default_device()
    return torch.device("cpu") if found.type == "meta" else found


def _check_kind(device: torch.device, layout: RankLayout) -> None:
    if layout.device_type not in ("", device.type):
        raise PipelineError(
            f"the mesh is one of {layout.device_type!r} devices, but the stages go to {device}: "
            f"init_device_mesh({device.type!r}, ...)"
        )


def store_for(
    options: TrainerOptions, schedule: Schedule, device: torch.device
) -> HostStore | None:
    """The host's store of a rank; None where nothing is or may be offloaded.

    Raises:
        OutputError: there can be no file in the folder.
        PipelineError: the option ``store`` has no effect.
    """
    folder = options.store
    if options.memory_limit is not None or offloads(schedule):
        return open_store(device, folder)
    if folder is not None:
        raise PipelineError(
            f"store={str(folder)!r} has no effect: schedule {schedule.name!r} offloads nothing"
        )
    return None
