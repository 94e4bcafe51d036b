"""Dependencies point one way, and ``import autosplit`` stays light. Each in a fresh process."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from autosplit.compat import OLDEST

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("passes/**/*.py"), *ROOT.glob("autosplit/*.py")]) + sorted(
    path
    for folder in (
        "capture",
        "checkpoint",
        "cli",
        "compile",
        "files",
        "pipeline",
        "planner",
        "report",
        "compare",
        "integrations",
        "runtime",
    )
    for path in (ROOT / "autosplit" / folder).rglob("*.py")
)


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


def test_passes_know_nothing_of_autosplit() -> None:
    for path in ROOT.glob("passes/*.py"):
        imports = re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        outside = [name for name in imports if name.startswith(("autosplit", ".."))]
        assert not outside, f"{path.name} imports {outside}"


ORDER = [
    ["errors", "listing", "passes", "compat", "compat_leaves", "garbage", "generators", "streams"],
    ["structures", "first_call", "face", "store", "files", "compat_inductor", "reducer"],
    ["capture"],
    ["autocast", "compile", "handover", "accumulation"],
    ["dependence"],
    ["gradients"],
    ["slices"],
    ["backward"],
    ["functions"],
    ["tracing", "signature", "guard", "runtime"],
    ["report", "graphs", "overlap", "pending", "waiting", "addable"],
    ["delivery", "fitting"],
    ["compat_convention"],
    ["compat_dynamo", "compat_backward", "compat_breaks"],
    ["integrations"],
    ["autograd"],
    ["stage", "module"],
    ["splitting"],
    ["workload", "pipeline"],
    ["checkpoint"],
    ["planner"],
    ["inspection", "compare", "projection", "planning"],
    ["cli"],
    ["__main__"],
]


def test_no_module_reaches_back() -> None:
    """Every package imports only from earlier rows (or its own). ``report`` also draws what
    ``pipeline`` and ``compare`` found, so those drawings are looked at separately.
    """
    level = {name: row for row, names in enumerate(ORDER) for name in names}
    drawings = {
        "timeline.py",
        "trace.py",
        "lettering.py",
        "comparison.py",
        "survey.py",
        "gaps.py",
        "page.py",
        "plans.py",
    }
    wrong = []
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "passes" or path.name == "__init__.py" or path.name in drawings:
            continue
        own = parts[1]
        for target in _imported(path, depth=len(parts) - 1):
            if target != own and level[target] >= level[own]:
                wrong.append(f"{'/'.join(parts)} imports {target}")
    assert wrong == []


PIPELINE = [
    ["action", "wiring"],
    ["schedule", "dependency", "timeline"],
    ["routes"],
    ["simulation", "sends"],
    ["grid", "schedules"],
    ["validate"],
    ["search", "interchange"],
    ["survey", "communication"],
    ["processes", "execution"],
    ["training"],
]


def test_no_part_of_the_pipeline_reaches_back() -> None:
    """Schedules know nothing of processes and tensors; what drives them knows of schedules."""
    level = {name: row for row, names in enumerate(PIPELINE) for name in names}
    folder = ROOT / "autosplit/pipeline"
    assert {path.stem for path in folder.iterdir() if path.stem[0] != "_"} == level.keys()
    wrong = []
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).with_suffix("").parts[0]
        names = r"^from autosplit\.pipeline\.(\w+)"
        for target in re.findall(names, path.read_text(), re.MULTILINE):
            if target != own and level[target] >= level[own]:
                wrong.append(f"{path.relative_to(folder)} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_only_where_allowed(path: pathlib.Path) -> None:
    if path.name.startswith("compat") or path.parent.name == "capture":
        return
    text = re.sub(r"torch\.ops\.aten\._\w+|aten\._\w+", "", path.read_text())
    private = re.findall(r"(?:from|import) torch[\w.]*\._\w+|\btorch(?:\.\w+)*\._[a-z]\w*", text)
    assert private == []


def _imported(path: pathlib.Path, depth: int) -> set[str]:
    """First names below ``autosplit`` that a file imports, outside ``TYPE_CHECKING`` blocks."""
    text = re.sub(r"if TYPE_CHECKING:\n(?:    .*\n|\n)+", "", path.read_text())
    found = set(re.findall(r"^(?:from|import) autosplit\.(\w+)", text, re.MULTILINE))
    for dots, name in re.findall(r"^from (\.+)(\w*)", text, re.MULTILINE):
        if len(dots) == depth:
            found.add(name)
    return found - {""}
