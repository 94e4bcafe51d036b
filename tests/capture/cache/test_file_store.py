"""The folder of the cache, with writers that are killed."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from multiprocessing.connection import Connection

import pytest

from autosplit.capture.cache.file_store import FileStore
from tests.interpreters import interpreters


def write_half(folder: pathlib.Path, pipe: Connection) -> None:
    def stop(*_: object) -> None:
        pipe.send("in the middle")
        time.sleep(60)

    os.replace = stop  # type: ignore[assignment]
    FileStore(folder).write("key", b"half of it")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no locks and no SIGKILL")
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "cache"
    ours, theirs = interpreters().Pipe(duplex=False)
    writer = interpreters().Process(target=write_half, args=(folder, theirs))
    writer.start()
    theirs.close()
    try:
        assert ours.recv() == "in the middle"
        FileStore(folder).write("other", b"whole")
        assert len(os.listdir(folder)) == 2  # that which is being written stays
    finally:
        ours.close()
        writer.kill()
        writer.join()
    FileStore(folder).write("more", b"whole")
    assert sorted(os.listdir(folder)) == ["more", "other"]
    assert FileStore(folder).read("other") == FileStore(folder).read("more") == b"whole"
    assert FileStore(folder).read("key") is None
