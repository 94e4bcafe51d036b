"""Inductor's templates of GPU kernels, parsed at their first use instead of Inductor's import."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch._inductor.codegen.common import KernelTemplate

from .patches import patched

_parse: Any = KernelTemplate._template_from_string


class _LazyTemplate:
    """A template that is parsed when it is rendered."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, *args: Any, **kwargs: Any) -> Any:
        return self._template.render(*args, **kwargs)

    @functools.cached_property
    def _template(self) -> Any:
        return _parse(self._source)


def lazy_templates() -> AbstractContextManager[Any]:
    """Context in which Inductor's templates are made without parsing them."""
    return patched(KernelTemplate, "_template_from_string", staticmethod(_LazyTemplate))
