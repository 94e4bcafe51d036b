"""Files that were sound, and what may have happened to them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

_TOKENS = (
    *("0F0", "1B0", "0W0", "2I1", "0F999999999", "1000000000000F0", "0F1000000000000", "7X0"),
    *(",", ",,,,", "\n", "\n\n", "\r", '"', "\x00", " ", "-1F0", "²F1", "0SEND_F0", "1RECV_F0"),
    *("(0F0;1B0)OVERLAP_F_B", "0UNSHARD", "0WAIT_SEND_F0", "9" * 5000, "[", "{", "null", "NaN"),
)
"""What a slip of the hand, another program or an attacker may put into a text."""

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 10**9, 10**18, 10**30, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "fast", "inductor", "0F0", "0F999999999", "layers.1"),
    *([], {}, [[]], [None], [0, 1], [1, 0], ["x"], [[1.0, 2.0, 3.0]], {"x": 1}),
)
"""What may stand in place of a value of a JSON file."""


@st.composite
def damaged_text(draw: st.DrawFn, sound: bytes) -> bytes:
    """A text after one to six changes of bytes, lines, cells or tokens."""
    content = sound
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 30)))
        change = draw(st.sampled_from(sorted(_CHANGES)))
        content = _CHANGES[change](draw, content, start, end)
    return content


def _insert(draw: st.DrawFn, content: bytes, start: int, end: int) -> bytes:
    token = draw(st.sampled_from(_TOKENS)).encode()
    return content[:start] + token + content[start:]


def _overwrite(draw: st.DrawFn, content: bytes, start: int, end: int) -> bytes:
    return content[:start] + draw(st.binary(max_size=4)) + content[end:]


def _exchange(draw: st.DrawFn, content: bytes, start: int, end: int) -> bytes:
    """Two cells."""
    cells = content.split(b",")
    one, other = (draw(st.integers(0, len(cells) - 1)) for _ in range(2))
    cells[one], cells[other] = cells[other], cells[one]
    return b",".join(cells)


def _exchange_lines(draw: st.DrawFn, content: bytes, start: int, end: int) -> bytes:
    lines = content.split(b"\n")
    one, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


_CHANGES: dict[str, Callable[[st.DrawFn, bytes, int, int], bytes]] = {
    "delete": lambda draw, content, start, end: content[:start] + content[end:],
    "repeat": lambda draw, content, start, end: content[:end] + content[start:],
    "cut off": lambda draw, content, start, end: content[:start],
    "insert": _insert,
    "overwrite": _overwrite,
    "exchange": _exchange,
    "exchange lines": _exchange_lines,
}


@st.composite
def damaged_json(draw: st.DrawFn, sound: bytes) -> bytes:
    """A JSON text after one to four changes of its values, names or lists."""
    data = json.loads(sound)
    for _ in range(draw(st.integers(1, 4))):
        data = _changed(draw, data)
    return json.dumps(data).encode()


def _changed(draw: st.DrawFn, data: Any) -> Any:
    """The same with one value changed, anywhere."""
    if not isinstance(data, (dict, list)) or not data or draw(st.integers(0, 5)) == 0:
        return copy.deepcopy(draw(st.sampled_from(_VALUES)))
    keys = list(data) if isinstance(data, dict) else range(len(data))
    key = draw(st.sampled_from(keys))
    change = draw(st.sampled_from(["within", "delete", "repeat", "exchange"]))
    if change == "within":
        data[key] = _changed(draw, data[key])
    elif change == "delete":
        del data[key]
    elif change == "exchange":
        other = draw(st.sampled_from(keys))
        data[key], data[other] = data[other], data[key]
    elif isinstance(data, dict):
        data[f"{key} again"] = data[key]
    else:
        data.insert(key, data[key])
    return data


def damaged(sound: bytes, *, is_json: bool) -> st.SearchStrategy[bytes]:
    """What may have become of a file."""
    text = damaged_text(sound)
    return st.one_of(text, damaged_json(sound)) if is_json else text
