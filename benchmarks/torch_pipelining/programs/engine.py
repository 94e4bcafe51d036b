"""autosplit's own engine."""

import torch

from autosplit.pipeline import PipelineTrainer

from ..task import Step, Task


def prepare(task: Task) -> Step:
    trainer = PipelineTrainer(
        task.build,
        task.loss_fn,
        torch.optim.SGD,
        stages=task.stages,
        microbatches=task.microbatches,
        schedule=task.order(),
    )
    task.closing.enter_context(trainer)
    return lambda: trainer.forward_backward(task.batch)
