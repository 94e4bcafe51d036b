"""Performs queues that are written down, on running ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .group import Call, StrictGroup, over
from .link import StrictError
from .player import Communicators, Item, Program
from .rules import RECEIVE, SEND

_TIMEOUT = timedelta(seconds=30)


def perform(program: Program, communicators: Communicators) -> str:
    """This rank's part of a program: "ends", or what is said of why it does not."""
    world = dist.group.WORLD
    assert isinstance(world, StrictGroup)
    try:
        groups = {
            name: world.beside(name, members, _TIMEOUT, eager=eager)
            for name, (members, eager) in sorted(communicators.items())
            if world.rank() in members
        }
        works: dict[str, list[Any]] = {name: [] for name in groups}
        for item in program.get(world.rank(), ()):
            _do(item, groups, works)
        for element in [work for row in works.values() for work in row]:
            element.wait()
        dist.barrier()
    except StrictError as error:
        return str(error)
    return "ends"


def _do(item: Item, groups: dict[str, StrictGroup], works: dict[str, list[Any]]) -> None:
    subject, name, *rest = item
    if subject == "wait":
        works[name][rest[0]].wait()
        return
    group = groups[name]
    parts = [tuple(rest)] if subject == "op" else rest[0]
    # Single messages, too, go over the group's own communicator, where they are coalesced.
    group._start_coalescing(torch.device("cpu"))
    for kind, peers in parts:
        if kind in (SEND, RECEIVE):
            call = group.send if kind == SEND else group.recv
            call([torch.zeros(2)], group.number_of(peers[0]), 0)
        else:
            group.start(Call(kind, group.members, None, [], _sum))
    work = group._end_coalescing(torch.device("cpu"))
    works[name] += work.each()


def _sum(under: dist.ProcessGroup, _: Any) -> dist.Work:
    """Of any collective, what moves."""
    return under.allreduce([torch.zeros(2)])


def perform_all(programs: Mapping[Any, tuple[Program, Communicators]], text: str) -> dict[Any, str]:
    """Perform programs, each in a new process group; return their verdicts."""
    results = {}
    for name, inputs in programs.items():
        with over(text):
            results[name] = perform(*inputs)
    return results
