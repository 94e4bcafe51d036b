"""Programs in processes of their own that keep split graphs in one folder, or find them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from autosplit.capture.cache.split_graph_cache import VARIABLE
from tests.interpreters import printed_by


def run_forked(program: str) -> str:
    """What a program prints, in a process that has imported torch before it begins."""
    return printed_by(program, environment={VARIABLE: os.environ[VARIABLE]})


def run_spawned(*programs: str) -> list[str]:
    """What programs print, one after another in a new interpreter with hashes of its own."""
    command = [sys.executable, "-c", _ONE_BY_ONE, json.dumps(programs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


_ONE_BY_ONE = """
import contextlib, io, json, sys
found = []
for program in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {"__name__": "__main__"})
    found.append(printed.getvalue())
print(json.dumps(found))
"""
