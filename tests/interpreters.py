"""Processes that begin with what takes longest to import, with or without autosplit."""

from __future__ import annotations

import gc
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess

from torch.distributed.launcher.api import LaunchConfig

_PLACES = ("_forkserver_address", "_forkserver_authkey")  # the latter since Python 3.14


def collect_rarely() -> None:
    """Tracing makes so many objects that the collector would go through those of torch and of all
    tests before again and again, for a tenth of the time.
    """
    gc.set_threshold(10_000, 10, 100)


def interpreters() -> ForkServerContext:
    """Starts processes as ``"spawn"`` does, but from one that has imported torch already; nothing
    of autosplit is there yet.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def rank_processes() -> ForkServerContext:
    """Likewise from one that has imported what ranks need of autosplit, too."""
    _ranks_server.set_forkserver_preload(["tests.preloaded", "tests.preloaded_ranks"])
    return _RankContext()


_ranks_server = forkserver.ForkServer()  # multiprocessing has one, for whatever is preloaded first


class _RankProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:  # noqa: N802
        """Starts it from the other server. There is no public way."""
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _ranks_server.connect_to_new_process
        try:
            return Popen(process)
        finally:
            forkserver.connect_to_new_process = usual


class _RankContext(ForkServerContext):
    Process = _RankProcess


def torchrun_config(run_id: str, *, max_restarts: int = 0) -> LaunchConfig:
    """What ``torchrun --standalone --nproc-per-node 2`` passes to its agent."""
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=max_restarts,
        start_method="forkserver", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=run_id, monitor_interval=0.1,
    )  # fmt: skip


@dataclass(frozen=True)
class Servers:
    """The processes that others are started from, which a started one can start others from.

    By itself it would start servers of its own. There is no public way.
    """

    places: tuple[dict[str, object], ...]

    @classmethod
    def running(cls) -> Servers:
        """Return the servers of this process; start them if there are none."""
        interpreters()
        rank_processes()
        for server in _servers():
            server.ensure_running()
        local = map(vars, _servers())
        return cls(
            tuple({name: tensor[name] for name in _PLACES if name in tensor} for tensor in local)
        )

    def join(self, *, ranks: bool = False) -> None:
        """Start this process's others from them; all of them as ranks, if so asked."""
        alive = vars(forkserver._forkserver)["_forkserver_alive_fd"]
        if alive is None:  # no server started this process; what it starts must get some file
            _, alive = os.pipe()
        for server, places in zip(_servers(), self.places, strict=True):
            expected = {**places, "_forkserver_alive_fd": alive}
            vars(server).update(expected, ensure_running=lambda: None)
        if ranks:
            forkserver.connect_to_new_process = _ranks_server.connect_to_new_process


def _servers() -> tuple[forkserver.ForkServer, ...]:
    return forkserver._forkserver, _ranks_server
