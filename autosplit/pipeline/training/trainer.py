"""Trains a model that is cut into stages, over any number of processes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.execution.evaluation import eval_mode
from autosplit.pipeline.engine.execution.microbatch import Batch
from autosplit.pipeline.engine.execution.stage_assembly import StageFactory, TrainableStage
from autosplit.pipeline.engine.faults.first_error import Board, Guard
from autosplit.pipeline.engine.faults.watch import watch_over
from autosplit.pipeline.engine.messages.nccl import await_device
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.engine.messages.step_results import Agreement
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Timeline

from .auto_partition import Example
from .configuration import Arrangement
from .optimizer_step import Update
from .option_agreement import check_unanimous
from .options import Options, choose_device, choose_order
from .rank_state import Holdings
from .runner import Runner
from .stage_modules import LossFunction, Model, Stages
from .tied_parameters import Holder, joined

OptimizerFunction = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class PipelineTrainer:
    """Trains a pipeline of stages: one process per stage, or several stages per process.

    Every process makes the same calls. Start them with torchrun or ``autosplit.pipeline.launch``.
    Whatever goes wrong on one rank ends the trainer on all of them, with the first cause as
    message; a new trainer must then be built.

    Under a schedule with two copies of the stages (``"chimera"``, ``"dualpipe"``), two ranks hold
    each stage and half of the microbatches go each way. The copies start with the parameters and
    buffers of the first; every rank that holds the first or the last stage needs the batch, the
    same on all. Losses are bit for bit those of a schedule with one copy on the same weights. Each
    copy adds up the gradients of its own microbatches, then both get the sum of the two: another
    order of summation than with one copy, so gradients differ by its rounding (not with two
    microbatches), but they are the same bit for bit on both ranks and from run to run. Optimizers
    must do the same with the same gradients, so none may draw random numbers. No buffer may be
    written, and random layers draw from the generator of their rank: seed ranks differently.

    Args:
        model: the modules in order (a list, or an ``nn.ModuleList``), or a function that builds
            module ``index`` and is called for this process's stages only: outputs of one are the
            positional inputs of the next. Or a model that ``autosplit.partition`` has cut, or any
            other ``nn.Module``, ``nn.Sequential`` included, which it then cuts into ``stages``.
        loss_fn: ``loss_fn(output, targets)`` gives the scalar loss of one microbatch.
        optimizer_fn: builds the optimizer of this process's parameters.
        stages: how many stages there are; required with a function and with a whole model.
        example: the inputs of one microbatch, to cut a whole model with: a tensor, a tuple, or
            a dictionary of keyword arguments. With anything but a whole model not allowed.
        planning: further options of ``autosplit.partition`` for a whole model, such as ``{"costs":
            "estimate", "limits": Limits(cap=8e9)}``; what the trainer knows, it hands on itself.
        schedule: a name from ``autosplit.pipeline.SCHEDULES``, a Schedule, or ``"auto"``:
            measure the first three steps and run the shortest schedule that ``search`` finds for
            them from then on, on the same placement and within the memory of the split schedule
            that they ran.
        microbatches: M, into how many equal parts a batch is cut along dimension 0.
        split_backward: run input and weight gradients as separate actions.
        weights: where the weight gradients go, see ``schedules.build``.
        early_weights: run the next weight gradients wherever a rank would wait for a message,
            rather than where the schedule has them; the results are the same, bit for bit. Only
            on the CPU: on a GPU, the host does not know when the device waits.
        slices: into how many parts of near-equal FLOPs ``early_weights`` may cut a weight gradient,
            so that it fits a wait shorter than the whole.
        shapes: how many shapes the batches may have, such as a shorter last batch or several
            sequence lengths. Each has its own graphs, built when it first comes.
        autocast: ``torch.bfloat16`` runs modules and loss under autocast.
        max_grad_norm: clips the norm of the whole model's gradient to this.
        undo_steps: if an optimizer fails in ``step``, take the step back on every rank. Keeps a
            copy of parameters and optimizer state while the optimizers move.
        shared_parameters: groups of (stage, name) that are one parameter of the model. They start
            with the values of the first holder, and each gets the sum of the gradients. Those that
            modules of a list, or a model that is cut, have in common are found.
        device: where this process's stages go; None means the current CUDA device if the default
            process group has NCCL, else the CPU.
        ranks: how many processes take part; None means all. 1 keeps all stages in this process
            and needs no process group.
        timeout: seconds to wait for another rank, and for each stage to be built.
        record: record each step for ``timeline``; may be changed between steps.
        backend: how stages are compiled, see ``autosplit.Stage``; None means ``"eager"``.
        memory: what a microbatch holds, see ``autosplit.split``; None means ``"balanced"``.
        accumulation: how weight gradients of microbatches are added up, see ``autosplit.Stage``;
            None means ``"exact"``. ``"concatenated"`` makes one call of those Ws of a stage that
            the schedule has next to each other on a rank.
        grad_dtype: in which dtype they are, see ``autosplit.Stage``; None means each parameter's.
        stage_factory: makes stages in place of ``autosplit.Stage``.

    Raises:
        PipelineError: no process group, a count that does not fit, or any other bad argument.
        ScheduleError: an unknown schedule or placement of weight gradients, or an illegal schedule.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction,
        optimizer_fn: OptimizerFunction,
        *,
        microbatches: int,
        stages: int | None = None,
        example: Example | None = None,
        planning: Mapping[str, Any] | None = None,
        schedule: str | Schedule = "1f1b",
        split_backward: bool = True,
        weights: str | None = None,
        early_weights: bool = False,
        slices: int | None = None,
        shapes: int = 1,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        undo_steps: bool = False,
        shared_parameters: Sequence[Sequence[Holder]] = (),
        device: torch.device | str | None = None,
        ranks: int | None = None,
        timeout: float = 300.0,
        record: bool = False,
        backend: str | None = None,
        memory: str | int | None = None,
        accumulation: str | None = None,
        grad_dtype: torch.dtype | None = None,
        stage_factory: StageFactory | None = None,
    ) -> None:
        options = Options(
            microbatches=microbatches,
            schedule=schedule,
            split_backward=split_backward,
            weights=weights,
            early_weights=early_weights,
            shapes=shapes,
            autocast=autocast,
            max_grad_norm=max_grad_norm,
            ranks=ranks,
            timeout=timeout,
            stage={
                "backend": backend,
                "memory": memory,
                "accumulation": accumulation,
                "grad_dtype": grad_dtype,
                "slices": slices,
            },
            stage_factory=stage_factory,
        )
        whole = Stages.of(model, stages, example, planning)
        arranged = Arrangement.of(whole, loss_fn, options)
        self.shared_parameters = joined(arranged.stages.shared, shared_parameters)
        self.record = record
        self.device = choose_device(device, arranged.processes)
        self._clipping = max_grad_norm is not None
        self._groups = Groups(arranged.processes, self.device, timeout)
        board = Board(self._groups.store) if arranged.processes > 1 else None
        self._update = Update(max_norm=max_grad_norm, undo=undo_steps, device=self.device)
        self._watch = watch_over(self._groups) if arranged.processes > 1 else None
        if self._watch is not None:
            dropped = weakref.finalize(self, self._watch.leave, "dropped its trainer")
            dropped.atexit = False  # how the process ends says more
        self._guard = Guard(self.rank, board, self._end, self._groups.place, self._watch)
        settled = partial(await_device, self.device, self._guard, timeout)
        order = choose_order(early_weights, arranged.schedule, self.device)
        with self._guard("building the model"):
            check_unanimous(
                {
                    "stages": arranged.stages.count,
                    "microbatches": microbatches,
                    "schedule": arranged.schedule,
                    "schedule='auto'": schedule == "auto",
                    "shapes": shapes,
                    "autocast": autocast,
                    "max_grad_norm": max_grad_norm,
                    "undo_steps": undo_steps,
                    "shared_parameters": [*map(list, self.shared_parameters)],
                },
                self._groups,
            )
            self._held = Holdings(
                arranged.stages,
                self.shared_parameters,
                arranged.schedule,
                self._groups,
                self.device,
                settled,
            )
            self.modules = self._held.modules
            parameters = self._held.parameters
            self.optimizer = optimizer_fn(parameters) if parameters else None
            self._update.drive(parameters, self.optimizer)
            # Whoever gets here knows that every other rank did.
            self._groups.meet()
        self._runner = Runner(
            arranged,
            options,
            order,
            self._held,
            self._groups,
            self._guard,
            self._update,
            self.device,
            settled,
        )

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._groups.rank

    @property
    def schedule(self) -> Schedule:
        """What training runs; with ``"auto"``, another one once the first steps are measured."""
        return self._runner.schedule

    @property
    def grad_norm(self) -> float | None:
        """The norm of the model's gradient in the last step; None without ``max_grad_norm``."""
        self._settle()
        return self._update.norm

    @property
    def stages(self) -> Mapping[int, TrainableStage]:
        """This process's stages by index, those of the last step; empty before the first."""
        return self._runner.stages

    def step(self, batch: Batch | None) -> Tensor:
        """Run one training step: all microbatches, clipping, optimizer, gradients cleared.

        No optimizer moves before every rank has all its gradients. If one fails, the trainer ends
        on all ranks, and with ``undo_steps`` every rank's weights are those before the step.

        Args:
            batch: (inputs, targets), each a tensor or a tuple of tensors with the samples along
                dimension 0; inputs also a dictionary, for a model that was cut with named ones.
                A rank uses the inputs that its stages take (in a chain, the first stage all of
                them), and of the targets those on the last stage's rank. ``()`` are no targets.

        Returns:
            The loss of each microbatch, shape [M], on the CPU, the same on every rank. The loss
            of the step, which the gradients belong to, is their mean.

        Raises:
            PipelineError: a bad batch, an error on any rank, a lost peer, or a timeout.
        """
        losses = self.forward_backward(batch)
        with self._guard("the optimizer step"):
            self._update.step(self.grad_norm, self._groups.meet)
        return losses

    def step_async(self, batch: Batch | None) -> Agreement:
        """Run one training step without waiting for the other ranks at its end.

        A rank that is done goes on to the next step, so that one step's start fills the idle end
        of the one before; losses and weights are bit for bit those of ``step``. But an optimizer
        moves as soon as its own rank has its gradients: after a failure, ranks may have come
        one step apart, and only a checkpoint gets them together again.

        With ``max_grad_norm``, the norm is not known by then. As in the Zero Bubble paper (Qi et
        al., section 4), the optimizer moves as if nothing were to be clipped and the norm is
        looked at behind the next step: if it is too great or no number, the step is taken back
        and taken again with clipped gradients, and the next one is run again. So a step that is
        clipped costs two, but only behind one that was not: behind one that was, the trainer waits
        for the norm. Until it is known, a copy of this rank's parameters, optimizer state and
        buffers is kept, and its gradients. Weights are final once ``wait()`` has returned, or any
        other call of the trainer.

        Args:
            batch: as for ``step``.

        Returns:
            The losses on their way; ``wait()`` gives what ``step`` returns.

        Raises:
            PipelineError: as for ``step``; or the trainer clips gradients and its optimizer writes
                into them.
        """
        with self._guard("the forward and backward"):
            agreement = self._run(batch)
        with self._guard("the optimizer step"):
            if self._clipping:
                agreement.behind = self._update.settle
                self._update.step_early(agreement)
            else:
                self._update.step_alone()
        return agreement

    def forward_backward(self, batch: Batch | None) -> Tensor:
        """Run the schedule and add the gradients of the mean loss to the parameters' ``.grad``.

        Arguments, result and errors are those of ``step``. Returns only once all ranks are done.
        """
        with self._guard("the forward and backward"):
            self._update.confirm()
            agreement = self._run(batch)
        losses = agreement.wait()
        if self._clipping:
            self._update.norm = agreement.norm()
        return losses

    def evaluate(self, batch: Batch | None) -> Tensor:
        """The loss of each microbatch in eval mode, without gradients.

        Batches may be of another shape than in training, and of ``shapes`` shapes in all.
        Arguments, result and errors are those of ``step``.
        """
        with self._guard("the evaluation"), eval_mode(self.modules.values()):
            self._update.confirm()
            agreement = self._runner.evaluate(batch)
        return agreement.wait()

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """This process's gradients, by stage and by parameter name within the stage."""
        return self._held.gradients()

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of this process's modules, by stage, with the names within the stage."""
        self._settle()
        return {index: module.state_dict() for index, module in self.modules.items()}

    def timeline(self) -> Timeline:
        """What all ranks ran in the last step, which must have been recorded; call on all ranks.

        Ranks share a clock only if they run on one machine.

        Raises:
            PipelineError: nothing was recorded.
        """
        with self._guard("gathering the timeline"):
            if not self._runner.spans:
                raise PipelineError(
                    "there is no recorded step: set record=True before a step, then ask"
                )
            rows = self._groups.gather(self._runner.spans)
        return Timeline(len(rows), tuple(span for row in rows for span in row))

    @contextlib.contextmanager
    def together(self, where: str) -> Iterator[Groups]:
        """Let all ranks do something between two steps; gives what they talk through.

        Weights are final inside. Whatever is raised inside ends the trainer on every rank.

        Args:
            where: what that is, for errors: "saving a checkpoint".

        Raises:
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        with self._guard(where):
            self._update.confirm()
            yield self._groups

    def close(self) -> None:
        """Give back the process groups. All ranks should be done."""
        self._settle()
        if self._watch is not None:
            self._watch.leave("closed its trainer")
        self._groups.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._guard.left(error)
        self.close()

    def _run(self, batch: Batch | None) -> Agreement:
        return self._runner.train(batch, clipping=self._clipping, record=self.record)

    def _settle(self) -> None:
        if not self._guard.ended:
            with self._guard("the end of a step"):
                self._update.settle()

    def _end(self) -> None:
        """What a fault leads to."""
        self._update.take_back()
        if self._watch is not None:
            self._watch.stop()
        self._groups.close()
