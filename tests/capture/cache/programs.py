"""Programs in processes of their own that keep split graphs in one folder, or find them there."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from multiprocessing.connection import Connection

from autosplit.capture.cache.split_graph_cache import VARIABLE
from tests.interpreters import interpreters


def run_forked(program: str, *arguments: str) -> str:
    """What a program prints, in a process that has imported torch before it begins."""
    ours, theirs = interpreters().Pipe(duplex=False)
    said = (program, arguments, os.environ[VARIABLE], theirs)
    process = interpreters().Process(target=_run, args=said)
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    finally:
        process.join()


def run_spawned(program: str, *arguments: str) -> str:
    """What a program prints, in a new interpreter, with hashes of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(program: str, arguments: tuple[str, ...], folder: str, pipe: Connection) -> None:
    os.environ[VARIABLE] = folder
    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {"__name__": "__main__"})
    pipe.send(printed.getvalue())
