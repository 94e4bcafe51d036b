"""Schedules that nobody would write, but that are legal."""

from __future__ import annotations

import random

from autosplit.pipeline.schedule.routes import StageDataflow, needs_of, result_of
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule


def random_schedule(seed: int, stages: int | None = None) -> Schedule:
    """Any placement, any order that can be played through."""
    chance = random.Random(seed)
    ranks, drawn = chance.randint(2, 4), chance.randint(2, 6)
    stages = stages or drawn
    count = chance.randint(1, 5)
    placement = [chance.randrange(ranks) for _ in range(stages)]
    kinds = chance.choice(["FIW", "FB"])
    actions = [
        Action(stage, ActionKind(kind), microbatch)
        for stage in range(stages)
        for kind in kinds
        for microbatch in range(count)
    ]
    dataflow = StageDataflow(stages)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    built: set[Action] = set()
    while actions:
        able = [a for a in actions if all(need in built for need in needs_of(a, dataflow))]
        action = chance.choice(able)
        actions.remove(action)
        built.add(result_of(action))
        rows[placement[action.stage]].append(action)
    return Schedule(
        f"random {seed}",
        stages,
        count,
        tuple(map(tuple, rows)),
        tuple(placement),
        kinds == "FIW",
    )
