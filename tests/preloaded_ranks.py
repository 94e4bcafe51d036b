"""Imports of ranks, for the process that `tests.interpreters` starts them from."""

from __future__ import annotations

import examples.language_model  # noqa: F401
