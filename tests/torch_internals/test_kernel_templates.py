"""Templates that Inductor makes in ``lazy_templates`` are parsed when they are rendered."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.codegen.common import KernelTemplate

from autosplit.torch_internals import kernel_templates


def test_a_template_is_parsed_once_when_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = KernelTemplate._template_from_string

    def counted(source: str) -> Any:
        parsed.append(source)
        return parse(source)

    monkeypatch.setattr(kernel_templates, "_parse", counted)
    with kernel_templates.lazy_templates():
        template = KernelTemplate._template_from_string("{{size}} rows")
    assert not parsed
    assert [template.render(size=size) for size in (3, 4)] == ["3 rows", "4 rows"]
    assert len(parsed) == 1
