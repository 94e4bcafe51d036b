"""A process group with NCCL's rules, for processes of one machine and tensors of the CPU.

``rules`` decides; ``player`` has it judge queues that are written down, ``referee`` those of
running processes, to which ``link`` connects ``group``, what torch sees. Nothing here imports
torch: the referee is a process that starts at once.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

VARIABLE = "AUTOSPLIT_TEST_COMM"
"""What ``--comm`` was given, for all processes that tests start."""


@dataclass(frozen=True)
class Settings:
    """How strict, in ``"strict:ms=2,seed=7"`` or ``"strict:eager=1"``.

    Attributes:
        ms: milliseconds for which what has met is under way, beside what moving the data takes.
        seed: each takes another part of these, the same in each run; without one, all of them.
        eager: make communicators with their groups, as where ``device_id`` was given: the group's
            own carries single messages, too.
        one_connection: see ``Rules``.
    """

    ms: float = 0.0
    seed: int = -1
    eager: bool = False
    one_connection: bool = False

    @classmethod
    def of(cls, text: str) -> Settings | None:
        """Parse a text of settings; None for Gloo.

        Raises:
            ValueError: it cannot be read.
        """
        name, _, inputs = text.partition(":")
        kinds: dict[str, Any] = {"ms": float, "seed": int}
        expected = [field.name for field in fields(cls)]
        pairs = dict(item.split("=", 1) for item in inputs.split(",") if item)
        if name not in ("gloo", "strict") or not {*pairs} <= {*expected}:
            raise ValueError(
                f"gloo, or strict:{','.join(f'{item}=' for item in expected)}; got {text}"
            )
        results = {
            key: kinds.get(key, lambda element: bool(int(element)))(item)
            for key, item in pairs.items()
        }
        return cls(**results) if name == "strict" else None

    def __str__(self) -> str:
        inputs = asdict(self) | {
            "eager": int(self.eager),
            "one_connection": int(self.one_connection),
        }
        return "strict:" + ",".join(f"{key}={item}" for key, item in inputs.items())


def chosen() -> Settings | None:
    """The settings in this process's environment; None for Gloo."""
    return Settings.of(os.environ.get(VARIABLE, "gloo"))


NOT_HERE = {
    "pipelining/test_refusals.py": "over other backends than Gloo, neighbours of a rank that fails "
    "in a step of torch's wait until the timeout",
}
"""Files of tests that are for Gloo only, and why."""


def why_not(path: Path) -> str | None:
    """Why a test file, named from ``tests/``, is not for NCCL's rules; None where it is."""
    return NOT_HERE.get(path.as_posix()) if chosen() else None
