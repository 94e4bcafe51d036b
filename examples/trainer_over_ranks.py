"""transformers' Trainer over a pipeline of ranks: its loop, its callbacks, its schedulers and its
logs; the steps are those of ``PipelineTrainer``. It needs accelerate.

``python -m examples.trainer_over_ranks FOLDER`` trains on two ranks of this machine. Each rank runs
the whole loop on the same batches, as if it were the only process; the ranks meet in the methods
that are overridden here:

    Trainer's loop             here
    training_step              all microbatches of the batch, forward and backward
    _clip_grad_norm            by the norm of the whole model
    optimizer.step             the optimizer of this rank's stages
    prediction_step            the forward, with logits gathered from the last stage's rank
    _save_checkpoint           a checkpoint of all stages, and files for ``from_pretrained``
    train(resume_from=...)     loads that checkpoint
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from autosplit import PipelineTrainer, StageOptions, launch, load_checkpoint, save_checkpoint
from autosplit.checkpoint import export_safetensors
from examples.transformers_trainer import Windows, build

_PIPELINE = "pipeline"  # the folder of all stages' weights and optimizers, in a checkpoint


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let accelerate see one process, so that it neither divides batches nor averages gradients."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


class RankArguments(TrainingArguments):  # type: ignore[misc]
    """The arguments of one rank, of which the first writes and logs."""

    def __post_init__(self) -> None:
        with one_process():
            super().__post_init__()
        if self.gradient_accumulation_steps != 1:
            raise ValueError("pass microbatches= in place of gradient_accumulation_steps")
        self.dataloader_drop_last = True  # a batch has the size of the first

    @property
    def should_save(self) -> bool:
        return dist.get_rank() == 0

    @property
    def should_log(self) -> bool:
        return dist.get_rank() == 0


class TrainerOverRanks(Trainer):  # type: ignore[misc]
    """A Trainer whose model is cut into stages, one or more on each rank.

    Args:
        microbatches: the parts into which a batch of ``per_device_train_batch_size`` is cut.
        stages: the number of stages; None: one a rank.
        pipeline: further options of ``PipelineTrainer``.
        options: those of ``Trainer``. The model returns its loss.
    """

    def __init__(
        self,
        *,
        microbatches: int,
        stages: int | None = None,
        pipeline: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        with one_process():
            super().__init__(**options)
        self._options = {
            "microbatches": microbatches,
            "stages": stages or dist.get_world_size(),
            "stage_options": StageOptions(autocast=torch.bfloat16 if self.args.bf16 else None),
            **(pipeline or {}),
        }
        self._microbatches = microbatches
        self.pipeline: PipelineTrainer | None = None

    def is_world_process_zero(self) -> bool:
        return dist.get_rank() == 0

    is_local_process_zero = is_world_process_zero

    # --- building ---------------------------------------------------------------------------------

    def _built(self) -> PipelineTrainer:
        """The pipeline, built for the shapes of the first batch of training."""
        if self.pipeline is None:
            with torch.random.fork_rng():  # the loader's order stays that of training
                batch = next(iter(self.get_train_dataloader()))
            size = self.args.train_batch_size // self._microbatches
            self.pipeline = PipelineTrainer(
                self.model,
                lambda output, _: output.loss,
                self._optimizer,
                example={name: value[:size] for name, value in batch.items()},
                max_grad_norm=self.args.max_grad_norm or None,
                **self._options,
            )
        return self.pipeline

    def _optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters; weights decay by their names in the model."""
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = [
            {
                "params": [p for name, p in named if (name in decayed) is decays],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        optimizer: torch.optim.Optimizer = kind(groups, **options)
        return optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.optimizer: Any = self._built().optimizer
        if self.optimizer is None:  # all of this rank's stages are frozen, but the loop has rates
            nothing = nn.Parameter(torch.zeros(0))
            self.optimizer = torch.optim.SGD([nothing], lr=self.args.learning_rate)
        return self.optimizer

    # --- steps ------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of a batch. Its loss is the mean over all tokens with a label."""
        pipeline, weight = self._built(), None
        if num_items_in_batch is not None:
            counts = inputs["labels"][:, 1:].ne(-100).flatten(1).sum(1)
            weight = [int(part.sum()) for part in counts.chunk(self._microbatches)]
        self.optimizer.zero_grad()  # the loop clears gradients of the uncut model only
        losses = pipeline.forward_backward((self._prepare_inputs(inputs), ()), weight=weight)
        if weight is None:
            return losses.mean()
        return losses @ torch.tensor(weight, dtype=losses.dtype) / sum(weight)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        pipeline = self._built()
        trained = [p for module in pipeline.modules.values() for p in module.parameters()]
        norm = torch.tensor(pipeline.grad_norm)
        torch.nn.utils.clip_grads_with_norm_(trained, self.args.max_grad_norm, norm)
        return norm.item()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._built().grad_norm

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        pipeline, inputs = self._built(), self._prepare_inputs(inputs)
        rows = pipeline.measure(
            (inputs, ()), lambda output, _: None if prediction_loss_only else output.logits.cpu()
        )
        loss = torch.tensor(pipeline.evaluation["loss"])
        if prediction_loss_only:
            return loss, None, None
        return loss, torch.cat(rows), inputs["labels"]

    # --- checkpoints ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save all stages, and the model's files for ``from_pretrained``; call on all ranks."""
        folder = Path(output_dir or self.args.output_dir)
        save_checkpoint(self._built(), folder / _PIPELINE, scheduler=self._saved_scheduler())
        if self.args.should_save:
            export_safetensors(folder / _PIPELINE, folder)
            self.model.config.save_pretrained(folder)
        dist.barrier()

    def _saved_scheduler(self) -> Any:
        """The scheduler of this rank's optimizer; None if all of its stages are frozen."""
        return None if self._built().optimizer is None else self.lr_scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """``save_model`` has saved both."""

    def _save_rng_state(self, output_dir: str) -> None:
        """``save_model`` has saved it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Generators are loaded with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            scheduler = self._saved_scheduler()
            load_checkpoint(self._built(), Path(checkpoint) / _PIPELINE, scheduler=scheduler)

    def _load_best_model(self) -> None:
        load_checkpoint(self._built(), Path(self.state.best_model_checkpoint) / _PIPELINE)


def accuracy(predictions: Any) -> dict[str, float]:
    """The share of tokens that are predicted, as a Trainer's ``compute_metrics``."""
    best = predictions.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((best == predictions.label_ids[:, 1:]).mean())}


def main(
    folder: str,
    *,
    model: nn.Module | None = None,
    pipeline: dict[str, Any] | None = None,
    resume: str | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train in ``folder``, on every rank, and return the logs. ``pipeline`` and ``options`` are
    further options of ``PipelineTrainer`` and of ``TrainingArguments``.
    """
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
    }
    trainer = TrainerOverRanks(
        microbatches=2,
        pipeline=pipeline,
        model=model or build(),
        args=RankArguments(folder, **(arguments | options)),
        train_dataset=Windows(32, 16, seed=0),
        eval_dataset=Windows(8, 16, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer._built().close()
    logs: list[dict[str, float]] = trainer.state.log_history
    return logs


if __name__ == "__main__":
    print(launch(main, 2, (sys.argv[1],), timeout=3600)[0][-1])
