"""torch's stages, compiled without donated buffers."""

import torch
from torch.distributed.pipelining import PipelineStage

from ..task import Step, Task


def prepare(task: Task) -> Step:
    torch._functorch.config.donated_buffer = False
    stages = []
    for index in task.held:
        module = task.build(index)
        module.compile()
        stage = PipelineStage(
            module,
            index,
            task.stages,
            task.device,
            group=task.group,
        )
        stages.append(stage)
    schedule = task.schedule_of(stages)
    return lambda: schedule.step(*task.args, **task.kwargs)
