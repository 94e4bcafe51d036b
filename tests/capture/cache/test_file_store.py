"""The folder of the cache, with writers that are killed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from autosplit.capture.cache.file_store import FileStore

WRITER = """
import hashlib, os, pathlib, sys, time
from autosplit.capture.cache.file_store import FileStore

def stop(*_):
    print("in the middle", flush=True)
    time.sleep(60)

os.replace = stop
FileStore(pathlib.Path(sys.argv[1])).write("key", b"half of it")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no locks and no SIGKILL")
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "in the middle\n"
            FileStore(folder).write("other", b"whole")
            assert len(os.listdir(folder)) == 2  # that which is being written stays
        finally:
            writer.kill()
    FileStore(folder).write("more", b"whole")
    assert sorted(os.listdir(folder)) == ["more", "other"]
    assert FileStore(folder).read("other") == FileStore(folder).read("more") == b"whole"
    assert FileStore(folder).read("key") is None
