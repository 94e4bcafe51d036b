"""The options that users pass to a trainer: of its stages, of its run, of its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, Unpack

import torch

from autosplit.errors import PipelineError, with_code
from autosplit.pipeline.engine.stage_protocols import StageFactory
from autosplit.recorder.options import Recorder
from autosplit.runtime.options import SplitArguments, SplitOptions, split_options
from autosplit.text.figures import parse_size
from autosplit.trainer.stage_modules import Holder

MEMORY = "memory"

Record: TypeAlias = "bool | Literal['memory']"
"""The record of a step: none, the times of its actions (True), or times and memory."""

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
"""The treatment of a step whose gradients are not all finite."""


@dataclass(frozen=True, init=False)
class StageOptions:
    """How a trainer builds and compiles its stages.

    Attributes:
        options: how stages are split and their graphs run. Fields of ``SplitOptions`` may also be
            passed by name, as in ``StageOptions(backend="inductor")``, and then replace those of
            ``options``. None: the defaults, or the options of the plan.
        changes: the fields passed by name, without ``options``; they replace those of the plan.
        autocast: ``torch.bfloat16`` runs modules and loss under autocast, and ``torch.float16``
            does with a ``grad_scaler``; None: no autocast.
        shared_parameters: groups of (stage, name) that are one parameter of the model. All members
            of a group start with the values of the first, and each gets the sum of the gradients.
            Parameters that the modules of a list share, or the stages of a model that is cut, are
            found without this option.
        aux_losses: weights of auxiliary losses, by the attribute that a forward leaves on modules
            of any stage, such as ``{"aux_loss": 0.01}`` for the routers of experts: scalar tensors,
            None in ``__init__``. Their weighted sum, averaged over microbatches, is trained with
            the loss; ``metrics()`` has each, without its weight, beside the loss.
        sharding: how the trainer shards stages along "dp_shard" that the user has not sharded:
            ``mp_policy`` and ``reshard_after_forward`` of torch's ``fully_shard``, and ``groups``,
            a function ``groups(name, module)`` that says whether a module is a parameter group of
            its own. Without them, entries of lists are groups ("layers.0"), and a stage is gathered
            once a step in a pipeline of several ranks.
        planning: more arguments of ``autosplit.partition`` for a whole model, such as ``{"costs":
            "estimate", "cut_at": ["layers.8"]}``. The trainer sets the other arguments.
        stage_factory: builds stages in place of ``autosplit.Stage``; excludes ``options``.
        fullgraph: whether to refuse a stage that cannot be captured in one graph. If False, such a
            stage runs as several graphs, with a warning that names the line.

    Raises:
        SplitError: an option has a wrong value.
        TypeError: an option is unknown; lists the known ones.
    """

    options: SplitOptions | None
    changes: Mapping[str, Any] = field(init=False)
    autocast: torch.dtype | None
    shared_parameters: Sequence[Sequence[Holder]]
    aux_losses: Mapping[str, float]
    sharding: Mapping[str, Any]
    planning: Mapping[str, Any] | None
    stage_factory: StageFactory | None
    fullgraph: bool

    def __init__(
        self,
        *,
        options: SplitOptions | None = None,
        autocast: torch.dtype | None = None,
        shared_parameters: Sequence[Sequence[Holder]] = (),
        aux_losses: Mapping[str, float] | None = None,
        sharding: Mapping[str, Any] | None = None,
        planning: Mapping[str, Any] | None = None,
        stage_factory: StageFactory | None = None,
        fullgraph: bool = False,
        **changes: Unpack[SplitArguments],
    ) -> None:
        values: dict[str, Any] = {
            "autocast": autocast,
            "shared_parameters": shared_parameters,
            "aux_losses": dict(aux_losses or {}),
            "sharding": dict(sharding or {}),
            "planning": planning,
            "stage_factory": stage_factory,
            "fullgraph": fullgraph,
        }
        chosen = split_options(options, changes, ["options", *values])
        values["options"] = chosen if options or changes else None
        values["changes"] = {} if options else changes
        self.__dict__.update(values)  # the class is frozen

    @property
    def split(self) -> SplitOptions:
        """How stages are split."""
        return self.options or SplitOptions()

    def with_defaults(self, options: SplitOptions, autocast: torch.dtype | None) -> StageOptions:
        """Return these options, completed by a plan's options where the user has chosen none."""
        if self.options is None or self.changes:
            options = replace(options, **self.changes)
        else:
            options = self.options
        return replace(self, options=options, autocast=self.autocast or autocast)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a trainer's steps run.

    Attributes:
        split_backward: run input gradients (I) and weight gradients (W) as separate actions;
            False: full backwards.
        weights: the placement of the weight gradients, see ``autosplit.pipeline.build``.
        timeout: seconds after which a wait for another rank fails; also for the build of a stage.
        store: the folder of the file to which stages on the CPU offload tensors; None: the folder
            of temporary files. The file has no name there and is gone when the process ends. A GPU
            offloads to pinned memory instead.
        record: the record of each step; ``trainer.record`` may be set between steps. True: the
            times of actions, for ``timeline()``. ``"memory"``: also the bytes that each rank holds,
            for ``memory()``. On the CPU torch's profiler measures them, which makes a step slower
            and excludes another profiler.
        nonfinite: the treatment of a step in which a gradient on any rank has an infinity or a NaN;
            equal on all ranks. ``"raise"``: end the trainer with an error that names the stages,
            the ranks, and the microbatches whose loss is not finite. ``"skip"``: drop the step
            at its end, with the gradients of all its batches, those of ``forward_backward``
            included, and count it in ``metrics()``. With both, no optimizer moves on any rank.
            Buffers stay as the step's forwards wrote them, such as the running statistics of
            ``BatchNorm``. ``"ignore"``: do not check. Only gradients are checked: a loss may be NaN
            if all gradients are finite, as for a microbatch without targets.
        audit: whether a rank that waits for others runs an action of the step again meanwhile, and
            compares the bits of what it computed, before any optimizer moves. The first three steps
            are measured; ``trainer.auditor`` then has the period in which every action is audited
            once. True: a difference ends the trainer with an ``AuditError``. ``"mark"``: all ranks
            warn and train on; they then wait for one another at the end of a ``step_async``, too.
            A rank keeps what an audited action took until its audit: at most one more microbatch
            for each wait.
        shard_optimizer: divide the optimizer's state, and parameters between steps, among the
            replicas of the pipeline along "dp_replicate" (ZeRO-1).
        grad_scaler: a ``torch.amp.GradScaler`` of each rank, with equal options, which scales the
            losses for float16. A step whose gradients are not finite is dropped on all ranks, as
            with ``nonfinite="skip"``. Gradients are unscaled after their reduction, before norm and
            clipping. The scale is updated once a step, after its last batch, equally on all ranks.
            ``forward_backward`` does not update it.
        recorder: the flight recorder, see ``autosplit.Recorder``; None: nothing is
            recorded. Give all ranks equal options. ``step_async`` then waits for the other ranks at
            its end.
    """

    split_backward: bool = True
    weights: str | None = None
    timeout: float = 300.0
    store: str | os.PathLike[str] | None = None
    record: Record = False
    nonfinite: NonFinite = "raise"
    audit: bool | Literal["mark"] = False
    shard_optimizer: bool = False
    grad_scaler: torch.amp.GradScaler | None = None
    recorder: Recorder | None = None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled."""
        return self.scaler is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of losses; None if the trainer has no scaler or a disabled one."""
        scaler = self.grad_scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def on_nonfinite(self) -> NonFinite:
        """The treatment of a step whose gradients are not all finite."""
        return "skip" if self.scales else self.nonfinite


MemoryLimit: TypeAlias = int | str | Sequence[int | str]
"""A size of ``parse_size``, or one for each rank of the pipeline."""


def parse_limit(limit: MemoryLimit) -> int | tuple[int, ...]:
    """A memory limit in bytes, or a tuple of the limits of all ranks.

    Raises:
        PipelineError: the limit is neither a size nor a sequence of sizes.
    """
    if isinstance(limit, Sequence) and not isinstance(limit, str):
        sizes: Sequence[int | str] = limit
        return tuple([parse_size(size, "memory_limit", PipelineError) for size in sizes])
    return parse_size(limit, "memory_limit", PipelineError)


def check_arguments(
    loss_fn: object, optimizer_fn: object, stage_options: object, run_options: object
) -> None:
    """Check the kinds of a trainer's arguments.

    Raises:
        PipelineError: a function cannot be called, or options are of another class.
    """
    if not callable(loss_fn):
        raise PipelineError(
            "loss_fn must be a function, such as torch.nn.functional.cross_entropy, which this "
            f"process calls; got a {type(loss_fn).__name__}"
        )
    if not callable(optimizer_fn):
        raise PipelineError(
            with_code(
                "optimizer_fn must be a function, such as lambda parameters: "
                "torch.optim.AdamW(parameters), which this process calls with the parameters of "
                f"its stages; got a {type(optimizer_fn).__name__}",
                wrong="optimizer_fn = torch.optim.AdamW(model.parameters(), lr=1e-3)",
                right="optimizer_fn = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
            )
        )
    for name, options, kind in (
        ("stage_options", stage_options, StageOptions),
        ("run_options", run_options, RunOptions),
    ):
        if not isinstance(options, kind):
            raise PipelineError(
                f"{name} must be an autosplit.{kind.__name__}(...); got a {type(options).__name__}"
            )


def check_record(record: object) -> None:
    """Check a value of ``Record``.

    Raises:
        PipelineError: the value is not valid; lists the valid values.
    """
    if not isinstance(record, bool) and record != MEMORY:
        raise PipelineError(
            f"record must be False, True (for timeline()) or {MEMORY!r} (for memory() too); "
            f"got {record!r}"
        )
