"""Options of a trainer, and what of them is refused: one table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from autosplit.device import has_streams
from autosplit.errors import PipelineError, ScheduleError
from autosplit.mesh.costs import device_of_group
from autosplit.mesh.dimensions import RankLayout
from autosplit.passes import CollectiveCosts
from autosplit.pipeline.builders.build import AUTO, ScheduleRequest
from autosplit.pipeline.engine.offload_target import OffloadTarget, open_offload_target
from autosplit.pipeline.engine.stage_builder import SplitStage
from autosplit.pipeline.engine.stage_protocols import StageFactory
from autosplit.pipeline.schedule.moves import has_moves, offloads
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.default_group import is_positive, process_count, wait_limit
from autosplit.trainer.stage_modules import Holder
from autosplit.trainer.tuning import first_schedule, usual_times

MEMORY = "memory"

Record: TypeAlias = "bool | Literal['memory']"
"""What a trainer records of a step: nothing, when what ran, or with that what ranks held."""

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
"""What becomes of a step whose gradients are not all finite."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a trainer's stages are made.

    Attributes:
        backend: how stages are compiled, see ``autosplit.Stage``; None means ``"eager"``.
        memory: what a microbatch holds, see ``autosplit.split``; None means ``"balanced"``.
        grad_dtype: in which dtype weight gradients are added up, see ``autosplit.Stage``; None
            means each parameter's.
        overlap: what collectives take in stages whose ranks exchange what they compute, see
            ``autosplit.split``. The same on all ranks.
        autocast: ``torch.bfloat16`` runs modules and loss under autocast.
        shared_parameters: groups of (stage, name) that are one parameter of the model. They start
            with the values of the first holder, and each gets the sum of the gradients. Those that
            modules of a list, or a model that is cut, have in common are found.
        planning: further options of ``autosplit.partition`` for a whole model, such as ``{"costs":
            "estimate", "cut_at": ["layers.8"]}``; what the trainer knows, it hands on itself.
        stage_factory: makes stages in place of ``autosplit.Stage``.
    """

    backend: str | None = None
    memory: str | int | None = None
    grad_dtype: torch.dtype | None = None
    overlap: CollectiveCosts | None = None
    autocast: torch.dtype | None = None
    shared_parameters: Sequence[Sequence[Holder]] = ()
    planning: Mapping[str, Any] | None = None
    stage_factory: StageFactory | None = None

    @property
    def of_stage(self) -> dict[str, Any]:
        """Those of ``autosplit.Stage`` that are given."""
        names = ("backend", "memory", "grad_dtype", "overlap")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a trainer's steps run.

    Attributes:
        split_backward: run input and weight gradients as separate actions.
        weights: where the weight gradients go, see ``autosplit.pipeline.build``.
        timeout: seconds to wait for another rank, and for each stage to be built.
        store: the folder of the file in which stages on the CPU keep what the schedule offloads;
            None means that of temporary files. The file has no name there and ends with the
            process. On a GPU it is pinned memory.
        record: what to record of each step; ``trainer.record`` may be changed between steps. True:
            when what ran, for ``timeline``. ``"memory"``: what each rank holds as well, for
            ``memory``; on the CPU by torch's profiler, which makes such a step slower and cannot
            run twice at once.
        nonfinite: what becomes of a step in which a gradient on any rank has an infinite number or
            a NaN; the same on all ranks. ``"raise"`` ends the trainer in an error that names
            stages, ranks and the microbatches whose loss is not finite. ``"skip"`` drops the
            gradients, those of earlier calls of ``forward_backward`` included, and counts the step
            in ``metrics()``. Under both no optimizer moves, on any rank. ``"ignore"`` does not
            look. A loss that is not finite is no reason if all gradients are finite, as of a
            microbatch whose targets are all ignored.
    """

    split_backward: bool = True
    weights: str | None = None
    timeout: float = 300.0
    store: str | os.PathLike[str] | None = None
    record: Record = False
    nonfinite: NonFinite = "raise"


def _is_path(store: object) -> bool:
    return isinstance(store, str | os.PathLike) and bool(os.fspath(store))


def _refusals(o: TrainerOptions, schedule: Schedule | None) -> Iterator[str]:
    """What no trainer is made with, and what is said of it; the schedule is None before it is
    built.
    """
    if o.stages.autocast not in (None, torch.bfloat16):
        text = f"autocast is None or torch.bfloat16; got {o.stages.autocast}"
        if o.stages.autocast == torch.float16:
            text += (
                ", whose small gradients become zeros without loss scaling, which trainers do not "
                "have: use torch.bfloat16, which has the range of float32"
            )
        yield text
    norm = o.max_grad_norm
    if norm is not None and not is_positive(norm):
        yield f"max_grad_norm is a positive number or None; got {norm!r}"
    if not (o.run.store is None or _is_path(o.run.store)):
        yield (
            "store is the folder for what is offloaded, a path such as '/mnt/fast', or None for "
            f"that of temporary files; got {o.run.store!r}"
        )
    if o.run.nonfinite not in get_args(NonFinite):
        known = ", ".join(map(repr, get_args(NonFinite)))
        yield f"nonfinite is one of {known}; got {o.run.nonfinite!r}"
    wait_limit(o.run.timeout)
    if o.stages.stage_factory is not None and (given := o.stages.of_stage):
        names = ", ".join(f"{name}={value!r}" for name, value in given.items())
        yield f"{names} has no effect beside stage_factory; pass one of the two"
    if o.mesh is not None and o.schedule.ranks is not None:
        yield f"ranks={o.schedule.ranks} has no effect beside mesh, which says who takes part"
    if o.memory_limit is None:
        return
    if o.of_mesh is not None and o.of_mesh.shards > 1:
        yield (
            "memory_limit counts parameters as each rank holds them between steps, and those that "
            "are sharded along 'dp_shard' are gathered in a step: leave one of the two out"
        )
    if schedule is not None and (not schedule.split_backward or has_moves(schedule)):
        yield (
            "memory_limit searches a schedule of I and W, for which it chooses the moves itself; "
            f"{schedule.name!r} is another: name one such as '1f1b'"
        )


@dataclass(frozen=True)
class TrainerOptions:
    """All of a trainer's options; ``PipelineTrainer`` says what each means.

    Attributes:
        schedule: the schedule that is asked for.
        memory_limit: in bytes.

    Raises:
        PipelineError: a value that cannot be, or an option without effect.
    """

    schedule: ScheduleRequest
    stages: StageOptions = StageOptions()
    run: RunOptions = RunOptions()
    max_grad_norm: float | None = None
    memory_limit: int | None = None
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        self._refuse(None)

    def _refuse(self, schedule: Schedule | None) -> None:
        for text in _refusals(self, schedule):
            raise PipelineError(text)

    @cached_property
    def of_mesh(self) -> RankLayout | None:
        """Which ranks are where; None without a mesh."""
        return None if self.mesh is None else RankLayout.of(self.mesh)

    def layout(self, stages: int) -> RankLayout:
        """Which ranks hold so many stages.

        Raises:
            PipelineError: no process group, or a count that does not fit.
        """
        if self.of_mesh is None:
            return RankLayout.alone(process_count(self.schedule.ranks, stages))
        ranks = len(self.of_mesh.pipeline)
        if ranks > stages:
            raise PipelineError(
                f"the mesh has {ranks} ranks along 'pp' for {stages} stages: each needs at least "
                "one stage; take a shorter 'pp' or cut the model into more stages"
            )
        return self.of_mesh

    @property
    def exchanges(self) -> bool:
        """Whether graphs of several ranks exchange what they compute."""
        return self.of_mesh is not None and self.of_mesh.exchanges

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
            schedule = first_schedule(stages, self.schedule.microbatches, ranks)
        else:
            with asked():
                request = replace(self.schedule, ranks=ranks)
                request.check_fits(stages)
            schedule = request.build(stages, usual_times(stages))
        self._refuse(schedule)
        return schedule

    def factory(self, *, cut: bool) -> StageFactory:
        """What makes a stage: the user's, or ``autosplit.Stage`` with these options, told whether W
        of a stage that nobody waits for is its whole backward.

        Where Ws fill waits, the step is never longer for that, and forwards come earlier. 2BP's
        own placement has most Ws at the end, whatever they take: there the stage has an I of its
        own, as in the paper.

        Args:
            cut: whether the stages were cut from a whole model, which balances them for that.

        Raises:
            SplitError: see ``SplitStage``.
        """
        late = cut or self.schedule.weights != "2bp"
        given = self.stages.stage_factory
        return (
            SplitStage(**self.stages.of_stage, defer_whole_backward=late)
            if given is None
            else given
        )


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """Where options ask for a schedule, what does not go together is an error of theirs."""
    try:
        yield
    except ScheduleError as error:
        raise PipelineError(str(error)) from error


def choose_device(device: torch.device | str | None, layout: RankLayout) -> torch.device:
    """The device that the user named, else this process's GPU if the process group has NCCL, and
    torch's default device where there is one rank.

    Raises:
        PipelineError: the mesh is of another kind of device, or this one holds no tensors here.
    """
    if device is not None:
        try:
            found = torch.device(device)
            torch.empty(0, device=found).cpu()
        except (RuntimeError, AssertionError) as error:
            raise PipelineError(
                f"device={device!r} is none that stages can be on here: {error}"
            ) from error
        # Tensors have a number there, and are compared with this.
        if found.index is None and (found.type == "cuda" or has_streams(found)):
            found = torch.device(found.type, torch.get_device_module(found).current_device())
    elif layout.device_type == "cpu":
        found = torch.device("cpu")
    elif len(layout.ranks) > 1:
        found = device_of_group()
    else:  # but for models that are built without memory
        found = torch.get_default_device()
        found = torch.device("cpu") if found.type == "meta" else found
    if layout.device_type not in ("", found.type):
        raise PipelineError(
            f"the mesh is one of {layout.device_type!r} devices, but the stages go to {found}: "
            f"init_device_mesh({found.type!r}, ...)"
        )
    return found


def store_for(
    options: TrainerOptions, schedule: Schedule, device: torch.device
) -> OffloadTarget | None:
    """The host's store of a rank; None where nothing is or may be offloaded.

    Raises:
        OutputError: there can be no file in the folder.
        PipelineError: the option ``store`` has no effect.
    """
    folder = options.run.store
    if options.memory_limit is not None or offloads(schedule):
        return open_offload_target(device, folder)
    if folder is not None:
        raise PipelineError(
            f"store={str(folder)!r} has no effect: schedule {schedule.name!r} offloads nothing"
        )
    return None


def check_record(record: object) -> None:
    """Refuse what is no ``Record``.

    Raises:
        PipelineError: lists what is.
    """
    if not isinstance(record, bool) and record != MEMORY:
        raise PipelineError(
            f"record is False, True (for timeline()) or {MEMORY!r} (for memory() too); "
            f"got {record!r}"
        )
