"""The search for a factory, and settings from a command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autosplit.compare.example import call_factory
from autosplit.errors import PipelineError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; sys.path and sys.modules are restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_a_factory_is_found_in_the_working_directory(here: Path) -> None:
    (here / "zoo_of_mine").mkdir()
    (here / "zoo_of_mine" / "small.py").write_text("def make(size=1): return size\n")
    assert call_factory("zoo_of_mine.small:make", {"size": 3}) == 3
    assert sys.path[0] == str(here)
    earlier = list(sys.path)
    call_factory("zoo_of_mine.small:make", {})
    assert sys.path == earlier


@pytest.mark.parametrize("spec", ["mine", "mine:", ":make", ""])
def test_a_spec_needs_module_and_factory(here: Path, spec: str) -> None:
    with pytest.raises(PipelineError) as error:
        call_factory(spec, {})
    assert str(error.value) == (
        f"expected MODULE:FACTORY, for example examples.models:llama, got {spec!r}"
    )


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("\nimport nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("\nfrom os import nothing_there", "ImportError: cannot import name 'nothing_there'"),
        ("\nraise ValueError('bad luck')", "ValueError: bad luck"),
        ("\ndef f(:", "SyntaxError: invalid syntax"),
        ("\ndef f(): return 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_shows_its_own_cause_and_line(
    here: Path, source: str, cause: str
) -> None:
    (here / "broken.py").write_text(source)
    with pytest.raises(PipelineError) as error:
        call_factory("broken:f", {})
    message = str(error.value)
    assert f" raised {cause}" in message
    assert message.endswith(f"({here / 'broken.py'}:2)")
    assert type(error.value.__cause__).__name__ == cause.partition(":")[0]


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ("zoo/small.py:make", "ValueError: invalid format: 'zoo/small.py:make'"),
        ("nowhere_at_all:f", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("mine:made", "AttributeError: module 'mine' has no attribute 'made'"),
        ("mine:size", "TypeError: 3 is not a callable object"),
    ],
)
def test_invalid_factories_are_refused(here: Path, spec: str, cause: str) -> None:
    (here / "mine.py").write_text("size = 3\n")
    with pytest.raises(PipelineError) as error:
        call_factory(spec, {})
    place = f"looking for {spec} in {here} and the installed packages"
    message = str(error.value).partition("\n")[0]
    assert message == f"{place} raised {cause}"
