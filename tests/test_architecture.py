"""``import autosplit`` stays light, and private torch in its rooms. import-linter has the rest."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from autosplit.torch_internals.version import OLDEST

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "passes").rglob("*.py")) + sorted((ROOT / "autosplit").rglob("*.py"))


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_autosplit_is_light() -> None:
    before = modules_after("import torch")
    loaded = modules_after("import autosplit") - before
    heavy = {"matplotlib", "transformers", "click", "tqdm", "torch.distributed.pipelining"}
    assert not loaded & heavy
    assert not [name for name in loaded if name.startswith("autosplit.pipeline")]
    assert "torch.distributed.distributed_c10d" not in loaded
    assert "torch._dynamo.eval_frame" not in loaded


def test_training_stages_that_are_there_needs_no_planner() -> None:
    loaded = modules_after("import autosplit.pipeline, autosplit.checkpoint")
    assert "autosplit.pipeline.trainer" in loaded
    assert not [name for name in loaded if name.startswith("autosplit.planner")]


@pytest.mark.parametrize(("version", "fits"), [("2.10.1+cpu", False), ("2.11.0a0", True)])
def test_importing_autosplit_refuses_a_torch_that_is_too_old(version: str, fits: bool) -> None:
    code = f"import torch; torch.__version__ = {version!r}; import autosplit"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode == 0) is fits, result.stderr
    if not fits:
        assert "autosplit needs torch 2.11 or later and found 2.10.1+cpu" in result.stderr


def test_the_oldest_torch_is_that_of_the_dependencies() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in metadata["dependencies"]
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text()
    assert metadata["requires-python"] == ">=3.11"
    assert "Python 3.11 or later" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_pages_are_no_wider_than_sources(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert not [f"{page}:{at}" for at, line in enumerate(lines, 1) if len(line) > 100]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_only_where_allowed(path: pathlib.Path) -> None:
    if path.is_relative_to(ROOT / "autosplit/torch_internals") or "capture" in path.parts:
        return
    text = re.sub(r"torch\.ops\.aten\._\w+|aten\._\w+", "", path.read_text())
    private = re.findall(r"(?:from|import) torch[\w.]*\._\w+|\btorch(?:\.\w+)*\._[a-z]\w*", text)
    assert private == []
