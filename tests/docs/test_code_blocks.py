"""Every Python block of README and docs runs as it stands, page by page."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pathlib
import re
import runpy
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import pytest

from tests.interpreters import Servers, interpreters, rank_processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: pathlib.Path) -> list[str]:
    return BLOCK.findall(page.read_text())


PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if blocks_of(page)]


def test_the_pages_that_show_code_are_found() -> None:
    assert {"README.md", "splitting.md", "pipelines.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for index, block in enumerate(blocks_of(page)):
        script = tmp_path / f"block_{index}.py"
        script.write_text(block)
        assert outcome(interpreters(), script) == "", f"block {index} of {page.name}"


def outcome(context: ForkServerContext, script: pathlib.Path) -> str:
    """The error that a script ends with."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(script, theirs, Servers.running()))
    process.start()
    theirs.close()
    try:
        result = str(ours.recv()) if ours.poll(300) else "it does not end"
    except EOFError:
        result = "it died"
    ours.close()
    process.join(20)
    process.kill()
    process.join()
    return result or ("" if process.exitcode == 0 else f"it left with {process.exitcode}")


def run(script: pathlib.Path, pipe: Connection, servers: Servers) -> None:
    """As ``python script.py`` in the folder of the script would; the ranks that it launches have
    imported torch and autosplit when they begin.
    """
    servers.join()
    context = rank_processes()
    multiprocessing.get_context = lambda method=None: context
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    loaded = [name for name in sys.modules if name.partition(".")[0] == "autosplit"]
    warnings.filterwarnings("error", category=DeprecationWarning, module=r"autosplit\Z")
    try:
        assert loaded == [], "no block may find imported what it does not import"
        runpy.run_path(str(script), run_name="__main__")
        atexit._run_exitfuncs()
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
