"""Processes that begin with what takes longest to import; nothing of autosplit is there yet."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from tests import devices

_PLACES = ("_forkserver_address", "_forkserver_authkey")  # the latter since Python 3.14


def interpreters() -> ForkServerContext:
    """Starts processes as ``"spawn"`` does, but from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def printed_by(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a program prints, in a process of its own that has imported torch before it begins.

    Raises:
        AssertionError: it ended with an error.
    """
    ours, theirs = interpreters().Pipe(duplex=False)
    said = (program, arguments, dict(environment or {}), theirs)
    process = interpreters().Process(target=_run, args=said)
    process.start()
    theirs.close()
    try:
        text, error = ours.recv()
    finally:
        process.join()
        ours.close()
    assert not error, error
    return str(text)


def _run(
    program: str, arguments: tuple[str, ...], environment: dict[str, str], pipe: Connection
) -> None:
    os.environ |= environment
    devices.use(devices.chosen())
    sys.argv = ["-c", *arguments]
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    pipe.send((printed.getvalue(), error))


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
