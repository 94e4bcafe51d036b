"""Artifacts of torch's structured trace, which ``TORCH_TRACE=folder`` turns on, for tlparse."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text into torch's structured trace. ``text`` is called only if the trace is turned
    on.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
