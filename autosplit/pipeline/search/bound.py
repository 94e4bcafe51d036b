"""A time that no order of a step can undercut."""

from __future__ import annotations

from autosplit.pipeline.schedule.action import Action

from .problem import FORWARD, KINDS, Problem


def lower_bound(problem: Problem) -> float:
    """No rank can end before its first input has come and all its work is done."""
    begins = _begins(problem)
    bounds = []
    for rank in range(len(problem.caps)):
        stages = [stage for stage, each in enumerate(problem.placement) if each == rank]
        lead = min((begins[stage] for stage in stages), default=0.0)
        work = sum(_least_work(problem, stage) for stage in stages)
        bounds.append(lead + problem.microbatches * work)
    return max(bounds)


def _begins(problem: Problem) -> list[float]:
    """When the first F of each stage can begin: behind the Fs before it and their messages."""
    begins: list[float] = []
    for stage in range(len(problem.placement)):
        begin = 0.0
        for parcel in problem.needs[problem.number[Action(stage, FORWARD, 0)]]:
            maker = problem.makers[parcel]
            end = begins[problem.actions[maker].stage] + problem.seconds[maker]
            begin = max(begin, end + _travel(problem, maker, parcel))
        begins.append(begin)
    return begins


def _travel(problem: Problem, maker: int, parcel: int) -> float:
    """Seconds from the end of an action to the arrival of its parcel, on a link of its own."""
    return next(
        message.took + message.latency
        for message in problem.makes[maker]
        if message.parcel == parcel
    )


def _least_work(problem: Problem, stage: int) -> float:
    """Seconds of a microbatch on a stage, with the shorter of the two backwards."""
    forward, inputs, weights, full = (
        problem.seconds[problem.number[Action(stage, kind, 0)]] for kind in KINDS
    )
    return forward + min(inputs + weights, full)
