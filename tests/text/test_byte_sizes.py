from __future__ import annotations

from typing import Any

import pytest

from autosplit.errors import PipelineError, PlanError
from autosplit.text.byte_sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("512MiB", 512 * 2**20),
        (" 1.5 kib ", 1536),
        ("16GB", 16 * 10**9),
        ("800 MB", 800 * 10**6),
        ("2TiB", 2**41),
        ("700", 700),
        ("700B", 700),
        ("1.5B", 1),
        (123, 123),
    ],
)
def test_sizes_as_people_write_them(size: str | int, count: int) -> None:
    found = parse_size(size)
    assert found == count
    assert isinstance(found, int)


@pytest.mark.parametrize(
    "size",
    [
        "",
        "80 GiBs",
        "GiB",
        "-1GiB",
        "0MiB",
        "1e3",
        "0.5B",
        "9" * 40,
        "\u0663GiB",
        0,
        -1,
        True,
        None,
    ],
)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(PlanError, match="expected a size such as 80GiB, '800 MB' or a number"):
        parse_size(size)


def test_the_message_names_the_option_and_the_units_and_is_of_the_callers_type() -> None:
    with pytest.raises(PipelineError) as raised:
        parse_size("12 gigs", "memory_limit", PipelineError)
    assert str(raised.value) == (
        "expected memory_limit such as 80GiB, '800 MB' or a number of bytes, got '12 gigs'; known "
        "units: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1024.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (5 * 2**40, "5120.00 GiB"),
    ],
)
def test_size_text(count: int, text: str) -> None:
    assert size_text(count) == text
