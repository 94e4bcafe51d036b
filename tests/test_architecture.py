"""``import autosplit`` stays light, and private torch in its rooms. import-linter has the rest."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from autosplit.torch_internals import OLDEST

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "passes").rglob("*.py")) + sorted((ROOT / "autosplit").rglob("*.py"))


# Where only torch has been imported: what each line of the input does by itself.
BY_ITSELF = """
import json, os, sys, torch
for line in sys.stdin:
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    before, error = {*sys.modules}, ""
    try:
        exec(line)
    except BaseException as raised:
        error = repr(raised)
    print(json.dumps([sorted({*sys.modules} - before), error]), flush=True)
    os._exit(0)
"""
LIGHT = "import autosplit"
STAGES = "import autosplit.pipeline, autosplit.checkpoint"
OLD, OLDEST_THERE_IS = (
    f"torch.__version__ = {version!r}; import autosplit; autosplit.split"
    for version in ("2.10.1+cpu", "2.11.0a0")
)


@pytest.fixture(scope="module")
def done() -> dict[str, tuple[list[str], str]]:
    """The modules that a statement loads, and the error it ends with."""
    statements = [LIGHT, STAGES, OLD, OLDEST_THERE_IS]
    command, lines = [sys.executable, "-c", BY_ITSELF], "\n".join(statements)
    result = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(statements, found, strict=True))


def test_importing_autosplit_is_light(done: dict[str, tuple[list[str], str]]) -> None:
    loaded, error = done[LIGHT]
    assert not error
    assert "autosplit" in loaded
    heavy = {"matplotlib", "transformers", "click", "tqdm", "torch.distributed.pipelining"}
    assert not {*loaded} & heavy
    assert not [name for name in loaded if name.startswith("autosplit.pipeline")]
    assert "torch.distributed.distributed_c10d" not in loaded
    assert "torch._dynamo.eval_frame" not in loaded


def test_training_stages_that_are_there_needs_no_planner(
    done: dict[str, tuple[list[str], str]],
) -> None:
    loaded, error = done[STAGES]
    assert not error
    assert "autosplit.pipeline.trainer" in loaded
    assert not [name for name in loaded if name.startswith("autosplit.planner")]


def test_autosplit_refuses_a_torch_that_is_too_old(
    done: dict[str, tuple[list[str], str]],
) -> None:
    assert "autosplit needs torch 2.11 or later and found 2.10.1+cpu" in done[OLD][1]
    assert done[OLDEST_THERE_IS][1] == ""


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


def test_private_torch_only_where_allowed() -> None:
    found = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / "autosplit/torch_internals") or "capture" in path.parts:
            continue
        text = re.sub(r"torch\.ops\.aten\._\w+|aten\._\w+", "", path.read_text())
        private = r"(?:from|import) torch[\w.]*\._\w+|\btorch(?:\.\w+)*\._[a-z]\w*"
        found[path] = re.findall(private, text)
    assert not {path: names for path, names in found.items() if names}
