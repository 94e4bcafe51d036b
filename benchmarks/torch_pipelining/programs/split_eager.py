"""autosplit's stages."""

from autosplit.pipelining import SplitPipelineStage

from ..task import Step, Task


def prepare(task: Task) -> Step:
    stages = []
    for index in task.held:
        module = task.build(index)
        stage = SplitPipelineStage(
            module,
            index,
            task.stages,
            task.device,
            group=task.group,
        )
        stages.append(stage)
    schedule = task.schedule_of(stages)
    return lambda: schedule.step(*task.args, **task.kwargs)
