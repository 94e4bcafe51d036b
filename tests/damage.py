"""Damage to files, and readers that must load the rest right or refuse it in time."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CHANGES = ("flip", "set", "cut", "drop", "double", "insert")
SECONDS = 20.0  # beyond which reading counts as hanging


@st.composite
def damaged(draw: st.DrawFn, sound: bytes, tokens: Sequence[str] = ("\0",)) -> bytes:
    """The bytes after one to three changes; what is inserted is one of ``tokens``."""
    content = sound
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(content) - 1, 0)))
        earlier, span = content[:start], content[start : start + draw(st.integers(1, 64))]
        after = content[start + len(span) :]
        match draw(st.sampled_from(CHANGES)):
            case "flip" if span:
                span = bytes([span[0] ^ 1 << draw(st.integers(0, 7))]) + span[1:]
            case "set":
                span = bytes([draw(st.integers(0, 255))]) * len(span)
            case "cut":
                span = after = b""
            case "drop":
                span = b""
            case "double":
                span *= 2
            case "insert":
                span = draw(st.sampled_from(tokens)).encode() + span
        content = earlier + span + after
    return content


def looked_at(strategy: st.SearchStrategy[Any], count: int, look: Callable[[Any], str]) -> Any:
    """How often ``look`` said what of ``count`` examples; an error in it shows the smallest."""
    message: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(example: Any) -> None:
        with limited(SECONDS):
            message[look(example)] += 1

    each()
    return message


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread only."""

    def over(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    earlier = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
