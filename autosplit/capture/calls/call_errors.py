"""Errors of calls that are looked up."""

from __future__ import annotations


class OtherwiseError(Exception):
    """What a call's guards found is otherwise in this process; says what."""
