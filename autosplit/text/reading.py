"""Bounded reading of text files, with typed errors."""

from __future__ import annotations

from pathlib import Path

from autosplit.errors import AutosplitError

LARGEST = 1 << 25
"""Bytes: several times what the largest schedule or plan that is accepted takes."""


def read_text(path: str | Path, kind: str, error: type[AutosplitError]) -> str:
    """The text of a file, line ends as they are.

    Args:
        path: the file; devices and pipes are read up to the bound.
        kind: what it should hold, for messages, as in ``"a plan"``.
        error: what to raise.

    Raises:
        AutosplitError: of that type, if there is no such file, it cannot be read, is no UTF-8
            text, or has more than ``LARGEST`` bytes.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise error(
                f"cannot read {kind} from {str(path)!r}: it has more than {LARGEST:,} bytes, which "
                "none has"
            )
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"cannot read {kind} from {str(path)!r}: it is no UTF-8 text ({problem.reason} at byte "
            f"{problem.start})"
        ) from problem
    except (OSError, ValueError) as problem:  # a path may hold what no path can, such as "\0"
        raise error(f"cannot read {kind} from {str(path)!r}: {problem}") from problem
