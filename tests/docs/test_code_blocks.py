"""Every Python block of README and docs runs as it stands, page by page."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

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
        found = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning:autosplit", str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert found.returncode == 0, f"block {index} of {page.name}:\n{found.stderr}"
