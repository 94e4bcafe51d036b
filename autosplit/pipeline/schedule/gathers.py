"""The actions UNSHARD, RESHARD and REDUCE_GRAD: when the parameters of a sharded stage are gathered
and freed, and when its gradients are reduced.

    row           3F0        0F0        0F1   ...   0W1                  3W0
                   |          |                      |                    |
    with stage 0  UNSHARD 0   waits for the          RESHARD 0: freed     another stage's W
    sharded       starts the  all-gather             REDUCE_GRAD 0        runs beside the
                  all-gather                         starts a             reduce-scatter
                                                     reduce-scatter

The kinds of actions and their text are as in torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from autosplit.pipeline.schedule.schedule import BACKWARDS, SHARDING, Action, ActionKind, Schedule


def add_gathers(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Add UNSHARD, RESHARD and REDUCE_GRAD of sharded stages, unless the schedule already lists
    such actions.

    A stage's all-gather starts one action before its first use, and its gradients are reduced after
    its last W or B. In between the stage stays gathered.

    Args:
        schedule: a legal schedule.
        stages: the sharded stages.
    """
    if not (stages and SHARDING.isdisjoint(schedule.kinds)):
        return schedule
    return replace(schedule, ranks=tuple(_with_gathers(row, stages) for row in schedule.ranks))


def _with_gathers(row: Sequence[Action], stages: Collection[int]) -> tuple[Action, ...]:
    last_uses: dict[int, int] = {}
    trained = {action.stage for action in row if action.kind in BACKWARDS}
    ahead: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    previous = 0
    for place, action in enumerate(row):
        if action.kind.is_compute:
            if action.stage in stages and action.stage not in last_uses:
                ahead[previous].append(Action(action.stage, ActionKind.UNSHARD, 0))
            last_uses[action.stage] = place
            previous = place
    for stage in last_uses.keys() & stages:
        kinds = [ActionKind.RESHARD, *([ActionKind.REDUCE_GRAD] if stage in trained else [])]
        after[last_uses[stage]] += [Action(stage, kind, 0) for kind in kinds]
    return tuple(
        item for place, action in enumerate(row) for item in (*ahead[place], action, *after[place])
    )
