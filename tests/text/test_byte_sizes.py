from __future__ import annotations

import pytest

from autosplit.errors import PlanError
from autosplit.text.byte_sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("512MiB", 512 * 2**20),
        (" 1.5 kib ", 1536),
        ("16GB", 16e9),
        ("2TiB", 2**41),
        ("700", 700),
        ("700B", 700),
    ],
)
def test_sizes_as_people_write_them(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "80 GiBs", "GiB", "-1GiB", "0MiB", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(PlanError, match="expected a size such as 80GiB or 512MiB, got"):
        parse_size(text)
