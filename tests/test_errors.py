"""Every error names the page that explains it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosplit import errors
from autosplit.errors import AutosplitError

ROOT = Path(__file__).resolve().parents[1]


def classes(base: type[AutosplitError] = AutosplitError) -> Iterator[type[AutosplitError]]:
    """An error class of ``autosplit.errors`` and all its subclasses there."""
    yield base
    for derived in base.__subclasses__():
        if derived.__module__ == errors.__name__:
            yield from classes(derived)


@pytest.mark.parametrize("kind", dict.fromkeys(classes()))
def test_the_page_of_an_error_and_its_section_exist(kind: type[AutosplitError]) -> None:
    page, _, section = kind.page.partition("#")
    text = (ROOT / page).read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert not section or section in {title.lower().replace(" ", "-") for title in titles}


def test_a_traceback_ends_with_the_page_and_the_message_does_not() -> None:
    error = errors.CheckpointError("no checkpoint at /tmp/x")
    assert str(error) == "no checkpoint at /tmp/x"
    assert traceback.format_exception(error)[-1] == "More: docs/checkpoints.md\n"
