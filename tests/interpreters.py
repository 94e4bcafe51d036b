"""Processes that begin with what takes longest to import; nothing of autosplit is there yet."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_PLACES = ("_forkserver_address", "_forkserver_authkey")  # the latter since Python 3.14


def interpreters() -> ForkServerContext:
    """Starts processes as ``"spawn"`` does, but from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


@dataclass(frozen=True)
class Server:
    """The process that others are started from, which a started one can start others from.

    By itself it would start a server of its own. There is no public way.
    """

    places: dict[str, object]

    @classmethod
    def running(cls) -> Server:
        """That of this process, started if there is none."""
        interpreters()
        forkserver.ensure_running()
        own = vars(forkserver._forkserver)
        return cls({name: own[name] for name in _PLACES if name in own})

    def join(self) -> None:
        """Start this process's others from it."""
        vars(forkserver._forkserver).update(self.places, ensure_running=lambda: None)
