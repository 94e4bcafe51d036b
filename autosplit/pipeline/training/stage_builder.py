"""Builds the stages of a mode when the first batch of its shape arrives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.mode import Mode
from autosplit.pipeline.engine.shapes import Batch, Microbatches
from autosplit.pipeline.engine.stages import (
    ModuleStage,
    StageFactory,
    TrainableStage,
    build_stages,
)
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.training.replicas.sharded_stages import ShardedStages
from autosplit.stage import Stage

from .metrics import MetricObserver
from .stage_modules import LossFunction, complete


class StageBuilder:
    """Makes the executors of one trainer.

    Args:
        modules: this rank's modules by stage.
        schedule: how they are driven in training.
        feeds: who feeds whom.
        loss_fn: what the last stage ends with.
        factory: makes a stage of a module.
        autocast: the dtype to run everything in, if any.
        device: where the stages run.
        sharded: the stages that are sharded.

    Attributes:
        observer: looks at what the loss is given in evaluation.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        feeds: Feeds,
        loss_fn: LossFunction,
        factory: StageFactory,
        *,
        autocast: torch.dtype | None,
        device: torch.device,
        sharded: ShardedStages,
    ) -> None:
        self._sharded = sharded
        self._modules = modules
        self._schedule = schedule
        self._feeds = feeds
        self._loss_fn = loss_fn
        self._factory = factory
        self._autocast = autocast
        self._device = device
        self.observer = MetricObserver()
        self._faces: dict[int, nn.Module] = {}
        self._evaluated: dict[int, nn.Module] = {}
        self._stages: dict[int, Stage] = {}

    def train(
        self, mode: Mode, batch: Batch | None, inputs: Microbatches, targets: Microbatches
    ) -> Executor:
        """Build the stages of a training mode from its first batch, whole and cut."""
        with mode.place("building its stages"):
            mode.stages = build_stages(
                self._trained(batch),
                self._schedule.stages,
                self._feeds,
                mode.negotiation,
                self._stage,
                inputs=inputs[0] if inputs else (),
                targets=targets[0] if targets else (),
                device=self._device,
            )
        mode.compile()
        scale = 1.0 / self._schedule.microbatches
        loss_grad = torch.full((), scale, dtype=mode.loss_dtype, device=self._device)
        return mode.prepare(mode.stages, loss_grad)

    def _stage(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``: that of another mode where it can take them, whose graphs
        may hold for these sizes, too.
        """
        known = self._stages.get(index)
        with self._sharded.gathered(index):
            if known is not None and known.takes(args):
                known.prepare(args)
                return known
            made = self._factory(module, args, index=index)
        if isinstance(made, Stage):
            self._stages[index] = made
        return made

    def evaluate(self, mode: Mode, batch: Batch | None) -> Executor:
        """Put the modules themselves into an evaluating mode."""
        if not self._evaluated:
            self._evaluated = self._complete(batch, self.observer)
        stages = {
            index: ModuleStage(
                module,
                index,
                self._feeds.shared_places(index),
                partial(self._sharded.gather, index),
            )
            for index, module in self._evaluated.items()
        }
        return mode.prepare(stages)

    def _trained(self, batch: Batch | None) -> dict[int, nn.Module]:
        if not self._faces:
            self._faces = self._complete(batch)
        return self._faces

    def _complete(
        self, batch: Batch | None, observer: MetricObserver | None = None
    ) -> dict[int, nn.Module]:
        return complete(
            self._modules,
            self._schedule.stages - 1,
            self._loss_fn,
            None if batch is None else batch[1],
            autocast=self._autocast,
            device=self._device,
            observer=observer,
        )
