"""The search for a factory, settings from a command line, and what is compared of gradients."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from autosplit.compare.factory import load_factory, prepared
from autosplit.compare.run import largest_difference
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
    (here / "zoo_of_mine" / "small.py").write_text("def make(): return 'made'\n")
    assert load_factory("zoo_of_mine.small:make")() == "made"
    assert sys.path[0] == str(here)
    before = list(sys.path)
    load_factory("zoo_of_mine.small:make")
    assert sys.path == before


@pytest.mark.parametrize("spec", ["mine", "mine:", ":make", ""])
def test_a_spec_needs_module_and_factory(here: Path, spec: str) -> None:
    with pytest.raises(PipelineError) as error:
        load_factory(spec)
    assert str(error.value) == (
        f"expected MODULE:FACTORY, for example examples.models:llama, got {spec!r}"
    )


def test_a_path_is_answered_with_the_module_it_means(here: Path) -> None:
    with pytest.raises(PipelineError) as error:
        load_factory("zoo/small.py:make")
    assert str(error.value) == (
        "expected the dotted name of a module, got 'zoo/small.py'; did you mean 'zoo.small'?"
    )


@pytest.mark.parametrize(
    ("spec", "missing"), [("nowhere_at_all:f", "nowhere_at_all"), ("mine.deeper:f", "mine.deeper")]
)
def test_a_missing_module_is_named(here: Path, spec: str, missing: str) -> None:
    (here / "mine.py").touch()
    module = spec.partition(":")[0]
    with pytest.raises(PipelineError) as error:
        load_factory(spec)
    assert str(error.value) == (
        f"no module named {missing!r}; {module!r} was looked for in the working directory "
        f"{here} and among the installed packages"
    )


@pytest.mark.parametrize(
    ("source", "kind", "cause"),
    [
        ("\nimport nowhere_at_all", "ModuleNotFoundError", "No module named 'nowhere_at_all'"),
        ("\nfrom os import nothing_there", "ImportError", "cannot import name 'nothing_there'"),
        ("\nraise ValueError('bad luck')", "ValueError", "bad luck"),
        ("\ndef f(:", "SyntaxError", "invalid syntax"),
    ],
)
def test_a_module_that_fails_shows_its_own_cause_and_line(
    here: Path, source: str, kind: str, cause: str
) -> None:
    (here / "broken.py").write_text(source)
    with pytest.raises(PipelineError) as error:
        load_factory("broken:f")
    message = str(error.value)
    assert message.startswith(
        f"module 'broken' was found but raised {kind} while it was imported: {cause}"
    )
    assert message.endswith(f"({here / 'broken.py'}:2)")
    assert type(error.value.__cause__).__name__ == kind


def test_a_missing_attribute_lists_the_functions_of_the_module(here: Path) -> None:
    (here / "mine.py").write_text(
        "from os.path import join\nsize = 3\nclass Net: ...\ndef make(): ...\ndef _hidden(): ...\n"
    )
    with pytest.raises(PipelineError) as error:
        load_factory("mine:made")
    assert str(error.value) == "mine has no 'made'; functions there: make"
    with pytest.raises(PipelineError) as error:
        load_factory("mine:size")
    assert str(error.value) == ("mine:size is not callable but of type int; functions there: make")


FACTORY = """
from typing import Any, Literal, Optional
import torch

class Built:
    def __init__(self, width: int = 8):
        self.width = width

def annotated(width: int, rate: float = 0.1, tied: bool = False, name: str = "x"):
    return width, rate, tied, name

def plain(width=8, rate=0.5, tied=True, name="x", sizes=None):
    return width, rate, tied, name, sizes

def one_of(act: Literal["relu", "gelu"] = "relu", cap: Optional[int] = 3, by: int | str = 1):
    return act, cap, by

def more(**settings):
    return settings

def texts(**settings: object):
    return settings

def odd(dtype: torch.dtype = torch.float32, anything: Any = 0, late: "Missing" = None):
    return dtype, anything, late
"""


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("annotated", "width=4 rate=1 tied=true name=5", (4, 1.0, True, "5")),
        ("plain", "width=4 rate=1 tied=false name=5 sizes=(1,2)", (4, 1.0, False, "5", (1, 2))),
        ("plain", "sizes=large", (8, 0.5, True, "x", "large")),
        ("one_of", "act=gelu cap=None by=left", ("gelu", None, "left")),
        ("one_of", "cap=7 by=2", ("relu", 7, 2)),
        ("more", "width=4 name=wide", {"width": 4, "name": "wide"}),
        ("texts", "width=4", {"width": "4"}),
        ("odd", "dtype=bfloat16 late=2", ("bfloat16", 0, 2)),
    ],
)
def test_texts_become_what_a_plain_factory_takes(
    here: Path, name: str, texts: str, expected: object
) -> None:
    (here / "plain_factories.py").write_text(FACTORY)
    overrides = dict(text.split("=", 1) for text in texts.split())
    assert prepared(f"plain_factories:{name}", overrides)() == expected


def test_a_class_and_values_that_are_no_texts(here: Path) -> None:
    (here / "plain_factories.py").write_text(FACTORY)
    assert prepared("plain_factories:Built", {"width": "4"})().width == 4
    assert prepared("plain_factories:plain", {"sizes": [3]})()[-1] == [3]


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("annotated", "width=wide", "setting width expects int, got 'wide'"),
        ("plain", "width=1.5", "setting width expects int, got '1.5'"),
        ("plain", "tied=perhaps", "setting tied expects true or false, got 'perhaps'"),
    ],
)
def test_texts_that_do_not_fit_are_refused(
    here: Path, name: str, setting: str, message: str
) -> None:
    (here / "plain_factories.py").write_text(FACTORY)
    key, _, text = setting.partition("=")
    needed = {} if key == "width" or name != "annotated" else {"width": "1"}
    with pytest.raises(PipelineError) as error:
        prepared(f"plain_factories:{name}", {**needed, key: text})
    assert str(error.value) == message


def test_a_gradient_that_stages_lack_is_as_far_off_as_can_be() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert largest_difference({"a": one, "b": one}, {"a": other}) == 0.5
    assert largest_difference({"b": one}, {"a": one}) == math.inf
